"""Commands that start a sandbox at each isolation level, and the host files that are visible inside the sandbox."""

from __future__ import annotations

import ctypes
import functools
import marshal
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from ...errors import IsolationError
from .limits import Limits

INSIDE = Path(__file__).parent.parent / "inside"
ZYGOTE_FILES = ("kernel", "processes", "interpreter", "zygote")  # each file comes after the files it imports
STRICT_HOME = "/tmp"
STRICT_SHM_MB = 16
STRICT_UID = 65534  # user and group
USERS = f"sandbox:x:{STRICT_UID}:{STRICT_UID}::{STRICT_HOME}:/bin/bash\n".encode()  # content of /etc/passwd
_PACKAGE_PATHS = ("purelib", "platlib")
_SYSTEM_FILES = ["/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"]
_NETWORK_FILES = ["/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates"]

# This program creates a package from `files`, a list of (module name, code) pairs, and calls `main` of the last module.
# At the end, the package is removed from sys.modules. The empty entry of sys.path is removed so that nothing is
# imported from the working directory.
BOOT = """
sys.path[:] = filter(None, sys.path)
sys.modules["sandbox"] = type(sys)("sandbox")
sys.modules["sandbox"].__path__ = []
for name, code in files:
    module = sys.modules["sandbox." + name] = type(sys)("sandbox." + name)
    module.__package__, module.__file__ = "sandbox", "/sandbox/" + name + ".py"
    exec(code, module.__dict__)
for name in [name for name in sys.modules if name.partition(".")[0] == "sandbox"]:
    del sys.modules[name]
module.main()
"""
# The zygote, a process that forks a sandbox's interpreters, gets its code as bytecode in an anonymous file, because
# compiling the source takes longer than starting Python and costs memory.
_LOCAL_BOOT = f"""# zygote.py
import sys, marshal
with open(int(sys.argv.pop(1)), "rb") as program: files = marshal.loads(program.read())
{BOOT}"""


def run_zygote(program_fd: int, *arguments: str) -> list[str]:
    """Return the command that runs the zygote. `program_fd` is the descriptor of a file made by `program_file`."""
    return [host_python(), "-s", "-S", "-c", _LOCAL_BOOT, str(program_fd), *arguments]


def program_file() -> BinaryIO:
    """Return an anonymous file with the compiled program of the zygote, the process that forks interpreters."""
    return anonymous_file(_program())


@functools.cache
def _program() -> bytes:
    return marshal.dumps(
        [
            (name, compile((INSIDE / f"{name}.py").read_bytes(), f"/sandbox/{name}.py", "exec", dont_inherit=True))
            for name in ZYGOTE_FILES
        ]
    )


def anonymous_file(content: bytes) -> BinaryIO:
    """Return a file without a name, positioned at its start."""
    file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(content)
    file.seek(0)
    return file


# --- Python and its packages ---------------------------------------------------------------------


def host_python() -> str:
    """Return the path of the Python binary with symlinks resolved. Python finds its standard library by this path."""
    return os.path.realpath(sys.executable)


def inside_python(packages: bool = True) -> str:
    """Return the value of `sys.executable` in the sandbox. With packages, the path may be in a virtual environment."""
    if not packages or not sys.executable:
        return host_python()
    folder, name = os.path.split(sys.executable)
    return os.path.join(os.path.realpath(folder), name)


def python_folders(with_packages: bool = True) -> list[str]:
    """Return the folders of the running Python and its packages, except those in /usr, which is always visible."""
    places = [sys.base_prefix, os.path.dirname(host_python())]
    if with_packages:
        places += [sys.prefix, *packages()]
    kept = ["/usr"]
    for folder in sorted({os.path.realpath(place) for place in places} - {"/"}):
        if not any(_is_within(folder, other) for other in kept):
            kept.append(folder)
    return kept[1:]


def packages() -> list[str]:
    """Return the folders of installed packages, for the sandbox's `sys.path`."""
    return list(dict.fromkeys(os.path.realpath(sysconfig.get_path(name)) for name in _PACKAGE_PATHS))


