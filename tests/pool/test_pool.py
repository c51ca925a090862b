"""Pool: leasing, order, expiry, failures and closing, and its state machine compared with a simple model."""

from __future__ import annotations

import asyncio
import gc
import itertools
import re
import time
from collections.abc import Callable
from typing import Any

import errors
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit.pool.records import PoolEvent
from agentfly_kit.pool.state import PoolState, Slot

# --- sandbox classes ------------------------------------------------------------------------------


class Notes:
    """A sandbox that keeps texts. `open` contains all open instances."""

    open: set[Notes] = set()  # noqa: RUF012  (shared on purpose)
    delay = 0.0

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.alive = True

    async def start(self) -> None:
        Notes.open.add(self)
        await asyncio.sleep(self.delay)

    async def run(self, text: str) -> list[str]:
        self.kept.append(text)
        await asyncio.sleep(self.delay)
        return list(self.kept)

    async def reset(self) -> None:
        await asyncio.sleep(self.delay)
        self.kept.clear()

    async def close(self) -> None:
        await asyncio.sleep(self.delay)
        self.kill()

    def kill(self) -> None:
        self.alive = False
        Notes.open.discard(self)


class Slow(Notes):
    delay = 0.002


class Stuck(Notes):
    """A sandbox whose start and reset take `delay` seconds, while closing is immediate."""

    delay = 60.0

    async def close(self) -> None:
        self.kill()


class Plain:
    """A minimal sandbox without `reset`, `close` and `alive`."""

    def __init__(self) -> None:
        self.number = next(_numbers)

    async def run(self) -> int:
        return self.number


_numbers = itertools.count(1)


class Broken:
    starts = 0

    async def start(self) -> None:
        type(self).starts += 1
        raise RuntimeError("no such image")


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch):
    # A pause of the circuit breaker does not end during a test.
    monkeypatch.setattr("agentfly_kit.pool.state._FIRST_PAUSE", 60.0)
    Notes.open.clear()
    Broken.starts = 0
    yield
    if Notes.open:
        gc.collect()
    assert not Notes.open, "a sandbox was left open"


# --- snapshots and messages -----------------------------------------------------------------------


async def test_a_timeout_names_the_holders():
    async with af.Pool(Notes, size=2) as pool:
        one, two = await pool.acquire("chain 3"), await pool.acquire("me")
        one.turn = 2
        with pytest.raises(af.errors.PoolTimeout) as caught:
            await pool.acquire("late", timeout=0.05)
        text = re.sub(r"\(\d+\.\d s", "(0.0 s", str(caught.value))  # the time since the leases
        assert text == (
            "no Notes free after 0.1 s (2 of 2 leased, 1 waiting); held by chain 3 (0.0 s, turn 2), me (0.0 s); "
            "increase size=, or release sandboxes that are not in use; a chain stepped by hand keeps its sandbox until "
            "`await chain.close()`"
        )
        assert isinstance(caught.value, TimeoutError)
        assert pool.snapshot().waiting == 0
        await errors.check(lambda: pool.acquire("late", queue=False), af.errors.PoolTimeout, "no Notes is free")
        await pool.release(one)
        await pool.release(two)


async def test_snapshot():
    async with af.Pool(Notes, size=2) as pool:
        async with pool.lease("first"):
            pass
        lease = await pool.acquire("second")
        lease.turn = "turn 3 of 6"
        s = pool.snapshot()
        assert (s.sandbox_type, s.size, s.leased, s.idle, s.starting, s.waiting, s.dead) == (
            "Notes",
            2,
            1,
            0,
            0,
            0,
            0,
        )
        assert [(x.owner, x.id, x.turn) for x in s.leases] == [("second", lease.id, "turn 3 of 6")]
        assert [(x.id, x.state, x.owner, x.uses) for x in s.sandboxes] == [(1, "leased", "second", 2)]
        await pool.release(lease)
        assert [(x.state, x.owner) for x in pool.snapshot().sandboxes] == [("idle", None)]
        assert pool.snapshot().recycled == 2


