"""Records for the tests of the views, messages like those of a page, and checks of what a view sends and shows."""

import asyncio
import html.parser
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agents
import numpy as np
from agentfly_kit.widgets._base import STATIC_LIMIT
from waiting import until

import agentfly_kit as af
from agentfly_kit import widgets as w

NASTY = (
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "'`${x}", "&lt;", "\x00", "\x1b[31m", "\u202eabc",
    "\u05e9\u05dc\u05d5\u05dd",
    "\u200b", "\u200d", "\ufeff", "\ufffd", "\ud800", "\udfff", "e\u0301", "\u0301", "\U0001f9d1\u200d\U0001f680",
    "\xa0", "\u2028", "", " ", "\n", "\r\n", "\t", "·", "⏎", "\ue000", "a" * 5000,
)  # fmt: skip


def trajectory(
    id: str = "t-0", actions: int = 2, width: int = 5, seed: int = 0, token_texts: Any = None
) -> af.Trajectory:
    rng = np.random.default_rng(seed)
    counter = iter(range(10, 10**6))

    def turn(kind: Any, author: str, n: int, *, sampled: bool = False, own: Any = None) -> af.Turn:
        words = tuple(own or (f" w{i}" for i in range(n)))
        extra: dict[str, Any] = {}
        if sampled:
            extra = {
                "logprobs": tuple(-rng.exponential(1.0, len(words))),
                "entropies": tuple(rng.exponential(1.0, len(words))),
                "versions": (0,) * len(words),
            }
        ids = tuple(next(counter) for _ in words)
        return af.Turn(kind, author, ids, sampled, text="".join(words), token_texts=words, **extra)

    turns = [turn("prompt", "task", width)]
    for _ in range(actions):
        turns += [
            turn("action", "policy", width, sampled=True, own=token_texts),
            turn("observation", "tool", 3, own=token_texts),
        ]
    turns.append(turn("forced", "hook", 2))
    task = af.Task("task-1", ({"role": "user", "content": "?"},))
    return af.Trajectory(id, task, "g", 0, tuple(turns), "answered", reward=1.0)


def batch_of(trajectories: list[af.Trajectory], **more: Any) -> SimpleNamespace:
    """Return a padded batch like that of `collate`, with the rows in the given order."""
    import torch

    width = max(len(t.ids) for t in trajectories) + 3
    shape = (len(trajectories), width)
    ids, attention = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    mask, logprobs, advantages = attention.clone(), torch.full(shape, math.nan), torch.full(shape, math.nan)
    for b, t in enumerate(trajectories):
        n = len(t.ids)
        ids[b, :n], attention[b, :n] = torch.tensor(t.ids), True
        mask[b, :n], logprobs[b, :n] = torch.tensor(t.action_mask), torch.tensor(t.logprobs)
        advantages[b, :n] = torch.where(mask[b, :n], torch.arange(n) + 100.0 * b, math.nan)
    return SimpleNamespace(
        trajectories=tuple(trajectories), ids=ids, attention=attention, mask=mask, logprobs=logprobs,
        advantages=advantages, token_rewards=torch.where(mask, 0.0, math.nan), **more,
    )  # fmt: skip


def stats_of(batch: Any, shift: Any = 0.1) -> af.Stats:
    """Return the statistics of an update that adds `shift` to the logprobs, a number or an array."""
    before = batch.logprobs.numpy()
    after = before + np.float32(shift)
    detail = {
        "logprob_before": before, "logprob_after": after, "ratio": np.exp(after - before),
        "clipped": np.where(batch.mask.numpy(), (after - before > 0.05).astype(np.float32), np.nan),
        "advantage": batch.advantages.numpy(),
    }  # fmt: skip
    return af.Stats(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, detail=detail, batch=batch)


def unpack(packed: dict[str, bytes]) -> np.ndarray:
    values = np.frombuffer(packed["values"], "<f4").copy()
    present = np.unpackbits(np.frombuffer(packed["present"], np.uint8), bitorder="little")[: len(values)]
    values[present == 0] = np.nan
    return values


