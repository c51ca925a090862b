"""Form that re-scores saved trajectories with `Rollout.rescore` while a reward is edited, and shows the changes."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import traitlets

from agentfly_kit.types import text_of

from ._base import require
from ._chain_code import _named
from ._chains import ChainsView, chain_label, find_in
from ._format import SUCCESS_RULE, count, escape, number, sendable, shared_prefix, tag
from ._saved import update_after_each_cell

# Maximum number of rows in the table on the page; `to_frame()` returns all rows.
_ROWS = 200
_BARS = 10

KINDS = {
    "gained": "▲ succeeds now",
    "lost": "▼ fails now",
    "higher": "△ higher",
    "lower": "▽ lower",
    "scored": "+ scored now",
    "unscored": "? unscored now",
    "same": "= the same",
}


class RewardForm(ChainsView):
    """Form that compares the recorded rewards of saved trajectories with a reward under development.

    The trajectories are re-scored whenever the cell that defines the reward is re-run; with `follow=False`, only when
    the button is pressed. Nothing is sampled and the rollout is not changed.

    `await form.score()` is equivalent to pressing the button. `form.rescored` is the rollout with the new rewards,
    `form.to_frame()` has one row per trajectory, and `form.picked` is the clicked trajectory.

    Args:
        reward: A reward, a function, or several of them.
        rollout: A Rollout, its trajectories, or the path of a saved rollout.
        agent: The agent that produced the trajectories, needed to open a trajectory in the stepper.
        follow: True to re-score whenever the cell that defines the reward is re-run.
        success: The rule that decides whether a chain succeeds, as in `Agent(success=)`; by default the rule of
            `agent`.

    Raises:  TaskError if a task lacks a field that the reward needs.
    """

    stem: ClassVar[str] = "reward_form"
    settable: ClassVar[frozenset[str]] = frozenset()
    actions: ClassVar[frozenset[str]] = frozenset({"score", "cancel", "look"}) | ChainsView.picking

    # True while trajectories are being scored, or when a task that will score them has been created.
    busy = traitlets.Bool(False).tag(sync=True)
    _about = traitlets.Dict().tag(sync=True)
    _progress = traitlets.List([0, 0]).tag(sync=True)
    _detail = traitlets.Dict().tag(sync=True)

    def __init__(
        self, reward: Any, rollout: Any, *, follow: bool = True, agent: Any = None, success: Any = None
    ) -> None:
        from agentfly_kit.rewards import RewardSet

        self.reward = RewardSet(reward)
        if not self.reward:
            raise TypeError("reward must be a function decorated with @af.reward")
        # Keep the rollout until the page closes, because `RewardForm(reward, await agent.rollout(...))` leaves no other
        # reference to it.
        self._kept: Any = _rollout(rollout)
        self.reward.check([group.task for group in self._kept.groups])
        self._picked: str | None = None
        self._agent = agent
        self._success = success if success is not None else getattr(agent, "success", None)
        self._scoring: asyncio.Future[Any] | None = None
        # The rollout with the new rewards; None before the first scoring.
        self.rescored: Any = None
        super().__init__(self._kept)
        self._show()
        if follow:
            update_after_each_cell(self)
        self._follow = follow
        if self._loop is not None:
            self._start()

    @property
    def record(self) -> Any:
        return self._kept if self._kept is not None else self._record()

    # --- scoring ---

    async def score(self) -> Any:
        """Re-score every trajectory and show the changes. Return the re-scored Rollout."""
        job = self._scoring
        if job is not None and job is not asyncio.current_task():
            job.cancel()
            await asyncio.wait([job])
        return await self._score()

    async def _score(self) -> Any:
        from agentfly_kit.agent.rollout import Rollout

        rollout = require(self.record, "the rollout")
        reward, began, told = self.reward, time.perf_counter(), 0.0
        reward.check([group.task for group in rollout.groups])
        self.busy = True
        try:
            groups: list[Any] = []
            for i, group in enumerate(rollout.groups):
                groups += (await Rollout((group,)).rescore(reward, success=self._success)).groups
                if (now := time.perf_counter()) - told > 0.1:
                    told = now
                    self._progress = [i + 1, len(rollout.groups)]
            self.rescored = Rollout(tuple(groups), rollout.seconds)
        finally:
            self.busy = False
        self._show(time.perf_counter() - began)
        return self.rescored

    def _start(self) -> None:
        if self._scoring is not None:
            self._scoring.cancel()
        job = self._scoring = self._job(self._score())
        self.busy = True

        def ended(_: Any) -> None:
            if self._scoring is job:
                self._scoring, self.busy = None, False

        job.add_done_callback(ended)

    def _after_cell(self) -> None:
        if self._follow and self.comm is not None and self._loop is not None and not self._loop.is_closed():
            try:
                self._redefined()
            except Exception as error:
                self._failed(error)

    def _redefined(self) -> None:
        """If rewards were redefined in a cell, switch to their new definitions and re-score the trajectories."""
        from agentfly_kit.rewards import RewardSet
        from agentfly_kit.tools.inspection import current_definition

        if (self._seen and not self._pages) or not self.reward.redefined():
            return
        names = set(self.reward.redefined())
        self.reward = RewardSet(current_definition(r.function) if r.name in names else r for r in self.reward)
        self._start()

    def _do_score(self, value: Any) -> None:
        self._redefined()
        self._start()

    def _do_cancel(self, value: Any) -> None:
        if self._scoring is not None:
            self._scoring.cancel()

    # --- inspection ---

    def _pairs(self) -> list[tuple[Any, Any]]:
        rollout = self.record
        if rollout is None:
            return []
        new = {t.id: t for t in self.rescored.trajectories} if self.rescored is not None else {}
        return [(t, new.get(t.id)) for t in rollout.trajectories]

    def _show(self, seconds: float | None = None) -> None:
        pairs = self._pairs()
        scored = self.rescored is not None
        changed = [(a, b, change_of(a, b)) for a, b in pairs if b is not None]
        tally = Counter(k for _, _, k in changed)
        rows = sorted(changed, key=lambda row: list(KINDS).index(row[2]))
        errors = Counter(str(b.error) for _, b, _ in changed if b.error is not None and b.reward is None)
        self._about = {
            "name": sendable(" + ".join(r.name for r in self.reward)),
            "source": sendable("\n\n".join(r.source for r in self.reward)),
            "n": len(pairs),
            "scored": scored,
            "old": _summary([a for a, _ in pairs]),
            "new": _summary([b for _, b, _ in changed]) if scored else {},
            "last": self._about.get("new", {}) if scored else {},
            "bars": bars([a.reward for a, _ in pairs], [b.reward for _, b, _ in changed]),
            "tally": [[k, KINDS[k], tally[k]] for k in KINDS],
            "rows": [
                [
                    sendable(a.id), sendable(chain_label(a)), sendable(_short(text_of(a.task.messages[-1]))),
                    number(a.reward), number(b.reward), k,
                    sendable(_short(a.final if a.final is not None else f"({a.stop})")),
                ]
                for a, b, k in rows[:_ROWS]
            ],
            "prefix": shared_prefix([sendable(chain_label(a)) for a, _ in pairs]),
            "errors": [[sendable(_short(text, 300)), n] for text, n in errors.most_common(5)],
            "seconds": seconds, "hint": SUCCESS_RULE,
        }  # fmt: skip

    def _do_look(self, value: Any) -> None:
        for a, b in self._pairs():
            if a.id == value:
                self._picked = a.id
                self.pick(a)
                self._detail = {
                    "id": sendable(a.id),
                    "task": sendable(text_of(a.task.messages[-1])[:2000]),
                    "fields": sendable(", ".join(f"{k}={_short(repr(v))}" for k, v in a.task.fields.items())),
                    "final": None if a.final is None else sendable(a.final[:4000]),
                    "old": sendable(a.explain()[:1000]),
                    "new": "" if b is None else sendable(b.explain()[:1000]),
                    "traceback": sendable(b.error.traceback) if b is not None and b.error is not None else "",
                }
                return
        self._picked, self._detail = None, {}
        self.pick(None)

    def _trajectory(self, id: str) -> Any:
        return require(next((a for a, _ in self._pairs() if sendable(a.id) == id), None), f"the rollout of {id}")

    def _agent_for(self) -> Any:
        return self._agent

    def _expression(self, id: str) -> str:
        rollout = self.record
        return find_in(f"{(_named(rollout) if rollout is not None else None) or 'rollout'}.trajectories", id)

    @property
    def picked(self) -> Any:
        """The clicked trajectory, with its recorded reward, or None."""
        return next((a for a, _ in self._pairs() if a.id == self._picked), None)

    def to_frame(self) -> Any:
        """Return a data frame with one row per trajectory.

        Its columns are trajectory, task, chain, old, new, change and final. Missing rewards are NaN.
        """
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "trajectory": a.id, "task": a.task.id, "chain": a.chain,
                    "old": math.nan if a.reward is None else a.reward,
                    "new": math.nan if b is None or b.reward is None else b.reward,
                    "change": None if b is None else change_of(a, b), "final": a.final,
                }
                for a, b in self._pairs()
            ],
            columns=["trajectory", "task", "chain", "old", "new", "change", "final"],
        )  # fmt: skip

    @property
    def flipped(self) -> Any:
        """The rows of `to_frame()` whose success changed."""
        frame = self.to_frame()
        return frame[frame["change"].isin(["gained", "lost"])]

    # --- lifecycle ---

    def _on_first_page(self) -> None:
        self._kept = self.record

    def _on_last_page_closed(self) -> None:
        self._kept = None

    def close(self) -> None:
        """Close the form and stop checking whether the rewards were redefined."""
        self._kept = None
        super().close()

    def __repr__(self) -> str:
        about = self._about
        changed = "being scored" if self.busy else "not scored yet"
        if about.get("scored"):
            flips = {k: n for k, _, n in about["tally"]}
            changed = f"{flips['gained']} gained, {flips['lost']} lost"
        scored = count(about.get("n", 0), "trajectory", "trajectories")
        return f"RewardForm({about.get('name', '')}, {scored}, {changed})"

    def _static(self) -> str:
        return _page(self._about, repr(self), self.busy)


def _rollout(source: Any) -> Any:
    from agentfly_kit.agent.rollout import Rollout

    if isinstance(source, str | os.PathLike):
        return Rollout.load(os.fspath(source))
    if hasattr(source, "groups") and callable(getattr(source, "rescore", None)):
        return source
    return Rollout.from_trajectories([source] if hasattr(source, "turns") else source)


def change_of(old: Any, new: Any) -> str:
    """Return the kind of change in a trajectory's score, one of `KINDS`."""
    if old.reward is None or new.reward is None:
        return "same" if old.reward is new.reward else "scored" if old.reward is None else "unscored"
    if bool(old.success) != bool(new.success):
        return "gained" if new.success else "lost"
    if old.reward == new.reward:
        return "same"
    return "higher" if new.reward > old.reward else "lower"