async def test_pools_lists_open_pools():
    before = af.pools()
    pool = af.Pool(Plain, size=1)
    assert af.pools() == [*before, pool]
    await pool.close()
    assert af.pools() == before
    pool = af.Pool(Plain, size=1)
    del pool
    assert af.pools() == before


# --- order ----------------------------------------------------------------------------------------


async def test_release_waits_for_its_own_reset_only():
    """A release on a busy pool must not wait while others use the sandbox."""
    async with af.Pool(Slow, size=1) as pool:
        resets = 0

        def on_event(event: PoolEvent) -> None:
            nonlocal resets
            resets += event.kind == "resetting"

        async def busy() -> None:
            while resets < 40:
                async with pool.lease("busy"):
                    pass

        mine = await pool.acquire("me")
        others = [asyncio.ensure_future(busy()) for _ in range(3)]
        await asyncio.sleep(0)
        pool.subscribe(on_event)
        await mine.release()
        assert resets < 40
        await asyncio.gather(*others)


async def test_a_grant_whose_request_is_cancelled_is_passed_on():
    events: list[tuple[str, str]] = []
    async with af.Pool(Notes, size=1) as pool:
        held = await pool.acquire("holder")
        first, second = (asyncio.ensure_future(pool.acquire(name)) for name in ("first", "second"))
        await asyncio.sleep(0)
        pool.subscribe(lambda event: events.append((event.kind, event.owner)))
        # Cancelled when it is granted: the future has its result, but the requester never receives it.
        pool.subscribe(lambda event: first.cancel() if (event.kind, event.owner) == ("leased", "first") else None)
        await held.release()
        await (await second).release()
    grants = [event for event in events if event[0] in ("leased", "cancelled")]
    assert grants == [("leased", "first"), ("cancelled", "first"), ("leased", "second")]


async def test_rollouts_are_served_in_turn():
    async with af.Pool(Notes, size=1) as pool:
        served: list[str] = []

        async def chain(run: str, number: int) -> None:
            async with pool.lease(f"{run}{number}", run=run):
                served.append(f"{run}{number}")

        held = await pool.acquire("holder")
        first = [asyncio.ensure_future(chain("a", number)) for number in range(6)]
        await asyncio.sleep(0)
        second = [asyncio.ensure_future(chain("b", number)) for number in range(3)]
        await asyncio.sleep(0)
        in_order = ("a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4", "a5")
        waiting = pool.snapshot()
        assert waiting.waiters == in_order
        assert len(waiting.waiting_seconds) == 9 and waiting.waiting_seconds[0] >= waiting.waiting_seconds[-1] >= 0
        await held.release()
        await asyncio.gather(*first, *second)
        assert tuple(served) == in_order


# --- replacement ----------------------------------------------------------------------------------


async def test_sandboxes_are_replaced_by_uses():
    events: list[PoolEvent] = []
    async with af.Pool(Notes, size=1, max_uses=2) as pool, af.Pool(Plain, size=1) as plain:
        pool.subscribe(events.append)
        seen, numbers = [], set()
        for _ in range(5):
            async with pool.lease() as notes, plain.lease() as without_reset:
                seen.append(notes)
                numbers.add(await without_reset.run())
        assert [seen[0] is seen[1], seen[1] is seen[2], seen[2] is seen[3], seen[3] is seen[4]] == [1, 0, 1, 0]
        assert [e.detail for e in events if e.kind == "closing"] == ["used 2 times"] * 2
        assert (pool.snapshot().dead, len(numbers)) == (0, 5)


def test_at_most_eight_sandboxes_start_at_once():
    state = PoolState(10)
    for ticket in range(10):
        state.apply(state.requested, ticket, "a", now=0)
    assert state.count("starting") == 8
    assert len(state.apply(state.started, next(iter(state.slots.values())), now=1).start) == 1


