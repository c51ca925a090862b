"""The interpreter of a sandbox, forked from the zygote: it confines itself, runs the cells it receives and replies.

Host and interpreter exchange JSON lines directly over the data socket: {"id", "code"} is answered by {"id", "value",
"error", "type", "truncated", "limit"}. Printed output goes through two pipes, so that it survives a kill.
"""

from __future__ import annotations

import _ast
import _socket
import errno
import json
import linecache
import os
import resource
import sys
import time

from .kernel import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, own_limits, prctl, restrict, set_oom_score

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing and the Python parts of ast, socket and traceback cost 1 MB per sandbox
    import signal
    from typing import Any, NoReturn, TextIO
else:
    import _signal as signal


class CpuLimit(BaseException):
    """Raised when a call exceeds its CPU time limit."""


class Interpreter:
    """An interpreter with one `__main__` namespace, which runs the cells it receives and returns values and errors."""

    def __init__(
        self,
        settings: dict[str, Any],
        restrictions: tuple[dict[str, Any], bytes] | None,
        data: int,
        out: int,
        err: int,
    ) -> None:
        self.settings = settings
        self.limit = int(settings["max_output"])
        self.running = False
        self.pid = os.getpid()
        os.setsid()
        if settings["user"]:
            os.setresuid(*[settings["user"]["uid"]] * 3)
        if settings["pdeathsig"]:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_DUMPABLE, 1)
        # When memory runs out, the kernel should kill this process, not the zygote.
        set_oom_score("500")
        if restrictions is not None:
            rules, program = restrictions
            # The Landlock rule for a /proc file is lost when the kernel's cache drops the file, so keep the file open.
            os.open("/proc/self/cgroup", os.O_PATH | os.O_CLOEXEC)
            restrict({**rules, "paths": [*rules["paths"], *((path, "read") for path in own_limits())]}, program)
            prctl(PR_SET_DUMPABLE, 1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        self.socket = _socket.socket(fileno=os.dup(data))
        # Code may close or replace its standard streams, so they are restored from these copies before each call.
        self.output = tuple((os.dup(given), number) for given, number in ((out, 1), (err, 2)))
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
                os._exit(0)  # this is a child forked by the code, and must not answer
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
        except BaseException as error:  # interrupted between the lines above, or out of memory
            self.running = False
            reply["type"] = type(error).__name__
            reply["error"] = reply["type"]
        disarm_timers()
        for stream in {sys.stdout, sys.stderr, *self.streams.values()}:
            try:
                stream.flush()
            except BaseException:
                pass  # the code has closed or replaced the stream
        return reply

    def prepare(self) -> None:
        signal.signal(signal.SIGINT, self.interrupt)
        signal.signal(signal.SIGXCPU, self.on_cpu_limit)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGXCPU))
        seconds = self.settings["cpu_seconds"]
        if seconds is not None:
            hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 1, hard))
        for kept, descriptor in self.output:
            restore(kept, descriptor)
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
        if self.running:  # raise only once, because building the reply must not be interrupted
            self.running = False
            raise KeyboardInterrupt("interrupted by the sandbox")

    def on_cpu_limit(self, number: int, frame: object) -> None:
        if self.running:
            raise CpuLimit(f"the call used more than {self.settings['cpu_seconds']} s of CPU time")

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
        import traceback  # imported here, because it costs 0.5 MB and most interpreters never need it

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


def restore(kept: int, descriptor: int) -> None:
    """Make `descriptor` refer to the file of `kept` again. End the interpreter if the code has closed `kept` too."""
    try:
        if not os.path.sameopenfile(kept, descriptor):
            os.dup2(kept, descriptor)
    except OSError:
        try:
            os.dup2(kept, descriptor)
        except OSError:
            os._exit(74)


def disarm_timers() -> None:
    """Stop the interval timers and the alarm of a call, so that their signals do not end a later call."""
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        while True:
            try:
                signal.setitimer(timer, 0)
                break
            except BaseException:  # raised by a signal handler of the code
                pass


def has_room_for_a_stack() -> bool:
    """Return True if there is enough memory for the stack of a new thread; otherwise no thread can be started."""
    import threading

    size = threading.stack_size() or resource.getrlimit(resource.RLIMIT_STACK)[0]
    try:
        import mmap

        # Try to map as much private memory as a stack needs; RLIMIT_DATA does not count shared memory.
        mmap.mmap(-1, size if 0 < size < 2**30 else 8 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, ImportError, MemoryError):
        return False
    return True
