"""Small policies that are shipped with the package, and functions that create and train others in a notebook.

The shipped policies are starting points for reinforcement learning. The calculator policy can copy an expression into a
tool call and read the result, but mostly answers "I don't know" or guesses, so that training on one core improves it
within a minute. Tasks, demonstrations and pretraining code of all policies are in `benchmarks/recipes`.
"""

from __future__ import annotations

import importlib.resources
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from agentfly_kit.chat.chat import Chat
from agentfly_kit.errors import SettingsError
from agentfly_kit.policy.policy import Policy
from agentfly_kit.tasks import load_tasks
from agentfly_kit.tools.tool import ToolSet
from agentfly_kit.trajectories import Trajectory
from agentfly_kit.types import Message, Task, ToolCall, Turn, normalize_messages, text_of

# Descriptions of the prompts and tools of each shipped policy.
_TASKS = {
    "calculator": "arithmetic questions, with the tool calculator",
    "alfworld": "a task in a household, with one tool per action",
    "code": "a description of a function, with tools that run tests",
    "desk": "a small screen and an instruction, with tools that click, type and scroll",
    "lookup": "questions about people, with a tool that looks up one fact",
    "search": "questions about places, with a search tool",
    "shapes": "an image of coloured shapes and a question about it",
    "sql": "the tables of a database and a question, with a tool that runs SQL",
    "sums": "sums of two numbers, without tools",
    "webshop": "a wish of a customer, with the tools of a shop",
}
NAMES = tuple(_TASKS)

__all__ = ["END", "NAMES", "TEMPLATE", "demonstration", "learner", "list", "model", "policy", "tokenizer"]


def __dir__() -> Sequence[str]:
    return __all__


END = "<|im_end|>"
_VOCABULARY = 400

# ChatML template. It renders only the names of tools and of their parameters, which keeps prompts short.
TEMPLATE = """\
{%- set lead = messages[0] if messages and messages[0].role == 'system' else none -%}
{%- if lead or tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if lead %}{{ lead.content }}{{ '\\n' if tools }}{% endif -%}
  {%- for tool in tools or [] -%}
    {%- set f = tool.function or tool -%}
    {{- 'Tools: ' if loop.first else ', ' }}{{ f.name }}({{ ((f.parameters or {}).properties or {}) | join(', ') }})
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if lead else messages) -%}
  {{- '<|im_start|>' + message.role + '\\n' -}}
  {%- if message.role == 'tool' -%}
    {{- '<tool_response>' }}{{ message.content }}{{ '</tool_response>' -}}
  {%- else -%}
    {{- message.content or '' -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set f = call.function or call -%}
      {{- '<tool_call>{"name":' }}{{ f.name | tojson }}{{ ',"arguments":' -}}
      {{- f.arguments if f.arguments is string else f.arguments | tojson(separators=(',', ':')) -}}
      {{- '}</tool_call>' -}}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}
"""

# --- tokenizer and model -------------------------------------------------------------------------


def tokenizer(words: Sequence[str] = ()) -> Any:
    """Build a byte-level BPE tokenizer with tokens for padding, ChatML and Hermes tool calls.

    Digits and operators are single tokens, so that an expression is copied character by character. The result is
    deterministic, because the training corpus is part of this module.

    Args:
        words: words that get one token each. They are added last, so that the ids of the other tokens do not depend
            on them. If a word starts with a space, its token includes the space. A word that does not start with a
            letter or digit also matches inside other words.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"[0-9+\-*/()]"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    specials = ["<|pad|>", "<|im_start|>", END]
    tags = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY - len(specials) - len(tags),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS, trainer)
    bpe.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    # As in Qwen's tokenizer, these tags are not special tokens, because servers remove special tokens from generated
    # text.
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in tags])
    bpe.add_tokens(
        [AddedToken(text, special=False, normalized=False, single_word=text[0].isalnum()) for text in words]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token="<|pad|>", clean_up_tokenization_spaces=False
    )
    made.chat_template = TEMPLATE
    return made


_CORPUS = [
    text
    for count, texts in (
        (40, ["system\n", "user\n", "assistant\n", "tool\n", "Tools: calculator(expression)", "What is 1?"]),
        (40, ["I don't know"]),
        (
            40,
            ['{"name":"calculator","arguments":{"expression":"1"}}', '{"name": "calculator", "arguments": {"a": 1}}'],
        ),
        (10, ["Error: the tool call is not valid JSON", "error", "Compute", "How much is", "Answer with the result"]),
        (4, ["a an and are as at be by can for from in it no not of on or that this to true false was with you"]),
    )
    for text in texts * count
]


def model(vocabulary: int = _VOCABULARY, *, seed: int = 0, **settings: Any) -> Any:
    """Create a Qwen3 model with random weights: width 96, 2 layers, 4 heads, about 275k parameters, float32.

    The head size is 32, because the kernels of inference servers do not support smaller or unusual sizes. There are 512
    positions, which suffice for a question, four turns of 64 sampled tokens and four short observations.

    Args:
        vocabulary: vocabulary size.
        seed: seed of the weights.
        **settings: overrides of the model config.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 96,
        "intermediate_size": 240,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
    }
    config = Qwen3Config(**(shape | settings))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float()