def test_a_successful_start_ends_the_pause_after_failed_starts():
    state = PoolState(2)
    state.apply(state.requested, 0, "a", now=0)
    state.apply(state.requested, 1, "a", now=0)
    first, second = state.slots.values()
    state.apply(state.start_failed, first, OSError("no"), True, now=0)
    state.apply(state.started, second, now=0)
    state.apply(state.removed, first, now=0)
    assert [slot.state for slot in state.slots.values()] == ["leased", "starting"]


async def test_leases_expire():
    assert af.Pool(Notes).max_lease == 3600
    pool = af.Pool(Notes, size=1, max_lease=0.05)
    events: list[PoolEvent] = []
    pool.subscribe(events.append)
    lease = await pool.acquire("slow")
    async with pool.lease("next") as notes:  # without any other use of the pool in the meantime
        assert notes is not lease.sandbox and not lease.sandbox.alive
        assert lease.revoked.startswith("held for ") and f"<Lease Notes 1 of slow, revoked: {lease.revoked}" in repr(
            lease
        )
    assert next((e.sandbox, e.owner) for e in events if e.kind == "expired") == (1, "slow")
    await pool.close()
    assert not Notes.open


def test_a_lease_of_a_closed_event_loop_expires():
    pool = af.Pool(Notes, size=1, max_lease=0.05)
    kept = []

    async def take() -> None:
        kept.append(await pool.acquire("ended"))

    async def next_one() -> None:
        async with pool.lease("next"):
            assert kept[0].revoked
        await pool.close()

    asyncio.run(take())
    time.sleep(0.06)
    asyncio.run(next_one())
    assert not Notes.open


async def test_recycle():
    pool = af.Pool(Notes, size=2)
    events: list[PoolEvent] = []
    one, two = await pool.acquire("a"), await pool.acquire("b")
    pool.subscribe(events.append)
    pool.recycle(1)
    assert one.revoked == "reset by hand" and not two.revoked
    pool.recycle(2, close=True)
    assert two.revoked == "closed by hand" and pool.snapshot().leased == 0
    async with pool.lease("c") as notes:
        assert notes is not one.sandbox and notes is not two.sandbox and not one.sandbox.alive
        await one.release()  # neither use of a revoked lease has an effect
        one.turn = 3
        assert pool.snapshot().leased == 1
    assert [e.detail for e in events if e.kind == "recycled"] == ["reset by hand", "closed by hand"]
    (box,) = pool.snapshot().sandboxes
    notes.kept.append("x")
    pool.recycle(box.id)
    assert pool.snapshot().sandboxes[0].state == "resetting"
    async with pool.lease("d") as again:
        assert again is notes and not notes.kept
    pool.recycle(box.id, close=True)
    pool.recycle(box.id, close=True)
    await until(lambda: not pool.snapshot().sandboxes)
    assert not Notes.open
    await pool.close()


class Leaky(Notes):
    async def reset(self) -> None:
        if "stain" not in self.kept:
            self.kept.clear()


async def unreachable(notes: Notes) -> bool:
    raise OSError("no answer")


def leaves(notes: Notes) -> bool:
    raise SystemExit(2)


@pytest.mark.parametrize(
    ("healthy", "died"),
    [
        (lambda notes: not notes.kept, ["", "its health check failed", ""]),
        (unreachable, ["its reset failed: OSError: no answer"] * 3),
        (leaves, ["its reset failed: SandboxError: the reset of a Leaky raised SystemExit(2)"] * 3),
    ],
    ids=["stained", "raises", "exits"],
)
async def test_sandboxes_that_fail_their_health_check_are_replaced(healthy: Any, died: list[str]):
    events: list[PoolEvent] = []
    seen = []
    async with af.Pool(Leaky, size=1, healthy=healthy) as pool:
        pool.subscribe(events.append)
        for text in ("water", "stain", "water"):
            async with pool.lease() as notes:
                seen.append(notes)
                assert await notes.run(text) == [text]
        assert pool.snapshot().dead == len([detail for detail in died if detail])
    assert [e.detail for e in events if e.kind == "died"] == [detail for detail in died if detail]
    assert [a is b for a, b in itertools.pairwise(seen)] == [not detail for detail in died[:2]]


# --- failures -------------------------------------------------------------------------------------


