"""scienceworld: splits, Java processes, expert, isolation of chains, and faults."""

import os
import re
from pathlib import Path
from typing import Any

import errors
import pytest
from processes import open_files

import agentfly_kit as af
from agentfly_kit.envs import scienceworld

here = pytest.mark.skipif(
    bool(scienceworld.family.missing), reason=f"not installed: {', '.join(scienceworld.family.missing)}"
)


def says(*commands: str) -> Any:
    """Return an engine that plays these commands, then answers."""

    def script(task: af.Task, turn: int) -> str:
        if turn >= len(commands):
            return "Done."
        return f'<tool_call>{{"name":"act","arguments":{{"command":"{commands[turn]}"}}}}</tool_call>'

    return af.ScriptedEngine(script)


def test_splits_are_the_simulators_and_no_variation_is_in_two() -> None:
    assert (sum(scienceworld.VARIATIONS.values()), len(scienceworld.KINDS)) == (7207, 30)
    for kind, count in scienceworld.VARIATIONS.items():
        parts = [scienceworld.variations(kind, split) for split in ("train", "dev", "test")]
        assert [i for part in parts for i in part] == list(range(count))
    assert [len(scienceworld.variations("boil", split)) for split in ("train", "dev", "test")] == [14, 7, 9]
    rows = scienceworld.rows(60, "test")
    assert {row["kind"] for row in rows} == set(scienceworld.KINDS)
    assert rows == scienceworld.rows(60, "test") != scienceworld.rows(60, "test", seed=1)
    assert scienceworld.rows(30, "test") == rows[:30]
    every = scienceworld.rows(1818, "test")
    assert len({(row["kind"], row["variation"]) for row in every}) == 1818
    assert len(scienceworld.rows(5, "test", kinds=("identify-life-stages-2",))) == 4


def test_a_task_that_its_simplification_makes_impossible_is_named() -> None:
    task = af.Task("t", ({"role": "user", "content": "?"},), {"kind": "power-component", "variation": 0})
    errors.check(
        lambda: scienceworld.ScienceWorld(simplification="noElectricalAction").check_task(task),
        af.errors.TaskError,
        "power-component is impossible with simplification=",
    )


async def test_missing_requirements_are_named_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "java" in scienceworld.family.missing
    errors.check(
        scienceworld.expert, af.errors.SettingsError, re.compile(r"needs .*java; type: .*default-jre-headless")
    )
    errors.check(
        lambda: scienceworld.Simulator(512),
        af.errors.SettingsError,
        re.compile(r"type: (pip install|apt-get install default-jre-headless)"),
    )


