"""The shipped small policies: their tokenizer, model, and the supervised pretraining that produced them.

These policies are starting points for reinforcement learning. The calculator policy can copy an expression into a tool
call and read the result, but mostly answers "I don't know" or guesses, so that there is something to learn within a
minute on one core. The tasks and demonstrations of each policy are in the module named after it, as a `Recipe`.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from agentfly_kit.batch.collate import collate
from agentfly_kit.chat.chat import Chat
from agentfly_kit.errors import SettingsError
from agentfly_kit.policy.policy import Policy
from agentfly_kit.ppo.imitation import imitation_steps
from agentfly_kit.tiny.recipe import END, TEMPLATE, BaseRecipe, demonstration
from agentfly_kit.tools.tool import ToolSet
from agentfly_kit.types import Message, Trajectory

NAMES = ("calculator", "alfworld", "code", "lookup", "search", "sql", "sums", "webshop")

_VOCABULARY = 400


def recipe(name: str) -> type[BaseRecipe]:
    """Return the recipe of a shipped policy, or raise SettingsError for an unknown name."""
    _check_name(name)
    found: type[BaseRecipe] = importlib.import_module(f"agentfly_kit.tiny.{name}").Recipe
    return found


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
    specials = ["<|pad|>", "<|im_start|>", END]
    tags = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY - len(specials) - len(tags),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS, trainer)
    bpe.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    # Tags are not special tokens, as in Qwen's tokenizer: servers strip special tokens, but must return tool calls.
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in tags])
    bpe.add_tokens([AddedToken(text, special=False, normalized=False, single_word=text[0].isalnum()) for text in words])
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


# --- pretraining ---------------------------------------------------------------------------------


def build(
    name: str = "calculator",
    out: str | Path | None = None,
    *,
    seed: int = 0,
    skill_steps: int | None = None,
    mixed_steps: int | None = None,
    report: Callable[[str], None] | None = None,
) -> Policy:
    """Train a policy from random weights with two phases of imitation. Takes about a minute on one core.

    The first phase, "skill", uses only correct demonstrations: a single mixed phase would copy digits poorly, and
    reinforcement learning would plateau early. In the second phase, "mixed", three in ten demonstrations are correct
    and most others answer "I don't know"; see `BaseRecipe.habits`. This phase hides the skill without destroying it,
    and reinforcement learning recovers the skill. Held-out tasks are never shown.

    Args:
        name: one of `NAMES`.
        out: folder to save the policy in.
        seed: seed of the weights and the demonstrations.
        skill_steps: steps of the first phase; by default those of the recipe.
        mixed_steps: steps of the second phase; by default those of the recipe.
        report: called with a line of text after each phase.

    Raises:  SettingsError for an unknown name.
    """
    own = recipe(name)
    policy = _untrained(own.words, seed)
    clean, mixed = own(policy.chat, seed).batches()
    skill = own.skill_steps if skill_steps is None else skill_steps
    second = own.mixed_steps if mixed_steps is None else mixed_steps
    for phase, batches, steps, lr in (("skill", clean, skill, 3e-3), ("mixed", mixed, second, 1e-3)):
        began = time.process_time()
        loss = _imitate(policy, batches, steps, lr)
        if report is not None:
            report(f"{phase}: {steps} steps, loss {loss:.4f}, {time.process_time() - began:.1f} cpu s")
    if own.half:
        policy.model.half().float()  # round the weights, so that the returned policy equals the saved one
    if out is not None:
        policy.save(out)
        if own.half:
            copy.deepcopy(policy.model).half().save_pretrained(out)
            (Path(out) / "model.safetensors").chmod((Path(out) / "policy.json").stat().st_mode)
    return policy


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
    """Train a small policy for a notebook from random weights, by imitating demonstrations. Takes about 15 seconds.

    Args:
        words: words that get one token each; see `tokenizer`. Include those of the demonstrations.
        demonstrate: function of a random number generator that returns the messages of one conversation. The
            assistant's messages are imitated.
        tools: tools, functions, or JSON schemas that the prompt shows.
        steps: number of updates.
        batch: demonstrations per update.
        lr: highest learning rate.
        seed: seed of the weights and of the generator.

    Raises:
        SettingsError: if a count is below 1.
        BatchError: if a conversation has no message of the assistant.
    """
    for name, value in (("steps", steps), ("batch", batch)):
        if value < 1:
            raise SettingsError(f"{name} must be at least 1, got {value!r}")
    given = list(tools)
    schemas = given if given and isinstance(given[0], dict) else list(ToolSet(given).schemas)
    made = _untrained(words, seed)
    rng, known = random.Random(seed), dict[Any, tuple[int, ...]]()

    def batches() -> Iterator[list[Trajectory]]:
        while True:
            yield [demonstration(made.chat, demonstrate(rng), schemas, known) for _ in range(batch)]

    _imitate(made, batches(), steps, lr)
    return made


def _untrained(words: Sequence[str], seed: int) -> Policy:
    """Return a policy with random weights whose tokenizer has these words."""
    made = Policy(model(_VOCABULARY + len(words), seed=seed), Chat(tokenizer(words)))
    config, tokens = made.model.config, made.chat.tokenizer
    config.eos_token_id = made.model.generation_config.eos_token_id = tokens.eos_token_id
    config.pad_token_id = made.model.generation_config.pad_token_id = tokens.pad_token_id
    return made


def _imitate(policy: Policy, batches: Iterator[list[Trajectory]], steps: int, lr: float) -> float:
    """Train on batches of demonstrations and return the smoothed final loss."""
    smooth = 0.0
    collated = (collate(batch, imitate=True) for batch in batches)
    for step, stats in enumerate(imitation_steps(policy, collated, steps, lr)):
        smooth = stats.loss if step == 0 else 0.9 * smooth + 0.1 * stats.loss
    policy.version = 0  # the version counts the updates of its user
    return smooth


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
        raise SettingsError(f"name must be one of {', '.join(map(repr, NAMES))}, got {name!r}")


# --- the command ---------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Regenerate shipped tasks or policies."""
    parser = argparse.ArgumentParser(prog="python -m agentfly_kit.tiny", description=main.__doc__)
    parser.add_argument("what", choices=("tasks", "policy"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", choices=NAMES, default="calculator")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.what == "tasks":
        for split, rows in recipe(given.name).tasks(given.seed).items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (given.out / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    else:
        build(given.name, given.out, seed=given.seed, report=_print)


def _print(line: str) -> None:
    sys.stderr.write(line + "\n")