async def test_failing_starts_open_the_circuit_breaker():
    async with af.Pool(Broken, size=8) as pool:
        results = await asyncio.gather(*(pool.acquire(f"c{i}") for i in range(20)), return_exceptions=True)
        assert {(type(result), str(result)) for result in results} == {
            (af.errors.SandboxError, "no Broken could be started: no such image")
        }
        assert isinstance(results[0], af.errors.SandboxError) and isinstance(results[0].__cause__, RuntimeError)
        # At most the first 8 concurrent starts and three consecutive ones, not one per request.
        assert Broken.starts <= 8 + 3
        before = Broken.starts
        for _ in range(5):
            await errors.check(pool.acquire, af.errors.SandboxError, "no such image")
        s = pool.snapshot()
        assert (s.error, s.failed_starts, Broken.starts) == ("no such image", before, before)


async def test_a_successful_start_closes_the_circuit_breaker():
    class Flaky(Notes):
        good = False

        async def start(self) -> None:
            await super().start()
            if not self.good:
                self.kill()
                raise OSError("not yet")

    async with af.Pool(Flaky, size=2) as pool:
        await errors.check(pool.acquire, af.errors.SandboxError, "not yet")
        Flaky.good = True
        await errors.check(pool.acquire, af.errors.SandboxError, "not yet")
        pool._state.blocked_until = time.monotonic()  # the pause is over
        async with pool.lease():
            assert pool.snapshot().error is None


async def test_permanent_failures_are_not_retried_and_hanging_starts_are_cancelled():
    class Picky(Broken):
        async def start(self) -> None:
            type(self).starts += 1
            raise af.errors.IsolationError("isolation='strict' cannot be had here")

    async with af.Pool(Picky, size=1) as pool:
        await errors.check(pool.acquire, af.errors.IsolationError, "cannot be had here")
        assert Picky.starts == 1
    async with af.Pool(Stuck, size=1, start_timeout=0.02) as pool:
        await errors.check(pool.acquire, af.errors.SandboxError, "the start of a Stuck took longer than")


# --- listeners ------------------------------------------------------------------------------------


async def test_events_are_complete_and_in_order():
    events: list[PoolEvent] = []
    seen: list[str] = []
    async with af.Pool(Notes, size=2) as pool:
        unsubscribe = pool.subscribe(events.append)
        pool.subscribe(lambda event: seen.append(repr(pool)))  # a listener may use the pool
        async with pool.lease("a"):
            pass
        unsubscribe()
        async with pool.lease("b"):
            pass
    assert [(event.kind, event.sandbox, event.owner) for event in events] == [
        ("waiting", None, "a"), ("starting", 1, None), ("idle", 1, None), ("leased", 1, "a"), ("resetting", 1, "a"),
        ("idle", 1, None),
    ]  # fmt: skip
    assert [event.sequence for event in events] == list(range(1, 7))
    assert [event.time for event in events] == sorted(event.time for event in events)
    assert [seen[0], *seen[3:6], seen[-1]] == [
        "<Pool Notes 0 leased, 0 idle, 1 starting, 1 waiting, size 2>",
        "<Pool Notes 1 leased, 0 idle, 0 starting, 0 waiting, size 2>",
        "<Pool Notes 0 leased, 0 idle, 0 starting, 1 resetting, 0 waiting, size 2>",
        "<Pool Notes 0 leased, 1 idle, 0 starting, 0 waiting, size 2>", "<Pool Notes closed, size 2>",
    ]  # fmt: skip


async def test_an_interrupted_listener_does_not_stop_later_events():
    """A KeyboardInterrupt can be raised in any Python code, including a listener."""
    heard: list[str] = []

    def on_event(event: PoolEvent) -> None:
        heard.append(event.kind)
        if event.kind == "recycled":
            raise KeyboardInterrupt

    async with af.Pool(Notes, size=1) as pool:
        pool.subscribe(on_event)
        lease = await pool.acquire()
        errors.check(lambda: pool.recycle(lease.id), KeyboardInterrupt)
        await lease.release()
        async with pool.lease():
            pass
        assert heard.count("leased") == 2 and heard[-1] in ("resetting", "idle"), heard
        assert not pool._events


