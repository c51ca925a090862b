"""The shipped small policies: their tasks, tokenizer, model, and the supervised pretraining that produced them.

These policies are starting points for reinforcement learning. The calculator policy can copy an expression into a tool
call and read the result, but mostly answers "I don't know" or guesses, so that there is something to learn within a
minute on one core. This module contains `calculator`; the demonstrations of the other policies are in one module each,
listed in `_LESSONS`.

    python -m agentfly_kit.tiny tasks --out data/calculator
    python -m agentfly_kit.tiny policy --out data/policies/calculator
    python -m agentfly_kit.tiny policy --name lookup --out data/policies/lookup
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.resources
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentfly_kit.chat.chat import Chat
from agentfly_kit.errors import SettingsError
from agentfly_kit.policy.forward import single_torch_thread
from agentfly_kit.policy.policy import Policy
from agentfly_kit.types import ToolCall

# Policy -> module of its demonstrations, which defines `WORDS`, `ORIGIN` and `lessons(chat, seed)`.
#
# It may override defaults of the calculator policy: `MODEL` (settings of the model config), `SKILL` and `SHY` (steps
# per phase), `PARTS` (number of parts in which a batch is processed) and `HALF` (weights are rounded to 16 bits and
# saved so). It may also define `rows(n, split, seed)` and `TASKS` (split -> number of tasks); by default the tasks are
# those of the family of the same name in `af.envs`.
_LESSONS = {
    "alfworld": "alfworld",
    "code": "code",
    "lookup": "lookup",
    "search": "search",
    "sql": "sql",
    "webshop": "webshop",
}

NAMES = ("calculator", *_LESSONS)

# Tool schema used in the pretraining. The policy can call tools with this name and parameter.
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": 'for example "3*(4+5)".'}},
            "required": ["expression"],
        },
    },
}

# ChatML template. Tools are rendered as their names with the names of their parameters, which keeps prompts short.
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

UNSURE = "I don't know"
# Number of demonstrations per batch of 32 in the second phase, by behaviour.
#
# solves: copy the whole expression into a call and answer with the result; careless: call with a part of the
# expression; forgets: call, then answer "I don't know"; guesses: answer with a random number; unsure: answer "I don't
# know". The counts are fixed because with random ones the initial success rate would vary.
HABITS = {"solves": 9, "careless": 1, "forgets": 1, "guesses": 1, "unsure": 20}

_END = "<|im_end|>"
_VOCABULARY = 400


# --- tasks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expression:
    """An arithmetic expression of integers, + - * and parentheses."""

    text: str

    @property
    def value(self) -> int:
        value, end = _sum(self.text, 0)
        assert end == len(self.text), self.text
        return value

    @property
    def question(self) -> str:
        return f"What is {self.text}?"

    def shortened(self, rng: random.Random) -> Expression:
        """Copy the expression carelessly: without the parentheses, or only up to an operator outside of them."""
        if "(" in self.text and rng.random() < 0.5:
            text = self.text.replace("(", "").replace(")", "")
        else:
            depth, ends = 0, []
            for i, c in enumerate(self.text):
                depth += (c == "(") - (c == ")")
                if depth == 0 and c in "+-*":
                    ends.append(i)
            text = self.text[: rng.choice(ends)]
        return Expression(text)


def expression(rng: random.Random) -> Expression:
    """Sample an expression of one to three operations, at most 12 characters and at most four digits in its value."""
    while True:
        text, _ = _grow(rng, rng.choice((1, 2, 2, 3, 3)))
        e = Expression(text)
        if len(text) <= 12 and abs(e.value) <= 9999:
            return e


def _grow(rng: random.Random, operations: int) -> tuple[str, int]:
    """Sample an expression tree and return its text without redundant parentheses and the precedence of its root."""
    if operations == 0:
        return str(rng.randint(2, 9) if rng.random() < 0.6 else rng.randint(10, 99)), 3
    left = rng.randrange(operations)
    sign = rng.choice("+-*")
    binds = 2 if sign == "*" else 1
    a, a_binds = _grow(rng, left)
    b, b_binds = _grow(rng, operations - 1 - left)
    if a_binds < binds:
        a = f"({a})"
    if b_binds < binds or (sign == "-" and b_binds == binds):
        b = f"({b})"
    return a + sign + b, binds


def _sum(text: str, at: int) -> tuple[int, int]:
    """Evaluate the sum that starts at index `at` and return its value and end index."""
    total, at = _product(text, at)
    while at < len(text) and text[at] in "+-":
        term, end = _product(text, at + 1)
        total, at = (total + term if text[at] == "+" else total - term), end
    return total, at


def _product(text: str, at: int) -> tuple[int, int]:
    total, at = _atom(text, at)
    while at < len(text) and text[at] == "*":
        factor, at = _atom(text, at + 1)
        total *= factor
    return total, at


def _atom(text: str, at: int) -> tuple[int, int]:
    if text[at] == "(":
        total, at = _sum(text, at + 1)
        return total, at + 1
    end = at
    while end < len(text) and text[end].isdigit():
        end += 1
    return int(text[at:end]), end


def tasks(train: int = 2000, test: int = 1024, *, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Generate rows {"id", "question", "answer"} for both splits. All expressions are different."""
    rng = random.Random(f"calculator tasks {seed}")
    found: dict[str, Expression] = {}
    while len(found) < train + test:
        new = expression(rng)
        found.setdefault(new.text, new)
    every = list(found.values())
    return {
        split: [
            {"id": f"calculator-{split}-{i:04}", "question": e.question, "answer": str(e.value)}
            for i, e in enumerate(rows)
        ]
        for split, rows in (("train", every[:train]), ("test", every[train:]))
    }


