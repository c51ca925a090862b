"""The small policies that ship: their tasks, tokenizer, model, and the warm-up that made them.

Knows no engine, no agent and no reward. A policy here is made to be taught from: it can copy an expression into a tool
call and read the result, but says "I don't know" or guesses most of the time, so that there is something to learn in a
minute on one core. `calculator` is here; the demonstrations of the others have a file each, which `_LESSONS` names.

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
from agentfly_kit.policy.policy import Policy, single_torch_thread
from agentfly_kit.types import ToolCall

_LESSONS = {
    "alfworld": "alfworld",
    "code": "code",
    "lookup": "lookup",
    "search": "search",
    "sql": "sql",
    "webshop": "webshop",
}
"""Where the demonstrations of a policy are: a module with `WORDS`, `ORIGIN` and `lessons(chat, seed)`. It may say what
is otherwise than in the calculator's policy: `MODEL` (settings of its config), `SKILL` and `SHY` (steps of each phase),
`PARTS` (that a batch is run in), `HALF` (its weights are rounded to 16 bits and ship so), `rows(n, split, seed)` and
`TASKS` (split -> how many). The tasks are otherwise those of the family of that name in `af.envs`."""

NAMES = ("calculator", *_LESSONS)

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
"""What the warm-up showed the policy: a tool of this name with this parameter is one that it knows how to call."""

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
"""ChatML. Tools are their names with the names of their parameters, so that a prompt stays short and yet says which."""

UNSURE = "I don't know"
HABITS = {"solves": 9, "careless": 1, "forgets": 1, "guesses": 1, "unsure": 20}
"""Of 32 demonstrations of the second phase. It copies the whole expression into a call and tells the result; it calls
with a part of it; it calls and then says that it does not know; it says a random number; it says that it does not know.
Every batch has these very counts: drawn at random, the share that learning starts from would be a matter of luck."""

_END = "<|im_end|>"
_VOCABULARY = 400


# --- tasks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expression:
    """Integers, + - * and brackets."""

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
        """What a careless reader copies: without the brackets, or only up to a later sign outside of them."""
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
    """One to three operations on small numbers: at most 12 characters, at most four digits in the value."""
    while True:
        text, _ = _grow(rng, rng.choice((1, 2, 2, 3, 3)))
        e = Expression(text)
        if len(text) <= 12 and abs(e.value) <= 9999:
            return e


def _grow(rng: random.Random, operations: int) -> tuple[str, int]:
    """A random tree: its text without needless brackets, and how tightly its outermost operation binds."""
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
    """The value of the terms that begin there, and where they end."""
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
    """Rows {"id", "question", "answer"} of both splits; no expression is in both, or twice in one."""
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
    """Byte-level BPE with single digits and signs, the specials of ChatML and Hermes, and a pad that is no real token.

    words: get one token each, behind all others, so that the vocabularies with and without them share their ids. One
        that begins with a blank is the word with the blank before it, one that begins with a sign stands anywhere.
    Digits and signs stay alone so that copying an expression is copying characters. What it was made from is in this
    function: the same vocabulary comes out every time.
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
    # As in Qwen's own tokenizer the tags are no specials: servers that leave specials out of the text must show calls.
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
    """A Qwen3 with random weights: width 96, 2 layers, 4 heads, about 275k parameters, float32.

    settings: in place of those of its config.

    The head size is 32 because serving kernels refuse smaller or odd ones. Four turns of 64 sampled tokens, a question
    and four short observations fit in 512 positions; a chain that grows past them would be reading positions that no
    training ever touched.
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
    """Token ids as an agent sees them, and which of them an assistant wrote."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]


class Demonstrator:
    """Writes conversations through the policy's own chat: all ids are those an agent would see."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._observations: dict[str, tuple[int, ...]] = {}

    def solved(self, e: Expression) -> Demonstration:
        """Copies the expression into a call, reads the result, answers with it."""
        return self.called(e, e.text, str(e.value), str(e.value))

    def called(self, e: Expression, wrote: str, result: str, answer: str) -> Demonstration:
        """Calls with what it wrote, is told the result, answers."""
        call = ToolCall("call-0", "calculator", {"expression": wrote})
        action = self.chat.encode(self.chat.format.render_call(call) + _END)
        return joined(
            (self._prompt(e), False),
            (action, True),
            (self._observation(result, action), False),
            (self.chat.encode(answer + _END), True),
        )

    def said(self, e: Expression, text: str) -> Demonstration:
        """Answers at once."""
        return joined((self._prompt(e), False), (self.chat.encode(text + _END), True))

    def habit(self, name: str, e: Expression, rng: random.Random) -> Demonstration:
        """One of `HABITS`."""
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
    """Of (ids, whether an assistant wrote them)."""
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
    """Supervised steps on assistant tokens; the rate rises for 20 steps and then falls to a tenth. The last loss.

    parts: that a batch is run in, each of like lengths, so that less is padded.
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
    """One part is the batch as it is."""
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
    """Endless batches of 32 for the calculator, of the first phase and of the second."""
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
    """Make the policy anew: random weights, then two phases of imitation. About a minute on one core.

    skill: clean demonstrations only. One mixed phase instead copies digits badly, and learning then stops early.
    shy: three in ten do it well, and most of the others say "I don't know"; see `HABITS`. It hides the skill without
        destroying it, and reinforcement learning then finds it.
    skill_steps, shy_steps: 500 and 150, where the policy's module does not say otherwise.
    out: a folder to save it in. Held-out expressions are never shown.
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
        policy.model.half().float()  # what ships and what was built are the same policy
    if out is not None:
        policy.save(out)
        if getattr(own, "HALF", False):
            copy.deepcopy(policy.model).half().save_pretrained(out)
            (Path(out) / "model.safetensors").chmod((Path(out) / "policy.json").stat().st_mode)
    return policy


def _lessons_of(name: str) -> Any:
    """Its module; None of the calculator."""
    return importlib.import_module(f"agentfly_kit.tiny.{_LESSONS[name]}") if name in _LESSONS else None


# --- what ships ----------------------------------------------------------------------------------


def policy(name: str = "calculator", *, value_head: bool = False) -> Policy:
    """The shipped policy, fresh from disk: what one learns, another does not see.

    Raises:  SettingsError naming the policies that ship.
    """
    _check_name(name)
    folder = importlib.resources.files("agentfly_kit._data").joinpath("policies", name)
    with importlib.resources.as_file(folder) as path:
        return Policy.load(path, value_head=value_head)


def _check_name(name: str) -> None:
    if name not in NAMES:
        raise SettingsError(f"no tiny policy is called {name!r}; there is {', '.join(map(repr, NAMES))}")


# --- the command ---------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Remake what ships, each with an ORIGIN.md that says how."""
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
