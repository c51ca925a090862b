"""Agents shared by several test files, with the shipped policy, scripted texts or tiny random models."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))  # for programs that import this module without pytest's settings
from recipes.calculator import tasks as calculator_tasks

import agentfly_kit as af
from agentfly_kit.rewards import reward
from agentfly_kit.samples import TurnRequest


@af.tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: for example "3*(4+5)".
    """
    if set(expression) - set("0123456789+-*() ") or len(expression) > 40 or "**" in expression:
        return "error"
    try:
        return str(eval(expression, {"__builtins__": {}}))
    except Exception:
        return "error"


Text = Annotated[str, "any"]


class Box:
    """Sandbox that returns all texts received since the last reset. All methods suspend."""

    def __init__(self, **_: Any) -> None:
        self.log: list[str] = []
        self.alive = True

    async def start(self) -> None:
        await asyncio.sleep(0)

    async def run(self, text: str) -> str:
        await asyncio.sleep(0.001)
        if not self.alive:
            raise af.errors.SandboxError("this box is closed")
        self.log.append(text)
        return ",".join(self.log)

    async def reset(self) -> None:
        await asyncio.sleep(0.001)
        self.log.clear()

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.alive = False


class ForkingBox(Box):
    async def fork(self, into: ForkingBox) -> None:
        await asyncio.sleep(0)
        into.log = list(self.log)


@af.tool
async def put(text: Text, box: Box) -> str:
    """Put a text into the box."""
    return await box.run(text)


@af.tool
async def put_forking(text: Text, box: ForkingBox) -> str:
    """Put a text into the box."""
    return await box.run(text)


def put_call(text: str, name: str = "put") -> str:
    return f'<tool_call>{{"name":"{name}","arguments":{{"text":"{text}"}}}}</tool_call>'


@reward
def exact(final: str | None, answer: str) -> float:
    return float(final is not None and final.strip() == answer)


def tasks(count: int = 4, seed: int = 0) -> list[af.Task]:
    """Return calculator tasks with their answers."""
    rows = calculator_tasks(train=count, test=1, seed=seed)["train"]
    return [
        af.Task(row["id"], ({"role": "user", "content": row["question"]},), {"answer": row["answer"]}) for row in rows
    ]


def numbered(count: int) -> list[af.Task]:
    """Return tasks t0, t1, ... with the same question."""
    return [af.Task(f"t{i}", ({"role": "user", "content": "What is 2+3?"},), {"answer": "5"}) for i in range(count)]


def assert_same_gradient(got: torch.Tensor, wanted: torch.Tensor, message: str = "") -> None:
    """Compare two float32 gradients that are equal in exact arithmetic but were summed in different orders.

    A gradient element is a sum over tokens and layer widths. In these tests the sums have about 10,000 terms, which may
    cancel. The rounding error is therefore of the order of eps * sqrt(10,000) relative to the largest gradients, not to
    the element itself, so errors are compared with the norm of the whole gradient.
    """
    assert got.dtype == wanted.dtype == torch.float32 and got.shape == wanted.shape
    allowed = 100 * torch.finfo(torch.float32).eps * float(wanted.norm())
    error = float((got - wanted).norm())
    assert error <= allowed, f"{message}: the difference has norm {error:.3g}, rounding explains {allowed:.3g}"


def assert_same_update(got: torch.Tensor, wanted: torch.Tensor, before: torch.Tensor) -> None:
    """Compare float32 weights after two updates from `before` that are equal in exact arithmetic.

    The changes differ as much as gradients do, and adding a change to a weight rounds to the last bit of the weight.
    """
    eps = torch.finfo(torch.float32).eps
    allowed = eps * (100 * float((wanted - before).norm()) + 2 * float(before.norm()))
    error = float((got - wanted).norm())
    assert error <= allowed, f"the difference has norm {error:.3g}, rounding explains {allowed:.3g}"