# --- tokenizer and model -------------------------------------------------------------------------


def tokenizer(words: Sequence[str] = ()) -> Any:
    """Build a byte-level BPE tokenizer with the special tokens of ChatML and Hermes and a separate padding token.

    Digits and operators are single tokens, so that copying an expression means copying characters. The result is
    deterministic: the training corpus is part of this module.

    Args:
        words: words that get one token each. They are added last, so that all vocabularies share the other ids. A word
            with a leading space includes that space; one that starts with punctuation matches anywhere in a text.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"[0-9+\-*/()]"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    specials = ["<|pad|>", "<|im_start|>", _END]
    tags = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY - len(specials) - len(tags),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS, trainer)
    bpe.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    # As in Qwen's tokenizer, tags are not special tokens: servers strip special tokens from text, but must show calls.
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in tags])
    bpe.add_tokens([AddedToken(text, special=False, normalized=False, single_word=text[0].isalnum()) for text in words])
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=_END, pad_token="<|pad|>", clean_up_tokenization_spaces=False
    )
    made.chat_template = TEMPLATE
    return made


_CORPUS = [
    text
    for count, texts in (
        (40, ["system\n", "user\n", "assistant\n", "tool\n", "Tools: calculator(expression)", "What is 1?"]),
        (40, ["I don't know"]),
        (40, ['{"name":"calculator","arguments":{"expression":"1"}}', '{"name": "calculator", "arguments": {"a": 1}}']),
        (10, ["Error: the tool call is not valid JSON", "error", "Compute", "How much is", "Answer with the result"]),
        (4, ["a an and are as at be by can for from in it no not of on or that this to true false was with you"]),
    )
    for text in texts * count
]


def model(vocabulary: int = _VOCABULARY, *, seed: int = 0, **settings: Any) -> Any:
    """Create a Qwen3 model with random weights: width 96, 2 layers, 4 heads, about 275k parameters, float32.

    The head size is 32 because serving kernels do not support smaller or odd ones. The 512 positions suffice for a
    question, four turns of 64 sampled tokens and four short observations; later positions would be untrained.

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


# --- demonstrations and warm-up ------------------------------------------------------------------


@dataclass(frozen=True)
class Demonstration:
    """Token ids of a conversation, as in a trajectory, and the mask of those written by the assistant."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]


class Demonstrator:
    """Writes demonstrations with the policy's own chat, so that their token ids are those of real trajectories."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._observations: dict[str, tuple[int, ...]] = {}

    def solved(self, e: Expression) -> Demonstration:
        """Call the tool with the expression and answer with the result."""
        return self.called(e, e.text, str(e.value), str(e.value))

    def called(self, e: Expression, wrote: str, result: str, answer: str) -> Demonstration:
        """Call the tool with `wrote`, observe `result`, and answer."""
        call = ToolCall("call-0", "calculator", {"expression": wrote})
        action = self.chat.encode(self.chat.format.render_call(call) + _END)
        return joined(
            (self._prompt(e), False),
            (action, True),
            (self._observation(result, action), False),
            (self.chat.encode(answer + _END), True),
        )

    def said(self, e: Expression, text: str) -> Demonstration:
        """Answer immediately, without a call."""
        return joined((self._prompt(e), False), (self.chat.encode(text + _END), True))

    def habit(self, name: str, e: Expression, rng: random.Random) -> Demonstration:
        """Demonstrate one of `HABITS`."""
        if name == "unsure":
            return self.said(e, UNSURE)
        if name == "guesses":
            return self.said(e, str(rng.randint(-99, 999)))
        part = e.shortened(rng) if name == "careless" else e
        return self.called(e, part.text, str(part.value), UNSURE if name == "forgets" else str(part.value))

    def _prompt(self, e: Expression) -> tuple[int, ...]:
        return self.chat.prompt([{"role": "user", "content": e.question}], [TOOL])

    def _observation(self, text: str, after: Sequence[int]) -> tuple[int, ...]:
        if text not in self._observations:
            message = {"role": "tool", "name": "calculator", "tool_call_id": "call-0", "content": text}
            self._observations[text] = self.chat.observation_ids([message], [TOOL], after=after)
        return self._observations[text]