# --- closing --------------------------------------------------------------------------------------


async def test_close_ends_requests_and_leases():
    pool = af.Pool(Slow, size=2)
    lease = await pool.acquire("a")
    other = await pool.acquire("b")
    waiting = [asyncio.ensure_future(pool.acquire(f"w{i}")) for i in range(3)]
    await asyncio.sleep(0)
    await asyncio.wait_for(pool.close(), GUARD)
    for task in waiting:
        await errors.check(lambda: task, af.errors.PoolClosed, "the pool of Slow is closed")
    assert not Notes.open
    await pool.release(lease)  # harmless after the pool was closed
    await other.release()
    await errors.check(pool.acquire, af.errors.PoolClosed)
    await pool.close()


async def test_close_while_starting_and_while_resetting(monkeypatch: pytest.MonkeyPatch):
    pool = af.Pool(Stuck, size=3)
    starting = [asyncio.ensure_future(pool.acquire(f"s{i}")) for i in range(3)]
    await until(lambda: len(Notes.open) == 3)
    assert pool.snapshot().starting == 3
    await pool.close()
    assert all(
        isinstance(error, af.errors.PoolClosed) for error in await asyncio.gather(*starting, return_exceptions=True)
    )
    monkeypatch.setattr(Stuck, "delay", 0.0)
    pool = af.Pool(Stuck, size=1)
    lease = await pool.acquire()
    monkeypatch.undo()
    releasing = asyncio.ensure_future(lease.release())
    await until(lambda: pool.snapshot().sandboxes[0].state == "resetting")
    await pool.close()
    await releasing
    assert not Notes.open


async def test_a_collected_lease_is_replaced():
    async with af.Pool(Notes, size=1) as pool:
        lease = await pool.acquire("forgetful")
        waiting = asyncio.ensure_future(pool.acquire("next"))
        await asyncio.sleep(0)
        with pytest.warns(ResourceWarning, match="of forgetful"):
            del lease
        await (await asyncio.wait_for(waiting, GUARD)).release()


def test_a_collected_pool_closes_its_sandboxes_immediately():
    pool = af.Pool(Notes, size=2, min_idle=2)

    async def use() -> None:
        async with pool.lease():
            await until(lambda: pool.snapshot().idle == 1)

    asyncio.run(use())
    assert len(Notes.open) == 2
    gc.disable()  # reference counting must suffice when a notebook rebinds a pool
    try:
        pool = af.Pool(Notes, size=1)
        assert not Notes.open
    finally:
        gc.enable()


def test_successive_event_loops():
    pool = af.Pool(Notes, size=1)

    async def use() -> Notes:
        async with pool.lease() as notes:
            return notes

    first = asyncio.run(use())
    assert asyncio.run(use()) is first

    async def leave_requests_and_leases() -> None:
        await pool.acquire("kept")
        tasks.append(asyncio.ensure_future(pool.acquire("cancelled")))
        await asyncio.sleep(0)

    tasks: list[asyncio.Future[Any]] = []
    with pytest.warns(ResourceWarning, match="of kept"):
        asyncio.run(leave_requests_and_leases())
    assert tasks[0].cancelled() and asyncio.run(use()) is not first
    assert repr(pool) == "<Pool Notes 0 leased, 1 idle, 0 starting, 0 waiting, size 1>"
    asyncio.run(pool.close())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_a_loop_closed_during_a_start(monkeypatch: pytest.MonkeyPatch):
    pool = af.Pool(Stuck, size=1)
    loop = asyncio.new_event_loop()
    task = loop.create_task(pool.acquire("lost"))
    loop.run_until_complete(asyncio.sleep(0.001))
    loop.close()  # neither the start in progress nor the request will ever continue
    assert pool.snapshot().starting == 1
    monkeypatch.setattr(Stuck, "delay", 0.0)

    async def use() -> None:
        async with pool.lease():
            assert pool.snapshot().waiting == 0

    asyncio.run(use())
    asyncio.run(pool.close())
    task._log_destroy_pending = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("first", ["cold", "warm", "waiting"])
