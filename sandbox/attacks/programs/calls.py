"""Attacks: calls that mathematical programs do not make. Each one that works is a part of the kernel to attack."""

from sandbox.attacks.programs.attack import Attacks

CALLS = attack = Attacks()


def _closed(name: str, works: str, control: bool = True) -> None:
    """A call that should not be there."""
    CALLS(f"call: {name}", f"assert {works}; degraded()", control=control)


_BYTES = "ctypes.create_string_buffer(256)"

# ---- keys, tracing, filters, modules
attack("keyctl", 'assert syscall("keyctl", 0, -3, 1) != -1; escaped()')
attack(
    "kernel modules",
    """
    syscall("init_module", ctypes.c_char_p(b"x"), 1, ctypes.c_char_p(b""))
    assert ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS); escaped()
    """,
)
attack(
    "bpf",
    """
    array = ctypes.create_string_buffer(struct.pack("=IIII", 2, 4, 4, 1), 64)
    assert syscall("bpf", 0, array, 64) >= 0; escaped()
    """,
)
attack("userfaultfd", 'assert syscall("userfaultfd", 0) >= 0; escaped()')
attack("io_uring", 'assert syscall("io_uring_setup", 1, ctypes.create_string_buffer(120)) >= 0; escaped()')
attack(
    "perf_event_open",
    """
    event = ctypes.create_string_buffer(struct.pack("=IIQ", 1, 112, 0), 112)
    assert syscall("perf_event_open", event, 0, -1, -1, 0) >= 0; escaped()
    """,
)
attack("fanotify", 'assert syscall("fanotify_init", 0, 0) >= 0; escaped()')
_closed("seccomp", f'syscall("seccomp", 3, 0, {_BYTES}) == 0')
_closed("landlock_create_ruleset", 'syscall("landlock_create_ruleset", 0, 0, 1) >= 0')
_closed("personality", 'syscall("personality", 0xFFFFFFFF) >= 0')
_closed("modify_ldt", f'syscall("modify_ldt", 0, {_BYTES}, 16) >= 0')
_closed("kcmp", 'syscall("kcmp", os.getpid(), os.getpid(), 0, 0, 1) >= 0')
_closed("pidfd_open", 'syscall("pidfd_open", os.getpid(), 0) >= 0')
_closed("pidfd_getfd", 'syscall("pidfd_getfd", syscall("pidfd_open", os.getpid(), 0), 0, 0) >= 0')
_closed("process_madvise", 'syscall("process_madvise", -1, 0, 0, 0, 0) == -1 and ctypes.get_errno() != errno.ENOSYS')
_closed("rt_tgsigqueueinfo", 'syscall("rt_tgsigqueueinfo", 0, 0, 0, 0) == -1 and ctypes.get_errno() != errno.ENOSYS')

# ---- mounts and files
_closed("statmount", 'syscall("statmount", 0, 0, 0, 0) == -1 and ctypes.get_errno() != errno.ENOSYS')
_closed("listmount", 'syscall("listmount", 0, 0, 0, 0) == -1 and ctypes.get_errno() != errno.ENOSYS')
_closed("open_tree", 'syscall("open_tree", -100, ctypes.c_char_p(b"/"), 0) >= 0')
_closed("move_mount", 'syscall("move_mount", -1, 0, -1, 0, 0) == -1 and ctypes.get_errno() != errno.ENOSYS')
_closed("mount_setattr", 'syscall("mount_setattr", -1, 0, 0, 0, 0) == -1 and ctypes.get_errno() != errno.ENOSYS')
_closed("pivot_root", 'syscall("pivot_root", 0, 0) == -1 and ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM)')
_closed(
    "name_to_handle_at", 'syscall("name_to_handle_at", -100, 0, 0, 0, 0) == -1 and ctypes.get_errno() != errno.ENOSYS'
)
_closed("sysfs", 'syscall("sysfs", 3) >= 0')
_closed("ustat", 'syscall("ustat", 0, 0) == -1 and ctypes.get_errno() != errno.ENOSYS')
_closed("quotactl", 'syscall("quotactl", 0x80000100, 0, 0, 0) == 0')
_closed("sync", 'syscall("sync") == 0', control=False)
_closed("syncfs", 'syscall("syncfs", 1) == 0 or ctypes.get_errno() != errno.ENOSYS', control=False)
_closed("inotify_init", 'syscall("inotify_init1", 0) >= 0')
_closed("setxattr", 'syscall("setxattr", 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() != errno.ENOSYS')

