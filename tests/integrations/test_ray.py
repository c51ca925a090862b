"""Rollouts on a Ray cluster of three nodes on this machine: equal to those of one process, also when workers die."""

import asyncio
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import errors
import pytest
from agents import Box, agent, call, fresh, played, put, put_call, random_policy, scripted, tasks
from paths import ROOT
from processes import alive
from test_engine_vllm import gaps
from test_fleet import nudge, states
from test_server_updates import PolicyServer
from test_trainer import SMALL, learner, numbers, small
from waiting import GUARD, blocking_until, until

import agentfly_kit as af

ray = pytest.importorskip("ray", reason='needs the extra: pip install -e ".[ray]"')

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PYTHON = '<tool_call>{"name":"python","arguments":{"code":"6 * 7"}}</tool_call>'

# --- pickling, without a cluster -----------------------------------------------------------------


def sent(value: Any) -> Any:
    from ray import cloudpickle

    return pickle.loads(cloudpickle.dumps(value))


async def test_a_pickled_agent_samples_the_same() -> None:
    here = agent(pools=[af.Pool(Box, size=3, max_uses=5, acquire_timeout=7.0)])
    mine = await here.rollout(tasks(3), 2)
    there = sent(here.replace(watch=None))
    theirs = await there.rollout(tasks(3), 2)
    same(mine, theirs)
    assert there.engine.policy.fingerprint() == here.engine.policy.fingerprint()  # type: ignore[attr-defined]
    (pool,) = there.pools
    assert (pool.size, pool._arguments) == (3, here.pools[0]._arguments)


async def test_trajectories_can_be_pickled_although_their_pools_cannot() -> None:
    pool = af.Pool(Box, size=1)
    rollout = await played([put_call("a"), "x"], tools=[put], pools=[pool]).rollout(tasks(1))
    assert rollout[0].tool_calls[0].rerunner is not None
    copy = sent(rollout)
    assert copy == rollout and copy[0].tool_calls[0].rerunner is None
    await pool.close()


def test_a_pickled_openai_engine_keeps_its_settings() -> None:
    engine = af.OpenAIEngine("http://127.0.0.1:1/v1", "m", "key", retries=7)
    copy = sent(af.Agent(engine, chat=engine.chat)).engine
    assert (copy.base_url, copy.model, copy.http._retries, copy.http._key) == (engine.base_url, "m", 7, "key")


async def test_a_pickled_fleet_keeps_the_states_of_its_engines() -> None:
    policy = fresh()
    fleet = af.Fleet([af.LocalEngine(policy), af.LocalEngine(policy)])
    await fleet.probe()
    fleet.members[1].state, fleet.members[1].reason = "stale", "a test"
    fleet.members[0].sessions.add("t/0")
    copy = sent(fleet)
    assert states(copy) == ["up", "stale"] and copy.members[1].reason == "a test"
    assert not copy.members[0].sessions and fleet.members[0].sessions == {"t/0"}
    same(await agent(engine=copy).rollout(tasks(2)), await agent(engine=fleet).rollout(tasks(2)))


def test_an_engine_that_runs_in_this_process_is_not_sent(tmp_path: Path) -> None:
    errors.check(
        lambda: sent(af.VLLMEngine(fresh().save(tmp_path / "policy"))),
        TypeError,
        "a VLLMEngine cannot be sent to another process; use the engine of",
    )


def test_workers_need_a_connection() -> None:
    errors.check(
        lambda: af.ray.workers(agent(), 0), af.errors.SettingsError, "n must be an integer of at least 1, got 0"
    )
    if not ray.is_initialized():
        errors.check(
            lambda: af.ray.workers(agent(), 1),
            af.errors.SettingsError,
            re.compile(r"Ray is not connected: call ray.init"),
        )


# --- a cluster -----------------------------------------------------------------------------------


def same(a: af.Rollout, b: af.Rollout) -> None:
    """Assert that two rollouts are equal, bit for bit."""
    assert [t.id for t in a] == [t.id for t in b]
    for x, y in zip(a, b, strict=True):
        assert (x.stop, x.reward, x.seed, x.metrics) == (y.stop, y.reward, y.seed, y.metrics)
        assert [t.ids for t in x.turns] == [t.ids for t in y.turns]
        assert [t.logprobs for t in x.turns] == [t.logprobs for t in y.turns]
        assert [t.entropies for t in x.turns] == [t.entropies for t in y.turns]
    assert a == b


