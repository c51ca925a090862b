"""The zygote, the first process of a sandbox, which forks its interpreters and never runs untrusted code.

The zygote owns the control socket, forks a fresh interpreter on request, kills all its descendants, and empties the
writable folders. A reset therefore starts a new process instead of clearing a namespace. The program is started as
`zygote FD` with the descriptor of the control socket, or as `probe JSON` to apply Landlock restrictions to itself and
print 42.

The control socket carries JSON lines. The host sends the settings once, and then any of these commands: {"op": "fresh",
"serial", "wipe"} with three file descriptors (data, stdout, stderr); {"op": "interrupt"}; {"op": "kill"}; {"op":
"count", "serial"}; {"op": "listen", "serial"} with a Unix socket over which the host gets a listening socket; and
{"op": "sync", "serial"}, which is echoed after all earlier commands are done. The zygote sends {"op": "ready"}, {"op":
"fresh", "serial", "error"}, {"op": "exit", "serial", "status"}, {"op": "count", "serial", "processes"}, {"op":
"listen", "serial", "port", "error"} and the echoed sync. When the host closes the socket, the zygote kills all its
descendants and exits.
"""

from __future__ import annotations

import _socket
import gc
import json
import os
import resource
import select
import sys
import time

from .interpreter import Interpreter
from .kernel import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    become,
    changeable,
    enter_user_namespace,
    landlock,
    prctl,
    restrict,
    set_oom_score,
)
from .processes import descendants, is_dead, send, wipe

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing and the Python parts of socket cost memory in every sandbox
    import signal
    from typing import Any
else:
    import _signal as signal


class Zygote:
    """The process that forks and kills interpreters. Serial numbers identify interpreters in messages to the host."""

    def __init__(self, control: _socket.socket) -> None:
        self.control = control
        self.buffer = b""
        self.descriptors: list[int] = []
        self.settings: dict[str, Any] = {}
        self.worker = 0
        self.serial = 0
        self.orphan = False
        self.wake_pipe: tuple[int, ...] = ()
        # The Landlock rules and the system-call filter that each interpreter applies to itself.
        self.restrictions: tuple[dict[str, Any], bytes] | None = None

    def wake_on_signals(self) -> int:
        """Ignore signals that could end the zygote, and return a pipe that becomes readable when a child exits."""
        # Neither Ctrl-C on the host nor a signal sent from inside may end the zygote.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
            signal.signal(number, signal.SIG_IGN)
        wake, waker = self.wake_pipe = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        return wake

    def woken(self) -> None:
        """Empty the wake pipe and reap exited children."""
        try:
            os.read(self.wake_pipe[0], 4096)
        except BlockingIOError:
            pass
        self.reap()

    def serve(self) -> None:
        """Handle messages until the host closes the control socket or dies."""
        wake = self.wake_on_signals()
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while not self.orphan:
            for descriptor, _ in poll.poll():
                if descriptor == wake:
                    self.woken()
                elif not self.receive():
                    return

    def host_died(self, number: int, frame: object) -> None:
        self.orphan = True  # set a flag, because an exception could interrupt a kill or a wipe

    def receive(self) -> bool:
        """Read and handle messages. Return False if the host has closed the socket."""
        try:
            data, extra, _, _ = self.control.recvmsg(65536, _socket.CMSG_SPACE(16 * 4))
        except ConnectionError:
            return False
        self.descriptors += passed_descriptors(extra)
        if not data:
            return False
        self.buffer += data
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            self.handle(json.loads(line))
        return True

    def send_message(self, **message: object) -> None:
        try:
            self.control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the host has disconnected; the next read will see EOF

    def handle(self, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "settings":
            self.settings = message
            if message.get("own_user"):
                enter_user_namespace()  # RLIMIT_NPROC then counts only processes of this sandbox
            if message.get("user"):
                become(**message["user"], folders=message["wipe"])
            if message["pdeathsig"]:
                # When the host dies, the control socket is closed, unless a fork of the host keeps it open. The signal
                # is not SIGKILL, because the zygote must first kill its descendants.
                signal.signal(signal.SIGTERM, self.host_died)
                prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            confine(message)
            program = bytes.fromhex(message["filter"])
            if message["landlock"]:
                # Each interpreter restricts itself. The zygote stays unrestricted, and interpreters cannot access it.
                os.close(landlock(message["landlock"]))  # fails here, at startup, if the kernel rejects the rules
                self.restrictions = (message["landlock"], program)
            self.send_message(op="ready")
        elif op == "fresh":
            descriptors, self.descriptors = self.descriptors[:3], self.descriptors[3:]
            error = None
            try:
                self.kill_all()
                set_oom_score("0")  # undo a change made by code that runs as root on the host
                if message["wipe"]:
                    for folder in self.settings["wipe"]:
                        wipe(folder, self.settings["keep"])
                self.serial = message["serial"]
                self.fork(descriptors)
            except Exception as failure:  # reported to the host, which then discards this sandbox
                error = f"{type(failure).__name__}: {failure}"
            for descriptor in descriptors:
                os.close(descriptor)
            self.send_message(op="fresh", serial=message["serial"], error=error)
        elif op == "interrupt":
            if self.worker:
                os.kill(self.worker, signal.SIGINT)
        elif op == "sync":
            self.send_message(op="sync", serial=message["serial"])
        elif op == "count":
            self.send_message(op="count", serial=message["serial"], processes=self.count())
        elif op == "listen":
            port, error = 0, None
            try:
                port = self.listen()
            except OSError as failure:
                error = str(failure)
            self.send_message(op="listen", serial=message["serial"], port=port, error=error)
        elif op == "kill":
            self.kill_all(notify=True)

    def listen(self) -> int:
        """Open a port on the loopback interface, pass its listening socket to the host, and return its number."""
        channel = _socket.socket(fileno=self.descriptors.pop(0))
        listener = listening_socket()
        descriptor = listener.fileno().to_bytes(4, sys.byteorder)
        channel.sendmsg([b"1"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptor)])
        port = listener.getsockname()[1]
        listener.close()
        channel.close()
        return int(port)

    def fork(self, descriptors: list[int]) -> None:
        pid = os.fork()
        if pid:
            self.worker = pid
            return
        try:
            signal.set_wakeup_fd(-1)
            self.close_in_child()
            Interpreter(self.settings, self.restrictions, *descriptors).serve()
        finally:
            os._exit(70)

    def close_in_child(self) -> None:
        """Close the zygote's descriptors in a forked child, so that the interpreter does not inherit them."""
        self.control.close()
        for descriptor in self.wake_pipe:
            os.close(descriptor)

    def reap(self, options: int = os.WNOHANG) -> bool:
        """Reap exited children. Return True if none are left. With `options=0`, wait until all children have exited."""
        while True:
            try:
                pid, status = os.waitpid(-1, options)
            except ChildProcessError:
                return True
            if not pid:
                return False
            if pid == self.worker:
                self.worker = 0
                self.send_message(op="exit", serial=self.serial, status=os.waitstatus_to_exitcode(status))

    def count(self) -> int | None:
        """Return the number of living descendants; None if the kernel does not list the children of a process."""
        self.reap()
        found = descendants(os.getpid())
        return None if self.worker and self.worker not in found else sum(not is_dead(pid) for pid in found)

    def kill_all(self, notify: bool = False) -> None:
        """Kill and reap all descendants. If `notify` is True, report the interpreter's exit to the host."""
        if not notify:
            self.worker = 0
        if os.getpid() == 1:
            # In pid 1 of a pid namespace, kill(-1) signals all other processes atomically, so that a fork bomb cannot
            # escape between listing and killing.
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.reap(0)
            return
        deadline = time.monotonic() + 3.0
        while True:
            victims = descendants(os.getpid()) or ([self.worker] if self.worker else [])
            for number in (signal.SIGSTOP, signal.SIGKILL):
                send(number, *victims)
            if self.reap():
                return
            if time.monotonic() > deadline:
                raise TimeoutError("processes of the last chain are still alive after 3 s")
            time.sleep(0.0002)


