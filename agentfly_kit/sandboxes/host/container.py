"""Sandboxes in containers: `isolation=Container("python:3.12-slim")`, on any engine with Docker's API.

This module creates a container, connects to the zygote in it and removes the container. The zygote (inside/zygote.py,
inside/container_relay.py) is the container's first process and communicates over its standard input and output, to
which this process stays attached. Therefore a call needs no `exec`; and when this process dies, for whatever reason,
the input ends, the container exits, and the engine removes it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import IsolationError, SandboxError, SettingsError
from ..inside.container_relay import CONTROL, DATA, OUT, USAGE, frame, frames
from . import isolation, reaper, seccomp
from .limits import Group, Limits
from .process import SandboxProcess

_MEBIBYTE = 2**20
_OWN_MEMORY = 24  # MB for the zygote, in addition to the sandbox's limit
_LABEL = "agentfly.maker"
_HOME = "/tmp"
_USER = "65534:65534"
_CHUNK = 65536
_API_SECONDS = 60
_DRAIN_SECONDS = 1.0  # after the container ended: how long to wait until its last output is delivered
_PROCESSES = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}
# Reads two source files from standard input, makes them modules of one package, and runs the second one.
_BOOT = """
import os, sys, types
def read(count):
    data = b""
    while len(data) < count:
        piece = os.read(0, count - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data
def line():
    data = b""
    while not data.endswith(b"\\n"):
        data += read(1)
    return int(data)
sys.modules["sandbox"] = types.ModuleType("sandbox")
sys.modules["sandbox"].__path__ = []
for name in ("zygote", "container_relay"):
    module = sys.modules["sandbox." + name] = types.ModuleType("sandbox." + name)
    module.__package__, module.__file__ = "sandbox", "/sandbox/" + name + ".py"
    exec(compile(read(line()), module.__file__, "exec"), module.__dict__)
for name in ("sandbox", "sandbox.zygote", "sandbox.container_relay"):
    del sys.modules[name]
sys.argv[:] = [""]
module.main()
"""
launch_executor = concurrent.futures.ThreadPoolExecutor(8, "agentfly-container")  # starts its threads on first use

NOT_ISOLATED = (
    "the kernel is shared, unless runtime= says otherwise: a hole in it is a hole in the container",
    "what mounts= shows can be read, and written where it says so; what is written there outlives the sandbox",
    "whoever may talk to the engine is root on its machine: that is you, never the code inside",
    "with network=True the code is on the engine's default network, or on the one that network= names",
)


@dataclass(frozen=True)
class Container:
    """Container isolation for sandboxes: `Pool(PythonSandbox, isolation=Container("python:3.12-slim"))`.

    The code runs without root, capabilities or the ability to gain privileges, in a file system of its own that is
    read-only except for /tmp. The engine enforces the sandbox's limits (memory, processes, CPU time, disk, network).

    Attributes:
        image: name of an image that the engine already has; it is not pulled. It must contain Python 3.9 or newer.
        cpus: number of processors that all processes of the container together can use (0.5: half of one). None: all.
        mounts: {"/path/on/host": "/path/inside"}, mounted read-only; append ":rw" to the inner path to make it
            writable. A reset does not clear mounts. Host paths refer to the engine's machine.
        network: name of the engine's network to use if the sandbox has network=True. None: the default network.
        python: the Python command in the image.
        runtime: OCI runtime to use, such as "runsc" for gVisor. None: the engine's default.
        engine: address of the engine: "unix:///run/podman/podman.sock", "tcp://host:port". None: DOCKER_HOST, else the
            usual sockets of Docker and podman.
    """

    image: str
    cpus: float | None = None
    mounts: Mapping[str, str] = field(default_factory=dict)
    network: str | None = None
    python: str = "python3"
    runtime: str | None = None
    engine: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.image, str) or not self.image.strip():
            raise SettingsError(f'Container({self.image!r}): want an image\'s name, such as "python:3.12-slim"')
        if self.cpus is not None and not 0.01 <= self.cpus <= 1024:
            raise SettingsError(f"Container(cpus={self.cpus!r}): want at least 0.01 processors, or None for all")
        for here, inside in self.mounts.items():
            if not os.path.isabs(here) or not os.path.isabs(inside):
                raise SettingsError(f"Container(mounts={{{here!r}: {inside!r}}}): want two absolute paths")

    def __str__(self) -> str:
        return f"container {self.image}"

    @property
    def not_isolated(self) -> tuple[str, ...]:
        """Aspects of the host that a container does not isolate."""
        return NOT_ISOLATED

    @property
    def inner_mounts(self) -> dict[str, str]:
        """Mapping from path inside to "ro" or "rw"."""
        split = (inside.removesuffix(":ro") for inside in self.mounts.values())
        return {inside.removesuffix(":rw"): "rw" if inside.endswith(":rw") else "ro" for inside in split}

    def limit_mechanisms(self, limits: Limits) -> dict[str, str]:
        """Describe how each limit is enforced; "not limited" if it is not."""
        group = "the container's control group, all processes together"
        network = "no interface but its own loopback"
        return {
            "memory_mb": "not limited" if limits.memory_mb is None else group,
            "processes": "not limited" if limits.processes is None else group,
            "cpu_seconds": "not limited"
            if limits.cpu_seconds is None
            else "the control group's clock, else RLIMIT_CPU",
            "disk_mb": "not limited" if limits.disk_mb is None else "size of its own /tmp",
            "network": f"{self.network or 'the default network'}, as asked" if limits.network else network,
        }


# --- the engine ----------------------------------------------------------------------------------


def address(engine: str | None) -> str:
    """Return the address of the container engine.

    Raises:  IsolationError if none is given and none is found.
    """
    if engine or os.environ.get("DOCKER_HOST"):
        return engine or os.environ["DOCKER_HOST"]
    places = ["/var/run/docker.sock", "/run/podman/podman.sock"]
    if os.environ.get("XDG_RUNTIME_DIR"):
        places.insert(1, f"{os.environ['XDG_RUNTIME_DIR']}/podman/podman.sock")
    for place in places:
        if os.path.exists(place):
            return f"unix://{place}"
    raise IsolationError(
        f"no container engine was found (looked at DOCKER_HOST, {', '.join(places)}); start Docker, or "
        "`podman system service --time=0 unix:///tmp/podman.sock &` and say Container(engine='unix:///tmp/podman.sock')"
    )


@functools.cache
def _version(url: str) -> tuple[str, str]:
    """Return an engine's API version and architecture, and remove orphaned containers there. Runs once per url."""
    with _client(url, "auto") as api:
        info = api.version()
        _remove_orphans(api)
        return api._version, str(info.get("Arch", ""))


@contextlib.contextmanager
def _client(url: str, version: str = "") -> Any:
    """Connect to the engine, translating its exceptions into IsolationError and SandboxError."""
    try:
        import docker
        from docker.errors import APIError, DockerException, ImageNotFound
        from requests.exceptions import RequestException
    except ImportError as error:
        raise IsolationError(
            f'containers need the package docker ({error}): pip install "agentfly_kit[containers]"'
        ) from error
    if url.startswith("ssh://"):
        raise IsolationError(f"{url}: forward the engine's socket instead, `ssh -L /tmp/engine.sock:/run/docker.sock`")
    _check_listening(url)
    api = None
    try:
        api = docker.APIClient(base_url=url, version=version or _version(url)[0], timeout=_API_SECONDS)
        yield api
    except ImageNotFound as error:
        raise IsolationError(f"the engine at {url} has no such image: {error.explanation}; pull it first") from error
    except APIError as error:
        raise SandboxError(f"the engine at {url} refused: {error.explanation or error}") from error
    except (DockerException, RequestException) as error:
        raise IsolationError(f"no container engine answers at {url}: {error}") from error
    finally:
        if api is not None:
            api.close()


def _check_listening(url: str) -> None:
    """Raise IsolationError if the socket does not accept connections; the docker library would leak a socket then."""
    if url.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_API_SECONDS)
            try:
                probe.connect(url.removeprefix("unix://"))
            except OSError as error:
                raise IsolationError(f"no container engine answers at {url}: {error.strerror or error}") from error