@pytest.fixture(scope="module")
def three(cluster: Any) -> Iterator[tuple[af.Agent, Any]]:
    """The calculator agent with three workers."""
    given = agent()
    with af.ray.workers(given, 3) as workers:
        yield given, workers


@pytest.mark.real
def test_a_rollout_equals_that_of_one_process(three: tuple[af.Agent, Any]) -> None:
    given, workers = three

    async def go() -> None:
        same(await given.rollout(tasks(8), 4, index=3, workers=workers), await given.rollout(tasks(8), 4, index=3))
        limited = {"group_budget": af.Budget(turns=5), "max_concurrency": 2}
        same(
            await given.rollout(tasks(4), 3, workers=workers, **limited), await given.rollout(tasks(4), 3, **limited)
        )

    asyncio.run(go())


@pytest.mark.real
def test_evaluations_and_events(three: tuple[af.Agent, Any]) -> None:
    """Settings that differ from those of the workers' agent are sent, events arrive, and `async for` works."""
    given, workers = three

    async def go() -> None:
        there = await af.evaluate(
            given, tasks(6), 2, seeds=(0, 1), sampling=af.Sampling(0.5, max_tokens=64), workers=workers
        )
        here = await af.evaluate(given, tasks(6), 2, seeds=(0, 1), sampling=af.Sampling(0.5, max_tokens=64))
        same(there.rollout, here.rollout)
        assert there.success == here.success
        handle = given.rollout(tasks(4), 2, workers=workers)
        events: list[Any] = []
        handle.subscribe(events.append)
        ids = {t.id async for t in handle}
        assert len(ids) == 8 == handle.snapshot().count("done")
        local: list[Any] = []
        other = given.rollout(tasks(4), 2)
        other.subscribe(local.append)
        await other
        for name in ids:
            kinds = [
                [(e.kind, e.phase, e.turn, e.detail) for e in found if e.trajectory == name]
                for found in (events, local)
            ]
            assert kinds[0] == kinds[1]
        assert all(0 <= e.time <= handle.partial.seconds for e in events)

    asyncio.run(go())


@pytest.mark.real
def test_branches_and_forks(three: tuple[af.Agent, Any]) -> None:
    given, workers = three

    async def go() -> None:
        branch = af.Branch(2, weight=0.0, base=1.0)
        same(
            await given.rollout(tasks(4), 6, branch=branch, workers=workers),
            await given.rollout(tasks(4), 6, branch=branch),
        )
        forking = given.replace(after_observation=lambda chain: 1 if not chain.key.fork else None)
        there = await forking.rollout(tasks(4), 2, workers=workers)
        same(there, await forking.rollout(tasks(4), 2))
        assert any("." in t.id for t in there)

    asyncio.run(go())