@functools.cache
def shipped() -> af.Policy:
    """Return the shipped policy, loaded once. It must not be trained; use `fresh()` for that."""
    return af.tiny.policy("calculator")


def fresh(*, value_head: bool = False) -> af.Policy:
    policy = shipped().copy()
    if value_head:
        return af.Policy(policy.model, policy.chat, value_head=True)
    return policy


@functools.cache
def chat() -> af.Chat:
    return af.Chat(af.tiny.tokenizer())


def random_policy(
    seed: int = 0,
    *,
    value_head: bool = False,
    spread: float = 0.25,
    width: int = 32,
    heads: int = 2,
    length: int = 256,
) -> af.Policy:
    """Return a Qwen3 with a few thousand random weights, whose distributions are far from uniform."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(chat().tokenizer), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=1, head_dim=16, max_position_embeddings=length,
        tie_word_embeddings=False, initializer_range=spread, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
        policy = af.Policy(model, chat(), value_head=value_head)
        if policy.value_head is not None:
            torch.nn.init.normal_(policy.value_head.weight, std=0.1)
    return policy


def agent(policy: af.Policy | None = None, **settings: Any) -> af.Agent:
    """Return the calculator agent, with the shipped policy by default."""
    policy = shipped() if policy is None else policy
    settings.setdefault("engine", af.LocalEngine(policy))
    settings.setdefault("chat", policy.chat)
    settings.setdefault("tools", [calculator])
    settings.setdefault("reward", exact)
    settings.setdefault("max_turns", 4)
    settings.setdefault("sampling", af.Sampling(max_tokens=64))
    return af.Agent(**settings)


def scripted(script: Any, **settings: Any) -> af.Agent:
    """Return an agent that plays scripted texts without running a model."""
    engine = af.ScriptedEngine(script, latency=settings.pop("latency", 0.0))
    return agent(engine=engine, chat=chat(), **settings) if "policy" not in settings else agent(**settings)


def call(expression: str = "1+1", name: str = "calculator") -> str:
    """Return the text of a tool call."""
    return f'<tool_call>{{"name":"{name}","arguments":{{"expression":"{expression}"}}}}</tool_call>'


async def stepped(chain: Any) -> Any:
    """Return an interactive chain after its first step."""
    await chain.step()
    return chain


def pass_time(seconds: float) -> None:
    """Let the clock of the running event loop jump, so that its time limits end, however slow the machine is."""
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + seconds  # type: ignore[method-assign]


class Played(af.Engine):
    """Engine that plays texts as if a policy had sampled them, with ids, logprobs and mask 1, without running a model.

    A text that ends in "…" is truncated before it. `given` and `gave` record the token ids received and returned.
    """

    reproducible = True

    def __init__(self, script: Any, *, max_length: int = 1 << 30) -> None:
        self.script = script
        self.given: list[tuple[int, ...]] = []
        self.gave: list[tuple[int, ...]] = []
        self.seeds: list[int] = []
        self.samplings: list[af.Sampling] = []
        self._max_length = max_length

    @property
    def max_length(self) -> int:
        return self._max_length

    async def sample(
        self, ids: Sequence[int], sampling: af.Sampling, seed: int, *, request: TurnRequest | None = None
    ) -> af.Sample:
        assert request is not None
        said = self.script(request.task, request.turn) if callable(self.script) else self.script[request.turn]
        if isinstance(said, BaseException):
            raise said
        stop: Any = "stop"
        if said.endswith("…"):
            out, stop = chat().encode(said[:-1])[: sampling.max_tokens], "length"
        elif said.endswith("§"):
            out, stop = chat().encode(said[:-1]), "string"
        else:
            out = (*chat().encode(said), chat().stop_ids[0])
        self.given.append(tuple(ids))
        self.gave.append(tuple(out))
        self.seeds.append(seed)
        self.samplings.append(sampling)
        n = len(out)
        lp = tuple(-0.5 - 0.001 * i for i in range(n))
        return af.Sample(tuple(out), lp, (1.0,) * n, stop, (0,) * n)


class TextOnly(Played):
    """Engine that plays texts without token ids. `given` records the contents of the messages."""

    tokens = "none"
    logprobs = "no"
    given: list[Any]

    async def sample(self, ids: Any, sampling: Any, seed: int, *, request: TurnRequest | None = None) -> af.Sample:
        assert request is not None
        self.given.append(tuple(m["content"] for m in request.messages))
        return af.Sample(None, None, None, "stop", None, text=self.script[request.turn])


def played(script: Any, *, max_length: int = 1 << 30, **settings: Any) -> af.Agent:
    """Return an agent whose scripted texts count as sampled, to test everything except the model."""
    return agent(engine=Played(script, max_length=max_length), chat=chat(), **settings)


def trajectory(
    policy: af.Policy | None,
    plan: list[list[tuple[str, int]]],
    *,
    name: str = "g/0",
    task: af.Task | None = None,
    reward: float | None = 1.0,
    turn_rewards: dict[int, float] | None = None,
    stop: str = "answered",
    sampling: af.Sampling | None = None,
    version: int = 0,
    seed: int = 0,
    noise: float = 0.3,
    stale: float = 0.0,
    with_entropies: bool = True,
) -> af.Trajectory:
    """Return a trajectory of random ids with the policy's logprobs (-1 without a policy) plus random noise.

    Args:
        plan: the turns of each row, as (author, number of tokens). "policy" and authors in upper case sample.
        stale: added to the logprobs with alternating sign.
    """
    g = torch.Generator().manual_seed(seed)
    sampling = af.Sampling() if sampling is None else sampling
    turns: list[af.Turn] = []
    for r, row in enumerate(plan):
        ids: list[int] = [i for t in turns if t.row == r for i in t.ids or ()]
        for author, n in row:
            new = torch.randint(7, 390, (n,), generator=g).tolist()
            sampled = author == "policy" or author.isupper()
            at = range(len(ids), len(ids) + n)
            ids += new
            logp, entropies = [-1.0] * n, [1.0] * n
            if policy is not None and sampled:
                logp, entropies = reference_logprobs(policy, ids, list(at), sampling.temperature)
            offset = (torch.randn(n, generator=g) * noise + stale * (-1.0) ** torch.arange(n)).tolist()
            given: dict[str, Any] = {}
            if sampled:
                given = {
                    "logprobs": tuple(min(a + b, 0.0) for a, b in zip(logp, offset, strict=True)),
                    "entropies": tuple(entropies) if with_entropies else None, "versions": (version,) * n,
                    "seed": 1000 * seed + len(turns),
                    "kept_mass": tuple(0.5 + 0.05 * (j % 8) for j in range(n)) if sampling.truncates else None,
                }  # fmt: skip
            kind: Any = "action" if sampled else "prompt" if at.start == 0 else "observation"
            turns.append(
                af.Turn(
                    kind, author, tuple(new), sampled, reward=(turn_rewards or {}).get(len(turns)),
                    parent=turns[-1] if turns else None, row=r, **given,
                )
            )  # fmt: skip
    group, _, chain = name.partition("/")
    task = af.Task("t", ({"role": "user", "content": "?"},)) if task is None else task
    return af.Trajectory(name, task, group, int(chain.split(".")[0]), tuple(turns), stop, reward, sampling=sampling)


@torch.no_grad()
def reference_logprobs(
    policy: af.Policy, ids: Sequence[int], positions: Sequence[int], temperature: float = 1.0
) -> tuple[list[float], list[float]]:
    """Compute log p(ids[t] | ids[:t]) and the entropy at each position with one plain forward pass of the model."""
    logits = policy.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].double() / temperature
    logp = torch.log_softmax(logits, -1)
    at = [t - 1 for t in positions]
    entropy = -(logp.exp() * logp).sum(-1)
    return [float(logp[a, ids[t]]) for a, t in zip(at, positions, strict=True)], [float(entropy[a]) for a in at]