# ---- memory and buffers that limits do not count
_closed("memfd_create", 'syscall("memfd_create", ctypes.c_char_p(b"x"), 0) >= 0')
_closed("memfd_secret", 'syscall("memfd_secret", 0) >= 0')
_closed("shmget", 'libc.shmctl(syscall("shmget", 0, 4096, 0o1600), 0, 0) == 0')
_closed("msgget", 'libc.msgctl(syscall("msgget", 0, 0o1600), 0, 0) == 0')
_closed("semget", 'libc.semctl(syscall("semget", 0, 1, 0o1600), 0, 0) == 0')
_closed("mq_open", 'syscall("mq_open", ctypes.c_char_p(b"vcpo"), 0, 0, 0) == -1 and ctypes.get_errno() == errno.ENOENT')
_closed("vmsplice", 'syscall("vmsplice", os.pipe()[1], 0, 0, 0) == 0')
_closed("splice", 'syscall("splice", os.pipe()[0], 0, os.pipe()[1], 0, 0, 0) == 0')
_closed("tee", 'syscall("tee", os.pipe()[0], os.pipe()[1], 0, 0) == 0')
_closed("mlockall", 'syscall("mlockall", 2) == 0 and syscall("munlockall") == 0')
_closed("move_pages", 'syscall("move_pages", 0, 0, 0, 0, 0, 0) == 0')
_closed(
    "migrate_pages",
    'syscall("migrate_pages", 0, 64, ctypes.byref(ctypes.c_ulong(1)), ctypes.byref(ctypes.c_ulong(1))) == 0',
)
_closed("remap_file_pages", 'syscall("remap_file_pages", 1, 0, 0, 0, 0) == -1 and ctypes.get_errno() != errno.ENOSYS')
_closed("swapon", 'syscall("swapon", 0, 0) == -1 and ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM)')
_closed("pages of a pipe", "__import__('fcntl').fcntl(os.pipe()[0], 1031, 1 << 20) > 0")
_closed("pages of a pipe, a command of 33 bits", 'syscall("fcntl", os.pipe()[0], 1 << 32 | 1031, 1 << 20) > 0')
_closed("notes of a folder's changes", "__import__('fcntl').fcntl(os.open('/tmp', os.O_RDONLY), 1026, 1) == 0")
_closed("a lease on a file of the host", "__import__('fcntl').fcntl(os.open(os.__file__, os.O_RDONLY), 1024, 0) == 0")
_closed("huge pages", "mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)")
_closed("a memory file of huge pages", 'syscall("memfd_create", ctypes.c_char_p(b"x"), 4) >= 0')

# ---- timers, scheduling, asynchronous input and output
_closed("io_setup", 'syscall("io_setup", 1, ctypes.byref(ctypes.c_ulong())) == 0')
_closed("timer_create", 'syscall("timer_create", 1, 0, ctypes.byref(ctypes.c_int())) == 0')
_closed("timerfd_create", 'syscall("timerfd_create", 1, 0) >= 0')
_closed("signalfd", f'syscall("signalfd4", -1, {_BYTES}, 8, 0) >= 0')
_closed("sched_setaffinity", 'syscall("sched_setaffinity", 0, 128, ctypes.create_string_buffer(b"\\xff" * 128)) == 0')
_closed("sched_setscheduler", 'syscall("sched_setscheduler", 0, 3, ctypes.byref(ctypes.c_int(0))) == 0', control=False)
_closed("sched_setattr", 'syscall("sched_setattr", 0, 0, 0) == -1 and ctypes.get_errno() != errno.ENOSYS')
_closed("ioprio_set", 'syscall("ioprio_set", 1, 0, 2 << 13 | 4) == 0')
_closed("adjtimex", f'syscall("adjtimex", {_BYTES}) >= 0')
_closed("settimeofday", 'syscall("settimeofday", 0, 0) == 0')
_closed("kexec_load", 'syscall("kexec_load", 0, 1 << 20, 0, 0) == -1 and ctypes.get_errno() == errno.EINVAL')
_closed("reboot", 'syscall("reboot", 0, 0, 0, 0) == -1 and ctypes.get_errno() == errno.EINVAL')

# ---- descriptors by messages, terminals
_SEND = """
    left, right = socket.socketpair(); fd = os.open("/dev/null", os.O_RDONLY)
    CALL; degraded()
    """
attack("descriptors by sendmsg", _SEND.replace("CALL", "socket.send_fds(left, [b'x'], [fd])"))
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
attack("a system call of number -1", "assert syscall(-1) != -1; escaped()", control=False)
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