@here
@pytest.mark.real  # the fast tests are run without this family's packages
@pytest.mark.parametrize("says", ["echo no; exit 1", "exec sleep 60 >&-", "echo no; exec sleep 60"])
def test_a_java_that_is_broken_leaves_no_process_and_no_pipe(
    says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\necho $$ > {tmp_path / 'pid'}\n{says}\n")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    import py4j.java_gateway  # noqa: F401  (the import opens descriptors of its own)

    before = open_files()
    with pytest.raises(af.errors.SandboxError, match="ended before it was ready") as broken:
        scienceworld.Simulator(512)
    assert open_files() <= before, f"a descriptor is open while {broken.value!r} exists"
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


@pytest.mark.real
@here
async def test_the_expert_scores_100_and_the_random_player_does_not() -> None:
    kinds = (
        "find-animal", "find-non-living-thing", "identify-life-stages-2", "lifespan-longest-lived", "power-component",
        "use-thermometer",
    )  # fmt: skip
    tasks = scienceworld.tasks(6, "test", kinds=kinds)
    expert = await af.evaluate(scienceworld.expert(), tasks)
    assert expert.success == 1.0, [
        (t.task.id, t.metrics, t.error) for t in expert.rollout.trajectories if not t.success
    ]
    assert all(t.metrics["score"] == 100 and t.stop == "env_done" for t in expert.rollout.trajectories)
    luck = await af.evaluate(scienceworld.random_agent(max_turns=30), tasks)
    assert (luck.success, luck.unscored) == (0.0, 0)
    assert luck.reward <= 0.2


@pytest.mark.real
@here
async def test_64_chains_on_two_processes_are_isolated() -> None:
    """Each chain opens doors, which must be closed for the next chain in the same Java process."""
    pool = af.Pool(scienceworld.ScienceWorld, size=2, min_idle=2, memory_mb=256, acquire_timeout=1800)
    tasks = [
        af.Task(f"t{i}", ({"role": "user", "content": "?"},), {"kind": "find-plant", "variation": i % 8})
        for i in range(64)
    ]
    doors = [
        f"open door to {room}" for room in ("hallway", "kitchen", "greenhouse", "bedroom", "outside", "art studio")
    ]
    agent = scienceworld.agent(says(*doors, "look around"), chat=af.envs.family.small_chat(), pool=pool)
    rollout = await agent.rollout(tasks)
    seen: dict[int, set[Any]] = {}
    for t in rollout.trajectories:
        assert t.error is None, t.error
        told = tuple(c.result.observation for c in t.tool_calls)
        opening = t.turns[0].text
        # Only doors are compared, because animals move randomly.
        doors = tuple(sorted(line.strip() for line in opening.splitlines() if line.strip().startswith("A door")))
        seen.setdefault(t.task.fields["variation"], set()).add(doors)
        assert "(that is closed)" in opening
        assert "The door is now open." in told and "(that is open)" in told[-1]
    assert {variation: len(ways) for variation, ways in seen.items()} == dict.fromkeys(range(8), 1)
    assert pool.snapshot().size == 2
    await pool.close()


@pytest.mark.long
@here
async def test_a_lease_finds_a_process_that_runs_and_one_that_died_is_replaced(caplog: Any) -> None:
    pool = af.Pool(scienceworld.ScienceWorld, size=1, min_idle=1, memory_mb=300)
    task = scienceworld.tasks(1, "test", kinds=("find-animal",))[0]
    chat = af.envs.family.small_chat()
    pids = []

    async def killed(chain: Any) -> None:
        process = chain.context.held[scienceworld.ScienceWorld]._simulator.process
        pids.append(process.pid)
        if chain.actions == 2:
            process.kill()
            process.wait()

    well = scienceworld.agent(says("look around", "inventory"), chat=chat, pool=pool)
    for _ in range(2):
        (t,) = (await well.rollout([task])).trajectories
        assert t.stop == "answered"
    async with pool.lease() as world:
        process = world._simulator.process
        assert "-Xmx300m" in process.args
        first = process.pid
    ill = well.replace(engine=says("look around", "inventory", "look around"), after_observation=killed)
    (t,) = (await ill.rollout([task])).trajectories
    assert t.stop == "error" and "Java process has ended" in str(t.error)
    assert set(pids) == {first}
    (t,) = (await well.rollout([task])).trajectories
    assert t.stop == "answered"
    await pool.close()
    errors.check(lambda: os.kill(first, 0), ProcessLookupError)
    # py4j must not log tracebacks: they would reach the root logger, and so standard error.
    assert [record.getMessage() for record in caplog.records if "py4j" in record.pathname] == []


@pytest.mark.long
@here
async def test_unknown_commands_are_reported() -> None:
    hostile = ["", "fly", "x" * 3000, "ключ \U0001f511", "reset task", "open door to nowhere", "12"]
    pool = af.Pool(scienceworld.ScienceWorld, size=1, memory_mb=256)
    chat = af.envs.family.small_chat()
    task = scienceworld.tasks(1, "train", kinds=("melt",))[0]
    (t,) = (await scienceworld.agent(says(*hostile), chat=chat, pool=pool).rollout([task])).trajectories
    assert t.stop == "answered"
    assert [c.result.ok for c in t.tool_calls][:5] == [False] * 5
    assert (t.reward, t.metrics["score"]) == (0.0, 0.0)
    chain = scienceworld.agent(says("open door to kitchen", "go to kitchen"), chat=chat, pool=pool).chain(task)
    await chain.prepare()
    for name, wanted in (("actions", "pick up OBJ"), ("objects", "picture")):
        tool = next(tool for tool in scienceworld.family.tools if tool.name == name)
        assert wanted in (await tool.invoke({}, chain.context)).observation
    await chain.close()
    await pool.close()


@pytest.mark.long
@here
async def test_a_fork_replays_the_commands() -> None:
    pool = af.Pool(scienceworld.ScienceWorld, size=2, memory_mb=256)
    task = scienceworld.tasks(1, "train", kinds=("find-plant",))[0]
    script = says("open door to kitchen", "go to kitchen", "look around")
    chain = scienceworld.agent(script, chat=af.envs.family.small_chat(), pool=pool).chain(task)
    for _ in range(4):
        await chain.step()
    fork = await chain.fork()
    ends = []
    for each in (chain, fork):
        while each.stop is None:
            await each.step()
        ends.append([c.result.observation for c in (await each.finish()).tool_calls])
    assert ends[0] == ends[1]
    assert ends[0][2].startswith("This room is called the kitchen.")
    await pool.close()
