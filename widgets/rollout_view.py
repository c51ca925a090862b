"""Live view of the chains of a rollout and their states, such as sampling, waiting for a sandbox or running a tool."""

from __future__ import annotations

import functools
import time
import weakref
from collections import deque
from typing import Any, ClassVar

import numpy as np
import traitlets

from ._base import LiveView, require
from ._chain_code import _named
from ._chains import ChainsView
from ._format import count, escape, number, pack, sendable, shared_prefix, tag
from .token_view import TokenView

STATES = ("queued", "waiting", "sampling", "sandbox", "tool", "scoring", "done", "failed", "cancelled")
# The page shows a chain in state "done" as "succeeded", "done" (no success) or "unscored" (no reward).
RESULTS = (*STATES, "succeeded", "unscored")
WORDS = {
    "sandbox": "waiting for a sandbox",
    "tool": "running a tool",
    "waiting": "waiting",
    "queued": "not started",
    "done": "no success",
    "unscored": "no reward",
}
SIGNS = {
    "queued": "·",
    "waiting": "◌",
    "sampling": "●",
    "sandbox": "◔",
    "tool": "◆",
    "scoring": "★",
    "done": "○",
    "failed": "✕",
    "cancelled": "⊘",
    "succeeded": "✓",
    "unscored": "?",
}
_TINTS = {
    "queued": "128,128,128",
    "waiting": "128,128,128",
    "sampling": "40,120,220",
    "sandbox": "200,150,20",
    "tool": "150,90,200",
    "scoring": "220,110,30",
    "done": "220,110,30",
    "failed": "200,60,50",
    "cancelled": "128,128,128",
    "succeeded": "40,160,90",
    "unscored": "128,128,128",
}
_ENDS = ("done", "stopped", "interrupted", "failed")
# Maps the state of a chain to its rank in the list. Chains in all other states are running; their rank is 0.
_RANK = {"queued": 1, "failed": 2, "unscored": 2, "succeeded": 3, "done": 3, "cancelled": 4}
# Length of the window over which the rate is averaged, in seconds.
_WINDOW = 20.0


