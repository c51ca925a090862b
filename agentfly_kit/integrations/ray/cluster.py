"""The connection to a Ray cluster, and its resources."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Self

from agentfly_kit._display import Displayable
from agentfly_kit.errors import AgentFlyError, SettingsError

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


def _resources(amounts: dict[str, Any]) -> str:
    names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    shown = {
        names.get(name, name): value for name, value in amounts.items() if names.get(name, name) in ("CPU", "GPU")
    }
    return " and ".join(f"{value:g} {name}" for name, value in shown.items() if value) or "no CPU"


def describe_node() -> dict[str, Any]:
    """Return the version of the package, the host name and the process id of this process."""
    return {"version": VERSION, "node": socket.gethostname(), "pid": os.getpid()}


class Processes(Displayable):
    """Processes on a Ray cluster, which `close` ends. Base class of `Workers` and `Learner`.

    Attributes:
        nodes: Host name and process id of each process when it started.
    """

    nodes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._actors: list[Any] = []

    @contextlib.contextmanager
    def _starting(self, what: str, timeout: float, needed: dict[str, Any], failed: str) -> Iterator[None]:
        """Context manager for the start, which ends the processes if the block raises, and explains Ray's errors.

        Args:
            what: Description of the processes for the error of a timeout.
            timeout: Time limit that the block passes to Ray.
            needed: Resources that each process needs.
            failed: Beginning of the message of other errors.
        """
        ray = connected()
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, ray.exceptions.GetTimeoutError):
                raise SettingsError(
                    f"{what} did not start within {timeout:g} s; each needs {_resources(needed)}, and the cluster has "
                    f"{_resources(ray.available_resources())} free; earlier workers and learners keep their resources "
                    "until closed"
                ) from None
            if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, AgentFlyError):
                raise error.cause from None
            if isinstance(error, ray.exceptions.RayError):
                raise SettingsError(f"{failed}: {error}") from error
            raise

    def _set_nodes(self, found: Sequence[dict[str, Any]]) -> None:
        """Set `nodes`. Raise SettingsError if a process has a different version of the package than this process."""
        for process in found:
            if process["version"] != VERSION:
                raise SettingsError(
                    f"every node must have agentfly_kit {VERSION}, got {process['version']} on {process['node']}"
                )
        self.nodes = tuple(f"{each['node']}:{each['pid']}" for each in found)

    def close(self) -> None:
        """End the processes. Further calls have no effect."""
        import ray

        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)
        self._actors = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
