"""System-call filters, as hand-written classic BPF programs.

The filters allow calls by default, but deny calls that could bypass the restrictions of namespaces, mounts and
capabilities, and calls whose effects would survive a reset. Without namespaces, the filters also deny what Landlock
does not cover: sockets, signals sent by files, changes to the modes, owners and times of files, and reads of extended
attributes.
"""

from __future__ import annotations

import platform
import struct
import sys

_ALLOW, _KILL, _EPERM, _ENOSYS, _ENOTSUP = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026, 0x0005005F
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
# Offsets in seccomp_data. _FIRST and _SECOND are the offsets of the low halves of the first and second argument.
_NR, _ARCH, _FIRST, _SECOND = 0, 4, 16, 24

# Denied system calls with their numbers on x86_64 and aarch64 (from the kernel's unistd tables), or None if absent.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    # access to other processes, such as the zygote
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "move_pages": (279, 239), "migrate_pages": (256, 238),
    # calls with effects that a reset could not undo, because objects or settings outlive the process that made them
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181), "setpriority": (141, 140),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "ioprio_set": (251, 30), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # kernel interfaces that sandboxed code does not need
    "bpf": (321, 280), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "acct": (163, 89), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "lookup_dcookie": (212, 18), "personality": (135, 92), "vhangup": (153, 58),
    "iopl": (172, None), "ioperm": (173, None), "sethostname": (170, 161), "setdomainname": (171, 162),
    "fanotify_init": (300, 262),
}  # fmt: skip
# Calls that are also denied with Landlock, which covers neither the metadata of files nor the names of changed files.
_METADATA: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469),
    "inotify_add_watch": (254, 27), "statmount": (457, 457), "listmount": (458, 458),
}  # fmt: skip
# Calls that fail with "not supported", an error that `ls` and `cp` tolerate.
_ATTRIBUTES: dict[str, tuple[int | None, int | None]] = {
    "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
    "llistxattr": (195, 12), "flistxattr": (196, 13), "getxattrat": (464, 464), "listxattrat": (465, 465),
}  # fmt: skip
_TRUNCATE = {"truncate": (76, 45)}  # truncation by path, which Landlock covers from ABI version 3
_SIGNALS: dict[str, tuple[int | None, int | None]] = {  # signals, which Landlock covers from ABI version 6
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
}  # fmt: skip
_CLONE, _CLONE3, _PRLIMIT, _AFFINITY = (56, 220), (435, 435), (302, 261), (203, 122)
_SOCKET, _SOCKETPAIR, _IOCTL, _FCNTL = (41, 198), (53, 199), (16, 29), (72, 25)
_NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag
# Allowed socket families: unix, inet, inet6, netlink. vsock is denied because it reaches the host from any network
# namespace.
_FAMILIES = (1, 2, 10, 16)
_TIOCSTI = 0x5412
# Commands that make a file send signals, even SIGKILL, to any process: F_SETOWN, F_SETSIG and F_SETOWN_EX of fcntl,
# FIOSETOWN and SIOCSPGRP of ioctl.
_FCNTL_OWNER, _IOCTL_OWNER = (8, 10, 15), (0x8901, 0x8902)
# Allowed types of socket pairs: stream and seqpacket. Sockets of other types can send data to sockets outside.
_PAIRED = (1, 5)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def _op(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
    return struct.pack("<HBBI", code, jt, jf, k)


def _unless_argument(number: int, argument: int, allowed: tuple[int, ...], mask: int | None = None) -> list[bytes]:
    """Return the instructions that deny a call unless the masked argument is one of the allowed values."""
    test = [_op(_LOAD, argument), *([] if mask is None else [_op(_AND, mask)])]
    test += [_op(_EQUAL, value, len(allowed) - 1 - i, i == len(allowed) - 1) for i, value in enumerate(allowed)]
    return _for_call(number, [*test, _op(_RETURN, _ALLOW), _op(_RETURN, _EPERM)])


def _if_argument(number: int, argument: int, denied: tuple[int, ...]) -> list[bytes]:
    """Return the instructions that deny a call if an argument is one of the values."""
    test = [_op(_EQUAL, value, len(denied) - i) for i, value in enumerate(denied)]
    return _for_call(number, [_op(_LOAD, argument), *test, _op(_RETURN, _ALLOW), _op(_RETURN, _EPERM)])


def _for_call(number: int, instructions: list[bytes]) -> list[bytes]:
    """Return `instructions`, preceded by a jump that skips them unless the loaded call number is `number`."""
    return [_op(_EQUAL, number, 0, len(instructions)), *instructions]


def program(
    machine: str | None = None, *, landlock: int | None = None, network: bool = True
) -> bytes | None:  # fmt: skip
    """Return the filter for an architecture, by default this machine's, or None if the architecture is not supported.

    `landlock` is the Landlock ABI version in use, if any. With Landlock, the filter also denies calls that this version
    does not cover, and all sockets. If `network` is True, internet and netlink sockets remain allowed.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES or sys.byteorder != "little":
        return None
    column, arch = _MACHINES[machine]
    out = [_op(_LOAD, _ARCH), _op(_EQUAL, arch, 1, 0), _op(_RETURN, _KILL), _op(_LOAD, _NR)]
    if machine == "x86_64":  # every call also has an x32 number
        out += [_op(_AT_LEAST, 0x40000000, 0, 1), _op(_RETURN, _EPERM)]
    denied = dict(_DENIED)
    families: tuple[int, ...] = _FAMILIES
    controls: tuple[int, ...] = (_TIOCSTI,)
    if landlock is not None:
        denied |= _METADATA | (_TRUNCATE if landlock < 3 else {}) | (_SIGNALS if landlock < 6 else {})
        families, controls = ((2, 10, 16) if network else ()), (_TIOCSTI, *_IOCTL_OWNER)
        if not families:
            denied["socket"] = _SOCKET
    answers = [(denied, _EPERM), ({} if landlock is None else _ATTRIBUTES, _ENOTSUP)]
    # A filter cannot inspect the flags of clone3, which are passed by pointer. ENOSYS makes libc fall back to clone.
    answers.append(({"clone3": _CLONE3}, _ENOSYS))
    for calls, answer in answers:
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                out += _for_call(number, [_op(_RETURN, answer)])
    namespaces = [
        _op(_LOAD, _FIRST),
        _op(_ANY_BIT, _NEW_NAMESPACES, 1, 0),
        _op(_RETURN, _ALLOW),
        _op(_RETURN, _EPERM),
    ]
    out += _for_call(_CLONE[column], namespaces)
    for numbers in (_PRLIMIT, _AFFINITY):  # allowed for the calling process (pid 0) only
        out += _unless_argument(numbers[column], _FIRST, (0,))
    out += _if_argument(_IOCTL[column], _SECOND, controls)
    if families:
        out += _unless_argument(_SOCKET[column], _FIRST, families)
    if landlock is not None:
        out += _if_argument(_FCNTL[column], _SECOND, _FCNTL_OWNER)
        out += _unless_argument(_SOCKETPAIR[column], _SECOND, _PAIRED, mask=0xF)
    return b"".join([*out, _op(_RETURN, _ALLOW)])