def _visible_packages() -> list[str]:
    """Return the package folders to hide if packages=False: those in /usr or in Python's base folder."""
    bases = (os.path.realpath(sys.base_prefix), "/usr")
    names = [
        sysconfig.get_path(name, vars={"base": base, "platbase": base}) for base in bases for name in _PACKAGE_PATHS
    ]
    names += [*packages(), "/usr/lib/python3/dist-packages", "/usr/local/lib/python3/dist-packages"]
    folders = dict.fromkeys(map(os.path.realpath, names))
    return [path for path in folders if os.path.isdir(path) and any(_is_within(path, base) for base in bases)]


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def environment(home: str, path: str = "/usr/local/bin:/usr/bin:/bin") -> dict[str, str]:
    """Return the complete environment for code in the sandbox. No variable is inherited from the host."""
    return {
        "PATH": path,
        "HOME": home,
        "TMPDIR": home,
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # gives a set of strings the same order in every chain
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1",
        # Use one thread per sandbox: the pool provides parallelism, and memory reserved by threads counts as used.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def inside_path(path: str) -> str:
    """Convert a path of the host's Python to its path inside a strict sandbox.

    A virtual environment below /tmp is mounted elsewhere, because the sandbox has its own /tmp. The folder of the
    interpreter keeps its path, because Python uses this path to find its standard library.
    """
    python = (os.path.realpath(sys.base_prefix), host_python())
    fixed = any(_is_within(place, path) or _is_within(path, place) for place in python)
    return path if fixed or not _is_within(path, STRICT_HOME) else f"/sandbox/host{path}"


# --- levels --------------------------------------------------------------------------------------


@functools.cache
def landlock_version() -> int:
    """Return the kernel's Landlock ABI version, or 0 if Landlock is not available.

    Version 3 added rules for truncation, version 4 for TCP, version 6 for signals.
    """
    if sys.platform != "linux":
        return 0
    return max(0, int(ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def landlock_rules(home: str, limits: Limits, packages: bool = True) -> dict[str, object]:
    """Return the paths that code may access with isolation="landlock" and its rights. Other paths are denied."""
    read = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", *_SYSTEM_FILES, *python_folders(packages)]
    read += ["/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/uptime", "/proc/loadavg", "/proc/version"]
    read += ["/proc/sys/kernel/pid_max", "/sys/devices/system/cpu"]
    if limits.network:
        read += _NETWORK_FILES
    devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    paths = [(path, "read") for path in read] + [(path, "device") for path in devices] + [(home, "all")]
    return {"abi": min(7, landlock_version()), "network": limits.network, "paths": paths}


# This program enters a new user namespace, waits until its uids are mapped, and forbids nested user namespaces.
_UNSHARE = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000): sys.exit(f"unshare: errno {ctypes.get_errno()}")
print(flush=True)
input()
with open("/proc/sys/user/max_user_namespaces", "w") as file: file.write("0")
print(flush=True)
input()
"""


@functools.cache
def unprivileged_namespace() -> int | None:
    """Return a descriptor of a user namespace for strict sandboxes if this process is root; otherwise None.

    A namespace that bwrap creates contains only the user who starts bwrap. If this user is root, code inside could
    change the files of /proc/sys and the devices of /dev, which root owns. In the namespace returned here, `STRICT_UID`
    is the unprivileged user of the host with the same number. The result is also None if root may not map this user, as
    in some containers.
    """
    if os.geteuid() != 0:
        return None
    with subprocess.Popen(
        [host_python(), "-I", "-S", "-c", _UNSHARE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        try:
            if not holder.stdout.readline():
                return None
            for name in ("uid_map", "gid_map"):
                # The kernel accepts a mapping only in a single write.
                with open(f"/proc/{holder.pid}/{name}", "wb", buffering=0) as file:
                    file.write(f"0 0 1\n{STRICT_UID} {STRICT_UID} 1\n".encode())
            holder.stdin.write(b"\n")
            holder.stdin.flush()
            if not holder.stdout.readline():
                return None
            return os.open(f"/proc/{holder.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        finally:
            holder.kill()


def strict_command(
    limits: Limits,
    seccomp_fd: int,
    program: str = "bwrap",
    packages: bool = True,
    links: Mapping[str, str] | None = None,
    users_fd: int | None = None,
) -> tuple[list[str], dict[str, str], list[int]]:
    """Return the bwrap command line without the program to run, bwrap's environment, and the descriptors to pass to it.

    The environment is minimal, because code in the sandbox can read it. Later mounts of the command hide earlier ones.
    If there is an `unprivileged_namespace`, the program starts as its uid 0, with the capabilities that it needs to
    become `STRICT_UID`. `links` maps paths of symbolic links to their targets. `users_fd` is the
    descriptor of a file with the content of /etc/passwd.
    """
    command, passed = [shutil.which(program) or program], [seccomp_fd]
    namespace = unprivileged_namespace()
    if namespace is None:
        command += ["--unshare-all", "--unshare-user", "--uid", str(STRICT_UID), "--gid", str(STRICT_UID)]
        command += ["--disable-userns", "--cap-drop", "ALL"]
    else:
        passed.append(namespace)
        command += ["--userns", str(namespace), "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
        command += ["--unshare-cgroup-try", "--cap-drop", "ALL"]
        for capability in ("CAP_CHOWN", "CAP_SETUID", "CAP_SETGID"):
            command += ["--cap-add", capability]
    if limits.network:
        command += ["--share-net"]
    command += ["--clearenv"]
    for name, value in environment(STRICT_HOME).items():
        command += ["--setenv", name, value]
    command += ["--new-session", "--die-with-parent", "--as-pid-1", "--hostname", "sandbox"]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.islink(f"/{name}"):
            command += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            command += ["--ro-bind", f"/{name}", f"/{name}"]
    command += ["--perms", "0755", "--dir", "/etc"]  # bwrap makes missing folders accessible to uid 0 only
    for name in _SYSTEM_FILES:
        command += ["--ro-bind-try", name, name]
    if users_fd is not None:
        passed.append(users_fd)
        command += ["--perms", "0444", "--ro-bind-data", str(users_fd), "/etc/passwd"]
    if limits.network:
        for name in _NETWORK_FILES:
            command += ["--ro-bind-try", os.path.realpath(name), name]
    command += ["--proc", "/proc", "--dev", "/dev", "--size", str(shm_bytes(limits)), "--tmpfs", "/dev/shm"]
    command += ["--remount-ro", "/dev"]
    if limits.disk_mb is not None:
        command += ["--size", str(limits.disk_mb * 2**20)]
    command += ["--tmpfs", STRICT_HOME]
    for folder in python_folders(packages):
        for parent in reversed(Path(inside_path(folder)).parents[:-1]):
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind", folder, inside_path(folder)]
    if not packages:
        for folder in _visible_packages():
            command += ["--size", "4096", "--perms", "0555", "--tmpfs", folder, "--remount-ro", folder]
    for path, target in (links or {}).items():
        if any(_is_within(inside_path(folder), path) for folder in python_folders(packages)):
            raise IsolationError(
                f"{path} must not contain this Python, because tasks use it; install Python elsewhere"
            )
        command += ["--symlink", target, path]
    command += ["--chdir", STRICT_HOME, "--remount-ro", "/", "--seccomp", str(seccomp_fd), "--"]
    return command, {"PATH": "/usr/bin:/bin"}, passed


def strict_settings() -> dict[str, object]:
    """Return settings for the zygote of a strict sandbox: the folders to empty, and the user to become, if any."""
    namespace = unprivileged_namespace()
    user = None if namespace is None else {"uid": STRICT_UID, "namespace": namespace}
    return {"wipe": [STRICT_HOME, "/dev/shm"], "user": user}


def shm_bytes(limits: Limits) -> int:
    """Return the size of /dev/shm in bytes: the smaller of a fixed maximum and the disk limit."""
    return (STRICT_SHM_MB if limits.disk_mb is None else min(STRICT_SHM_MB, limits.disk_mb)) * 2**20
