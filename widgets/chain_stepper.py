"""Interactive stepping of one chain, with buttons and keys that call the methods of the chain."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import sys
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import traitlets

from ._base import Opener, Throttle, count, escape, escape_control_chars, number, sendable, tag
from ._selection import Trajectories
from ._tokens import visible

_TEXT = 12_000


class ChainStepper(Opener):
    """View to step a chain in the browser. `ChainStepper(agent, task)` starts a new chain.

    The view works on the chain object itself: changes made in the view and in cells are visible in both.
    `to_code()` returns code for a cell that reproduces the chain.

    Args:
        chain: A chain, or an agent if `task` is given.
        task: The task for which the agent starts a new chain.
        top: Number of next-token candidates to show; 0 to request none from the engine.

    Attributes:
        chain: The chain shown.
        chains: The initial chain and the forks made in this view.
        trajectory: The result of `finish()`, or None.
        error: The exception raised by the last click, which is also shown on the page.
        selection: A snapshot of the chain shown, with `.to_frame("turns")` and `.to_frame("tokens")`.
        opened: The TokenView of the chain opened below this view, or None.
    """

    stem: ClassVar[str] = "chain_stepper"
    settable: ClassVar[frozenset[str]] = frozenset({"top"})
    actions: ClassVar[frozenset[str]] = frozenset(
        {
            "sample",
            "act",
            "force",
            "observe",
            "edit",
            "rewind",
            "fork",
            "finish",
            "switch",
            "cancel",
            "code",
            "tokens",
            "leave",
        }
    )

    top = traitlets.Int(20, min=0, max=200).tag(sync=True)
    _state = traitlets.Dict().tag(sync=True)
    _distribution = traitlets.Dict().tag(sync=True)
    _code = traitlets.Dict().tag(sync=True)

    def __init__(self, chain: Any, task: Any = None, *, top: int = 20) -> None:
        if task is not None:
            if not callable(getattr(chain, "chain", None)):
                raise TypeError(
                    f"the first argument of ChainStepper(agent, task) must be an Agent, got {type(chain).__name__}"
                )
            chain = chain.chain(task)
        if not (callable(getattr(chain, "rewind", None)) and hasattr(chain, "turn")):
            raise TypeError(f"chain must be a Chain, or pass an agent and a task, got {type(chain).__name__}")
        self.error: BaseException | None = None
        self.chains: list[Any] = [chain]
        self._at = 0
        self._doing = ""
        self._task: asyncio.Future[Any] | None = None
        self._asking: asyncio.Future[Any] | None = None
        self._asked_for: Any = None
        super().__init__(None, top=top)
        self._follow()
        self.refresh()

    # --- the chain shown ---

    @property
    def chain(self) -> Any:
        """The chain shown."""
        return self.chains[self._at]

    @property
    def trajectory(self) -> Any:
        """The result of `finish()` for the chain shown, or None."""
        return self.chain.trajectory

    @property
    def selection(self) -> Any:
        """The trajectory of the chain shown if the chain is finished, otherwise an unscored snapshot."""
        now = self.trajectory or self.chain.snapshot()
        return Trajectories((now.id,), (now,))

    def refresh(self) -> None:
        """Send the chain's current state. Called automatically whenever the chain changes while a page is open."""
        self._state = _state(self.chains, self._at, self._doing)
        self._ask_distribution()

    def __repr__(self) -> str:
        return f"ChainStepper({self.chain!r})"

    def _static(self) -> str:
        return _page(_state(self.chains, self._at, ""), repr(self))

    # --- following the chain ---

    _throttle: Throttle | None = None
    _end: Callable[[], Any] | None = None

    def _follow(self) -> None:
        """Subscribe to the chain shown. The chain holds the listener, which refers weakly to the view."""
        self._unfollow()
        view_ref = weakref.ref(self)

        def changed() -> None:
            view = view_ref()
            if view is not None and view.comm is not None:
                view._refresh_safely()

        throttle = self._throttle = Throttle(changed, 0.05)
        self._end = weakref.finalize(self, _both, self.chain.subscribe(lambda _: throttle.schedule()), throttle.close)

    def _unfollow(self) -> None:
        if self._end is not None:
            self._end()
            self._end = None

    def _refresh_safely(self) -> None:
        if self._seen and not self._pages:
            return  # no page is open; opening a page refreshes the view
        try:
            self.refresh()
        except Exception as error:
            self._failed(error)  # an exception in a loop callback would go unnoticed

    def _on_first_page(self) -> None:
        self.refresh()

    def _running_loop(self) -> asyncio.AbstractEventLoop | None:
        if self._loop is None or self._loop.is_closed():
            try:
                self._loop = asyncio.get_running_loop()
            except RuntimeError:
                self._loop = None
        return self._loop

    @traitlets.observe("top")
    def _top_changed(self, _: Any) -> None:
        if self.comm is not None:
            self._asked_for = None
            self._ask_distribution()

    def _ask_distribution(self) -> None:
        """Request the next-token distribution directly from the engine, so that the chain remains usable in cells."""
        chain = self.chain
        wanted = (chain.turn, self.top) if self.top and _can(chain)["sample"] and not chain.busy else None
        if wanted is None:
            if self._distribution and not (chain.busy or self._doing):
                self._distribution, self._asked_for = {}, None
            return
        same = self._asked_for is not None and self._asked_for[0] is wanted[0] and self._asked_for[1] == wanted[1]
        if same or not self.is_open:
            return
        loop = self._running_loop()
        if loop is None:
            return
        self._asked_for = wanted
        loop.call_soon_threadsafe(self._begin_asking, chain, wanted)

    def _begin_asking(self, chain: Any, wanted: Any) -> None:
        if self._asking is not None and not self._asking.done():
            self._asking.cancel()
        self._asking = self._job(self._distribute(chain, wanted))

    async def _distribute(self, chain: Any, wanted: Any) -> None:
        agent = chain.agent
        try:
            ids, logprobs, entropy = await agent.engine.distribution(chain.ids, agent.sampling, top=self.top)
            stops = set(agent.chat.stop_ids)
            found = {
                "ids": [int(i) for i in ids],
                "texts": [visible(piece, 40) for piece in agent.chat.token_texts(ids)],
                "probabilities": [math.exp(min(0.0, float(lp))) for lp in logprobs],
                "stops": [int(i) in stops for i in ids],
                "entropy": number(float(entropy)),
            }
        except Exception as error:
            found = {"why": sendable(str(error) or type(error).__name__)}
        if self._asked_for is wanted:
            self._distribution = found

    # --- clicks ---

    def _do_sample(self, value: Any) -> None:
        greedy = bool(value)
        self._start("sampling", lambda chain: chain.sample(greedy=greedy))

    def _do_act(self, _: Any) -> None:
        self._start("running tools", lambda chain: chain.act())

    def _do_force(self, value: Any) -> None:
        """Force an action, given as {"text": ..., "end": bool} or {"ids": [...], "end": bool}."""
        said = value["text"] if "text" in value else [int(i) for i in value["ids"]]
        self._start("writing", lambda chain: _now(lambda: chain.force(said, end=bool(value.get("end", True)))))

    def _do_observe(self, value: Any) -> None:
        self._start("answering", lambda chain: _now(lambda: chain.observe(str(value))))

    def _do_edit(self, value: Any) -> None:
        """Replace the results of the last action's tool calls."""

        def edit(chain: Any) -> None:
            if chain.turn.kind != "observation":
                raise ValueError("the chain does not end with a tool result; rewind to the result to edit")
            chain.rewind(len(chain.turns) - 2)
            chain.observe(str(value))

        self._start("editing", lambda chain: _now(lambda: edit(chain)))

    def _do_rewind(self, value: Any) -> None:
        """Rewind to the turn with index `value`, or by one turn if it is None."""

        def back(chain: Any) -> None:
            last = len(chain.turns) - 1
            if value is None and last < 1:
                raise ValueError("there is nothing to undo")
            chain.rewind(last - 1 if value is None else int(value))

        self._start("going back", lambda chain: _now(lambda: back(chain)))

    def _do_fork(self, _: Any) -> None:
        async def fork(chain: Any) -> None:
            twin = await chain.fork()
            self.chains.append(twin)
            self._at = len(self.chains) - 1
            self._follow()

        self._start("forking", fork)

    def _do_finish(self, _: Any) -> None:
        self._start("scoring", lambda chain: chain.finish())

    def _do_switch(self, value: Any) -> None:
        if not 0 <= int(value) < len(self.chains):
            raise ValueError(f"chain must be between 0 and {len(self.chains) - 1}, got {value}")
        if self._doing:
            raise ValueError(f"the stepper is busy ({self._doing}); wait or cancel")
        self._at = int(value)
        self._asked_for = None
        self._follow()
        self.refresh()

    def _do_cancel(self, _: Any) -> None:
        if self._task is not None:
            self._task.cancel()

    def _do_tokens(self, _: Any) -> None:
        from .token_view import TokenView

        self._show_below(TokenView(list(self.selection)))

    def _do_code(self, _: Any) -> None:
        self._code = {"n": self._code.get("n", 0) + 1, "text": sendable(self.to_code())}

    def _start(self, what: str, call: Callable[[Any], Awaitable[Any]]) -> None:
        """Start an operation as a background task. Only one operation runs at a time."""
        if self._doing:
            raise RuntimeError(f"the stepper is busy ({self._doing}); wait or cancel")
        self._doing = what
        self._task = self._job(self._run(what, call, self.chain))
        self.refresh()

    async def _run(self, what: str, call: Callable[[Any], Awaitable[Any]], chain: Any) -> None:
        try:
            await call(chain)
        except asyncio.CancelledError:
            self._notice = f"{what} was cancelled"
        except Exception as error:
            self._failed(error)
        finally:
            self._doing = ""
            if self.comm is not None:
                self.refresh()

    def _failed(self, error: BaseException) -> None:
        self.error = error
        super()._failed(error)

    def close(self) -> None:
        """Close the view and unsubscribe from the chain, which stays open."""
        self._unfollow()
        super().close()

    # --- code ---

    def to_code(self) -> str:
        """Return code for a cell that reproduces the chain, with the same tokens.

        Sampled turns are re-sampled with the same seeds; a comment warns if the engine is not reproducible. Undone
        turns are omitted.
        """
        return code(self.chain)


