"""PoolView without a browser: states of sandboxes, buttons, and the selection."""

import asyncio
import gc
import time
import weakref
from unittest.mock import Mock

import agents
import errors
import pytest
from views import NASTY, Box, ask, check_static, hide, put, sent, show
from waiting import until

import agentfly_kit as af
from agentfly_kit import widgets as w


async def test_pool_view_follows_a_pool() -> None:
    async with af.Pool(Box, size=len(NASTY)) as pool:
        view = w.PoolView(pool)
        assert repr(view) == f"PoolView(Box 0 leased, 0 idle, 0 starting, 0 waiting, size {len(NASTY)})"
        updates, began = view.updates, time.monotonic()
        for _ in range(300):
            async with pool.lease(owner="quick"):
                pass
        async with pool.lease(owner="me"):
            await until(lambda: view.counts["leased"] == 1)
            assert view.updates - updates <= 2 + 10 * (time.monotonic() - began)
            assert "me" in view.freeze()._repr_html_()
            view.refresh()
            (lane,) = view._state["lanes"]
            assert (lane[1:4], lane[6]) == (["leased", "me", 301], False)
        await until(lambda: view.counts["leased"] == 0)
        assert view.counts == {
            "size": len(NASTY), "idle": 1, "starting": 0, "resetting": 0, "leased": 0, "waiting": 0, "recycled": 301,
            "dead": 0, "failed_starts": 0,
        }  # fmt: skip
        assert "at most 1 leased at once" in check_static(view).text
        # The view rests while no page shows it.
        show(view)
        hide(view)
        held = [await pool.acquire(owner) for owner in NASTY]
        waiting = [asyncio.ensure_future(pool.acquire(owner)) for owner in NASTY]
        await asyncio.sleep(0.12)  # an update would come after 0.1 s
        assert view.counts["leased"] == 0
        show(view)
        assert view.counts["leased"] == view.counts["waiting"] == len(NASTY)
        check_static(view)
        # An error while sending is shown.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool, "snapshot", Mock(side_effect=TypeError("odd")))
            await held.pop().release()
            await until(lambda: view._notice == "TypeError: odd")
        for request in waiting[1:]:
            request.cancel()
        await asyncio.wait(waiting)
        for lease in (*held, waiting[0].result()):
            await lease.release()
    view.refresh()
    assert view._state["closed"] and view._state["lanes"] == []
    assert "Box, closed" in check_static(view).text and "not started" not in check_static(view).text


async def test_a_pool_and_its_view_do_not_keep_each_other_alive() -> None:
    pool = af.Pool(Box, size=1)
    closed, view = w.PoolView(pool), w.PoolView(pool)
    assert pool._listeners
    closed.close()
    assert "0 leased" in closed.freeze()._repr_html_()
    del view
    gc.collect()
    assert not pool._listeners
    view = w.PoolView(pool)
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    view.refresh()
    assert view._state["gone"]
    check_static(view)


async def test_views_of_one_pool_share_history_events_and_what_was_taken() -> None:
    async with af.Pool(Box, size=2, max_uses=1) as pool:
        first = w.PoolView(pool)
        put(first, "_tab", "events")
        await first._do_take(None)
        await errors.check(lambda: first._do_take(None), ValueError, "at most 1 of 2 sandboxes can be taken")
        second = w.PoolView(pool)  # as after re-running the cell of the view
        assert second._tab == "events" and second._points is first._points
        (number,) = second.held
        first.close()
        await asyncio.sleep(0.01)
        assert pool.snapshot().leased == 1, "another view still shows the sandbox as taken"
        held = await pool.acquire("a chain")
        waiting = asyncio.ensure_future(pool.acquire("x" * 300))
        await until(lambda: pool.snapshot().waiting == 1)
        await asyncio.sleep(0.02)
        second.refresh()
        ((owner, seconds),) = second._state["queue"]
        assert owner == "x" * 200 and seconds >= 0.01
        await second._do_give_back(number)
        await held.release()
        await (await waiting).release()
        second.refresh()
        assert [tuple(event[2:5]) for event in second._state["events"]] == [
            ("closed", name, "used 1 times") for name in ("x" * 200, "a chain", "you")
        ]
        show(second)
        assert max(leased for _, leased, *_ in second._history) == 2
        sent(second)