def _remove_orphans(api: Any) -> None:
    """Remove containers whose owner was killed between creating and starting them."""
    for each in api.containers(all=True, filters={"label": _LABEL}):
        if reaper.is_gone(str((each.get("Labels") or {}).get(_LABEL, ""))):
            with contextlib.suppress(Exception):  # another process may be removing it too
                api.remove_container(each["Id"], force=True)


# --- one container -------------------------------------------------------------------------------


class Usage(Group):
    """Counters of a container's control group, as last reported by its zygote. The engine owns the group."""

    def __init__(self) -> None:
        self.version, self.folders = "", {}
        self.hit_counts: tuple[int, int] = (0, 0)
        self.seconds: float | None = None

    def limit_hits(self) -> tuple[int, int]:
        return self.hit_counts

    def cpu_seconds(self) -> float | None:
        return self.seconds

    def processes(self) -> list[int]:
        return []

    def kill(self, patience: float = 0.0) -> bool:
        return True

    def remove(self, patience: float = 0.0) -> bool:
        return True


class ContainerProcess(SandboxProcess):
    """A running container and the stream to its zygote. Created by `launch`."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.id: str | None = None
        self.stream: Stream | None = None
        self.group: Usage = Usage()

    @property
    def alive(self) -> bool:
        """True if the container is connected and was not destroyed."""
        return not self._destroyed and self.stream is not None and not self.stream.ended

    def last_error_line(self) -> str:
        lines = b"" if self.stream is None else bytes(self.stream.stderr_tail)
        text = lines.decode(errors="replace").strip().splitlines()
        return text[-1][:500] if text else ""

    def destroy(self) -> None:
        """End the container and release all resources. Blocks for about 0.1 s."""
        with self._lock:
            if self._destroyed:
                return
            self._destroyed = True
            self.disconnect()
            if os.getpid() == self.owner_pid:
                self._remove()

    def _remove(self) -> None:
        if self.stream is not None:
            self.stream.thread.join(5.0)
        if self.id is not None:
            try:
                with _client(self.url) as api:
                    _remove_container(api, self.id)
            except SandboxError:
                pass  # the engine is gone or refuses; the container exits anyway, because its input has ended

    def stop(self) -> None:
        """Disconnect, upon which the zygote exits and the engine removes the container."""
        if os.getpid() == self.owner_pid:
            self.disconnect()

    def kill(self) -> None:
        """Like `destroy`, but without waiting for the engine."""
        with self._lock:
            if self._destroyed:
                return
            self._destroyed = True
            self.disconnect()
        if os.getpid() == self.owner_pid:
            with contextlib.suppress(RuntimeError):  # Python is shutting down; the end of input ends the container
                threading.Thread(target=self._remove, name="agentfly-container-removal", daemon=True).start()


def _remove_container(api: Any, id: str) -> None:
    """Remove a container; it may be in the middle of its own automatic removal."""
    from docker.errors import APIError, NotFound

    for _ in range(200):
        try:
            api.remove_container(id, force=True, v=True)
        except NotFound:
            return
        except APIError:
            threading.Event().wait(0.02)  # "removal is already in progress", or it is just exiting
        else:
            return


def launch(
    container: Container, limits: Limits, preload: Sequence[str], max_output: int, packages: bool = True
) -> SandboxProcess:
    """Create and start a container. Takes about 0.1 s; its zygote later sends "ready" on the control socket.

    Raises:  IsolationError if the engine or the image does not exist; SandboxError if the engine refuses.
    """
    url = address(container.engine)
    handle = ContainerProcess(url)
    try:
        version, arch = _version(url)
        with _client(url, version) as api:
            config = _config(api, container, limits, packages)
            handle.id = api.create_container_from_config(config)["Id"]
            taken = api.inspect_container(handle.id)["HostConfig"].get("Runtime")
            if container.runtime is not None and taken != container.runtime:
                raise SandboxError(f"the engine at {url} did not take runtime={container.runtime!r}: it says {taken!r}")
            attached = api.attach_socket(handle.id, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
            connection = _raw_socket(attached, url)
            try:
                api.start(handle.id)
            except BaseException:
                connection.close()
                raise
        handle.control, inside = socket.socketpair()
        handle.control.setblocking(False)
        handle.stream = Stream(connection, inside, handle.group)
        handle.stream.boot([isolation.WORKER, Path(__file__).parent.parent / "inside" / "container_relay.py"])
        rlimits: dict[str, int] = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": 512}
        if limits.memory_mb is not None:
            rlimits["RLIMIT_DATA"] = limits.memory_mb * _MEBIBYTE  # raises MemoryError before the group's limit kills
        if limits.disk_mb is not None:
            rlimits["RLIMIT_FSIZE"] = limits.disk_mb * _MEBIBYTE
        program = seccomp.program(_PROCESSES.get(arch, arch)) if container.runtime != "runsc" else None
        settings = {
            "op": "settings", "rlimits": rlimits, "cpu_seconds": limits.cpu_seconds, "max_output": max_output,
            "keep": list(container.inner_mounts), "path": [], "preload": ["traceback", *preload], "pdeathsig": False,
            "scratch": None, "landlock": None, "filter": "",
            "restrict": "" if program is None else program.hex(),
        }  # fmt: skip
        handle.control.sendall(json.dumps(settings).encode() + b"\n")
        handle.stream.thread.start()
    except BaseException as error:
        handle.destroy()
        if isinstance(error, OSError):
            raise SandboxError(f"a container could not be started: {error}") from error
        raise
    return handle


def _config(api: Any, container: Container, limits: Limits, packages: bool = True) -> Any:
    memory = None if limits.memory_mb is None else (limits.memory_mb + _OWN_MEMORY) * _MEBIBYTE
    shm = isolation.STRICT_SHM_MB if limits.disk_mb is None else min(isolation.STRICT_SHM_MB, limits.disk_mb)
    size = "" if limits.disk_mb is None else f",size={limits.disk_mb}m"
    host = api.create_host_config(
        auto_remove=True, read_only=True, init=False, privileged=False, ipc_mode="private",
        network_mode=(container.network or None) if limits.network else "none",
        cap_drop=["ALL"], security_opt=["no-new-privileges"], oom_score_adj=None,
        mem_limit=memory, memswap_limit=memory, pids_limit=None if limits.processes is None else limits.processes + 1,
        nano_cpus=None if container.cpus is None else int(container.cpus * 1e9),
        shm_size=shm * _MEBIBYTE,
        # podman mounts writable /run and /var/tmp without a size limit; these replacements are too small to be used.
        tmpfs={_HOME: f"rw,nosuid,nodev,mode=1777{size}", "/run": "size=4k,mode=0755", "/var/tmp": "size=4k,mode=0755"},
        binds=[f"{here}:{inside.removesuffix(':ro').removesuffix(':rw')}:{'rw' if inside.endswith(':rw') else 'ro'}"
               for here, inside in container.mounts.items()],
        runtime=container.runtime,
    )  # fmt: skip
    variables = isolation.environment(_HOME)
    del variables["PATH"]  # keep the image's PATH
    return api.create_container_config(
        container.image, [container.python, "-s", *([] if packages else ["-S"]), "-c", _BOOT], entrypoint=[],
        host_config=host,
        user=_USER, working_dir=_HOME, environment=variables, stdin_open=True, detach=False, tty=False,
        labels={_LABEL: reaper.owner_tag()}, hostname="sandbox", network_disabled=not limits.network,
    )  # fmt: skip


def _raw_socket(attached: Any, url: str) -> socket.socket:
    """Duplicate the underlying socket; the library's objects close theirs when they are garbage-collected."""
    connection = getattr(attached, "_sock", attached)
    if type(connection) is not socket.socket:
        raise IsolationError(f"{url}: an engine can be used over unix:// or plain tcp:// (through a tunnel), not TLS")
    copy = socket.socket(fileno=os.dup(connection.fileno()))
    copy.settimeout(None)
    response = getattr(attached, "_response", None)
    if response is not None:
        with contextlib.suppress(Exception):
            response.close()
    return copy


