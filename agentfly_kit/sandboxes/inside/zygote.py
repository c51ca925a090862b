"""The program inside a sandbox: a zygote that forks one interpreter per chain, and that interpreter.

isolation.run_worker runs this file, compiled, as `zygote FD`; it imports only the standard library. The zygote never
runs untrusted code. It owns the control socket, forks a fresh interpreter on request, kills all its descendants, and
empties the writable folders: a reset is a new process, not a cleared namespace. With `probe JSON` it applies the
restrictions of the landlock level to itself and prints 42.

Control socket, JSON lines. Host to zygote: the settings once; then {"op": "fresh", "serial", "wipe"} with three file
descriptors (data, stdout, stderr); {"op": "interrupt"}; {"op": "kill"}; {"op": "count", "serial"}; and {"op": "sync",
"serial"}, which is echoed after all earlier commands are done. Zygote to host: {"op": "ready"}, {"op": "fresh",
"serial", "error"}, {"op": "exit", "serial", "status"}, {"op": "count", "serial", "processes"} and the echoed sync. When
the socket ends, the zygote kills everything and exits.

Data socket, JSON lines, directly between host and interpreter: {"id", "code"} is answered by {"id", "value", "error",
"type", "truncated", "limit"}. Printed output goes through the two pipes, so that it survives a kill.
"""

from __future__ import annotations

import _ast
import _socket
import ctypes
import errno
import gc
import json
import linecache
import os
import resource
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing and the Python parts of ast, socket and traceback cost 1 MB per sandbox
    import signal
    from typing import Any, NoReturn, TextIO
else:
    import _signal as signal

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36


libc = ctypes.CDLL(None, use_errno=True)  # loaded before any fork, so that all interpreters share its pages


# --- system calls --------------------------------------------------------------------------------


def prctl(option: int, value: int) -> None:
    """Call prctl; does nothing on systems without it."""
    call = getattr(libc, "prctl", None)
    if call is not None:
        call(option, value, 0, 0, 0)