def _summary(ts: Sequence[Any]) -> dict[str, Any]:
    rewards = [float(t.reward) for t in ts if t.reward is not None]
    wins = sum(bool(t.success) for t in ts if t.reward is not None)
    return {
        "mean": number(math.fsum(rewards) / len(rewards)) if rewards else "–",
        "success": number(wins / len(rewards)) if rewards else "–",
        "scored": len(rewards),
        "unscored": len(ts) - len(rewards),
    }


def bars(old: Sequence[float | None], new: Sequence[float | None]) -> list[list[Any]]:
    """Return histogram bars [label, old count, new count].

    There is one bar per distinct value if there are few values, otherwise one per range of equal width. Unscored
    trajectories come last.
    """
    there = sorted({float(r) for r in [*old, *new] if r is not None})
    if len(there) <= _BARS:
        out = [[number(value), sum(r == value for r in old), sum(r == value for r in new)] for value in there]
    else:
        low, high = there[0], there[-1]
        edges = [low + k * (high / _BARS - low / _BARS) for k in range(_BARS)] + [high]
        sides = ([r for r in side if r is not None] for side in (old, new))
        places = (np.searchsorted(edges[1:-1], rewards, side="right") for rewards in sides)
        olds, news = (np.bincount(each, minlength=_BARS).tolist() for each in places)
        out = [[f"{number(edges[k])} to {number(edges[k + 1])}", olds[k], news[k]] for k in range(_BARS)]
    missing = [sum(r is None for r in side) for side in (old, new)]
    return [*out, ["unscored", *missing]] if any(missing) else out