class Page(html.parser.HTMLParser):
    """Parser that collects the tags, attributes and text of a static form."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.images: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.images += [value or "" for name, value in attrs if name == "src"]

    def handle_data(self, data: str) -> None:
        self.text += data


def check_static(view: w.View) -> Page:
    """Check that the state can be sent, and that the static form is small and contains only HTML that untrusted
    notebooks keep; return the form parsed."""
    sent(view)
    text = view.freeze()._repr_html_()
    assert len(text.encode()) <= STATIC_LIMIT
    page = Page(text)
    assert page.tags <= {
        "div", "span", "b", "code", "details", "summary", "table", "thead", "tbody", "tr", "th", "td", "img", "wbr",
    }  # fmt: skip
    assert page.attributes <= {"style", "title", "src", "alt", "width", "height"}
    assert all(src.startswith(("data:image/svg+xml;base64,", "data:image/png;base64,")) for src in page.images)
    return page


def sent(view: w.View) -> dict[str, Any]:
    """Return the state as it is sent to the page. Fail if it cannot be encoded as JSON or UTF-8."""
    state = view.get_state()
    kept = {k: v for k, v in state.items() if k not in ("_buffers", "_esm", "_css", "layout")}
    json.dumps(kept, allow_nan=False, ensure_ascii=False, default=bytes.hex).encode("utf-8")  # buffers are sent apart
    return state


def leaves(x: Any) -> list[bytes]:
    """Return the buffers in nested lists and dictionaries."""
    if isinstance(x, bytes):
        return [x]
    return [leaf for value in (x.values() if isinstance(x, dict) else x) for leaf in leaves(value)]


class FakeRun:
    total = 20

    def __init__(self, n: int = 0) -> None:
        self.records: list[dict[str, float]] = []
        self.listeners: list[Callable[..., Any]] = []
        for _ in range(n):
            self.step()

    def subscribe(self, callback: Callable[..., Any]) -> Callable[[], None]:
        self.listeners.append(callback)
        return lambda: self.listeners.remove(callback)

    def step(self, **more: float) -> None:
        i = len(self.records) + 1
        record = {
            "step": i, "success": i / 20, "reward": i / 10, "approx_kl": 0.01, "grad_norm": 1.0, "seconds": 2.0, **more,
        }  # fmt: skip
        self.records.append(record)
        for listener in list(self.listeners):
            listener(record)


def started(path: Path | None, steps: int = 4, **more: Any) -> Any:
    """Return a training run with short chains, and evaluations if `evaluate_every` is given."""
    policy, tasks = agents.fresh(), agents.tasks(6)
    agent = agents.agent(policy, max_turns=2, sampling=af.Sampling(max_tokens=8))
    config = af.TrainConfig(steps=steps, tasks_per_step=2, group_size=2, **more)
    return af.train(agent, policy, tasks, config, run=path, eval_tasks=tasks[:2] if config.evaluate_every else None)


class Gated(agents.Played):
    """Play texts. Requests after the first `free` ones wait until `gate` is set."""

    def __init__(self, script: Any, free: int) -> None:
        super().__init__(script)
        self.free, self.gate = free, asyncio.Event()

    async def sample(self, *args: Any, **options: Any) -> af.Sample:
        if len(self.given) >= self.free:
            await self.gate.wait()
        return await super().sample(*args, **options)


def gated(script: Any, free: int, **settings: Any) -> Any:
    """Return an agent whose engine answers `free` requests and then waits for `agent.engine.gate`."""
    return agents.agent(engine=Gated(script, free), chat=agents.chat(), **settings)


class Box:
    """A sandbox without state."""

    async def reset(self) -> None: ...


# --- messages of a page ----------------------------------------------------------------------------


def click(view: Any, name: str, value: Any = None) -> None:
    """Send the message that the page sends for a click."""
    view._handle_custom_msg({"kind": "do", "page": "p", "name": name, "value": value}, [])


def show(view: Any, page: str = "p") -> None:
    view._handle_custom_msg({"kind": "open", "page": page}, [])


def hide(view: Any, page: str = "p") -> None:
    view._handle_custom_msg({"kind": "close", "page": page}, [])


def put(view: Any, name: str, value: Any) -> None:
    """Set a trait as a page does."""
    view._handle_custom_msg({"kind": "set", "page": "p", "name": name, "value": value}, [])


async def press(view: Any, name: str, value: Any = None) -> None:
    """Click, and wait until the action has ended."""
    click(view, name, value)
    await asyncio.sleep(0)
    await until(lambda: not view._jobs)


async def ask(view: Any, name: str, value: Any = None) -> None:
    """Click, and send the state after the action at once instead of at the next update."""
    await press(view, name, value)
    view.refresh()
