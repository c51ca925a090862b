"""Forms without a browser: calling tools, scoring rewards, and showing the results."""

import asyncio
import gc
import json
import weakref
from typing import Annotated, Any, Literal

import agents
import errors
from pydantic import BaseModel
from views import NASTY, check_static, click, hide, press, sent, show
from waiting import until

import agentfly_kit as af
from agentfly_kit import widgets as w


class Place(BaseModel):
    city: str
    at: tuple[float, float] = (0.0, 0.0)


@af.tool(max_chars=120)
def weather(
    places: Annotated[list[Place], "where"],
    unit: Annotated[Literal["C", "F"], "of the answer"] = "C",
    days: Annotated[int, "from today"] = 1,
    note: Annotated[str | None, "anything else"] = None,
) -> str:
    """Say the weather."""
    if note == "fail":
        raise ZeroDivisionError("ours")
    if note == "refuse":
        raise af.ToolError("no such city")
    return f"{', '.join(p.city for p in places)}: {20 * days} {unit}" + ("!" * 200 if note == "long" else "")


async def test_the_form_calls_as_the_model_does() -> None:
    form = w.ToolForm(weather)
    assert repr(form) == "ToolForm(weather, 0 calls)"
    check_static(form)
    await press(form, "call", '{"places": [{"city": "Rome"}], "days": 2}')
    assert (form._notice, form.result.observation, form._result["ok"]) == ("", "Rome: 40 C", True)
    assert form.to_code() == "await weather.try_(places=[{'city': 'Rome'}], days=2)"
    assert await eval(form.to_code().removeprefix("await "), {"weather": weather}) == form.result
    result = await form.call(places=[{"city": "Rome"}], note="long")
    assert result.truncated and form._result["truncated"]
    assert (
        form._result["observation"]
        == result.observation
        == (await weather.try_([{"city": "Rome"}], note="long")).observation
    )
    assert json.loads(form.draft) == {"places": [{"city": "Rome"}], "note": "long"}
    assert repr(form) == "ToolForm(weather, 2 calls)"
    assert result.observation[:30] in check_static(form).text


async def test_a_call_is_picked_and_is_a_frame() -> None:
    form = w.ToolForm(weather)
    assert not form.selection and form.to_frame().empty
    one = [{"city": "Rome"}]
    await form.call(places=one)
    await form.call(places=one, note="fail")
    await form.call(places=one, note="refuse")
    (last,) = form.selection
    assert (last.number, last.result, last.code) == (3, form.result, form.to_code())
    assert [n for n, _, _ in form._calls] == [1, 2, 3] and [ok for *_, ok in form._calls] == [True, False, False]
    await press(form, "pick", 1)
    assert form._result["number"] == 1 and form._result["observation"] == "Rome: 20 C"
    frame = form.selection.to_frame()
    assert frame[["call", "tool", "ok", "observation"]].values.tolist() == [[1, "weather", True, "Rome: 20 C"]]
    assert await eval(frame["code"][0].removeprefix("await "), {"weather": weather}) == form.results[0][1]
    whole = form.to_frame()
    assert whole["ok"].tolist() == [True, False, False]
    assert "ZeroDivisionError" in whole["error"][1] and whole["reward"].isna().all()
    await press(form, "pick", 9)
    assert "call 9 does not exist; calls 1 to 3 are kept" in form._notice
    for _ in range(60):
        await form.call(places=one)
    assert [c.number for c in form.selection] == [63] and len(form.to_frame()) == 50
    errors.check(lambda: form.select(1), ValueError, "calls 14 to 63 are kept")
    sent(form)


async def test_a_call_goes_on_in_a_chain() -> None:
    form = w.ToolForm(agents.calculator, agent=agents.scripted(["42"]), task=agents.tasks()[0])
    await press(form, "chain", '{"expression": "6*7"}')
    assert form._notice == ""
    chain = form.opened.chain
    assert [turn.kind for turn in chain.turns] == ["prompt", "forced"]
    assert (await chain.act()).tool_calls[0].result.observation == "42"
    below = form.opened
    await press(form, "leave")
    assert form.opened is None and below.comm is None
    await press(form, "chain", "{oops")
    assert "JSON" in form._notice


async def test_whose_fault_it_was() -> None:
    form = w.ToolForm(weather)
    one = [{"city": "Rome"}]
    await form.call(places=one, note="refuse")
    assert (form._result["ok"], form._result["error"], form._result["observation"]) == (False, None, "no such city")
    await form.call(places=one, note="fail")
    assert (form._result["error"], form._result["observation"]) == ("ZeroDivisionError: ours", "weather failed.")
    assert "raise ZeroDivisionError" in form._result["traceback"]
    await form.call(days=2, place=1)
    assert "places is missing; place is not a parameter" in form._result["observation"]
    for text, said in (("{", "not valid JSON"), ("[1]", "JSON object"), ("{'a': 1}", "not valid JSON")):
        await press(form, "call", text)
        assert said in form._notice
        assert form.draft == text
    assert len(form.results) == 3


