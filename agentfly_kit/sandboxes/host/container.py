"""Sandboxes in containers, with `isolation=Container("python:3.12-slim")` and any container engine with Docker's API.

The container's first process is the zygote (inside/container_relay.py). The host communicates with the zygote over
standard input and output (stream.py). If the host process dies, the input ends, the container exits, and the engine
removes it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentfly_kit._display import Displayable, printable

from ...errors import IsolationError, SandboxError, SettingsError
from . import commands, reaper, seccomp
from .limits import Limits
from .process import SandboxProcess, settings_line
from .stream import ContainerUsage, Stream

_MEBIBYTE = 2**20
_OWN_MEMORY = 24  # MB for the zygote, in addition to the sandbox's limit
_LABEL = "agentfly.maker"
_IMAGE_LABELS = {"agentfly.task": "true"}  # of images that `build_image` builds, for `podman image prune --filter`
_HOME = "/tmp"
_USER = "65534:65534"
# Capabilities of root in a writable container, which package managers need to install files of other users.
_ROOT_CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID"]
# podman mounts writable /run and /var/tmp without a size limit; these replacements are too small to hold data.
_SMALL_FOLDERS = {"/run": "size=4k,mode=0755", "/var/tmp": "size=4k,mode=0755"}
_API_SECONDS = 60
_PROCESSORS = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}
_RELAY_FILES = (*commands.ZYGOTE_FILES, "frames", "container_relay")
# The container runs this program, which compiles source files from standard input, because the Python version of the
# container may differ from the host's.
_BOOT = f"""
import os, sys
def read(count):
    data = b""
    while len(data) < count:
        piece = os.read(0, count - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data
files = []
for name in {_RELAY_FILES}:
    size = b""
    while not size.endswith(b"\\n"):
        size += read(1)
    files.append((name, compile(read(int(size)), "/sandbox/" + name + ".py", "exec")))
sys.argv[:] = [""]
{commands.BOOT}"""


@dataclass(frozen=True, repr=False)
class Container(Displayable):
    """Container isolation for sandboxes: `Pool(PythonSandbox, isolation=Container("python:3.12-slim"))`.

    The code runs without root, capabilities or the ability to gain privileges, in a separate file system that is
    read-only except for /tmp, unless `writable` is True. The engine enforces the sandbox's limits (memory, processes,
    CPU time, disk, network).

    Attributes:
        image: name of an image that the engine already has; it is not pulled. The image must contain Python 3.9 or
            newer.
        cpus: maximum number of processors that the whole container uses, such as 0.5. By default, there is no limit.
        mounts: {"/path/on/host": "/path/inside"}, mounted read-only; append ":rw" to the inner path to make it
            writable. A reset does not clear mounts. Host paths refer to the engine's machine.
        network: name of the network to use if the sandbox has network=True; by default the engine's default network.
        python: the Python command in the image.
        writable: whether the code runs as root in a writable file system. A reset then starts a new container, and
            forks are not possible.
        runtime: OCI runtime to use, such as "runsc" for gVisor; by default the engine's default runtime.
        engine: address of the container engine, such as "unix:///run/podman/podman.sock" or "tcp://host:port". By
            default, the address in DOCKER_HOST is used, or else one of the usual sockets of Docker and podman.
    """

    image: str
    cpus: float | None = None
    mounts: Mapping[str, str] = field(default_factory=dict)
    network: str | None = None
    python: str = "python3"
    writable: bool = False
    runtime: str | None = None
    engine: str | None = None

    def __post_init__(self) -> None:
        for here, inside in self.mounts.items():
            if not os.path.isabs(here) or not os.path.isabs(inside):
                raise SettingsError(f"mounts must map absolute paths to absolute paths, got {here!r}: {inside!r}")

    def __str__(self) -> str:
        return printable(f"container {self.image}")

    @property
    def not_isolated(self) -> tuple[str, ...]:
        """Descriptions of what the container does not isolate."""
        return (
            "the kernel is shared, with its vulnerabilities, unless runtime= selects a runtime with another kernel",
            "the folders of mounts= can be read, and written if mounted ':rw'; files written there are not deleted",
            "access to the engine amounts to root access to its machine; you have it, but the code inside does not",
            "with network=True the code is on the engine's default network, or on the one named by network=",
            "with writable=True the code is root in the container, also for folders of mounts=, and its disk usage is "
            "limited in /tmp only",
        )

    def limit_mechanisms(self, limits: Limits) -> dict[str, str]:
        """Return a description of how each limit is enforced; "not limited" for a limit that is None."""
        group = "the container's control group, all processes together"
        return limits.describe(
            {
                "memory_mb": group,
                "processes": group,
                "cpu_seconds": "the control group's clock, else RLIMIT_CPU",
                "disk_mb": "size of its own /tmp",
                "network": (
                    f"{self.network or 'the default network'}, as requested"
                    if limits.network
                    else "only its own loopback interface"
                ),
            }
        )


def _path_and_mode(inner: str) -> tuple[str, str]:
    return inner.removesuffix(":ro").removesuffix(":rw"), "rw" if inner.endswith(":rw") else "ro"


# --- the engine ----------------------------------------------------------------------------------


def address(engine: str | None) -> str:
    """Return `engine` or, if it is None, the address of the default engine. Raises IsolationError if there is none."""
    if engine or os.environ.get("DOCKER_HOST"):
        return engine or os.environ["DOCKER_HOST"]
    places = ["/var/run/docker.sock", "/run/podman/podman.sock"]
    if os.environ.get("XDG_RUNTIME_DIR"):
        places.insert(1, f"{os.environ['XDG_RUNTIME_DIR']}/podman/podman.sock")
    for place in places:
        if os.path.exists(place):
            return f"unix://{place}"
    raise IsolationError(
        f"no container engine was found (looked at DOCKER_HOST, {', '.join(places)}); start Docker, or run "
        "`podman system service --time=0 unix:///tmp/podman.sock &` and pass Container(engine='unix:///tmp/podman.sock')"
    )


@functools.cache
def _version(url: str) -> tuple[str, str]:
    """Return the API version and architecture of the container engine at `url`, and remove its orphaned containers."""
    with _client(url, "auto") as api:
        info = api.version()
        _remove_orphans(api)
        return api._version, str(info.get("Arch", ""))


@contextlib.contextmanager
def _client(url: str, version: str = "") -> Any:
    """Connect to the container engine. Errors of its API are raised as IsolationError or SandboxError."""
    try:
        import docker
        from docker.errors import APIError, DockerException, ImageNotFound
        from requests.exceptions import RequestException
    except ImportError as error:
        raise IsolationError('containers need docker; type: pip install "agentfly_kit[containers]"') from error
    if url.startswith("ssh://"):
        raise IsolationError(
            f"ssh:// addresses are not supported ({url}); forward the engine's socket instead: "
            "`ssh -L /tmp/engine.sock:/run/docker.sock HOST`"
        )
    _check_listening(url)
    api = None
    try:
        api = docker.APIClient(base_url=url, version=version or _version(url)[0], timeout=_API_SECONDS)
        yield api
    except ImageNotFound as error:
        raise IsolationError(f"the engine at {url} has no such image: {error.explanation}; pull it first") from error
    except APIError as error:
        raise SandboxError(f"the engine at {url} reported an error: {error.explanation or error}") from error
    except (DockerException, RequestException) as error:
        raise IsolationError(f"no container engine answers at {url}: {error}") from error
    finally:
        if api is not None:
            api.close()


def _check_listening(url: str) -> None:
    """Raise IsolationError if the engine accepts no connections. Docker's library would leak a socket in this case."""
    if url.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_API_SECONDS)
            try:
                probe.connect(url.removeprefix("unix://"))
            except OSError as error:
                raise IsolationError(f"no container engine answers at {url}: {error.strerror or error}") from error


