"""The connection to a Ray cluster, and its resources."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from agentfly_kit.errors import SettingsError

VERSION: str = sys.modules["agentfly_kit"].__version__


def connected() -> Any:
    """Return the module `ray`. Raise SettingsError if it is not installed or not connected to a cluster."""
    if importlib.util.find_spec("ray") is None:
        raise SettingsError('ray is not installed: pip install "agentfly_kit[ray]"')
    import ray

    if not ray.is_initialized():
        raise SettingsError(
            'Ray is not connected: call ray.init("auto") on a cluster, or ray.init() for this machine'
        )
    return ray


def not_started(what: str, timeout: float, needed: dict[str, Any]) -> SettingsError:
    """Return an error for processes that did not start in time, with the resources that they need."""
    import ray

    return SettingsError(
        f"{what} did not start within {timeout:g} s; each needs {_resources(needed)}, and the cluster has "
        f"{_resources(ray.available_resources())} free; earlier workers and learners keep their resources until closed"
    )


def _resources(amounts: dict[str, Any]) -> str:
    names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    shown = {
        names.get(name, name): value for name, value in amounts.items() if names.get(name, name) in ("CPU", "GPU")
    }
    return " and ".join(f"{value:g} {name}" for name, value in shown.items() if value) or "no CPU"


def describe_node() -> dict[str, Any]:
    """Return the version of the package, the host name and the process id of this process."""
    return {"version": VERSION, "node": socket.gethostname(), "pid": os.getpid()}


def check_versions(found: Sequence[dict[str, Any]]) -> None:
    """Raise SettingsError if a process has a different version of the package than this process."""
    for process in found:
        if process["version"] != VERSION:
            raise SettingsError(
                f"every node must have agentfly_kit {VERSION}, got {process['version']} on {process['node']}"
            )