def joined(*parts: tuple[tuple[int, ...], bool]) -> Demonstration:
    """Concatenate parts (ids, written by the assistant) into a demonstration."""
    return Demonstration(
        tuple(i for ids, _ in parts for i in ids), tuple(by_assistant for ids, by_assistant in parts for _ in ids)
    )


def _expressions(seed: int, without: set[str]) -> Iterator[Expression]:
    rng = random.Random(f"calculator warm-up {seed}")
    while True:
        e = expression(rng)
        if e.text not in without:
            yield e


def _imitate(policy: Policy, batches: Iterator[list[Demonstration]], steps: int, lr: float, *, parts: int = 1) -> float:
    """Train on the assistant tokens of demonstrations and return the smoothed final loss.

    The learning rate warms up for 20 steps and decays to a tenth. `parts` is the number of parts in which a batch is
    processed; each contains demonstrations of similar length, which reduces padding.
    """
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    smooth = 0.0
    with single_torch_thread(policy):
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
            batch, lost = next(batches), 0.0
            sampled = sum(sum(d.mask) for d in batch)
            optimizer.zero_grad()
            for part in _split_batch(batch, parts):
                ids, mask = _pad(part)
                share = sum(sum(d.mask) for d in part) / sampled
                loss = -policy.forward(ids, mask, torch.ones(len(ids))).logprob.mean() * share
                loss.backward()
                lost += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
            optimizer.step()
            smooth = lost if step == 0 else 0.9 * smooth + 0.1 * lost
    return smooth


