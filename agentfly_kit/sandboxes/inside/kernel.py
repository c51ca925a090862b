"""System calls, through ctypes, that confine a sandbox: capabilities, Landlock, seccomp filters, namespaces."""

from __future__ import annotations

import ctypes
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs memory in every sandbox
    from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
# libc is loaded before any fork, so that all interpreters share its memory pages.
libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Call prctl, or do nothing on systems that lack it."""
    call = getattr(libc, "prctl", None)
    if call is not None:
        call(option, value, 0, 0, 0)


def kernel(name: str, *arguments: Any) -> int:
    """Call a function of the C library. Integers are passed as 64 bits. Raises OSError if the result is -1."""
    result: int = getattr(libc, name)(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def enter_user_namespace() -> None:
    """Enter a new user namespace in which this user keeps its uid and gid."""
    uid, gid = os.getuid(), os.getgid()
    kernel("unshare", 0x10000000)  # CLONE_NEWUSER
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        write(f"/proc/self/{name}", text)


def become(uid: int, namespace: int, folders: list[str]) -> None:
    """Change from uid 0 to an unprivileged user and group without capabilities, and make them the owner of `folders`.

    The saved uid stays 0, so that bwrap, which runs as uid 0, can send this process a signal when bwrap exits.
    Interpreters change their saved uid too. `namespace` is the descriptor of the user namespace, which bwrap leaves
    open.
    """
    os.close(namespace)
    for folder in folders:
        os.chown(folder, uid, uid)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, 0)
    drop_capabilities()
    prctl(PR_SET_PDEATHSIG, 9)  # bwrap has set this signal, but the change of user cleared it


def changeable(path: str) -> bool:
    """Return True if this process may change the mode of a file, or open it for writing. The file is not changed."""
    try:
        os.chmod(path, os.stat(path).st_mode & 0o7777)
        return True
    except OSError:
        pass
    try:
        if os.path.isfile(path):
            os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
            return True
    except OSError:
        pass
    return False


def drop_capabilities() -> None:
    """Drop all capabilities, for this process and all programs that it starts."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(47, 4)  # PR_CAP_AMBIENT: clear all ambient capabilities
    for capability in range(64):
        # PR_CAPBSET_DROP; fails for capabilities that the kernel does not have
        prctl(24, capability)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    kernel("capset", header, (ctypes.c_uint32 * 6)())


def filter_calls(program: bytes) -> None:
    """Install a system-call filter for this process and its descendants. PR_SET_NO_NEW_PRIVS must be set."""
    text = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions and their address
    head = (ctypes.c_uint64 * 2)(len(program) // 8, ctypes.addressof(text))
    kernel("prctl", 22, 2, head, 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def landlock(rules: dict[str, Any]) -> int:
    """Create a Landlock ruleset that allows only the given paths, ignoring missing ones. Return its descriptor."""
    abi = rules["abi"]
    every = 0x1FFF | (0x2000 if abi >= 2 else 0) | (0x4000 if abi >= 3 else 0) | (0x8000 if abi >= 5 else 0)
    words = [every, *([0 if rules["network"] else 3] if abi >= 4 else []), *([3] if abi >= 6 else [])]
    attribute = (ctypes.c_uint64 * len(words))(*words)
    ruleset = kernel("syscall", 444, attribute, ctypes.sizeof(attribute), 0)
    on_files = 0xC007  # rights on files: execute, write, read, truncate, ioctl
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


def restrict(rules: dict[str, Any], program: bytes) -> None:
    """Confine this process and its descendants by Landlock rules, dropped capabilities and a system-call filter."""
    ruleset = landlock(rules)
    drop_capabilities()
    kernel("syscall", 446, ruleset, 0)  # landlock_restrict_self
    os.close(ruleset)
    filter_calls(program)


_LIMIT_FILES = {
    "": ("cpu.max", "memory.max", "memory.high"),  # cgroup v2, with all controllers in one folder
    "cpu": ("cpu.cfs_quota_us", "cpu.cfs_period_us"),
    "memory": ("memory.limit_in_bytes",),
}


def own_limits() -> list[str]:
    """Return the files that contain this process's control group limits. DuckDB aborts if it cannot read these."""
    found = ["/proc/self/cgroup"]
    with open(found[0]) as file:
        memberships = [line.rstrip("\n").split(":", 2) for line in file]
    for _, controllers, path in memberships:
        for controller in controllers.split(","):
            root = f"/sys/fs/cgroup/{controller}".rstrip("/")
            for folder in dict.fromkeys((root, root + path.rstrip("/"))):
                found += [f"{folder}/{name}" for name in _LIMIT_FILES.get(controller, ())]
    return found


def set_oom_score(score: str) -> None:
    """Set the score by which the kernel selects a process to kill when memory runs out, the highest score first."""
    try:
        write("/proc/self/oom_score_adj", score)
    except OSError:
        pass  # not Linux


def write(path: str, text: str) -> None:
    """Write to an existing file without a Python stream, which would need more memory in every sandbox."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