async def test_a_slow_call_is_cancelled_and_two_are_refused() -> None:
    @af.tool(describe="optional")
    async def slow(seconds: Annotated[float, "how long"]) -> str:
        await asyncio.sleep(seconds)
        return "done"

    form = w.ToolForm(slow)
    click(form, "call", '{"seconds": 1e6}')
    await until(lambda: form.busy)
    click(form, "call", '{"seconds": 1e6}')
    await until(lambda: "a call is running" in form._notice)
    await press(form, "cancel")
    assert (form.busy, form.results) == (False, [])
    await press(form, "call", '{"seconds": 0}')
    assert form.result.observation == "done"


async def test_a_form_takes_its_sandbox_from_the_pool_and_its_fields_from_the_task() -> None:
    @af.tool(describe="optional")
    async def say(text: Annotated[str, "what"], box: agents.Box, greeting: af.FromTask[str]) -> str:
        return await box.run(f"{greeting} {text}")

    pool = af.Pool(agents.Box, size=1)
    task = af.Task("t", ({"role": "user", "content": "?"},), {"greeting": "hello"})
    form = w.ToolForm(say, pool=pool, task=task)
    assert form._about["hidden"] == ["box: Box, from the pool", "greeting: from the task"]
    assert (await form.call(text="you")).observation == "hello you"
    assert pool.snapshot().leased == 0
    assert form.to_code() == "await say.try_(text='you', pool=pool, task=task)"
    assert (await w.ToolForm(say, task=task).call(text="you")).observation == "hello you"
    assert "greeting" in str((await w.ToolForm(say).call(text="you")).error)
    gone = weakref.ref(pool)
    await pool.close()
    del pool
    gc.collect()
    assert gone() is None
    await press(form, "call", '{"text": "you"}')
    assert "the pool no longer exists" in form._notice


async def test_texts_of_every_kind() -> None:
    @af.tool
    def echo(text: Annotated[str, "what"]) -> str:
        """Say it again. <script>alert(1)</script>"""
        return text

    form = w.ToolForm(echo)
    for text in NASTY:
        await form.call(text=text)
        check_static(form)
    assert len(form.results) == len(NASTY)
    await form.call(text="x" * 8000)
    check_static(form)


# --- RewardForm ----------------------------------------------------------------------------------


def saved(n: int = 12, nasty: bool = False) -> af.Rollout:
    """Return chains with a correct answer for every third task; one is truncated and one failed."""
    out = []
    for i in range(n):
        text = NASTY[i % len(NASTY)] if nasty else f"it is {i if i % 3 == 0 else -1}"
        task = af.Task(f"q{i}", ({"role": "user", "content": text if nasty else f"{i}?"},), {"answer": str(i)})
        turns = (
            af.Turn("prompt", "task", (1, 2), text="?"),
            af.Turn(
                "action", "policy", (3,), True, logprobs=(-0.5,), versions=(0,), text=text,
                messages=({"role": "assistant", "content": text},),
            ),
        )  # fmt: skip
        stop = "max_turns" if i == 1 else "error" if i == 2 else "answered"
        reward = None if stop == "error" else 0.0
        out.append(af.Trajectory(f"q{i}/0", task, f"q{i}", 0, turns, stop, reward=reward))
    return af.Rollout.from_trajectories(out)


@af.reward
def ends(final: str | None, answer: str) -> float:
    return float(final is not None and final.endswith(answer))