# --- imitation ---------------------------------------------------------------------------------


def demonstration(
    chat: Chat,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] = (),
    observations: dict[Any, tuple[int, ...]] | None = None,
) -> Trajectory:
    """Encode a conversation as a trajectory. Assistant messages become actions with `author="script"`.

    Args:
        chat: Chat of the policy.
        messages: The conversation. It must end with an assistant message or the result of a tool call.
        tools: JSON schemas of the tools in the prompt.
        observations: Cache of encoded observations. Pass the same dict for conversations with the same chat and tools.
    """
    observations = {} if observations is None else observations
    opening, *rest = (
        (by_assistant, [*some]) for by_assistant, some in groupby(messages, lambda m: m["role"] == "assistant")
    )
    turn = Turn(kind="prompt", author="task", ids=tuple(chat.prompt(opening[1], tools)))
    turns = [turn]
    for by_assistant, some in rest:
        if by_assistant:
            (message,) = some
            functions = [call["function"] for call in message.get("tool_calls", ())]
            calls = [chat.format.render_call(ToolCall("", f["name"], dict(f["arguments"]))) for f in functions]
            # As in a prompt: the template writes calls without a separator, and the chat writes each in a new line.
            separator = "" if chat._in_template_format else "\n"
            ids = tuple(chat.encode(separator.join(filter(None, [text_of(message), *calls])) + END))
            turn = Turn(kind="action", author="script", ids=ids, messages=(message,), stop="stop", parent=turn)
        else:
            key = tuple((m["role"], m.get("name"), text_of(m)) for m in some)
            if key not in observations:
                observations[key] = tuple(chat.observation_ids(some, tools, after=turn.ids or ()))
            turn = Turn(kind="observation", author="tool", ids=observations[key], parent=turn)
        turns.append(turn)
    task = Task("demonstration", tuple(opening[1]))
    return Trajectory("demonstration", task, "demonstration", 0, tuple(turns), "answered")


def learner(
    words: Sequence[str],
    demonstrate: Callable[[random.Random], Sequence[Message]],
    *,
    tools: Iterable[Any] = (),
    steps: int = 300,
    batch: int = 32,
    lr: float = 3e-3,
    seed: int = 0,
) -> Policy:
    """Train a small policy from random weights by imitating demonstrations.

    The policy then knows the words, questions and tools of the demonstrations, and can be improved by reinforcement
    learning. Demonstrations that are not always good leave room for improvement::

        def demonstrate(rng):
            secret = rng.randint(1, 9)
            guess = secret if rng.random() < 0.3 else rng.randint(1, 9)
            call = {"function": {"name": "guess", "arguments": {"number": guess}}}
            return [
                {"role": "user", "content": f"guess {secret}"},
                {"role": "assistant", "tool_calls": [call]},
            ]

        policy = af.tiny.learner(["guess", "number"], demonstrate, tools=af.envs.tools(Guess), steps=100)

    The result of a tool call is a message such as {"role": "tool", "name": "guess", "content": "higher"}.

    Such a policy learns fixed associations, copying of words, and choosing among the behaviors in the demonstrations.
    It hardly learns to compare two words, to count or to search: after 400 updates on perfect searches for an item on
    six shelves, it found half of the items. Before training it further, compare its success with the success of a
    random agent.

    With conversations of 70 tokens and the default batch, 150 updates took 14 s of CPU time (`time.process_time`) with
    one thread on an otherwise idle core of an AMD EPYC, and the default of 300 takes twice as long. The time is about
    proportional to the number of tokens. During training, a line shows the loss and the time left; afterwards, it shows
    the final loss and the duration.

    To choose `steps`, double it until the final loss falls by less than a tenth. The remaining loss is due to the
    choices in the demonstrations. More updates then cost only time, because all demonstrations are new. With too few
    updates, some calls are invalid. The guessing game of the README had final losses of 0.37, 0.160 and 0.158 after 40,
    120 and 240 updates, and 32, 2 and 0 % of the calls were invalid. The bus station of notebook 00 had final losses of
    0.45, 0.089, 0.047 and 0.046 after 40, 80, 160 and 320 updates, and 61, 22, 4 and 0 % of the calls were invalid.

    Args:
        words: words that get one token each; see `tokenizer`. They should include the words of the demonstrations.
        demonstrate: function that takes a random number generator and returns the messages of one conversation.
            Assistant messages are imitated.
        tools: tools, functions, or JSON schemas that the prompt shows.
        steps: number of updates; see above. Copying, for example of a result into an answer, is often learned only
            after 100 updates.
        batch: demonstrations per update.
        lr: highest learning rate.
        seed: seed of the weights and of the random number generator.

    Raises:
        SettingsError: if `lr` is not a positive finite number, or a conversation is invalid, has no assistant message,
            or calls a tool that is not in `tools` or has no such parameter.
    """
    given = [*tools]
    schemas = given if given and isinstance(given[0], dict) else [*ToolSet(given).schemas]
    made = _untrained(words, seed)
    rng, known = random.Random(seed), dict[Any, tuple[int, ...]]()

    def batches() -> Iterator[Sequence[Trajectory]]:
        while True:
            conversations = (_check_demonstration(demonstrate(rng), schemas) for _ in range(batch))
            yield [demonstration(made.chat, messages, schemas, known) for messages in conversations]

    _imitate(made, batches(), steps, lr)
    return made