async def test_cancellation_at_every_step(first: str):
    """Cancel a chain after 0, 1, 2, ... steps until it completes, while another request waits."""
    finished = False
    for steps in range(100):
        async with af.Pool(Notes, size=1) as pool:
            held = await pool.acquire("holder") if first == "waiting" else None
            if first == "warm":
                await (await pool.acquire()).release()

            async def chain() -> None:
                async with pool.lease("chain") as notes:
                    await notes.run("x")

            task = asyncio.ensure_future(chain())
            await asyncio.sleep(0)
            behind = asyncio.ensure_future(pool.acquire("behind"))
            if held is not None:
                releasing = asyncio.ensure_future(held.release())
            for _ in range(steps):
                await asyncio.sleep(0)
            finished = task.done()
            task.cancel()
            await asyncio.wait([task])
            lease = await behind
            assert lease.sandbox.kept == []
            if held is not None:
                await releasing
            assert repr(pool) == "<Pool Notes 1 leased, 0 idle, 0 starting, 0 waiting, size 1>"
            await lease.release()
        assert not Notes.open
        if finished:
            break
    assert finished and steps > 5


# --- the state machine compared with a model ------------------------------------------------------


class StateMachine(RuleBasedStateMachine):
    """Random events in any possible order. The model consists of the waiting requests, the leases, and the actions in
    progress; after each event the state must agree with it."""

    @initialize(
        size=st.integers(1, 4), min_idle=st.integers(0, 2), uses=st.sampled_from((None, 1, 3)),
        lease=st.sampled_from((12.0, 1000.0)),
    )  # fmt: skip
    def begin(self, size: int, min_idle: int, uses: int | None, lease: float) -> None:
        self.dead: set[Slot] = set()
        self.size = size
        self.state = PoolState(
            size, min(min_idle, size), alive=lambda slot: slot not in self.dead, max_uses=uses, max_lease=lease
        )
        self.effects: dict[Slot, str] = {}  # slot -> action requested by the state machine
        self.queues: dict[str, list[int]] = {}  # run -> its tickets
        self.turns: list[str] = []  # runs in the order in which they were last served
        self.held: dict[int, Slot] = {}  # ticket -> slot
        self.since: dict[int, float] = {}  # ticket -> time of the grant
        self.lease = lease
        self.by_hand: Slot | None = None  # sandbox that is being recycled
        self.now = 0.0
        self.tickets = itertools.count(1)

    def tell(self, event: Callable[..., None], *args: Any) -> None:
        self.now += 1.0
        effects = self.state.apply(event, *args, now=self.now)
        for state in ("starting", "idle", "leased", "resetting", "closing"):
            assert self.state.count(state) == sum(slot.state == state for slot in self.state.slots.values())
        for slot, state in [(s, "closing") for s in effects.close] + [(s, "resetting") for s in effects.reset]:
            self.effects[slot] = state
        for slot in effects.start:
            assert slot not in self.effects
            self.effects[slot] = "starting"
        for ticket, slot in effects.grant:
            waiting = {run: tickets for run, tickets in self.queues.items() if tickets}
            run = min(waiting, key=lambda run: (self.turns.index(run) if run in self.turns else -1, waiting[run][0]))
            assert ticket == waiting[run].pop(0)
            self.turns = [other for other in self.turns if other != run] + [run]
            assert slot not in self.dead, "a dead sandbox was handed out"
            assert slot not in self.held.values(), "one sandbox, two holders"
            self.held[ticket] = slot
            self.since[ticket] = self.now
        for slot, _ in effects.revoked:
            holder = next(ticket for ticket, its in self.held.items() if its == slot)
            old = self.now - self.since[holder] >= self.lease
            assert old or slot == self.by_hand
            del self.held[holder]
        assert all(self.now - self.since[ticket] < self.lease for ticket in self.held), "a lease is too old"
        for ticket, error in effects.refuse:
            self.forget(ticket)
            assert error is not None or self.state.closed
        if self.state.closed:
            self.held = {}

    def pick(self, data: Any, state: str) -> Slot | None:
        slots = sorted((slot for slot, what in self.effects.items() if what == state), key=lambda slot: slot.id)
        return data.draw(st.sampled_from(slots)) if slots else None

    @property
    def queue(self) -> list[int]:
        return sorted(itertools.chain(*self.queues.values()))

    def forget(self, ticket: int) -> None:
        next(tickets for tickets in self.queues.values() if ticket in tickets).remove(ticket)

    @rule(run=st.sampled_from("abc"))
    def want(self, run: str) -> None:
        ticket = next(self.tickets)
        if not self.state.closed:
            self.queues.setdefault(run, []).append(ticket)
            self.tell(self.state.requested, ticket, f"chain {ticket}", run)
        else:
            assert self.state.apply(self.state.requested, ticket, "", now=self.now).refuse == [(ticket, None)]

    @rule(data=st.data())
    def give_up(self, data: Any) -> None:
        tickets = self.queue + list(self.held)
        if tickets:
            ticket = data.draw(st.sampled_from(tickets))
            if ticket in self.queue:
                self.forget(ticket)
            self.held.pop(ticket, None)
            self.tell(self.state.cancelled, ticket)

    @rule(data=st.data())
    def started(self, data: Any) -> None:
        slot = self.pick(data, "starting")
        if slot is not None:
            del self.effects[slot]
            self.tell(self.state.started, slot)

    @rule(data=st.data(), permanent=st.booleans())
    def start_failed(self, data: Any, permanent: bool) -> None:
        slot = self.pick(data, "starting")
        if slot is not None:
            self.tell(self.state.start_failed, slot, OSError("no"), permanent)

    @rule(data=st.data(), reusable=st.booleans())
    def returned(self, data: Any, reusable: bool) -> None:
        if self.held:
            ticket = data.draw(st.sampled_from(sorted(self.held)))
            self.tell(self.state.released, self.held.pop(ticket), reusable)

    @rule(data=st.data())
    def reset(self, data: Any) -> None:
        slot = self.pick(data, "resetting")
        if slot is not None:
            del self.effects[slot]
            self.tell(self.state.was_reset, slot)

    @rule(data=st.data())
    def closed(self, data: Any) -> None:
        slot = self.pick(data, "closing")
        if slot is not None:
            del self.effects[slot]
            self.tell(self.state.removed, slot)
            self.dead.discard(slot)

    @rule(data=st.data())
    def dies(self, data: Any) -> None:
        if self.state.slots:
            slot = data.draw(st.sampled_from(list(self.state.slots.values())))
            self.dead.add(slot)
            if data.draw(st.booleans()):
                self.held = {ticket: its for ticket, its in self.held.items() if its != slot}
                self.tell(self.state.died, slot)

    @rule()
    def time_passes(self) -> None:
        self.now += 100.0
        self.tell(self.state.wakeup)

    @rule(data=st.data(), close=st.booleans())
    def recycled_by_hand(self, data: Any, close: bool) -> None:
        if self.state.slots:
            self.by_hand = data.draw(st.sampled_from(list(self.state.slots.values())))
            state = self.by_hand.state
            self.tell(self.state.recycle, self.by_hand, close)
            after = self.effects.get(self.by_hand)
            assert after in ("closing", "resetting") or (state == "starting" and not close)
            assert after == "closing" or not close
            self.by_hand = None

    @rule(sure=st.integers(0, 19))
    def close_all(self, sure: int) -> None:
        if sure == 0 and not self.state.closed:
            self.tell(self.state.close)
            assert not self.queue

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "state"):
            return
        s = self.state
        assert list(s.waiters) == sorted(s.order()) == self.queue
        leased = {slot.ticket: slot for slot in s.slots.values() if slot.state == "leased"}
        busy = {slot: slot.state for slot in s.slots.values() if slot.state in ("starting", "resetting", "closing")}
        idle = [slot.id for slot in s.slots.values() if slot.state == "idle"]
        assert (leased, busy) == (self.held, self.effects)
        assert len(s.slots) <= s.size and not (s.waiters and idle)
        if s.waiters and not s.closed:
            # Some sandbox is leased or in progress, so the request will be served.
            assert len(idle) < len(s.slots)