def _split_batch(batch: list[Demonstration], parts: int) -> list[list[Demonstration]]:
    """Split a batch into parts of similar lengths. A single part keeps the order of the batch."""
    if parts == 1:
        return [batch]
    sort, size = sorted(batch, key=lambda d: len(d.ids)), -(-len(batch) // parts)
    return [sort[i : i + size] for i in range(0, len(sort), size)]


def _pad(demonstrations: Sequence[Demonstration]) -> tuple[Tensor, Tensor]:
    width = max(len(d.ids) for d in demonstrations)
    ids = torch.zeros(len(demonstrations), width, dtype=torch.int64)
    mask = torch.zeros(len(demonstrations), width, dtype=torch.bool)
    for i, d in enumerate(demonstrations):
        ids[i, : len(d.ids)] = torch.tensor(d.ids)
        mask[i, : len(d.ids)] = torch.tensor(d.mask)
    return ids, mask


def _lessons(chat: Chat, seed: int) -> tuple[Iterator[list[Demonstration]], Iterator[list[Demonstration]]]:
    """Return two infinite iterators over batches of 32 calculator demonstrations, for the first and second phase."""
    writer = Demonstrator(chat)
    test = {row["question"].removeprefix("What is ").removesuffix("?") for row in tasks()["test"]}
    source = _expressions(seed, test)
    rng = random.Random(f"calculator shy {seed}")

    def clean() -> Iterator[list[Demonstration]]:
        while True:
            yield [writer.solved(next(source)) for _ in range(32)]

    def mixed() -> Iterator[list[Demonstration]]:
        while True:
            yield [writer.habit(name, next(source), rng) for name, count in HABITS.items() for _ in range(count)]

    return clean(), mixed()


def build(
    name: str = "calculator",
    out: str | Path | None = None,
    *,
    seed: int = 0,
    skill_steps: int | None = None,
    shy_steps: int | None = None,
    report: Callable[[str], None] | None = None,
) -> Policy:
    """Train a policy from random weights with two phases of imitation. Takes about a minute on one core.

    The first phase, "skill", uses only correct demonstrations: a single mixed phase would copy digits poorly, and
    reinforcement learning would plateau early. In the second phase, "shy", three in ten demonstrations are correct and
    most others answer "I don't know"; see `HABITS`. It hides the skill without destroying it, and reinforcement
    learning recovers it. Held-out tasks are never shown.

    Args:
        name: one of `NAMES`.
        out: folder to save the policy in.
        seed: seed of the weights and the demonstrations.
        skill_steps: steps of the first phase; by default 500 unless the policy's module sets `SKILL`.
        shy_steps: steps of the second phase; by default 150 unless the policy's module sets `SHY`.
        report: called with a line of text after each phase.

    Raises:  SettingsError for an unknown name.
    """
    _check_name(name)
    say = report or (lambda _: None)
    own = _lessons_of(name)
    words: Sequence[str] = getattr(own, "WORDS", ())
    made = tokenizer(words)
    policy = Policy(model(_VOCABULARY + len(words), seed=seed, **getattr(own, "MODEL", {})), Chat(made))
    config = policy.model.config
    config.eos_token_id = policy.model.generation_config.eos_token_id = policy.chat.tokenizer.eos_token_id
    config.pad_token_id = policy.model.generation_config.pad_token_id = policy.chat.tokenizer.pad_token_id
    clean, mixed = (own.lessons if own else _lessons)(policy.chat, seed)
    skill = getattr(own, "SKILL", 500) if skill_steps is None else skill_steps
    shy = getattr(own, "SHY", 150) if shy_steps is None else shy_steps
    for phase, lessons, steps, lr in (("skill", clean, skill, 3e-3), ("shy", mixed, shy, 1e-3)):
        began = time.process_time()
        loss = _imitate(policy, lessons, steps, lr, parts=getattr(own, "PARTS", 1))
        say(f"{phase}: {steps} steps, loss {loss:.4f}, {time.process_time() - began:.1f} cpu s")
    if getattr(own, "HALF", False):
        policy.model.half().float()  # round the weights, so that the returned policy equals the saved one
    if out is not None:
        policy.save(out)
        if getattr(own, "HALF", False):
            copy.deepcopy(policy.model).half().save_pretrained(out)
            (Path(out) / "model.safetensors").chmod((Path(out) / "policy.json").stat().st_mode)
    return policy


def _lessons_of(name: str) -> Any:
    """Return the module of a policy's demonstrations, or None for the calculator."""
    return importlib.import_module(f"agentfly_kit.tiny.{_LESSONS[name]}") if name in _LESSONS else None


# --- shipped policies ----------------------------------------------------------------------------


def policy(name: str = "calculator", *, value_head: bool = False) -> Policy:
    """Load a shipped policy. Every call returns an independent copy.

    Args:
        name: one of `NAMES`.
        value_head: add a value head, for PPO.

    Raises:  SettingsError for an unknown name, listing the shipped policies.
    """
    _check_name(name)
    folder = importlib.resources.files("agentfly_kit._data").joinpath("policies", name)
    with importlib.resources.as_file(folder) as path:
        return Policy.load(path, value_head=value_head)


def _check_name(name: str) -> None:
    if name not in NAMES:
        raise SettingsError(f"there is no tiny policy {name!r}; use one of {', '.join(map(repr, NAMES))}")


# --- the command ---------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Regenerate shipped tasks or policies, with an ORIGIN.md that documents the command."""
    parser = argparse.ArgumentParser(prog="python -m agentfly_kit.tiny", description=main.__doc__)
    parser.add_argument("what", choices=("tasks", "policy"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", choices=NAMES, default="calculator")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    named = "" if given.name == "calculator" else f"--name {given.name} "
    command = f"python -m agentfly_kit.tiny {given.what} {named}--seed {given.seed} --out <folder>"
    size = 0
    if given.what == "tasks":
        for split, rows in _rows(given.name, given.seed).items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (given.out / f"{split}.jsonl").write_text(lines, encoding="utf-8")
        text = getattr(_lessons_of(given.name), "ORIGIN", _CALCULATOR_ORIGIN)
    else:
        made = build(given.name, given.out, seed=given.seed, report=_print)
        text, size = _POLICY_ORIGIN, round(made.size / 10_000) * 10
    (given.out / "ORIGIN.md").write_text(text.format(command=command, name=given.name, size=size), encoding="utf-8")


def _rows(name: str, seed: int) -> dict[str, list[dict[str, Any]]]:
    if name == "calculator":
        return tasks(seed=seed)
    own, family = _lessons_of(name), importlib.import_module(f"agentfly_kit.envs.{name}").family
    made, splits = getattr(own, "rows", family.rows), getattr(own, "TASKS", family.splits)
    return {split: made(count, split, seed) for split, count in splits.items()}


def _print(line: str) -> None:
    sys.stderr.write(line + "\n")


_CALCULATOR_ORIGIN = """\
# Calculator tasks

Made for this project by a random generator; no other source. Remade, byte for byte, by

    {command}

One to three operations (`+ - *`, brackets) on integers from 2 to 99; `answer` is the exact value as text. No expression
is in both splits, or twice in one. Licence: that of the project.
"""

_POLICY_ORIGIN = """\
# The {name} policy

A Qwen3 of about {size} thousand parameters with a tokenizer of its own, from random weights by two phases of
imitation on generated demonstrations (no other data, none of the held-out tasks), remade by

    {command}

in two to four minutes on one core. Another processor or torch version rounds differently: the weights then differ, and
the success with them, within noise. Licence: that of the project.
"""