def kernel(name: str, *arguments: Any) -> int:
    """Call a C function that reports failure by -1 and errno. Integers are passed as 64 bits.

    Raises:  OSError, naming the function, if the call fails.
    """
    result: int = getattr(libc, name)(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def enter_user_namespace() -> None:
    """Enter a new user namespace in which this user keeps its uid and gid."""
    uid, gid = os.getuid(), os.getgid()
    kernel("unshare", 0x10000000)  # NEWUSER
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        write(f"/proc/self/{name}", text)


def drop_capabilities() -> None:
    """Drop all capabilities, for this process and all programs that it starts."""
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    prctl(47, 4)  # PR_CAP_AMBIENT, clear all
    for capability in range(64):
        prctl(24, capability)  # PR_CAPBSET_DROP; fails for capabilities that the kernel does not have
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    kernel("capset", header, (ctypes.c_uint32 * 6)())


def filter_calls(program: bytes) -> None:
    """Install a system-call filter for this process and its descendants. Needs `drop_capabilities` first."""
    text = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions, and where they are
    head = (ctypes.c_uint64 * 2)(len(program) // 8, ctypes.addressof(text))
    kernel("prctl", 22, 2, head, 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def landlock(rules: dict[str, Any]) -> int:
    """Create a Landlock ruleset that denies all but the given paths, and return its file descriptor.

    Paths that do not exist are skipped.
    """
    abi = rules["abi"]
    every = 0x1FFF | (0x2000 if abi >= 2 else 0) | (0x4000 if abi >= 3 else 0) | (0x8000 if abi >= 5 else 0)
    words = [every, *([0 if rules["network"] else 3] if abi >= 4 else []), *([3] if abi >= 6 else [])]
    attribute = (ctypes.c_uint64 * len(words))(*words)
    ruleset = kernel("syscall", 444, attribute, ctypes.sizeof(attribute), 0)
    on_files = 0xC007  # execute, write, read, truncate, ioctl
    for path, rights in rules["paths"]:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        allowed = (every if rights == "all" else 0xD if rights == "read" else 0x400E) & every
        if not os.path.isdir(path):
            allowed &= on_files
        rule = allowed.to_bytes(8, sys.byteorder) + descriptor.to_bytes(4, sys.byteorder)
        try:
            kernel("syscall", 445, ruleset, 1, ctypes.create_string_buffer(rule, 12), 0)
        finally:
            os.close(descriptor)
    return ruleset


def own_limits() -> list[str]:
    """Return the files with the limits of this process's control group. DuckDB aborts if it cannot read them."""
    found = ["/proc/self/cgroup"]
    with open(found[0]) as file:
        memberships = [line.rstrip("\n").split(":", 2) for line in file]
    for _, controllers, path in memberships:
        for controller in controllers.split(","):
            if controller in ("", "cpu", "memory"):  # "" is cgroup v2, with all controllers in one folder
                names = _LIMIT_FILES[controller]
                root = f"/sys/fs/cgroup/{controller}".rstrip("/")
                found += [
                    f"{folder}/{name}" for folder in dict.fromkeys((root, root + path.rstrip("/"))) for name in names
                ]
    return found


_LIMIT_FILES = {
    "": ("cpu.max", "memory.max", "memory.high"),
    "cpu": ("cpu.cfs_quota_us", "cpu.cfs_period_us"),
    "memory": ("memory.limit_in_bytes",),
}


# --- the zygote ----------------------------------------------------------------------------------


class Zygote:
    """The process that forks and kills interpreters. `serial` numbers them, so that the host knows which one ended."""

    def __init__(self, control: _socket.socket) -> None:
        self.control = control
        self.buffer = b""
        self.descriptors: list[int] = []
        self.settings: dict[str, Any] = {}
        self.worker = 0
        self.serial = 0
        self.orphan = False
        # The Landlock rules and the system-call filter that each interpreter applies to itself.
        self.restrictions: tuple[dict[str, Any], bytes] | None = None

    def serve(self) -> None:
        # Neither Ctrl-C on the host nor a signal sent from inside may end the zygote.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
            signal.signal(number, signal.SIG_IGN)
        wake, waker = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while not self.orphan:
            for descriptor, _ in poll.poll():
                if descriptor == wake:
                    try:
                        os.read(wake, 4096)
                    except BlockingIOError:
                        pass
                    self.reap()
                elif not self.receive():
                    return

    def host_died(self, number: int, frame: object) -> None:
        self.orphan = True  # not an exception, which could interrupt a kill or a wipe

    def receive(self) -> bool:
        """Read and handle messages. Return False at the end of the socket."""
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
            pass  # the host is gone; the next read will notice

    def handle(self, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "settings":
            self.settings = message
            if message.get("own_user"):
                enter_user_namespace()  # RLIMIT_NPROC then counts only this sandbox
            if message["pdeathsig"]:
                # Usually the socket ends when the host dies, but a fork of the host may keep it open. The signal is not
                # SIGKILL, because the zygote must live long enough to kill its descendants.
                signal.signal(signal.SIGTERM, self.host_died)
                prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            confine(message)
            program = bytes.fromhex(message["filter"])
            if message["landlock"]:
                # Each interpreter restricts itself; the zygote stays unrestricted and out of its reach.
                os.close(landlock(message["landlock"]))  # fails here, at startup, if the kernel rejects the rules
                self.restrictions = (message["landlock"], program)
            self.send_message(op="ready")
        elif op == "fresh":
            descriptors, self.descriptors = self.descriptors[:3], self.descriptors[3:]
            error = None
            try:
                self.kill_all()
                set_oom_score("0")  # code that runs as the host's root can have changed it
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
        elif op == "kill":
            self.kill_all(notify=True)

    def fork(self, descriptors: list[int]) -> None:
        pid = os.fork()
        if pid:
            self.worker = pid
            return
        try:
            self.control.close()
            signal.set_wakeup_fd(-1)
            Interpreter(self.settings, self.restrictions, *descriptors).serve()
        finally:
            os._exit(70)

    def child_exited(self, pid: int, status: int) -> None:
        if pid == self.worker:
            self.worker = 0
            self.send_message(op="exit", serial=self.serial, status=os.waitstatus_to_exitcode(status))

    def reap(self, options: int = os.WNOHANG) -> bool:
        """Reap exited children. Return True if none remain, alive or dead. With options 0, wait until then."""
        while True:
            try:
                pid, status = os.waitpid(-1, options)
            except ChildProcessError:
                return True
            if not pid:
                return False
            self.child_exited(pid, status)

    def count(self) -> int | None:
        """Return the number of living descendants; None if the kernel does not list the children of a process."""
        self.reap()
        found = descendants(os.getpid())
        if self.worker and self.worker not in found:
            return None
        return sum(not is_dead(pid) for pid in found)

    def kill_all(self, notify: bool = False) -> None:
        """Kill and reap all descendants. `notify`: report the interpreter's exit to the host."""
        if not notify:
            self.worker = 0
        if os.getpid() == 1:
            # As pid 1 of a pid namespace, -1 means all other processes, and the kernel signals them atomically, so that
            # a fork bomb cannot escape between listing and killing.
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
                for pid in victims:
                    try:
                        os.kill(pid, number)
                    except OSError:
                        pass
            if self.reap():
                return
            if time.monotonic() > deadline:
                raise TimeoutError("processes of the last chain are still alive after 3 s")
            time.sleep(0.0002)


def is_dead(pid: int) -> bool:
    """Return True if a process has ended: it does not exist, or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def passed_descriptors(extra: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the file descriptors in the ancillary data of a message."""
    found: list[int] = []
    for _, kind, data in extra:
        if kind == _socket.SCM_RIGHTS:
            found += memoryview(data[: len(data) // 4 * 4]).cast("i").tolist()
    return found


def descendants(root: int) -> list[int]:
    """Return all descendants of `root`; empty if the kernel does not list the children of a process."""
    found: list[int] = []
    unseen = [root]
    while unseen:
        pid = unseen.pop()
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as lines:
                    children = [int(child) for child in lines.read().split()]
                found += children
                unseen += children
        except OSError:
            continue  # it has ended in the meantime
    return found


def wipe(folder: str, keep: list[str]) -> None:
    """Delete the content of a folder, whatever its permissions and depth, except the read-only mounts in `keep`.

    Nested folders are moved to the top before they are emptied, so that neither paths nor recursion grow with the
    depth.
    """
    if os.stat(folder).st_uid == os.getuid():  # mounts of a container belong to root and are writable for all
        os.chmod(folder, 0o700)
    mark, number = os.urandom(8).hex(), 0
    while True:
        folders = []
        for entry in list(os.scandir(folder)):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
            elif entry.path in keep:
                continue
            elif any(kept.startswith(entry.path + "/") for kept in keep):
                wipe(entry.path, keep)
            else:
                folders.append(entry.path)
        if not folders:
            return
        for path in folders:
            os.chmod(path, 0o700)
            for entry in list(os.scandir(path)):
                if entry.is_dir(follow_symlinks=False):
                    number += 1
                    os.chmod(entry.path, 0o700)
                    os.rename(entry.path, f"{folder}/{mark}-{number}")
                else:
                    os.unlink(entry.path)
            os.rmdir(path)


def confine(settings: dict[str, Any]) -> None:
    """Set the limits that all processes of the sandbox inherit, and protect the zygote from the code inside."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Not dumpable: otherwise code inside, which has the same uid, could open /proc/<zygote>/mem, environ and fd.
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
            pass  # not supported on this system; the host does not report it as enforced
    sys.path += settings["path"]
    for name in settings["preload"]:  # inherited by every interpreter
        __import__(name)
    gc.freeze()  # otherwise a collection in a fork would copy pages by writing to them


def set_oom_score(score: str) -> None:
    """Set how likely the kernel is to kill this process when memory runs out."""
    try:
        write("/proc/self/oom_score_adj", score)
    except OSError:
        pass  # not Linux


def write(path: str, text: str) -> None:
    """Write to an existing file without a Python stream, which would dirty more pages."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


# --- the interpreter -----------------------------------------------------------------------------


class CpuLimit(BaseException):
    """The call exceeded its CPU time."""


class Interpreter:
    """An interpreter with one `__main__` namespace: runs the cells it receives and returns values and errors."""

    def __init__(
        self, settings: dict[str, Any], restrictions: tuple[dict[str, Any], bytes] | None, data: int, out: int, err: int
    ) -> None:
        self.settings = settings
        self.limit = int(settings["max_output"])
        self.running = False
        self.pid = os.getpid()
        os.setsid()
        if settings["pdeathsig"]:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_DUMPABLE, 1)
        set_oom_score("500")  # when memory runs out the kernel should take this process, not the zygote
        if restrictions is not None:
            rules, program = restrictions
            ruleset = landlock({**rules, "paths": [*rules["paths"], *((path, "read") for path in own_limits())]})
            # A rule for /proc lasts only while the kernel caches the entry; an open descriptor keeps it cached.
            os.open("/proc/self/cgroup", os.O_PATH | os.O_CLOEXEC)
            drop_capabilities()
            kernel("syscall", 446, ruleset, 0)  # landlock_restrict_self
            os.close(ruleset)
            filter_calls(program)
            prctl(PR_SET_DUMPABLE, 1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        self.socket = _socket.socket(fileno=os.dup(data))
        for descriptor in (null, data, out, err):
            os.close(descriptor)
        self.lines = open(self.socket.fileno(), "rb", closefd=False)  # noqa: SIM115
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        self.main = type(sys)("__main__")
        self.main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = self.main
        sys.argv = [""]
        sys.executable = settings["executable"]
        sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]
        sys.path.insert(0, "")
        self.streams: dict[str, TextIO] = {}
        self.cells = 0

    def serve(self) -> NoReturn:
        while True:
            line = self.lines.readline()
            if os.getpid() != self.pid or not line:
                os._exit(0)
            request = json.loads(line)
            reply = self.run(request["code"])
            if os.getpid() != self.pid:
                os._exit(0)  # the code forked and this is the child, which must not answer
            reply["id"] = request["id"]
            self.socket.sendall(json.dumps(reply).encode() + b"\n")

    def run(self, code: str) -> dict[str, Any]:
        reply: dict[str, Any] = {"value": None, "error": None, "type": None, "truncated": False, "limit": None}
        try:
            try:
                self.prepare()
                self.running = True
                value = self.execute(code)
                if value is not None:
                    text = repr(value)
                    reply["value"] = text[: self.limit]
                    reply["truncated"] = len(text) > self.limit
                self.running = False
            except BaseException as error:
                self.running = False
                self.describe_error(reply, error)
        except BaseException as error:  # an interrupt between the lines above, or no memory to format the error
            self.running = False
            reply["type"] = type(error).__name__
            reply["error"] = reply["type"]
        for stream in {sys.stdout, sys.stderr, *self.streams.values()}:
            try:
                stream.flush()
            except BaseException:
                pass  # the code closed or replaced it
        return reply

    def prepare(self) -> None:
        signal.signal(signal.SIGINT, self.interrupt)
        signal.signal(signal.SIGXCPU, self.on_cpu_limit)
        seconds = self.settings["cpu_seconds"]
        if seconds is not None:
            hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 1, hard))
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            stream = self.streams.get(name)
            if stream is None or stream.closed:  # a cell may have closed the stream; the descriptor stays open
                stream = open(  # noqa: SIM115
                    descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=8192
                )
                self.streams[name] = stream
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)

    def execute(self, code: str) -> object:
        """Run a cell and return the value of its last statement if that is an expression, else None."""
        self.cells += 1
        name = f"<cell {self.cells}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree: _ast.Module = compile(code, name, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)  # type: ignore[assignment]
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
        space = self.main.__dict__
        if tree.body:
            exec(compile(tree, name, "exec", dont_inherit=True), space)
        if not isinstance(last, _ast.Expr):
            return None
        value: object = eval(compile(_ast.Expression(last.value), name, "eval", dont_inherit=True), space)
        if value is not None:
            space["_"] = value
        return value

    def interrupt(self, number: int, frame: object) -> None:
        if self.running:  # only once: building the reply must not be interrupted
            self.running = False
            raise KeyboardInterrupt("stopped from outside")

    def on_cpu_limit(self, number: int, frame: object) -> None:
        if self.running:
            raise CpuLimit(f"{self.settings['cpu_seconds']} s of processor time used")

    def describe_error(self, reply: dict[str, Any], error: BaseException) -> None:
        step = error.__traceback__
        while step is not None and not step.tb_frame.f_code.co_filename.startswith("<cell "):
            step = step.tb_next  # hide the frames of this file
        last = step
        while last is not None and last.tb_next is not None:
            if last.tb_next.tb_frame.f_code.co_filename == __file__:
                last.tb_next = None  # hide the signal handler that raised the error
            else:
                last = last.tb_next
        import traceback  # imported late: costs 0.5 MB, which most interpreters never need

        name = type(error).__name__
        text = "".join(traceback.format_exception(type(error), error.with_traceback(step), step)).rstrip("\n")
        text = text.replace("__main__.CpuLimit", "CpuLimit")
        reply["type"] = name
        reply["error"] = text[-self.limit :]
        reply["truncated"] = reply["truncated"] or len(text) > self.limit
        number = getattr(error, "errno", None)
        if isinstance(error, MemoryError):
            reply["limit"] = "memory"
        elif isinstance(error, CpuLimit):
            reply["limit"] = "cpu"
        elif isinstance(error, OSError) and number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            reply["limit"] = "disk"
        elif isinstance(error, BlockingIOError) and number == errno.EAGAIN and "temporarily unavailable" in text:
            reply["limit"] = "processes"
        elif isinstance(error, RuntimeError) and "can't start new thread" in str(error):
            reply["limit"] = "processes" if has_room_for_a_stack() else "memory"


def has_room_for_a_stack() -> bool:
    """Return True if a thread's stack can still be mapped. If not, lack of memory kept a thread from starting."""
    import threading

    size = threading.stack_size() or resource.getrlimit(resource.RLIMIT_STACK)[0]
    try:
        import mmap

        # Private, like a stack, because RLIMIT_DATA does not count shared memory.
        mmap.mmap(-1, size if 0 < size < 2**30 else 8 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, ImportError, MemoryError):
        return False
    return True


# --- the program ---------------------------------------------------------------------------------


def probe(settings: dict[str, Any]) -> None:
    """Apply the restrictions of the landlock level to this process, and print 42 if that succeeds."""
    if settings.get("own_user"):
        enter_user_namespace()
    rules = landlock(settings["landlock"])
    drop_capabilities()
    kernel("syscall", 446, rules, 0)
    filter_calls(bytes.fromhex(settings["filter"]))
    os.write(1, b"42\n")
    os._exit(0)


def run_zygote(zygote: Zygote) -> None:
    try:
        zygote.serve()
    except Exception:
        import traceback

        traceback.print_exc()  # for the host, which waits for an answer
        sys.stderr.flush()
    finally:
        try:
            zygote.kill_all()
            if zygote.settings.get("scratch"):  # the host does so too, unless it was killed
                wipe(zygote.settings["scratch"], zygote.settings["keep"])
                os.rmdir(zygote.settings["scratch"])
        finally:
            os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "probe":
        probe(json.loads(sys.argv[2]))
    else:
        run_zygote(Zygote(_socket.socket(fileno=int(sys.argv[2]))))
