"""A seccomp filter: system calls that a numerical program never needs and that kernel exploits are made of.

Namespaces already take from these calls what they could reach. The filter takes the calls themselves, so that a flaw in
one of them is out of reach, and closes what network namespaces leave open (AF_VSOCK reaches a virtual machine's host).
The program is classic BPF as in Documentation/userspace-api/seccomp_filter.rst, handed to `bwrap --seccomp`.
"""

import errno
import platform
import socket
import struct

# linux/filter.h, linux/seccomp.h
_LOAD, _JUMP_EQUAL, _JUMP_AND, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; the low 32 bits of an argument
_X32_BIT = 0x40000000
_NEW_NAMESPACE = 0x7E020080  # CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | NEWTIME

_SOCKETS = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
"""The only address families. Their sockets end at the sandbox's own, empty network."""

# asm/unistd_64.h and asm-generic/unistd.h: name -> (x86_64, aarch64)
DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "fanotify_init": (300, 262),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "personality": (135, 92),
}
_CLONE, _SOCKET, _CLONE3 = (56, 220), (41, 198), (435, 435)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*


def filter_program(machine: str = platform.machine()) -> bytes:
    """The filter as struct sock_filter[].

    Raises:
        OSError: no filter is written for this machine's architecture.
    """
    if machine not in _MACHINES:
        raise OSError(f"the sandbox's system call filter knows {' and '.join(_MACHINES)}, not {machine}")
    column, architecture = _MACHINES[machine]
    refused = _ERRNO | errno.EPERM
    # Each block ends by returning or falls through to the next one; jumps count instructions.
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_JUMP_EQUAL, architecture, 1, 0),
        _instruction(_RETURN, _KILL_PROCESS),  # 32-bit calls have other numbers
        _instruction(_LOAD, _NUMBER),
        _instruction(_JUMP_GREATER_EQUAL, _X32_BIT, 0, 1),
        _instruction(_RETURN, _KILL_PROCESS),
    ]
    for numbers in DENIED.values():
        program += [_instruction(_JUMP_EQUAL, numbers[column], 0, 1), _instruction(_RETURN, refused)]
    # clone3's flags lie in memory, where a filter cannot look: glibc falls back to clone on ENOSYS.
    program += [
        _instruction(_JUMP_EQUAL, _CLONE3[column], 0, 1),
        _instruction(_RETURN, _ERRNO | errno.ENOSYS),
        _instruction(_JUMP_EQUAL, _CLONE[column], 0, 4),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_JUMP_AND, _NEW_NAMESPACE, 0, 1),
        _instruction(_RETURN, refused),
        _instruction(_RETURN, _ALLOW),
        _instruction(_JUMP_EQUAL, _SOCKET[column], 0, 2 + len(_SOCKETS)),
        _instruction(_LOAD, _FIRST_ARGUMENT),
    ]
    program += [_instruction(_JUMP_EQUAL, family, len(_SOCKETS) - i, 0) for i, family in enumerate(_SOCKETS)]
    program += [_instruction(_RETURN, refused), _instruction(_RETURN, _ALLOW)]
    return b"".join(program)


def _instruction(code: int, constant: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, constant)