def _remove_orphans(api: Any) -> None:
    """Remove containers that were created but never started, because their host process was killed."""
    for each in api.containers(all=True, filters={"label": _LABEL}):
        if reaper.is_gone(str((each.get("Labels") or {}).get(_LABEL, ""))):
            with contextlib.suppress(Exception):  # another process may be removing it too
                api.remove_container(each["Id"], force=True)


def build_image(engine: str | None, folder: str | os.PathLike[str], tag: str, timeout: float) -> None:
    """Build an image from the Dockerfile in a folder, unless the engine already has an image with this tag.

    Args:
        engine: address of the container engine, as in `Container`.
        folder: folder with the Dockerfile and the files that it copies.
        tag: name of the image.
        timeout: maximum time in seconds without output of the build.

    Raises:  SandboxError, with the last lines of output, if a command of the Dockerfile fails or prints nothing for
             `timeout` seconds.
    """
    with _client(address(engine)) as api:
        if api.images(tag):
            return
        with _building:
            if not api.images(tag):
                _build_image(api, os.fspath(folder), tag, timeout)


def _build_image(api: Any, folder: str, tag: str, timeout: float) -> None:
    from urllib3.exceptions import HTTPError

    lines: list[str] = []
    try:
        for part in api.build(
            path=folder, tag=tag, labels=_IMAGE_LABELS, rm=True, forcerm=True, decode=True, timeout=timeout
        ):
            lines += str(part.get("stream", part.get("error", ""))).strip().splitlines()
            if "error" in part:
                break
        else:
            return
    except HTTPError:
        lines.append(f"no output for {timeout:g} s")
    output = "\n".join(lines[-8:])
    raise SandboxError(
        f"the image of {folder!r} could not be built. If its commands download something, the engine needs network "
        f"access. Last output:\n{output}"
    )