async def test_a_reward_form_shows_what_flipped() -> None:
    rollout = saved()
    form = w.RewardForm(ends, rollout)
    # Scoring has begun, although the scoring task has not run yet.
    assert repr(form) == "RewardForm(ends, 12 trajectories, being scored)" and form.busy
    assert "scores were being computed" in check_static(form).text and "Not scored" not in check_static(form).text
    form._do_cancel(None)
    await until(lambda: not form.busy)
    assert repr(form) == "RewardForm(ends, 12 trajectories, not scored yet)"
    assert "Not scored yet." in check_static(form).text
    rescored = await form.score()
    expected = (await rollout.rescore(ends)).trajectories
    assert [t.reward for t in rescored.trajectories] == [t.reward for t in expected]
    gained = [t.id for t in expected if t.reward == 1.0]
    assert list(form.flipped["trajectory"]) == gained
    assert len(gained) == 4
    assert repr(form) == "RewardForm(ends, 12 trajectories, 4 gained, 0 lost)"
    assert form._about["bars"] == [["0", 11, 7], ["1", 0, 4], ["unscored", 1, 1]]
    assert form._about["old"]["mean"] == "0"
    assert form._about["new"] == {"mean": "0.3636", "success": "0.3636", "scored": 11, "unscored": 1}
    assert [row[0] for row in form._about["rows"][:4]] == gained
    assert [t.reward for t in rollout.trajectories if t.reward] == []  # the rollout is unchanged
    await press(form, "look", gained[1])
    assert form.picked is rollout.trajectories[3] and "Reward 1" in form._detail["new"]
    assert list(form.selection) == [form.picked]
    await press(form, "chain_tokens")
    assert form.opened.trajectories == (form.picked,)
    await press(form, "chain_code")
    assert form._cell["text"].startswith(
        f"trajectory = next(t for t in rollout.trajectories if t.id == {gained[1]!r})"
    )
    await press(form, "look", "nothing")
    assert form.opened is None and form.picked is None
    assert "succeeds now" in check_static(form).text and "scored yet" not in check_static(form).text
    form._start()
    assert "these are older scores" in check_static(form).text
    await press(form, "cancel")
    assert repr(form) == "RewardForm(ends, 12 trajectories, 4 gained, 0 lost)"


async def test_a_reward_that_is_defined_again_is_scored_again() -> None:
    cell = {"af": af, "__name__": "__main__"}
    source = "@af.reward\ndef mine(final: str | None) -> float:\n    return {} if final else None\n"
    exec(source.format("0.25"), cell)
    rollout = saved()
    form = w.RewardForm(cell["mine"], rollout)
    await form.score()
    assert form._about["new"]["mean"] == "0.25"
    form._redefined()
    assert not form._jobs  # the reward is unchanged
    exec(source.format("1.0"), cell)
    form._redefined()  # called by the hook after each cell
    await asyncio.wait(form._jobs)
    assert (form._about["new"]["mean"], form._about["last"]["mean"]) == ("1", "0.25")
    assert form.reward[0] is cell["mine"]
    show(form)
    hide(form)
    exec(source.format("0.5"), cell)
    form._redefined()  # no page is open
    assert not form._jobs


async def test_a_reward_that_fails_is_told_and_leaves_a_chain_unscored() -> None:
    @af.reward
    def bad(final: str | None) -> float:
        return 1 / len("" if final and "-1" in final else "x")

    form = w.RewardForm(bad, saved())
    await form.score()
    assert form._about["new"]["unscored"] > 1
    ((text, n),) = form._about["errors"]
    assert "ZeroDivisionError" in text
    assert n == form._about["new"]["unscored"] - 1
    assert {k: n for k, _, n in form._about["tally"]}["unscored"] == n
    failed = form.to_frame().query("change == 'unscored'")["trajectory"].iloc[0]
    await press(form, "look", failed)
    assert "1 / len" in form._detail["traceback"]


async def test_what_a_reward_form_keeps(tmp_path: Any) -> None:
    form = w.RewardForm(ends, saved().save(tmp_path / "r.jsonl"))
    await form.score()
    assert len(form.flipped) == 4
    rollout = saved()
    form = w.RewardForm(ends, rollout)
    await form.score()
    show(form)
    hide(form)
    del rollout
    form.rescored = None
    gc.collect()
    assert form.record is None  # the rollout is released with the last page
    await errors.check(form.score, LookupError, "the rollout no longer exists")
    empty = w.RewardForm(ends, af.Rollout())
    await empty.score()
    assert repr(empty) == "RewardForm(ends, 0 trajectories, 0 gained, 0 lost)"


async def test_a_reward_form_of_nasty_texts() -> None:
    form = w.RewardForm(ends, saved(len(NASTY), nasty=True))
    await form.score()
    assert not check_static(form).tags & {"script", "img"}
    for t in form.record.trajectories:
        await press(form, "look", t.id)
        sent(form)


def test_bars() -> None:
    from agentfly_kit.widgets.reward_form import bars

    assert bars([], []) == []
    assert bars([None], [1.0]) == [["1", 0, 1], ["unscored", 1, 0]]
    many = [i / 7 for i in range(50)]
    made = bars(many, many[::2])
    assert len(made) == 10
    assert [sum(row[k] for row in made) for k in (1, 2)] == [50, 25]
    assert sum(row[1] for row in bars([-1e308 * (1 - i / 30) for i in range(30)] + [1e308], [])) == 31
