"""Time limits of sandboxes that a slow machine does not reach, and a Ray cluster."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import raised_limits  # noqa: F401  (a fixture)
from waiting import GUARD


def start_cluster() -> Any:
    """Start three nodes, one after the other because Ray waits 30 s for each, and connect to them."""
    import ray
    from ray.cluster_utils import Cluster

    settings = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    cluster = Cluster()
    for _ in range(3):
        cluster.add_node(**settings)
    ray.init(address=cluster.address, log_to_driver=False)
    return cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # a short path, because it contains sockets
    before = dict(os.environ)
    here = Path(__file__).resolve().parent
    modules = [str(here), *(str(here.parent / name) for name in ("", "agent", "trainer", "engines", "ppo", "policy"))]
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(modules), "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0",
        # Time limits for the start of Ray's own processes.
        "RAY_agent_register_timeout_ms": f"{GUARD * 1000:.0f}", "RAY_worker_register_timeout_seconds": f"{GUARD:.0f}",
        "RAY_gcs_server_port_wait_time_s": f"{GUARD:.0f}",
    }  # fmt: skip
    (Path(folder) / "ray").mkdir()
    cluster = start_cluster()
    yield cluster
    import ray

    ray.shutdown()
    cluster.shutdown()
    os.environ.clear()
    os.environ.update(before)
    shutil.rmtree(folder, ignore_errors=True)