def working_folder(engine: str | None, image: str) -> str:
    """Return the working directory that an image declares, by default "/"."""
    with _client(address(engine)) as api:
        return str(api.inspect_image(image)["Config"].get("WorkingDir") or "/")


_building = threading.Lock()

# --- one container -------------------------------------------------------------------------------


class ContainerProcess(SandboxProcess):
    """A running container and the stream to its first process, created by `launch`."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.id: str | None = None
        self.stream: Stream | None = None

    @property
    def alive(self) -> bool:
        """True until the container is destroyed or its connection ends."""
        return not self._destroyed and self.stream is not None and not self.stream.ended

    def last_error_line(self) -> str:
        """Return the last line that the container wrote to its stderr."""
        lines = b"" if self.stream is None else bytes(self.stream.stderr_tail)
        text = lines.decode(errors="replace").strip().splitlines()
        return text[-1][:500] if text else ""

    def destroy(self) -> None:
        """End the container and release all resources. Blocks for about 0.1 s."""
        self._end(self._remove)

    def _end(self, remove: Callable[[], None]) -> None:
        # ExitStack runs every step, even if SIGINT raises KeyboardInterrupt during an earlier one.
        with self._lock, contextlib.ExitStack() as last_first:
            if self._destroyed:
                return
            self._destroyed = True
            if os.getpid() == self.owner_pid:
                last_first.callback(remove)
            last_first.callback(self.disconnect)

    def _remove(self) -> None:
        try:
            if self.stream is not None:
                self.stream.thread.join(5.0)
        finally:
            if self.id is not None:
                # If the engine is unreachable or refuses, the container exits anyway, because its input has ended.
                with contextlib.suppress(SandboxError), _client(self.url) as api:
                    _remove_container(api, self.id)

    def stop(self) -> None:
        """Disconnect from the container's first process, which then exits, so that the engine removes the container."""
        if os.getpid() == self.owner_pid:
            self.disconnect()

    def kill(self) -> None:
        """Like `destroy`, but remove the container on a background thread."""
        self._end(self._remove_in_background)

    def _remove_in_background(self) -> None:
        # While Python is shutting down, no thread can be started; the container then exits at the end of its input.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._remove, name="agentfly-container-removal", daemon=True).start()


def _remove_container(api: Any, id: str) -> None:
    from docker.errors import APIError, NotFound

    for _ in range(200):
        try:
            api.remove_container(id, force=True, v=True)
        except NotFound:
            return
        except APIError:
            threading.Event().wait(0.02)  # the container is exiting or already being removed
        else:
            return