def listening_socket() -> _socket.socket:
    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    return listener


def passed_descriptors(extra: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the file descriptors in the ancillary data of a message."""
    found: list[int] = []
    for _, kind, data in extra:
        if kind == _socket.SCM_RIGHTS:
            found += memoryview(data[: len(data) // 4 * 4]).cast("i").tolist()
    return found


def confine(settings: dict[str, Any]) -> None:
    """Set the limits that all processes of the sandbox inherit, and protect the zygote from sandboxed code."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    # If the zygote were dumpable, code inside, which has the same uid, could open /proc/<zygote>/mem, environ and fd.
    prctl(PR_SET_DUMPABLE, 0)
    for name, value in settings["rlimits"].items():
        number = getattr(resource, name, None)
        if number is None:
            continue
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(number, (value, value))
        except (ValueError, OSError):
            pass  # this system lacks the limit, and the host does not report it as enforced
    sys.path += settings["path"]
    for name in settings["preload"]:  # every interpreter inherits these modules
        __import__(name)
    gc.freeze()  # otherwise, garbage collection in a fork would write to pages and thus copy them


def probe(settings: dict[str, Any]) -> None:
    """Apply the restrictions of a level to this process, test them, and print 42 if that succeeds."""
    if settings.get("own_user"):
        enter_user_namespace()
    if settings.get("user"):
        become(**settings["user"], folders=settings["wipe"])
    if settings.get("landlock"):
        restrict(settings["landlock"], bytes.fromhex(settings["filter"]))
    for path in settings.get("visible", ()):
        if not os.access(path, os.R_OK):
            sys.exit(f"{path} can be read by root only")
    for path in settings.get("unchangeable", ()):
        if changeable(path):
            sys.exit(f"code inside could change {path} of this machine")
    os.write(1, b"42\n")
    os._exit(0)


def run(zygote: Zygote) -> None:
    """Serve requests until the host disconnects or dies, then kill all processes of the sandbox and exit."""
    try:
        zygote.serve()
    except Exception:
        import traceback

        traceback.print_exc()  # the host reports the last line of stderr
        sys.stderr.flush()
    finally:
        try:
            zygote.kill_all()
            if zygote.settings.get("scratch"):  # the host deletes the folder too, unless it was killed
                wipe(zygote.settings["scratch"], zygote.settings["keep"])
                os.rmdir(zygote.settings["scratch"])
        finally:
            os._exit(0)


def main() -> None:
    if sys.argv[1] == "probe":
        probe(json.loads(sys.argv[2]))
    run(Zygote(_socket.socket(fileno=int(sys.argv[2]))))