def _both(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    first()
    second()


async def _now(call: Callable[[], Any]) -> Any:
    return call()


# --- a chain as data ------------------------------------------------------------------------------


def _can(chain: Any) -> dict[str, bool]:
    """Map the name of each operation to whether the chain would accept it now."""
    open = not chain.closed
    calls, stop, leaf = bool(chain.pending_calls), chain.stop, chain.turn
    complete = leaf.kind in ("action", "forced") and bool(leaf.messages)
    return {
        "sample": open and stop is None and not calls,
        "act": open and stop is None and calls,
        "force": open and stop is None and not calls,
        "observe": open and complete and stop in (None, "answered", "turn_tokens"),
        "edit": open and leaf.kind == "observation" and bool(leaf.tool_calls),
        "rewind": open and len(chain.turns) > 1,
        "fork": open,
        "finish": open,
    }


def _state(chains: list[Any], at: int, doing: str) -> dict[str, Any]:
    chain = chains[at]
    done = chain.trajectory
    tokens = sum(len(turn.ids or ()) for turn in chain.turns)
    if done is not None:
        where = "finished"
    elif chain.closed:
        where = "closed without a score"
    elif doing:
        where = doing
    elif chain.busy:
        where = "busy in a cell"
    elif chain.stop:
        where = f"stopped: {chain.stop}"
    elif chain.pending_calls:
        where = "waiting for its tools"
    else:
        where = "waiting for an action"
    return {
        "id": sendable(chain.id),
        "task": sendable(chain.task.id),
        "where": where,
        "busy": bool(doing),
        "actions": chain.actions,
        "max_turns": chain.agent.max_turns,
        "tokens": tokens,
        "stop": chain.stop,
        "error": None if chain.error is None else sendable(str(chain.error))[:2000],
        "chains": [sendable(c.id) for c in chains],
        "at": at,
        "can": {name: can and not doing for name, can in _can(chain).items()},
        "turns": [_turn(turn) for turn in chain.turns],
        "result": None if done is None else {
            "reward": None if done.reward is None else number(float(done.reward)),
            "metrics": [[escape_control_chars(k, 60), number(float(v))] for k, v in done.metrics.items()],
            "says": escape_control_chars(done.explain(), 1000),
        },
    }  # fmt: skip


def _turn(turn: Any) -> dict[str, Any]:
    return {
        "kind": turn.kind,
        "author": escape_control_chars(turn.author, 60),
        "n": None if turn.ids is None else len(turn.ids),
        "sampled": bool(turn.sampled),
        "open": turn.kind == "forced" and not turn.messages,
        "text": escape_control_chars(turn.text, _TEXT),
        "plain": sendable(_answer(turn))[:_TEXT] if turn.kind == "observation" else "",
        "calls": [_call(call) for call in turn.tool_calls],
        "reward": None if turn.reward is None else number(float(turn.reward)),
        "stop": turn.stop,
        "seconds": float(turn.seconds),
        "logprob": None if not turn.logprobs else number(math.fsum(turn.logprobs)),
    }


def _call(call: Any) -> dict[str, Any]:
    result = call.result
    return {
        "name": escape_control_chars(call.name or "?", 80),
        "arguments": escape_control_chars(json.dumps(call.arguments, ensure_ascii=False, default=repr), 2000),
        "unreadable": None if call.error is None else escape_control_chars(call.error, 500),
        "ok": None if result is None else bool(result.ok),
        "result": None if result is None else escape_control_chars(result.observation, _TEXT),
        "error": None if result is None or result.error is None else escape_control_chars(str(result.error), 2000),
        "traceback": ""
        if result is None or result.error is None
        else escape_control_chars(result.error.traceback, 6000),
        "seconds": 0.0 if result is None else float(result.seconds),
        "truncated": bool(result is not None and result.truncated),
    }


def _answer(turn: Any) -> str:
    """Return the text to pass to `observe` for this observation."""
    for call in turn.tool_calls:
        if call.result is not None:
            return str(call.result.observation)
    return "\n".join(str(m["content"]) for m in turn.messages)


# --- a chain as code ------------------------------------------------------------------------------


def _named(thing: Any) -> str | None:
    """Return a notebook expression for the object: a variable, or an element of a list variable; None if not found."""
    names = {k: v for k, v in vars(sys.modules["__main__"]).items() if not k.startswith("_") and k.isidentifier()}
    for name, value in names.items():
        if value is thing:
            return name
    for name, value in names.items():
        if isinstance(value, list | tuple) and len(value) < 10_000:
            for i, item in enumerate(value):
                if item is thing:
                    return f"{name}[{i}]"
    return None


def code(chain: Any) -> str:
    """Return code for a cell that reproduces the chain."""
    agent, path = chain.agent, list(chain.turns)
    lines: list[str] = []
    named = _named(agent) or "agent"
    origin = getattr(chain, "origin", None)
    first = 1
    if origin is not None:
        source = _named(origin) or f"next(t for t in rollout if t.id == {origin.id!r})"
        lines.append(f"chain = {named}.chain({source})")
        kept = [i for i, turn in enumerate(path) if any(turn is t for t in origin.turns)]
        first = len(kept)
        if first < len(origin.turns):
            lines.append(f"chain.rewind(to={first - 1})")
    else:
        task = _named(chain.task)
        if task is None:
            t = chain.task
            lines.append(f"task = af.Task({t.id!r}, {t.messages!r}, {t.fields!r})")
            task = "task"
        lines.append(f"chain = {named}.chain({task})")
    if any(turn.kind == "action" for turn in path) and not agent.engine.reproducible:
        lines.insert(0, "# this engine does not promise the same sample twice")
    # Each fork has its own seeds, so the first action with a fork's seed shows where the fork was made.
    places = _places(chain)
    at, index = 0, sum(1 for turn in path[:first] if turn.kind in ("action", "forced") and turn.messages)
    for turn in path[first:]:
        if turn.kind == "action":
            while at + 1 < len(places) and turn.seed != _seed(chain, places[at], index):
                at += 1
                lines.extend(_fork(places[at]))
            if turn.seed == _seed(chain, places[at], index):
                greedy = turn.kept_mass is not None and turn.logprobs is not None and not agent.sampling.greedy
                greedy = greedy and turn.kept_mass == tuple(math.exp(lp) for lp in turn.logprobs)
                lines.append(f"await chain.sample({'greedy=True' if greedy else ''})")
            else:
                lines.append("# sampled from another seed, so its ids are written here; their mask is 0")
                lines.append(f"chain.force({list(turn.ids or ())!r}, author={turn.author!r})")
        elif turn.kind == "forced":
            said = _said(chain, turn)
            more = "" if turn.messages else ", end=False"
            more += "" if turn.author == "person" else f", author={turn.author!r}"
            lines.append(f"chain.force({said!r}{more})")
        elif turn.author == "template":  # added automatically when the chat re-renders the history
            continue
        elif turn.kind == "prompt":  # a new row that begins with a compacted context
            more = "" if turn.author == "hook" else f", author={turn.author!r}"
            lines.append(f"chain.compact({list(turn.messages)!r}{more})")
        elif turn.author == "tool":
            lines.append("await chain.act()")
            lines += [f"chain.observe({m['content']!r})" for m in turn.messages if m.get("role") == "user"]
        else:
            more = "" if turn.author == "person" else f", author={turn.author!r}"
            lines.append(f"chain.observe({_answer(turn)!r}{more})")
        index += turn.kind in ("action", "forced") and bool(turn.messages)
    for place in places[at + 1 :]:
        lines.extend(_fork(place))
    if chain.trajectory is not None:
        lines.append("trajectory = await chain.finish()")
    return "\n".join(lines)


def _places(chain: Any) -> list[str]:
    """Return the fork names that lead to this chain since its start or continuation, such as "", ".1" and ".1.2"."""
    base, _, rest = chain.key.fork.rpartition("~")
    head = base + "~" if base or chain.key.fork.startswith("~") else ""
    parts = rest.split(".")[1:]
    return [head + "".join(f".{p}" for p in parts[:k]) for k in range(len(parts) + 1)]


def _seed(chain: Any, fork: str, index: int) -> int:
    """Return the seed of action `index` in the chain's ancestor named `fork`."""
    key = chain.seed_key
    if fork != chain.key.fork:
        continued = chain.origin_key is not None and fork.endswith("~")
        key = chain.origin_key if continued else dataclasses.replace(chain.key, fork=fork)
    return int(key.seed(chain.agent.seed, chain.task.id, index))


def _fork(place: str) -> list[str]:
    n = int(place.rsplit(".", 1)[1])
    before = ["await chain.fork()  # an earlier fork, so that the next one has the seeds of this one"] * (n - 1)
    return [*before, "chain = await chain.fork()"]


def _said(chain: Any, turn: Any) -> str | list[int]:
    """Return the text of the turn if it encodes to exactly the turn's token ids, otherwise the token ids."""
    ids, chat = list(turn.ids or ()), chain.agent.chat
    whole = ids[:-1] if turn.messages and ids and ids[-1] == chat.stop_ids[0] else ids
    text: str = chat.text(whole)
    return text if text and list(chat.encode(text)) == whole else ids


# --- the static form -----------------------------------------------------------------------------


def _page(state: dict[str, Any], title: str) -> str:
    head = f" · {state['where']}, {count(state['tokens'], 'token')} (when this was drawn)"
    out = [tag("div", tag("b", escape(title)), escape(head), style="margin:2px 0 6px")]
    if state["result"] is not None:
        out.append(tag("div", escape(state["result"]["says"])))
    left = 60_000
    rows = []
    for i, turn in enumerate(state["turns"]):
        text = turn["text"][:3000]
        left -= len(text.encode()) + 300
        if left < 0:
            rows.append(
                f"<tr><td></td><td>{count(len(state['turns']) - i, 'turn')} left out of this static form</td></tr>"
            )
            break
        who = f"{i} {turn['kind']} by {turn['author']}" + ("" if turn["n"] is None else f", {turn['n']} tokens")
        calls = "".join(
            tag(
                "div",
                escape(
                    f"→ {c['name']} {c['arguments'][:500]}"
                    + ("" if c["ok"] is None else " · ok" if c["ok"] else " · failed")
                ),
            )
            for c in turn["calls"]
        )
        cell = "text-align:left;white-space:pre-wrap;font-family:monospace"
        rows.append(
            f'<tr><td style="text-align:left">{escape(who)}</td><td style="{cell}">{escape(text)}{calls}</td></tr>'
        )
    out.append(f"<table><tbody>{''.join(rows)}</tbody></table>")
    return tag("div", *out)
