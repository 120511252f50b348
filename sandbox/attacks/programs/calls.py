"""Attacks: calls that mathematical programs do not make. Each one that works is a part of the kernel to attack."""

from code_sandbox.seccomp import ALLOWED
from sandbox.attacks.programs.attack import Attacks

CALLS = attack = Attacks()


def _closed(name: str, works: str) -> None:
    """A call that should not be there."""
    CALLS(f"call: {name}", f"assert {works}; degraded()")


_closed("pidfd_open", 'syscall("pidfd_open", os.getpid(), 0) >= 0')
_closed("memfd_create", 'syscall("memfd_create", ctypes.c_char_p(b"x"), 0) >= 0')
_BY_ARGUMENT = {"clone", "fcntl", "ioctl", "prctl", "socket", "socketpair"}
_NUMBERS = ", ".join(f'BAIT["calls"]["{name}"]' for name in sorted(ALLOWED | _BY_ARGUMENT))
attack(
    "every call that the filter does not name",
    f"""
    for number in {{*range(335), *range(424, 470)}} - {{{_NUMBERS}}}:  # the kernel has none between
        ctypes.set_errno(0)
        syscall(number, -1, -1, -1, -1, -1, -1)
        if ctypes.get_errno() != errno.ENOSYS: degraded(); print(number)
    print("all tried")
    """,
    control=False,
    told=lambda answer: "all tried" not in answer["run_result"]["stdout"],
)

# ---- calls that are allowed, with arguments that are not
_closed("pages of a pipe", "__import__('fcntl').fcntl(os.pipe()[0], 1031, 1 << 20) > 0")
_closed("pages of a pipe, a command of 33 bits", 'syscall("fcntl", os.pipe()[0], 1 << 32 | 1031, 1 << 20) > 0')
_closed("notes of a folder's changes", "__import__('fcntl').fcntl(os.open('/tmp', os.O_RDONLY), 1026, 1) == 0")
_closed("a lease on a file of the host", "__import__('fcntl').fcntl(os.open(os.__file__, os.O_RDONLY), 1024, 0) == 0")
_closed("huge pages", "mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)")

# ---- terminals
attack("terminals: by number", 'os.open("/dev/ptmx", os.O_RDWR); degraded()')
attack("terminals: by the library", "os.openpty(); degraded()")
attack(
    "terminals: type for another",
    """
    import fcntl
    own = os.openpty()[1]
    for command in (0x5412, 1 << 32 | 0x5412):  # TIOCSTI
        syscall("ioctl", own, command, ctypes.c_char_p(b"x"))
        if ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS): degraded()
    """,
)
attack(
    "input and output controls",  # FS_IOC_GETFLAGS, FIOASYNC, FIFREEZE, RNDGETENTCNT, SIOCGIFCONF
    """
    for place in ("/tmp", "/dev/urandom", "/dev/null"):
        fd = os.open(place, os.O_RDONLY)
        for command in (0x80086601, 0x5452, 0xC0045877, 0x80045200, 0x8912):
            ctypes.set_errno(0)
            syscall("ioctl", fd, command, ctypes.create_string_buffer(64))
            if ctypes.get_errno() != errno.ENOSYS: degraded()
    """,
    control=False,
)

# ---- past the filter: other ways to make a call
attack(
    "system calls of 33 bits",
    'assert syscall(1 << 32 | BAIT["calls"]["unshare"], 0x10000000) == 0; escaped()  # syscall("unshare")',
)
attack(
    "system calls of x32",
    'assert syscall(0x40000000 | BAIT["calls"]["getpid"]) == os.getpid(); escaped()  # syscall("getpid")',
)
_MACHINE_CODE = """
    if os.uname().machine != "x86_64": sys.exit()
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    def machine_code(code):
        page[: len(code)] = code
        return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    """
attack(
    "system calls of 32 bits: getpid",
    _MACHINE_CODE + 'assert machine_code(b"\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3") == os.getpid(); escaped()',
)
attack(
    "system calls of 32 bits: user namespace",
    _MACHINE_CODE
    + """
    # push rbx; mov eax, 310 (unshare); mov ebx, CLONE_NEWUSER; int 0x80; pop rbx; ret
    assert machine_code(b"\\x53\\xb8\\x36\\x01\\0\\0\\xbb\\0\\0\\0\\x10\\xcd\\x80\\x5b\\xc3") == 0; escaped()
    """,
)
attack(
    "the filter after exec",
    """
    code = "import ctypes; print('ESCAPED' if ctypes.CDLL(None).unshare(0x10000000) == 0 else 'held')"
    os.execv(sys.executable, [sys.executable, "-c", code])
    """,
)
attack(
    "the filter in a child of vfork",
    """
    code = "import ctypes; print('ESCAPED' if ctypes.CDLL(None).unshare(0x10000000) == 0 else 'held')"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, close_fds=False).stdout)
    """,
)