def _check_demonstration(messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> Sequence[Message]:
    """Return the normalized messages. Raise SettingsError if no assistant message or an unknown tool is found."""
    messages = normalize_messages(messages, "demonstrate", answered=True)
    if all(message["role"] != "assistant" for message in messages):
        raise SettingsError("demonstrate must return at least one message with the role 'assistant', got none")
    functions = [schema["function"] for schema in schemas]
    known = {f["name"]: [*f.get("parameters", {}).get("properties", ())] for f in functions}
    for call in (c["function"] for message in messages for c in message.get("tool_calls") or () if schemas):
        if call["name"] not in known or not {*call["arguments"]} <= {*known[call["name"]]}:
            shown = ", ".join(f"{name}({', '.join(names)})" for name, names in known.items())
            raise SettingsError(f"demonstrate must call {shown}, got {call['name']}({', '.join(call['arguments'])})")
    return messages


def _untrained(words: Sequence[str], seed: int) -> Policy:
    """Return a policy with random weights and a tokenizer that has one token for each of `words`."""
    made = Policy(model(_VOCABULARY + len(words), seed=seed), Chat(tokenizer(words)))
    config, tokens = made.model.config, made.chat.tokenizer
    config.eos_token_id = made.model.generation_config.eos_token_id = tokens.eos_token_id
    config.pad_token_id = made.model.generation_config.pad_token_id = tokens.pad_token_id
    return made


def _imitate(policy: Policy, batches: Iterator[Sequence[Trajectory]], steps: int, lr: float) -> float:
    """Train on batches of demonstrations and return the smoothed final loss."""
    from agentfly_kit.batch.collate import collate
    from agentfly_kit.ppo.imitation import imitation_step, smoothed_loss, updates
    from agentfly_kit.ppo.optimizer import adamw

    collated = (collate(batch, imitate=True) for batch in batches)
    optimizer = adamw(policy, lr)
    done: Any = []
    for _, batch in zip(updates(optimizer, steps, done), collated, strict=False):
        done.append(imitation_step(policy, optimizer, batch))
    policy.version = 0  # count only the updates that the user of the policy makes
    return smoothed_loss(done)


# --- shipped policies ----------------------------------------------------------------------------


def policy(name: str = "calculator", *, value_head: bool = False) -> Policy:
    """Load a shipped policy. Every call returns an independent copy.

    Args:
        name: one of `NAMES`.
        value_head: add a value head, for PPO.

    Raises:
        SettingsError: if `name` is unknown.
    """
    _check_name(name)
    folder = importlib.resources.files("agentfly_kit._data").joinpath("policies", name)
    with importlib.resources.as_file(folder) as path:
        return Policy.load(path, value_head=value_head)


def list() -> Any:
    """Return a DataFrame with one row per shipped policy: its description and the first of its test tasks."""
    import pandas

    # The tasks of the vision policies are generated, which requires Pillow.
    shown = {
        "desk": "[image 64 x 64]\nTick the box, then click the red button.",
        "shapes": "[image 48 x 48]\nHow many shapes are there?",
    }
    examples = [shown.get(name) or text_of(load_tasks(name).test[0].messages[-1]) for name in NAMES]
    return pandas.DataFrame(
        {"reads": [*_TASKS.values()], "example": examples}, index=pandas.Index(NAMES, name="name")
    )


def _check_name(name: str) -> None:
    if name not in NAMES:
        raise SettingsError(f"name must be one of {', '.join(map(repr, NAMES))} (see af.tiny.list()), got {name!r}")