def launch(
    container: Container, limits: Limits, preload: Sequence[str], max_output: int, packages: bool
) -> SandboxProcess:
    """Create and start a container in about 0.1 s. The zygote later sends "ready" on the control socket."""
    url = address(container.engine)
    handle = ContainerProcess(url)
    try:
        version, arch = _version(url)
        with _client(url, version) as api:
            handle.id = api.create_container_from_config(_config(api, container, limits, packages))["Id"]
            # An engine that does not know the runtime may silently use its default, which isolates less.
            taken = api.inspect_container(handle.id)["HostConfig"].get("Runtime")
            if container.runtime is not None and taken != container.runtime:
                raise SandboxError(f"the engine at {url} ignores runtime={container.runtime!r} and uses {taken!r}")
            # Attach before starting the container, because output written before that would be lost.
            attached = api.attach_socket(handle.id, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
            connection = _raw_socket(attached, url)
            try:
                api.start(handle.id)
            except BaseException:
                connection.close()
                raise
        handle.control, inside = socket.socketpair()
        handle.control.setblocking(False)
        handle.usage = usage = ContainerUsage()
        handle.stream = Stream(connection, inside, usage)
        handle.stream.boot([commands.INSIDE / f"{name}.py" for name in _RELAY_FILES])
        program = seccomp.program(_PROCESSORS.get(arch, arch)) if container.runtime != "runsc" else None
        line = settings_line(
            limits,
            ["traceback", *preload],
            max_output,
            keep=[_path_and_mode(inner)[0] for inner in container.mounts.values()],
            restrict=(program or b"").hex(),
        )
        handle.control.sendall(line)
        handle.stream.thread.start()
    except BaseException as error:
        handle.destroy()
        if isinstance(error, OSError):
            raise SandboxError(f"a container could not be started: {error}") from error
        raise
    return handle


def _config(api: Any, container: Container, limits: Limits, packages: bool = True) -> Any:
    memory = None if limits.memory_mb is None else (limits.memory_mb + _OWN_MEMORY) * _MEBIBYTE
    size = "" if limits.disk_mb is None else f",size={limits.disk_mb}m"
    host = api.create_host_config(
        auto_remove=True,
        read_only=not container.writable,
        init=False,
        privileged=False,
        ipc_mode="private",
        network_mode=(container.network or None) if limits.network else "none",
        cap_drop=["ALL"],
        cap_add=_ROOT_CAPABILITIES if container.writable else None,
        security_opt=["no-new-privileges"],
        oom_score_adj=None,
        mem_limit=memory,
        memswap_limit=memory,
        pids_limit=None if limits.processes is None else limits.processes + 1,
        nano_cpus=None if container.cpus is None else int(container.cpus * 1e9),
        shm_size=commands.shm_bytes(limits),
        tmpfs={_HOME: f"rw,nosuid,nodev,mode=1777{size}", **({} if container.writable else _SMALL_FOLDERS)},
        binds=[":".join((outer, *_path_and_mode(inner))) for outer, inner in container.mounts.items()],
        runtime=container.runtime,
    )
    variables = commands.environment(_HOME)
    del variables["PATH"]  # keep the image's PATH
    return api.create_container_config(
        container.image,
        [container.python, "-s", *([] if packages else ["-S"]), "-c", _BOOT],
        entrypoint=[],
        host_config=host,
        user="0:0" if container.writable else _USER,
        working_dir=_HOME,
        environment=variables,
        stdin_open=True,
        detach=False,
        tty=False,
        labels={_LABEL: reaper.owner_tag()},
        hostname="sandbox",
        network_disabled=not limits.network,
    )


def _raw_socket(attached: Any, url: str) -> socket.socket:
    """Duplicate the socket of a stream, because Docker's library closes the original on garbage collection."""
    connection = getattr(attached, "_sock", attached)
    if type(connection) is not socket.socket:
        raise IsolationError(f"engine must be a unix:// or tcp:// address without TLS (use a tunnel), got {url}")
    copy = socket.socket(fileno=os.dup(connection.fileno()))
    copy.settimeout(None)
    response = getattr(attached, "_response", None)
    if response is not None:
        with contextlib.suppress(Exception):
            response.close()
    return copy