@pytest.mark.long
def test_a_killed_worker_costs_no_chain(cluster: Any, tmp_path: Path) -> None:
    """The groups of a worker that is killed during a rollout run again with the same result."""
    mark = tmp_path / "killed"

    @af.tool
    def calculator(expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: for example "3*(4+5)".
        """
        if mark.read_text() == "armed":
            mark.write_text("done")
            os.kill(os.getpid(), signal.SIGKILL)
        return str(eval(expression, {"__builtins__": {}}))

    given = agent(tools=[calculator])
    with af.ray.workers(given, 2) as workers:
        mark.write_text("armed")

        async def go() -> None:
            there = await given.rollout(tasks(8), 4, workers=workers)
            assert mark.read_text() == "done", "no worker was killed"
            same(there, await given.rollout(tasks(8), 4))
            again = await given.rollout(tasks(8), 4, index=1, workers=workers)
            same(again, await given.rollout(tasks(8), 4, index=1))

        asyncio.run(go())


@pytest.mark.soak
def test_groups_that_kill_every_worker_become_errors(cluster: Any) -> None:
    driver = os.getpid()

    @af.tool
    def calculator(expression: str) -> str:
        """Kill the process.

        Args:
            expression: anything.
        """
        if os.getpid() != driver:
            os.kill(os.getpid(), signal.SIGKILL)
        return "0"

    good, bad = tasks(2)
    given = scripted(Deadly(bad.id), tools=[calculator])
    with af.ray.workers(given, 1) as workers:
        rollout = asyncio.run(given.rollout([good, bad], 2, workers=workers))
    assert [t.stop for t in rollout] == ["answered", "answered", "error", "error"]
    assert str(rollout[2].error).startswith("worker: Actor") and rollout[2].reward is None


class Deadly:
    """Script that calls the tool for one task only. An instance can be pickled."""

    def __init__(self, task: str) -> None:
        self.task = task

    def __call__(self, task: af.Task, turn: int) -> str:
        return call() if task.id == self.task and turn == 0 else "1"


@pytest.mark.soak
def test_a_removed_node_costs_no_chain(cluster: Any) -> None:
    @af.tool
    async def calculator(expression: str) -> str:
        """Evaluate an arithmetic expression slowly.

        Args:
            expression: for example "3*(4+5)".
        """
        await asyncio.sleep(0.01 if os.getpid() == driver else 1.0)
        return str(eval(expression, {"__builtins__": {}}))

    driver = os.getpid()
    node = cluster.add_node(num_cpus=1, resources={"extra": 1}, object_store_memory=100 * 2**20)
    given = agent(tools=[calculator])
    with af.ray.workers(given, 1, resources={"extra": 0.1}) as only, af.ray.workers(given, 1) as other:
        both = merged(only, other)

        async def go() -> None:
            handle = given.rollout(tasks(8), 4, max_concurrency=4, workers=both)
            removed = False
            async for _ in handle:
                if not removed:
                    removed = True
                    await asyncio.to_thread(cluster.remove_node, node, False)
                    assert len(handle.partial) < 32, "the rollout was over before the node was removed"
            same(await handle, await given.rollout(tasks(8), 4))

        asyncio.run(go())


def merged(first: Any, second: Any) -> Any:
    """Return workers with the processes of both, so that one of them is on a certain node."""
    first._actors += second._actors
    first.nodes += second.nodes
    second._actors = []
    return first


@pytest.mark.parametrize(
    "overlap", [pytest.param(0, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.soak)]
)
def test_a_training_run_equals_that_of_one_process(cluster: Any, overlap: int) -> None:
    config = SMALL.replace(steps=3, evaluate_every=3, overlap=overlap)

    def run(n: int) -> tuple[str, Any]:
        policy = learner()
        given = small(policy)
        started = af.ray.workers(given, n) if n else None
        try:
            done = af.train(given, policy, tasks(12), config, eval_tasks=tasks(3), workers=started)
            asyncio.run(done)
            return policy.fingerprint(), numbers(done)
        finally:
            if started is not None:
                started.close()

    assert run(2) == run(0)


@pytest.mark.long
def test_servers_have_their_last_weights_and_states_in_the_workers(cluster: Any) -> None:
    """An update in this process changes the versions that workers record, and the servers that they use."""
    policy = fresh()
    servers = PolicyServer(policy), PolicyServer(policy)

    async def go(given: af.Agent, workers: Any) -> None:
        fleet = given.engine
        assert isinstance(fleet, af.Fleet)
        for version in (1, 2):
            nudge(policy)
            await fleet.update(policy)
            rollout = await given.rollout(tasks(4), 2, index=version, workers=workers)
            assert {int(v) for t in rollout for v in t.versions[t.action_mask]} == {version}
            assert gaps(policy, af.collate(rollout, af.advantages.grpo))[0] < 1e-4 and all(
                server.got for server in servers
            )
        servers[1].initial = fresh()
        servers[1].restart()
        with pytest.warns(UserWarning, match="is not used until"):
            await fleet.probe(policy)
        servers[1].got.clear()
        assert not (await given.rollout(tasks(4), 2, workers=workers)).failed
        assert not servers[1].got, "a stale server was used"
        await fleet.close()

    given = agent(policy, engine=af.Fleet([server.client() for server in servers]))
    try:
        with af.ray.workers(given, 1) as workers:
            asyncio.run(go(given, workers))
    finally:
        for server in servers:
            server.stop()


@pytest.mark.long
def test_a_closure_of_a_notebook_travels(cluster: Any) -> None:
    """Functions and classes of `__main__` are pickled by value, with the variables that they use."""
    code = textwrap.dedent("""
        import asyncio, ray, agentfly_kit as af
        from agents import scripted, tasks
        ray.init(address="auto", log_to_driver=False)
        secret = {"value": 7}

        @af.tool
        def calculator(expression: str) -> str:
            '''Return the secret.

            Args:
                expression: ignored.
            '''
            return str(secret["value"])

        @af.reward
        def has(final: str) -> float:
            return float(final == "1") * secret["value"]

        given = scripted(['<tool_call>{"name":"calculator","arguments":{"expression":"1"}}</tool_call>', "1"],
                         tools=[calculator], reward=has)
        with af.ray.workers(given, 1) as workers:
            rollout = asyncio.run(given.rollout(tasks(2), workers=workers))
        print([t.reward for t in rollout], rollout[0].tool_calls[0].result.observation)
    """)
    # A second driver, while this one has a rollout.
    given = agent()
    with af.ray.workers(given, 1) as workers:

        async def go() -> subprocess.CompletedProcess[str]:
            running = asyncio.ensure_future(given.rollout(tasks(4), 4, workers=workers))
            environment = os.environ | {"RAY_ADDRESS": cluster.address}
            command = [sys.executable, "-c", code]
            done = await asyncio.to_thread(
                subprocess.run, command, env=environment, capture_output=True, text=True, timeout=GUARD
            )
            same(await running, await given.rollout(tasks(4), 4))
            return done

        done = asyncio.run(go())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[7.0, 7.0] 7"


@pytest.mark.long
def test_each_worker_has_its_own_pool_as_the_documentation_says(
    cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cell of docs/cluster.md that counts sandboxes runs. All nodes of this cluster have the same host name."""
    section = (ROOT / "docs" / "cluster.md").read_text().partition("### Sandboxes on the nodes\n")[2]
    (cell,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {"af": af, "agent": scripted([PYTHON, "x"])}
    exec(cell, names)
    with names["workers"] as workers:
        assert capsys.readouterr().out.endswith(": 3 workers, up to 12 sandboxes\n")
        rollout = asyncio.run(names["agent"].rollout(tasks(3), 4, workers=workers))
    assert [c.result.observation for t in rollout for c in t.tool_calls if c.result] == ["42"] * 12
    assert names["pool"].snapshot().sandboxes == (), "no sandbox was started in this process"


@pytest.mark.long
def test_a_cancelled_rollout_gives_back_the_sandboxes_of_the_workers(cluster: Any, tmp_path: Path) -> None:
    """The next rollout gets the only sandbox, for which other chains waited as well when they were cancelled."""

    @af.tool
    async def calculator(expression: str, box: Box) -> str:
        """Wait until cancelled, or return a number.

        Args:
            expression: "wait" or a number.
        """
        if expression == "wait":
            (tmp_path / "waiting").touch()
            await asyncio.Event().wait()
        return await box.run(expression)

    pool = af.Pool(Box, size=1, acquire_timeout=GUARD)
    texts = {"wait": call("wait"), "ask": call("7")}
    given = scripted(lambda task, turn: "x" if turn else texts[task.fields["kind"]], tools=[calculator], pools=[pool])
    waiting, asking = (
        af.tasks_from([{"question": "?", "answer": "x", "kind": kind, "n": n} for n in range(2)]) for kind in texts
    )
    with af.ray.workers(given, 1) as workers:

        async def go() -> af.Rollout:
            running = asyncio.ensure_future(given.rollout(waiting, 2, workers=workers)._wait())
            await until((tmp_path / "waiting").exists)
            running.cancel()
            await asyncio.wait([running])
            return await given.rollout(asking, 2, workers=workers)

        rollout = asyncio.run(go())
    assert [c.result.observation for t in rollout for c in t.tool_calls if c.result] == ["7"] * 4


@pytest.mark.long
def test_sandboxes_of_the_workers_end_with_a_notebook_that_is_killed(cluster: Any) -> None:
    code = textwrap.dedent("""
        import asyncio, os, ray, agentfly_kit as af
        from agents import call, scripted, tasks
        ray.init(address="auto", log_to_driver=False)

        @af.tool
        async def calculator(expression: str, sandbox: af.PythonSandbox) -> str:
            '''Return the process ids of the worker and the sandbox.

            Args:
                expression: ignored.
            '''
            return f"{os.getpid()} {sandbox.pid}"

        pool = af.Pool(af.PythonSandbox, size=1, isolation="none")
        given = scripted([call(), "x"], tools=[calculator], pools=[pool])
        workers = af.ray.workers(given, 1)
        rollout = asyncio.run(given.rollout(tasks(1), workers=workers))
        print(rollout[0].tool_calls[0].result.observation, flush=True)
        input()
    """)
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as notebook:
        try:
            assert notebook.stdout is not None
            pids = [int(text) for text in notebook.stdout.readline().split()]
            assert len(pids) == 2 and all(map(alive, pids))
        finally:
            notebook.kill()
    blocking_until(lambda: not any(map(alive, pids)))


@pytest.mark.soak
def test_close_leaves_no_process(cluster: Any) -> None:
    workers = af.ray.workers(scripted(["x"]), 2)
    pids = [int(name.rpartition(":")[2]) for name in workers.nodes]
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    workers.close()
    workers.close()
    blocking_until(lambda: not any(alive(pid) for pid in pids))
    errors.check(
        lambda: scripted(["x"]).rollout(tasks(1), workers=workers),
        af.errors.SettingsError,
        "these workers are closed",
    )
    assert repr(workers) == "Workers(closed)"


@pytest.mark.real
def test_stopping_leaves_the_workers_usable(three: tuple[af.Agent, Any]) -> None:
    given, workers = three

    async def go() -> None:
        handle = given.rollout(tasks(12), 4, max_concurrency=4, workers=workers)
        async for _ in handle:
            handle.stop()
        assert 0 < len(handle.partial) < 48
        same(await given.rollout(tasks(3), 2, workers=workers), await given.rollout(tasks(3), 2))

    asyncio.run(go())


@pytest.mark.soak
def test_bad_input(cluster: Any, three: tuple[af.Agent, Any]) -> None:
    given, workers = three
    errors.check(
        lambda: given.rollout(tasks(1), budget=af.Budget(turns=3), workers=workers),
        af.errors.SettingsError,
        re.compile(r"budget must be None with workers.*group_budget="),
    )
    config = SMALL.replace(budget=af.Budget(turns=3))
    errors.check(
        lambda: af.train(given, given.engine.policy, tasks(3), config, workers=workers),  # type: ignore[attr-defined]
        af.errors.SettingsError,
        "budget must be None with workers",
    )
    errors.check(
        lambda: given.replace(engine=af.LocalEngine(random_policy()), chat=given.chat).rollout(
            tasks(1), workers=workers
        ),
        af.errors.SettingsError,
        re.compile(r"an agent with the same engine: af.ray.workers\(agent, 3\)"),
    )
    errors.check(
        lambda: given.replace(pools=[af.Pool(Box)]).rollout(tasks(1), workers=workers),
        af.errors.SettingsError,
        "an agent with the same pools",
    )
    errors.check(
        lambda: af.ray.workers(scripted(["x"]), 2, timeout=2, num_cpus=64),
        af.errors.SettingsError,
        re.compile(r"2 workers did not start within 2 s; each needs 64 CPU, .* free"),
    )
    generator = (i for i in range(3))

    @af.reward
    def unsendable(final: str) -> float:
        return float(next(generator))

    @af.tool
    def read(n: int) -> str:
        """Read.

        Args:
            n: number of characters.
        """
        return str(next(generator) + n)

    errors.check(
        lambda: af.ray.workers(scripted(["x"], reward=unsendable), 1),
        af.errors.SettingsError,
        re.compile(r"its reward 'unsendable' cannot be pickled .*generator"),
    )
    errors.check(
        lambda: af.ray.workers(scripted(["x"], tools=[read]), 1),
        af.errors.SettingsError,
        "its tool 'read' cannot be pickled",
    )
    errors.check(
        lambda: given.rollout([af.Task("t", ({"role": "user", "content": "?"},))], workers=workers),
        af.errors.TaskError,
        "answer",
    )


@pytest.mark.soak
def test_a_node_without_the_kit(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
        import sys

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name == "agentfly_kit":
                    raise ModuleNotFoundError("No module named 'agentfly_kit'")

        sys.meta_path.insert(0, Missing())
        """)
    )
    environment = {"env_vars": {"PYTHONPATH": str(tmp_path)}}
    errors.check(
        lambda: af.ray.workers(scripted(["x"]), 1, runtime_env=environment),
        af.errors.SettingsError,
        re.compile(r"(?s)every node needs agentfly_kit .*No module named 'agentfly_kit'"),
    )