def _short(text: str, limit: int = 120) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _page(about: dict[str, Any], title: str, busy: bool) -> str:
    old, new = about["old"], about["new"]
    out = [tag("div", tag("b", escape(title)), style="margin:2px 0 6px")]
    if not about["scored"]:
        state = "The new scores were being computed when this was saved." if busy else "Not scored yet."
        out.append(tag("div", f"recorded: mean reward {old['mean']}, success {old['success']}. {state}"))
    else:
        if busy:
            out.append(
                tag("div", "The trajectories were being re-scored when this was saved; these are older scores.")
            )
        out.append(
            tag("div", f"mean reward {old['mean']} → {new['mean']}, success {old['success']} → {new['success']}, "
                f"unscored {old['unscored']} → {new['unscored']}")
        )  # fmt: skip
    rows = "".join(
        f"<tr><td>{escape(label)}</td><td>{a}</td><td>{b if about['scored'] else '–'}</td></tr>"
        for label, a, b in about["bars"]
    )
    out.append(
        f"<table><thead><tr><th>reward</th><th>recorded</th><th>now</th></tr></thead><tbody>{rows}</tbody></table>"
    )
    if changed := [row for row in about["rows"] if row[5] != "same"]:
        body = "".join(
            f"<tr><td>{escape(KINDS[k])}</td><td>{escape(a)} → {escape(b)}</td><td>{escape(label)}</td>"
            f"<td>{escape(task)}</td><td>{escape(final)}</td></tr>"
            for _, label, task, a, b, k, final in changed[:40]
        )
        out.append(
            f"<details><summary>{count(sum(n for k, _, n in about['tally'] if k != 'same'), 'change')}</summary><table>"
            "<thead><tr><th></th><th>reward</th><th>trajectory</th><th>question</th><th>final</th></tr></thead>"
            f"<tbody>{body}</tbody></table></details>"
        )
    out += [tag("div", escape(f"{n} unscored: {text}")) for text, n in about["errors"]]
    return tag("div", *out, style="line-height:1.5")