# --- the stream ----------------------------------------------------------------------------------


class Stream:
    """Tunnel of a zygote's protocol through an attached connection, so that the zygote appears to run on the host.

    It runs on a thread of its own and is not bound to an event loop. It receives the channels of the interpreters from
    the other end of `control`, as a local zygote would.
    """

    def __init__(self, connection: socket.socket, control: socket.socket, usage: Usage) -> None:
        self.connection, self.control, self.usage = connection, control, usage
        control.setblocking(False)
        self.thread = threading.Thread(target=self._serve, name="agentfly-stream", daemon=True)
        self.ended = False
        self.stderr_tail = bytearray()
        self._serial = 0
        self._data: socket.socket | None = None
        self._pipes: tuple[int, ...] = ()
        self._commands = b""
        self._received_fds: list[int] = []
        self._raw = bytearray()  # includes the engine's own headers
        self._inbox = bytearray()
        self._outgoing: deque[tuple[int, bytes]] = deque()  # (channel, data still to be delivered), in order

    def boot(self, files: Sequence[Path]) -> None:
        """Send the source code to run inside."""
        for file in files:
            source = file.read_bytes()
            self.connection.sendall(b"%d\n" % len(source) + source)

    def _serve(self) -> None:
        try:
            self._relay()
        except OSError:
            pass  # one of the two ends was closed
        finally:
            self.ended = True
            self._drop_channels()
            for each in (self.connection, self.control):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _relay(self) -> None:
        over = False
        while not over or self._outgoing:
            poll = select.poll()
            poll.register(self.control, select.POLLIN)
            blocked = self._blocked()
            if blocked is not None:
                poll.register(blocked, select.POLLOUT)
            elif not over:
                poll.register(self.connection, select.POLLIN)
            if self._data is not None and not over:
                poll.register(self._data, select.POLLIN)
            ready = dict(poll.poll(_DRAIN_SECONDS * 1e3 if over else None))
            if over and not ready:
                return
            if self.control.fileno() in ready and not self._command():
                return
            if self._data is not None and self._data.fileno() in ready and not over:
                self._forward()
            if self.connection.fileno() in ready:
                over = not self._receive()
            self._deliver()

    # --- to the container

    def _command(self) -> bool:
        """Forward commands from the host to the zygote. Return False at the end of the socket."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.control, _CHUNK, 16)
        except ConnectionError:
            return False
        self._received_fds += descriptors
        *lines, self._commands = (self._commands + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message["op"] == "fresh":
                self._drop_channels()
                given, self._received_fds = self._received_fds[:3], self._received_fds[3:]
                self._data = socket.socket(fileno=given[0])
                self._data.setblocking(False)
                self._pipes = tuple(given[1:])
                for pipe in self._pipes:
                    os.set_blocking(pipe, False)
                self._serial = message["serial"]
                # Drop unread data of the previous interpreter; keep messages from the zygote.
                self._outgoing = deque(each for each in self._outgoing if each[0] == CONTROL)
            self.connection.sendall(frame(CONTROL, self._serial, line))
        return bool(data)

    def _forward(self) -> None:
        assert self._data is not None
        try:
            data = self._data.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.connection.sendall(frame(DATA, self._serial, data))
        else:
            self._data.close()
            self._data = None

    # --- from the container

    def _receive(self) -> bool:
        """Read from the container. Return False when the container has ended."""
        data = self.connection.recv(_CHUNK)
        self._raw += data
        while len(self._raw) >= 8:
            kind, length = self._raw[0], struct.unpack_from("!I", self._raw, 4)[0]
            if len(self._raw) < 8 + length:
                break
            piece = bytes(self._raw[8 : 8 + length])
            del self._raw[: 8 + length]
            if kind == 1:
                self._inbox += piece
            else:
                self.stderr_tail = (self.stderr_tail + piece)[-4096:]
        for channel, serial, piece in frames(self._inbox):
            if channel == USAGE:
                usage = json.loads(piece)
                self.usage.hit_counts = (int(usage["hits"][0]), int(usage["hits"][1]))
                self.usage.seconds = usage["cpu"]
            elif channel == CONTROL:
                self._outgoing.append((CONTROL, piece + b"\n"))
            elif serial == self._serial:
                self._outgoing.append((channel, piece))
        return bool(data)

    def _target(self, channel: int) -> int | socket.socket | None:
        if channel == CONTROL:
            return self.control
        if channel == DATA:
            return self._data
        return self._pipes[channel - OUT] if self._pipes else None

    def _blocked(self) -> int | None:
        """Return the file descriptor that must become writable before more data can be delivered."""
        if not self._outgoing:
            return None
        target = self._target(self._outgoing[0][0])
        return target if isinstance(target, int) or target is None else target.fileno()

    def _deliver(self) -> None:
        while self._outgoing:
            channel, piece = self._outgoing[0]
            target = self._target(channel)
            try:
                if target is None:
                    sent = len(piece)
                elif isinstance(target, int):
                    sent = os.write(target, piece)
                elif piece:
                    sent = target.send(piece)
                else:  # the interpreter closed its end
                    target.shutdown(socket.SHUT_WR)
                    sent = 0
            except BlockingIOError:
                return
            except OSError:
                sent = len(piece)  # its reader is gone
            if sent < len(piece):
                self._outgoing[0] = (channel, piece[sent:])
            else:
                self._outgoing.popleft()

    def _drop_channels(self) -> None:
        if self._data is not None:
            self._data.close()
            self._data = None
        pipes, self._pipes = self._pipes, ()
        for pipe in pipes:
            os.close(pipe)