class RolloutView(ChainsView, LiveView):
    """View of a running rollout: one line per chain, counts, rate, time left, and buttons to pause, resume and stop.

    Running chains come first, then queued, failed or unscored, finished, and cancelled chains, each in the order of the
    tasks; a menu selects other orders. Finished chains are marked as succeeded, not succeeded or unscored (see
    `Trajectory.success`), and a bar shows the reward. If chains have no reward, a hint shows how to rerun them.

    Pick a running or finished chain to show its tokens, step through it, or convert it to code; `view.selection`
    contains this chain. For a running chain, the tokens of further turns are added; for one of a harness, they are the
    rows of its requests. The buttons also work while a cell awaits the run. The view updates at most 10 times per
    second, regardless of the number of chains. `view.counts` contains the counts last sent to the page.

    Args:
        run: The handle returned by `agent.rollout(...)`, before or while it is awaited; or the handle of a training
            run, in which case the view shows the rollout of the current step.
    """

    stem: ClassVar[str] = "rollout_view"
    actions: ClassVar[frozenset[str]] = frozenset({"pause", "resume", "stop"}) | ChainsView.picking

    _about = traitlets.Dict().tag(sync=True)
    # Trajectory ids; sent again only when they change.
    _names: traitlets.List[Any] = traitlets.List().tag(sync=True)
    # Distinct texts shown next to the states (tools, stop reasons). The buffers contain their indices.
    _details: traitlets.List[Any] = traitlets.List().tag(sync=True)
    _buffers = traitlets.Dict().tag(sync=True)

    def __init__(self, run: Any) -> None:
        self._training = not hasattr(run, "snapshot") and hasattr(run, "rollout")
        if not self._training and not (
            callable(getattr(run, "snapshot", None)) and callable(getattr(run, "pause", None))
        ):
            raise TypeError(
                "run must be the handle of a rollout (run = agent.rollout(tasks), before `await run`) or a "
                f"training run, got {type(run).__name__}; use TrajectoryView for a finished rollout"
            )
        self._finished: deque[tuple[float, int]] = deque()
        self._ids: list[str] = []
        self._prefix = 0
        self._step = ""
        super().__init__(run, None if self._training else run.subscribe)
        self.refresh()
        self._tick()

    def _tick(self) -> None:
        """Poll for changes that no chain event reports, such as a pause or the end of the rollout."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        view_ref, pause = weakref.ref(self), 0.15 if self._training else 0.5

        def tick() -> None:
            view = view_ref()
            if view is None or view.comm is None:
                return
            if not view.resting:
                # Called once more after the run was garbage-collected, so that the page can say so.
                view._throttle.schedule()
            if view.record is not None and (view._training or view._about.get("state") not in _ENDS):
                loop.call_later(pause, tick)

        loop.call_later(pause, tick)

    def _handle(self) -> Any:
        run = self.record
        if not self._training or run is None:
            return run
        if run.latest_rollout is None:
            return None
        step, handle = run.latest_rollout
        self._step = f"step {step} of {run.total}"
        return handle

    def refresh(self) -> None:
        """Send the current state to the page immediately."""
        handle = self._handle()
        if handle is None:
            if not self._about:
                self._about = {
                    "total": 0, "counts": dict.fromkeys(RESULTS, 0), "state": "not started", "seconds": 0.0,
                    "gone": False, "max_turns": 0, "rate": None, "left": None, "reward": None, "step": "", "prefix": 0,
                    "rewards": None, "hint": "Not started: await the run in a cell.",
                }  # fmt: skip
            elif self.record is None:
                self._about = {**self._about, "gone": True}
            return
        s = handle.snapshot()
        with self.hold_sync():
            ids = [c.trajectory for c in s.chains]
            if ids != self._ids:
                if not set(ids) >= set(self._ids):  # another rollout has started; forks only add ids
                    self._finished = deque()
                self._prefix = shared_prefix(ids)
                self._ids, self._names = ids, [sendable(id) for id in ids]
            details: dict[str, int] = {}
            index = [details.setdefault(c.detail, len(details)) for c in s.chains]
            self._details = [sendable(text)[:200] for text in details]
            self._buffers = {
                "state": np.array([_INDEX[_result(c)] for c in s.chains], np.uint8).tobytes(),
                "turn": np.array([c.turn for c in s.chains], "<i2").tobytes(),
                "since": np.array([c.since for c in s.chains], "<f4").tobytes(),
                "detail": np.array(index, "<u2").tobytes(),
                "reward": pack([np.nan if c.reward is None else c.reward for c in s.chains]),
            }
            self._about = self._summary(handle, s)
        below = self.opened
        # A chain that is stepped by hand below its tokens would be lost with them.
        if isinstance(below, TokenView) and below.stepper is None:
            was, now = self._shown, self._find(self._picked_id())
            if now is not None and (len(now.turns), now.stop, now.reward) != (len(was.turns), was.stop, was.reward):
                self._handle_action("chain_tokens", None)  # on the event loop of the view

    def _summary(self, handle: Any, s: Any) -> dict[str, Any]:
        counts = dict.fromkeys(RESULTS, 0)
        for c in s.chains:
            counts[_result(c)] += 1
        over = s.count("done", "failed", "cancelled")
        now = time.monotonic()
        if s.state == "running" and (not self._finished or self._finished[-1][1] != over):
            self._finished.append((now, over))
        while len(self._finished) > 2 and now - self._finished[1][0] > _WINDOW:
            self._finished.popleft()
        rate = left = None
        if over and s.seconds > 0:
            rate = over / s.seconds
            if s.state == "running" and len(self._finished) > 1 and now > self._finished[0][0]:
                rate = (over - self._finished[0][1]) / (now - self._finished[0][0]) or rate
            left = (len(s.chains) - over) / rate if s.state == "running" else None
        rewards = [c.reward for c in s.chains if c.reward is not None]
        return {
            "total": len(s.chains),
            "counts": counts,
            "state": self._state(s.state),
            "seconds": s.seconds,
            "gone": False,
            "max_turns": int(handle.agent.max_turns),
            "rate": None if rate is None else _rate(rate),
            "left": left,
            "reward": number(sum(rewards) / len(rewards)) if rewards else None,
            "step": self._step,
            "prefix": self._prefix,
            "rewards": [min(rewards), max(rewards)] if rewards else None,
            "hint": "" if self._training else self._hint(handle, s),
        }

    def _hint(self, handle: Any, s: Any) -> str:
        """Return advice on how to start, continue or repeat the rollout, or ""."""
        run, agent = _named(handle) or "run", _named(handle.agent) or "agent"
        if s.state == "not started":
            return f"Not started: `await {run}` starts it."
        hint = (
            f"Interrupted. The finished chains are kept in {run}.partial; to run all chains, run the cell again. "
            if s.state == "interrupted"
            else ""
        )
        unscored = sum(c.state in ("done", "failed") and c.reward is None for c in s.chains)
        if s.state in _ENDS and unscored and (handle.agent.reward or handle.agent.group_reward is not None):
            have = "chain has" if unscored == 1 else "chains have"
            hint += (
                f"{unscored:,} {have} no reward. "
                f"To run their tasks again: `await {agent}.rollout({run}.partial.failed.tasks)`"
            )
        return hint.strip()

    def _state(self, state: str) -> str:
        """Return the state of the rollout, or of the training run if it has ended or is between two rollouts."""
        run = self.record
        if not self._training or run is None or run.rollout is not None:
            return state
        return str(run.state) if run.state in _ENDS else "between rollouts"

    @property
    def counts(self) -> dict[str, int]:
        """Number of chains in each state of `run.snapshot()`, as last sent to the page."""
        counts = dict(self._about.get("counts", {}))
        succeeded, unscored = counts.pop("succeeded", 0), counts.pop("unscored", 0)
        return counts and {**counts, "done": counts["done"] + succeeded + unscored}

    # --- chains ---

    def _find(self, id: str) -> Any:
        """Return the chain with an id as on the page, if it is running or finished and has a turn."""
        handle = self._handle()
        found = None if handle is None else next((handle.find(i) for i in self._ids if sendable(i) == id), None)
        return found if found is not None and found.turns else None

    def _trajectory(self, id: str) -> Any:
        return require(self._find(id), f"{id} has not started, or its run")

    def _agent_for(self) -> Any:
        return getattr(self._handle(), "agent", None)

    def _expression(self, id: str) -> str:
        run = self.record
        name = (_named(run) if run is not None else None) or "run"
        return f"{name}{'.latest_rollout[1]' if self._training else ''}.find({id!r})"

    # --- buttons ---

    def _control(self, method: str, _: Any) -> None:
        getattr(require(self.record, "the run"), method)()
        self._throttle.schedule()

    _do_pause = functools.partialmethod(_control, "pause")
    _do_resume = functools.partialmethod(_control, "resume")
    _do_stop = functools.partialmethod(_control, "stop")

    def __repr__(self) -> str:
        a = self._about
        if not a.get("total"):
            return "RolloutView(no chains yet)"
        c = self.counts
        return f"RolloutView({a['state']}, {c['done']} of {a['total']} chains done, {c['failed']} failed)"

    def _static(self) -> str:
        if self.record is not None:
            self.refresh()
        return _page(self._about, self._names, self._details, self._buffers, repr(self))


def _rate(a_second: float) -> str:
    """Format a rate per second, minute or hour with three significant digits, such as "5.59 chains a minute"."""
    n, each = a_second, "a second"
    for longer in ("a minute", "an hour"):
        if n < 0.9995:
            n, each = 60 * n, longer
    n = float(f"{n:.3g}")
    return f"{n:,.0f} chains {each}" if n >= 100 else f"{n:g} {'chain' if n == 1 else 'chains'} {each}"


_INDEX = {name: i for i, name in enumerate(RESULTS)}


def _result(chain: Any) -> str:
    """Return the state of a chain, or its result if the state is "done"."""
    if chain.state != "done":
        return str(chain.state)
    return "unscored" if chain.reward is None else "succeeded" if chain.success else "done"


def _page(
    about: dict[str, Any], names: list[str], details: list[str], buffers: dict[str, Any], title: str, most: int = 150
) -> str:
    head = f" · {about['seconds']:.1f} s" + (f", {about['rate']}" if about["rate"] else "")
    head += f", mean reward {about['reward']}" if about["reward"] is not None else ""
    out = [tag("div", tag("b", escape(title)), escape(f"{head} (when this was saved)"), style="margin:2px 0 6px")]
    style = "display:inline-block;margin:2px;padding:1px 7px;border:1px solid #888888;border-radius:5px"
    chips = [
        tag(
            "span", escape(f"{SIGNS[name]} {n:,} {WORDS.get(name, name)}"),
            style=f"{style};background-color:rgba({_TINTS[name]},0.20)",
        )
        for name, n in about["counts"].items() if n
    ]  # fmt: skip
    out.append(tag("div", " ".join(chips)))
    if about["hint"]:
        out.append(tag("div", escape(about["hint"])))
    state = np.frombuffer(buffers.get("state", b""), np.uint8)
    turn, detail = np.frombuffer(buffers.get("turn", b""), "<i2"), np.frombuffer(buffers.get("detail", b""), "<u2")
    left = 'style="text-align:left"'
    present = np.unpackbits(np.frombuffer(buffers.get("reward", {}).get("present", b""), np.uint8), bitorder="little")
    rewards = np.frombuffer(buffers.get("reward", {}).get("values", b""), "<f4")
    rows = []
    for i, at in sorted(enumerate(state), key=lambda item: _RANK.get(RESULTS[item[1]], 0))[:most]:
        name = RESULTS[at]
        rows.append(
            f"<tr><td {left}>{escape(names[i][:80])}</td><td {left}>{SIGNS[name]} {WORDS.get(name, name)}</td>"
            f"<td>{number(float(rewards[i])) if present[i] else ''}</td><td>{turn[i]}</td>"
            f"<td {left}>{escape(details[detail[i]][:80])}</td></tr>"
        )
    if rows:
        out.append(
            "<details><summary>chains</summary><table><thead><tr><th>chain</th><th>state</th><th>reward</th><th>actions</th><th></th></tr></thead>"
            f"<tbody>{''.join(rows)}</tbody></table></details>"
        )
    if len(names) > most:
        out.append(tag("div", f"{count(len(names) - most, 'chain')} left out of this static view."))
    return tag("div", *out, style="line-height:1.6")