StateMachine.TestCase.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)
TestStateMachine = StateMachine.TestCase


# --- faulty sandbox classes -----------------------------------------------------------------------


class Unruly:
    """A sandbox of which one method raises an exception, hangs, or ignores its cancellation (`what="deaf"`)."""

    where = ""
    what: BaseException | str = ""
    calls: list[str] = []  # noqa: RUF012  (of all instances)
    free = asyncio.Event()

    def __init__(self) -> None:
        if self.where == "constructor" and isinstance(self.what, BaseException):
            raise self.what

    async def start(self) -> None:
        await self.do("start")

    async def run(self) -> str:
        return "ran"

    async def reset(self) -> None:
        await self.do("reset")

    async def close(self) -> None:
        await self.do("close")

    @classmethod
    async def do(cls, method: str) -> None:
        cls.calls.append(method)
        if method != cls.where:
            return
        if isinstance(cls.what, BaseException):
            raise cls.what
        while not cls.free.is_set():
            try:
                await cls.free.wait()
            except asyncio.CancelledError:
                if cls.what != "deaf":
                    raise


def unruly(where: str, what: BaseException | str) -> type[Unruly]:
    return type("Unruly", (Unruly,), {"where": where, "what": what, "calls": [], "free": asyncio.Event()})


RAISED = [SystemExit(2), asyncio.CancelledError(), ValueError("broken")]
UNRULY = [*itertools.product(("constructor", "start", "reset", "close"), RAISED), ("close", "hangs")]