async def test_pool_view_by_hand() -> None:
    async with af.Pool(agents.Box, size=2) as pool:
        view = w.PoolView(pool)
        await ask(view, "take")
        (number,) = view.held
        view.held[number].log.append("1")
        assert view._state["lanes"][0][:3] == [number, "leased", "you"]
        assert view._state["lanes"][0][6] is True and "you (by hand, from this view)" in check_static(view).text
        await ask(view, "reset", number)
        assert view.held[number].log == [], "reset, and still ours"
        chain = await pool.acquire("chain")
        await ask(view, "reset", chain.id)
        assert chain.revoked == "reset by hand"
        again = await pool.acquire("chain")
        await ask(view, "close", again.id)
        assert again.revoked == "closed by hand"
        await ask(view, "close", 99)
        assert view._notice.startswith("SettingsError: sandbox must be the number of a sandbox in"), "it says so"
        await ask(view, "give_back", number)
        assert view.held == {} and pool.snapshot().leased == 0 and view._notice == ""
        await ask(view, "give_back", number)
        assert "was not leased in this view" in view._notice
        await ask(view, "take")
        (number,) = view.held
        await ask(view, "close", number)
        assert view.held == {} and number not in [box.id for box in pool.snapshot().sandboxes]
        await ask(view, "reset", "x")
        assert view._notice.startswith("ValueError")
        await ask(view, "take")
        view.close()
        await until(lambda: pool.snapshot().leased == 0)


async def test_pool_view_selection_is_a_frame() -> None:
    async with af.Pool(Box, size=3) as pool:
        view = w.PoolView(pool)
        assert not view.selection
        assert list(view.selection.to_frame().columns) == list(view.to_frame().columns)
        assert view.to_code().splitlines()[-1] == "view.to_frame()"
        leases = [await pool.acquire("calc-1/0"), await pool.acquire("a person")]
        leases[0].turn = 2
        # A click on a sandbox that no longer exists is ignored.
        put(view, "_selected", [leases[0].id, 99])
        assert view.selection.numbers == (leases[0].id,)
        frame = view.selection.to_frame()
        assert frame.iloc[0][["sandbox", "state", "owner", "turn", "leases", "hand"]].tolist() == [
            leases[0].id, "leased", "calc-1/0", "2", 1, False,
        ]  # fmt: skip
        assert frame["seconds"].iloc[0] >= 0
        view.select(leases[1].id, leases[0].id)
        assert [row["owner"] for row in view.selection] == ["calc-1/0", "a person"]
        assert view.to_frame()["hand"].tolist() == [False, False]
        assert view.to_code().splitlines() == [
            "view = w.PoolView(pool)", f"view.select({leases[0].id}, {leases[1].id})", "view.selection.to_frame()",
        ]  # fmt: skip
        errors.check(lambda: view.select(99), ValueError, "sandbox 99 does not exist; the pool has 1, 2")
        put(view, "_selected", ["x"])
        assert "x" in view._notice and len(view.selection) == 2, "it says so, and nothing is lost"
        view.select()
        assert not view.selection
        view.select(leases[0].id)
        for lease in leases:
            await lease.release()
        sent(view)
    last = {number: state for number, state, *_ in view._state["lanes"]}  # the view is updated ten times per second
    wanted = [last[leases[0].id]]
    del pool, lease, leases
    gc.collect()
    view.refresh()
    assert view.selection.to_frame()["state"].tolist() == wanted, "of a pool that is gone, what was last seen"
