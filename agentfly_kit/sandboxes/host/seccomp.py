"""System-call filters, as hand-written classic BPF programs.

The filters allow calls by default. They deny calls that could bypass the restrictions of namespaces, mounts and
capabilities, and calls whose effects would survive a reset. Without namespaces they also deny what Landlock does not
cover: sockets, and changes to the modes, owners and times of files.
"""

from __future__ import annotations

import platform
import struct
import sys

_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _FIRST, _SECOND = 0, 4, 16, 24  # offsets in seccomp_data; _FIRST, _SECOND: low halves of arguments

# Denied system calls with their numbers on x86_64 and aarch64 (from the kernel's unistd tables), or None if absent.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    # access to other processes, such as the zygote
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "move_pages": (279, 239), "migrate_pages": (256, 238),
    # effects that a reset could not undo, because the objects or settings outlive the process that made them
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181), "setpriority": (141, 140),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "ioprio_set": (251, 30), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # kernel interfaces that sandboxed code does not need
    "bpf": (321, 280), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "acct": (163, 89), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "quotactl": (179, 60),
    "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "lookup_dcookie": (212, 18), "personality": (135, 92), "vhangup": (153, 58),
    "iopl": (172, None), "ioperm": (173, None), "sethostname": (170, 161), "setdomainname": (171, 162),
    "fanotify_init": (300, 262),
}  # fmt: skip
# Also denied if Landlock is used, because it does not cover changes to the metadata of a user's own files.
_MODES: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469),
}  # fmt: skip
_TRUNCATE = {"truncate": (76, 45)}  # truncation by path, which Landlock covers from ABI version 3
_SIGNALS: dict[str, tuple[int | None, int | None]] = {  # covered by Landlock from ABI version 6
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
}  # fmt: skip
_CLONE, _CLONE3, _PRLIMIT, _AFFINITY, _SOCKET, _IOCTL = (
    (56, 220),
    (435, 435),
    (302, 261),
    (203, 122),
    (41, 198),
    (16, 29),
)
_NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag
# Allowed socket families: unix, inet, inet6, netlink. Not vsock, which reaches the host from any network namespace.
_FAMILIES = (1, 2, 10, 16)
_TIOCSTI = 0x5412
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def _op(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
    return struct.pack("<HBBI", code, jt, jf, k)


def program(
    machine: str | None = None, *, landlock: int | None = None, network: bool = True
) -> bytes | None:  # fmt: skip
    """Return the filter for an architecture, by default that of this machine; None if it is not supported.

    `landlock` is the Landlock ABI version in use, if any. With Landlock, the filter also denies calls that this version
    does not cover, and all sockets. If `network` is True, internet and netlink sockets remain allowed.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES or sys.byteorder != "little":
        return None
    column, arch = _MACHINES[machine]
    out = [_op(_LOAD, _ARCH), _op(_EQUAL, arch, 1, 0), _op(_RETURN, _KILL), _op(_LOAD, _NR)]
    if machine == "x86_64":  # every call has a second, x32 number
        out += [_op(_AT_LEAST, 0x40000000, 0, 1), _op(_RETURN, _EPERM)]
    denied = dict(_DENIED)
    families: tuple[int, ...] = _FAMILIES
    if landlock is not None:
        denied |= _MODES | (_TRUNCATE if landlock < 3 else {}) | (_SIGNALS if landlock < 6 else {})
        families = (2, 10, 16) if network else ()
    for numbers in denied.values():
        number = numbers[column]
        if number is not None:
            out += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _EPERM)]
    # A filter cannot inspect the flags of clone3, which are passed by pointer. ENOSYS makes libc fall back to clone.
    out += [_op(_EQUAL, _CLONE3[column], 0, 1), _op(_RETURN, _ENOSYS)]
    out += [_op(_EQUAL, _CLONE[column], 0, 4), _op(_LOAD, _FIRST), _op(_ANY_BIT, _NEW_NAMESPACES, 1, 0)]
    out += [_op(_RETURN, _ALLOW), _op(_RETURN, _EPERM)]
    for numbers in (_PRLIMIT, _AFFINITY):  # allowed for the calling process (pid 0) only
        out += [_op(_EQUAL, numbers[column], 0, 4), _op(_LOAD, _FIRST), _op(_EQUAL, 0, 0, 1)]
        out += [_op(_RETURN, _ALLOW), _op(_RETURN, _EPERM)]
    out += [_op(_EQUAL, _IOCTL[column], 0, 4), _op(_LOAD, _SECOND), _op(_EQUAL, _TIOCSTI, 1, 0)]
    out += [_op(_RETURN, _ALLOW), _op(_RETURN, _EPERM)]
    n = len(families)
    if n:
        out += [_op(_EQUAL, _SOCKET[column], 0, n + 3), _op(_LOAD, _FIRST)]
        out += [_op(_EQUAL, family, n - 1 - i, 1 if i == n - 1 else 0) for i, family in enumerate(families)]
        out += [_op(_RETURN, _ALLOW), _op(_RETURN, _EPERM)]
    else:
        out += [_op(_EQUAL, _SOCKET[column], 0, 1), _op(_RETURN, _EPERM)]
    return b"".join([*out, _op(_RETURN, _ALLOW)])