@pytest.mark.parametrize(("where", "what"), UNRULY, ids=repr)
async def test_exceptions_of_a_sandbox_class(where: str, what: Any, monkeypatch: pytest.MonkeyPatch):
    if what == "hangs":
        monkeypatch.setattr("agentfly_kit.pool.core._CLOSE_SECONDS", 0.05)
    kind = unruly(where, what)
    async with af.Pool(kind, size=1) as pool:
        if where in ("constructor", "start"):
            await errors.check(
                pool.acquire,
                af.errors.SandboxError,
                re.compile(r"could be started: .*(2|SystemExit|CancelledError|broken)"),
            )
            assert len(kind.calls) < 10 and pool.snapshot().waiting == 0
            return
        for _ in range(2):
            async with pool.lease() as sandbox:
                assert await sandbox.run() == "ran"
    wanted = {"reset": ["start", "reset", "close"] * 2, "close": ["start", "reset", "reset", "close"]}
    assert kind.calls == wanted[where]


@pytest.mark.parametrize("where", ["start", "reset", "close"])
async def test_a_method_that_ignores_its_cancellation_is_abandoned_with_a_warning(
    where: str, monkeypatch: pytest.MonkeyPatch
):
    """A bare `except:` in a loop, for example, ignores cancellation. Neither `release` nor `close` waits forever."""
    monkeypatch.setattr("agentfly_kit.pool.core._CLOSE_SECONDS", 0.05)
    monkeypatch.setattr("agentfly_kit.pool.calls._CANCEL_GRACE_SECONDS", 0.05)
    kind = unruly(where, "deaf")
    pool = af.Pool(kind, size=1, start_timeout=0.1, acquire_timeout=0.3)

    async def life() -> None:
        if where == "start":
            await errors.check(pool.acquire, af.errors.PoolTimeout)
        else:
            await pool.release(await pool.acquire(timeout=GUARD))
        await pool.close()

    with pytest.warns(UserWarning, match="of a Unruly ignored its cancellation.*except Exception"):
        await asyncio.wait_for(life(), GUARD)
    kind.free.set()  # a sandbox that starts late is closed
    await until(lambda: len(asyncio.all_tasks()) == 1)
    assert (kind.calls[-1], pool.snapshot().sandboxes) == ("close", ())
