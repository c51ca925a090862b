"""View for stepping through one chain with buttons and keys that call the methods of the chain."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import traitlets

from agentfly_kit._async.pending_call import maybe_await
from agentfly_kit.errors import SandboxError
from agentfly_kit.types import spans_of

from ._base import Opener, _call
from ._chain_code import code
from ._chain_page import allowed_operations, chain_state, histogram, page
from ._format import count, number, sendable
from ._selection import Trajectories
from ._throttle import Throttle
from ._tokens import visible

# Maximum number of samples drawn per click.
_MOST_SAMPLES = 1000


class ChainStepper(Opener):
    """View for stepping through a chain in the browser. `ChainStepper(agent, task)` starts a new chain.

    The view and the notebook's cells share one chain object, so changes made in either are visible in both. Sampling
    repeatedly at the same turn draws different samples. `to_code()` returns code for a cell that reproduces the chain.

    A chain can be scored only after it has ended, because scoring closes it. If the chain held no sandbox, scoring can
    be undone; the view then shows a fork with the same turns and seeds.

    Args:
        chain: A chain, or an agent if `task` is given.
        task: The task for which the agent starts a new chain.
        top: Number of next-token candidates to show; 0 to request none from the engine.

    Attributes:
        chain: The chain shown.
        chains: The initial chain and the forks made in this view, which stay open until they are finished or closed.
        samples: The Rollout of the samples last drawn with "Draw samples", or None; see `Chain.sample_turns`.
        trajectory: The result of `finish()`, or None.
        error: The exception raised by the last click, which is also shown on the page.
        selection: A snapshot of the chain shown, with `.to_frame("turns")` and `.to_frame("tokens")`.
        opened: The TokenView opened below this view, or None.
    """

    stem: ClassVar[str] = "chain_stepper"
    settable: ClassVar[frozenset[str]] = frozenset({"top"})
    actions: ClassVar[frozenset[str]] = frozenset(
        {
            "sample",
            "again",
            "act",
            "run",
            "samples",
            "open_sample",
            "drop_samples",
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
    _samples = traitlets.Dict().tag(sync=True)
    _code = traitlets.Dict().tag(sync=True)

    def __init__(self, chain: Any, task: Any = None, *, top: int = 20) -> None:
        if task is not None:
            chain = chain.chain(task)
        if not (callable(getattr(chain, "rewind", None)) and hasattr(chain, "turn")):
            raise TypeError(f"chain must be a Chain, got {type(chain).__name__}; with an Agent, pass a task")
        self.error: BaseException | None = None
        self.chains: list[Any] = [chain]
        self.samples: Any = None
        # The chain and the turn at which `samples` were drawn.
        self._drawn_at: tuple[Any, Any] | None = None
        # Seeds of the actions that were sampled after each turn, as id(turn) -> (turn, seeds).
        self._seeds: dict[int, tuple[Any, set[int]]] = {}
        # Maps the id of a scored chain to a fork made just before scoring. Undoing the scoring shows this fork.
        self._spares: dict[str, Any] = {}
        self._code_open = False
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
        """Trajectory of the displayed chain if it is finished, otherwise an unscored snapshot of it."""
        now = self.trajectory or self.chain.snapshot()
        return Trajectories((now.id,), (now,))

    def refresh(self) -> None:
        """Send the chain's current state. This is called automatically when the chain changes while a page is open."""
        with self.hold_sync():
            self._state = self._state_of(self._doing)
            if self._code_open:
                self._code = {**self._code, "text": sendable(self.to_code())}
        self._ask_distribution()

    def __repr__(self) -> str:
        return f"ChainStepper({self.chain!r})"

    def _static(self) -> str:
        return page(self._state_of(""), self._samples, repr(self))

    def _state_of(self, doing: str) -> dict[str, Any]:
        chain = self.chain
        again = chain.turn.kind == "action" or id(chain.turn) in self._seeds
        return chain_state(self.chains, self._at, doing, again, chain.id in self._spares)

    # --- following the chain ---

    _throttle: Throttle | None = None
    _end: Callable[[], Any] | None = None

    def _follow(self) -> None:
        """Subscribe to the displayed chain, which keeps the listener alive. The listener refers weakly to the view."""
        self._unfollow()
        view_ref = weakref.ref(self)
        throttle = self._throttle = Throttle(functools.partial(_call, view_ref, "_refresh_safely"), 0.05)

        def listener(chain: Any) -> None:
            _call(view_ref, "_record_seed", chain.turn)
            throttle.schedule()

        for turn in self.chain.turns:
            self._record_seed(turn)
        self._end = weakref.finalize(self, _both, self.chain.subscribe(listener), throttle.close)

    def _record_seed(self, turn: Any) -> None:
        if turn.kind == "action" and turn.seed is not None:
            self._seeds.setdefault(id(turn.parent), (turn.parent, set()))[1].add(turn.seed)

    def _next_attempt(self, chain: Any) -> int:
        """Return the lowest value of `attempt` whose seed has not yet been used to sample after the last turn."""
        _, used = self._seeds.get(id(chain.turn), (None, ()))
        key, seed, task = chain.seed_key, chain.agent.seed, chain.task.id
        return next(k for k in itertools.count() if key.seed(seed, task, chain.actions, k) not in used)

    def _unfollow(self) -> None:
        if self._end is not None:
            self._end()  # a second call has no effect

    def _refresh_safely(self) -> None:
        if self.comm is None or (self._seen and not self._pages):
            return  # no page is open; opening a page refreshes the view
        try:
            self.refresh()
        except Exception as error:
            self._failed(error)  # an exception in a loop callback would not be shown

    def _on_first_page(self) -> None:
        self.refresh()

    def _on_last_page_closed(self) -> None:
        self._code_open = False

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
        """Request the next-token distribution from the engine, without making the chain busy."""
        chain = self.chain
        wanted = (
            (chain.turn, self.top) if self.top and allowed_operations(chain)["sample"] and not chain.busy else None
        )
        if wanted is None:
            if self._distribution and not (chain.busy or self._doing):
                self._distribution, self._asked_for = {}, None
            return
        same = self._asked_for is not None and self._asked_for[0] is wanted[0] and self._asked_for[1] == wanted[1]
        if same or not self.is_open:
            return
        loop = self._running_loop()
        if loop is not None:
            self._asked_for = wanted
            loop.call_soon_threadsafe(self._begin_asking, chain, wanted)

    def _begin_asking(self, chain: Any, wanted: Any) -> None:
        if self._asking is not None and not self._asking.done():
            self._asking.cancel()
        self._asking = self._job(self._distribute(chain, wanted))

    async def _distribute(self, chain: Any, wanted: Any) -> None:
        agent = chain.agent
        try:
            options = {"top": self.top, "images": spans_of(chain.turn.row_path)}
            ids, logprobs, entropy = await agent.engine.distribution(chain.ids, agent.sampling, **options)
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
        self._start(
            "sampling", lambda chain: chain.sample(greedy, attempt=0 if greedy else self._next_attempt(chain))
        )

    def _do_again(self, _: Any) -> None:
        """Replace the last action with another sample. If the action was just undone, only sample a new one."""

        async def again(chain: Any) -> None:
            before = None if allowed_operations(chain)["sample"] else chain.snapshot()
            if before is not None:
                chain.rewind(len(chain.turns) - 2)
            try:
                await chain.sample(attempt=self._next_attempt(chain))
            except BaseException:
                if before is not None:
                    chain.append_sample(before)
                raise

        self._start("sampling", again)

    def _do_run(self, _: Any) -> None:
        """Continue the chain until it ends. The agent's hooks are called, but the chain is not scored."""

        async def run(chain: Any) -> None:
            while chain.stop is None:
                await chain._advance(lambda: chain.sample(attempt=self._next_attempt(chain)))

        self._start("running to the end", run)

    def _do_samples(self, value: Any) -> None:
        """Draw samples of the next action. `value` is {"n": ..., "to_end": bool}."""
        n, to_end = int(value["n"]), bool(value["to_end"])
        if not 1 <= n <= _MOST_SAMPLES:
            raise ValueError(f"the number of samples must be between 1 and {_MOST_SAMPLES}, got {n}")

        async def draw(chain: Any) -> None:
            samples = await chain.sample_turns(n, to_end=to_end)
            self.samples, self._drawn_at = samples, (chain, chain.turn)
            self._samples = histogram(chain, samples)

        self._start(f"drawing {count(n, 'sample')}", draw)

    def _do_open_sample(self, value: Any) -> None:
        assert self._drawn_at is not None
        sample = self.samples.trajectories[int(value)]
        origin, turn = self._drawn_at
        same = [i for i, chain in enumerate(self.chains) if chain.id == sample.id]
        if same:
            self._do_switch(same[0])
            return

        async def fork(_: Any) -> None:
            twin = await origin.fork(number=int(sample.id.rpartition(".")[2]))
            try:
                if twin.turn is not turn:
                    twin.rewind(turn)
                twin.append_sample(sample)
            except BaseException:
                await twin.close()
                raise
            self._show(twin)

        self._start("forking", fork)

    def _do_drop_samples(self, _: Any) -> None:
        self.samples, self._drawn_at, self._samples = None, None, {}

    def _do_act(self, _: Any) -> None:
        self._start("running tools", lambda chain: chain.act())

    def _do_force(self, value: Any) -> None:
        """Force an action, given as {"text": ..., "end": bool} or {"ids": [...], "end": bool}."""
        said = value["text"] if "text" in value else [int(i) for i in value["ids"]]
        self._start("writing", lambda chain: chain.force(said, end=bool(value.get("end", True))))

    def _do_observe(self, value: Any) -> None:
        self._start("answering", lambda chain: chain.observe(str(value)))

    def _do_edit(self, value: Any) -> None:
        def edit(chain: Any) -> None:
            if chain.turn.kind != "observation":
                raise ValueError("the chain does not end with a tool result; rewind to the result you want to edit")
            chain.rewind(len(chain.turns) - 2)
            chain.observe(str(value))

        self._start("editing", edit)

    def _do_rewind(self, value: Any) -> None:
        """Rewind to the turn with index `value`, or by one turn if it is None. For a scored chain, undo the scoring."""
        spare = self._spares.pop(self.chain.id, None)
        if spare is not None:
            self.chains[self._at] = spare
            self._asked_for = None
            self._follow()
            if value is None:
                self.refresh()
                return

        def back(chain: Any) -> None:
            last = len(chain.turns) - 1
            if value is None and last < 1:
                raise ValueError("there is nothing to undo")
            chain.rewind(last - 1 if value is None else int(value))

        self._start("going back", back)

    def _do_fork(self, _: Any) -> None:
        async def fork(chain: Any) -> None:
            self._show(await chain.fork())

        self._start("forking", fork)

    def _show(self, fork: Any) -> None:
        self.chains.append(fork)
        self._at = len(self.chains) - 1
        self._follow()

    def _do_finish(self, _: Any) -> None:
        """Score the chain. Keep a fork for undoing the scoring, unless the fork would occupy a sandbox."""

        async def score(chain: Any) -> None:
            if chain.stop is None:
                raise ValueError("the chain has not ended; run it to its end, or cancel it with chain.finish()")
            spare = None
            if not chain.context.held:
                with contextlib.suppress(SandboxError):  # the state of the tools cannot be copied
                    spare = await chain.fork(same_seeds=True)
            await chain.finish()
            if spare is not None:
                self._spares[chain.id] = spare

        self._start("scoring", score)

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

    def _do_code(self, value: Any) -> None:
        """Show the code of the chain and update it as the chain changes, or stop updating it if `value` is False."""
        self._code_open = value is not False
        if self._code_open:
            self._code = {"n": self._code.get("n", 0) + 1, "text": sendable(self.to_code())}

    def _start(self, what: str, call: Callable[[Any], Any]) -> None:
        if self._doing:
            raise RuntimeError(f"the stepper is busy ({self._doing}); wait or cancel")
        self._doing = what
        self._task = self._job(self._run(what, call, self.chain))
        self.refresh()

    async def _run(self, what: str, call: Callable[[Any], Any], chain: Any) -> None:
        try:
            await maybe_await(call(chain))
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
        """Close the view, cancel its operation, and unsubscribe from the chain. The chain and its forks stay open."""
        self._unfollow()
        super().close()

    # --- code ---

    def to_code(self) -> str:
        """Return code for a cell that reproduces the chain, with the same tokens.

        Sampled turns are sampled again with the same seeds; a comment warns if the engine is not reproducible. Undone
        turns are omitted.
        """
        return code(self.chain)


def _both(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    first()
    second()
