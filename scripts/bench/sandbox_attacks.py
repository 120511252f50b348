"""Programs that try to get out of the code sandbox, or to take more than they may (scripts/bench/sandbox.py).

Each one finds out by itself whether it succeeded, and then says so by `escaped()`; where only the host can know, the
attack has a `trace`. All start with `BAIT`, what the host has laid out for them.
"""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PRELUDE = """
import ctypes, errno, mmap, os, signal, socket, stat, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def escaped(): print("ESCAPED", flush=True)
def syscall(name, *arguments):
    return libc.syscall(ctypes.c_long(BAIT["calls"][name]), *[
        ctypes.c_long(x) if isinstance(x, int) else x for x in arguments])
"""
LIMIT_MB, PROCESSES, FILES_MB, TIME_S = 256, 32, 64, 10.0
"""What the server of the attacks allows."""


@dataclass(frozen=True)
class Attack:
    """One program.

    name, code: what it tries, and how.
    control: run it without a sandbox too, where it must succeed: that shows that the check can fail. Only where that
        harms nothing.
    trace: what of it is left on the host, if the program itself cannot tell: true for an escape.
    neighbour: a program that runs in another sandbox at the same time.
    time_s: the time limit that it asks for.
    whole_program: it can be stopped only where control groups are available.
    """

    name: str
    code: str
    control: bool = True
    trace: Callable[[dict[str, Any]], bool] | None = None
    neighbour: str | None = None
    time_s: float = TIME_S
    whole_program: bool = False


def daemon_lives(bait: dict[str, Any]) -> bool:
    """Whether a process with the daemon's mark is there."""
    import psutil

    return any(bait["mark"] in (p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))


def victim_is_dead(bait: dict[str, Any]) -> bool:
    """Whether the host's process that was laid out is gone."""
    import psutil

    return not psutil.pid_exists(bait["victim"]) or psutil.Process(bait["victim"]).status() == "zombie"


ATTACKS: list[Attack] = []


def _attack(name: str, code: str, **settings: Any) -> None:
    ATTACKS.append(Attack(name, textwrap.dedent(code), **settings))


# ---- the network
_attack("tcp to the loopback", 'socket.create_connection(("127.0.0.1", BAIT["port"]), 2); escaped()')
_attack("tcp to the host's address", 'socket.create_connection((BAIT["address"], BAIT["port"]), 2); escaped()')
_attack("the server's own port", 'socket.create_connection(("127.0.0.1", BAIT["server_port"]), 2); escaped()')
_attack(
    "udp",
    """
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1)
    s.sendto(b"?", ("127.0.0.1", BAIT["port"])); s.recv(9); escaped()
    """,
)
_attack("names: the host's", 'socket.gethostbyname(BAIT["host"]); escaped()')
_attack("unix socket", 's = socket.socket(socket.AF_UNIX); s.connect(BAIT["unix"]); escaped()')
_attack("abstract unix socket", 's = socket.socket(socket.AF_UNIX); s.connect("\\0" + BAIT["mark"]); escaped()')
_attack("see the host's interfaces", 'assert [n for _, n in socket.if_nameindex() if n != "lo"]; escaped()')
_attack("packet socket", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); escaped()")
_attack("raw socket", "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP); escaped()")
_attack("virtual machine socket", "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM); escaped()")
_attack("kernel crypto socket", "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET); escaped()")

# ---- what others know
_attack("the server's environment: own", 'assert BAIT["secret"] in os.environ.values(); escaped()')
_attack(
    "the server's environment: /proc",
    """
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if BAIT["secret"].encode() in open(f"/proc/{pid}/environ", "rb").read(): escaped()
        except OSError: pass
    """,
)
_attack("see other processes", "assert os.path.exists(f\"/proc/{BAIT['victim']}/cmdline\"); escaped()")
_attack("home", 'open(BAIT["home_file"]).read(); escaped()')
_attack("/etc/shadow", 'open("/etc/shadow").read(); escaped()')
_attack("the project's files", 'open(BAIT["project"] + "/setup.py").read(); escaped()')
_attack("a secret file", 'assert BAIT["secret"] in open(BAIT["file"]).read(); escaped()')
_attack(
    "a link to a secret file",
    'os.symlink(BAIT["file"], f"/tmp/{os.getpid()}"); open(f"/tmp/{os.getpid()}").read(); escaped()',
)
_attack("climb by ..", 'open("/tmp" + "/.." * 20 + BAIT["file"]).read(); escaped()')
_attack("climb by a parent's root", 'open(f"/proc/{os.getppid()}/root" + BAIT["file"]).read(); escaped()')
_attack("climb by a parent's folder", 'open(f"/proc/{os.getppid()}/cwd" + "/.." * 20 + BAIT["file"]).read(); escaped()')
_attack(
    "climb by a file handle",  # the root folder of ext4 is inode 2
    """
    handle = ctypes.create_string_buffer(struct.pack("=IiII", 8, 1, 2, 0))
    for place in ("/usr", "/packages", "/tmp"):
        if os.path.exists(place):
            root = syscall("open_by_handle_at", os.open(place, os.O_RDONLY), handle, os.O_RDONLY)
            if root >= 0:
                os.open(BAIT["file"].lstrip("/"), os.O_RDONLY, dir_fd=root); escaped()
    """,
)
_attack(
    "inherited descriptors",
    """
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if fd > 2 and os.fstat(fd): escaped()
        except OSError: pass  # the one that listed the folder
    """,
)
_attack("shared memory, posix", 'assert BAIT["secret"] in open("/dev/shm/" + BAIT["mark"]).read(); escaped()')
_attack("shared memory, system v", 'assert libc.shmget(BAIT["shm_key"], 16, 0) >= 0; escaped()')
_attack("the kernel's log", "b = ctypes.create_string_buffer(99); assert libc.klogctl(3, b, 99) >= 0; escaped()")
_attack("the kernel's memory", 'open("/proc/kcore", "rb").read(1); escaped()')
_attack(
    "another program's files",
    """
    end = time.time() + 4
    while time.time() < end:
        if os.path.exists("/tmp/" + BAIT["mark"]): escaped(); break
        time.sleep(0.05)
    """,
    neighbour='open("/tmp/" + BAIT["mark"], "w").close(); time.sleep(4); os.remove("/tmp/" + BAIT["mark"])',
)
_attack(
    "another program's processes",
    """
    end, mark = time.time() + 4, ("neighbour" + BAIT["mark"]).encode()
    while time.time() < end:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if mark in open(f"/proc/{pid}/cmdline", "rb").read(): escaped(); sys.exit()
            except OSError: pass
        time.sleep(0.05)
    """,
    neighbour='subprocess.run([sys.executable, "-c", "import time; time.sleep(4)", "neighbour" + BAIT["mark"]])',
)

# ---- changing what is not its own
_attack(
    "write outside /tmp",
    """
    for place in BAIT["places"]:
        try: open(place + "/" + BAIT["mark"], "w").close(); escaped()
        except OSError: pass
    """,
)
_attack("change a package", 'open("/packages/numpy/__init__.py", "a").close(); escaped()', control=False)
_attack("change the interpreter", 'open(os.__file__, "a").close(); escaped()')
_attack("sysrq", 'os.open("/proc/sysrq-trigger", os.O_WRONLY); escaped()')
_attack("core_pattern", 'os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY); escaped()')
_attack("control groups", 'assert os.listdir("/sys/fs/cgroup"); escaped()')
_attack(
    "device nodes: make one",
    """
    node = f"/tmp/node{os.getpid()}"
    os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(1, 8))  # the kernel's random numbers
    try: os.read(os.open(node, os.O_RDONLY), 1); escaped()
    finally: os.remove(node)
    """,
)
_attack(
    "device nodes: find one",
    """
    for name in ("mem", "kmsg", "kvm", "fuse", "vda", "sda", "nvme0n1", "loop-control", "net/tun"):
        try: os.open("/dev/" + name, os.O_RDONLY | os.O_NONBLOCK); escaped()
        except OSError: pass
    """,
)
_attack("the terminal", 'os.open("/dev/tty", os.O_RDWR); escaped()', control=False)
_attack("the host's name", 'socket.sethostname("escaped"); escaped()', control=False)
_attack("the clock", "time.clock_settime(time.CLOCK_REALTIME, time.time()); escaped()", control=False)

# ---- rights
_attack(
    "mount",
    """
    folder = f"/tmp/mount{os.getpid()}".encode(); os.mkdir(folder)
    try:
        assert libc.mount(b"none", folder, b"tmpfs", 0, None) == 0; escaped(); libc.umount2(folder, 2)
    finally: os.rmdir(folder)
    """,
)
_attack("mount by fsopen", 'assert syscall("fsopen", ctypes.c_char_p(b"tmpfs"), 0) >= 0; escaped()')
_attack("chroot", 'os.chroot("/tmp"); escaped()')
_attack("unshare: user namespace", "assert libc.unshare(0x10000000) == 0; escaped()")
_attack(
    "unshare: other namespaces",
    "for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x20000000, 0x40000000):\n"
    "    if libc.unshare(flag) == 0: escaped()",
)
_attack(
    "clone: user namespace",
    """
    pid = libc.syscall(ctypes.c_long(BAIT["calls"]["clone"]), ctypes.c_long(0x10000000 | signal.SIGCHLD), 0, 0, 0, 0)
    if pid == 0: os._exit(0)
    assert pid > 0; escaped()
    """,
)
_attack(
    "clone3: user namespace",
    """
    arguments = ctypes.create_string_buffer(struct.pack("=QQQQQQQQ", 0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0))
    pid = syscall("clone3", arguments, 64)
    if pid == 0: os._exit(0)
    assert pid > 0; escaped()
    """,
)
_attack("setns", 'assert libc.setns(os.open("/proc/self/ns/net", os.O_RDONLY), 0) == 0; escaped()')
_attack("setuid(0)", "os.setuid(0); escaped()")
_attack(
    "setuid programs",
    """
    for entry in os.scandir("/usr/bin"):
        if entry.is_file() and entry.stat().st_mode & stat.S_ISUID:
            child = subprocess.Popen([entry.path], stdin=subprocess.PIPE, stdout=-3, stderr=-3)
            try:
                if open(f"/proc/{child.pid}/status").read().split("Uid:")[1].split()[1] == "0": escaped(); break
            finally: child.kill()
    """,
)
_attack(
    "capabilities",
    'assert int(open("/proc/self/status").read().split("CapEff:")[1].split()[0], 16); escaped()',
)
_attack("new privileges by exec", "assert libc.prctl(39, 0, 0, 0, 0) == 0; escaped()")
_attack("no filter of system calls", "assert libc.prctl(21, 0, 0, 0, 0) == 0; escaped()")
_attack("input and output ports", "assert libc.ioperm(0x80, 1, 1) == 0; escaped()")
_attack("keyctl", 'assert syscall("keyctl", 0, -3, 1) != -1; escaped()')
_attack(
    "add_key",
    """
    none = ctypes.c_char_p(b"user"), ctypes.c_char_p(b"vcpo"), ctypes.c_char_p(b"x")
    assert syscall("add_key", *none, 1, -2) != -1; escaped()
    """,
)
_attack(
    "kernel modules",
    """
    syscall("init_module", ctypes.c_char_p(b"x"), 1, ctypes.c_char_p(b""))
    assert ctypes.get_errno() != errno.EPERM; escaped()
    """,
)
_attack(
    "bpf",
    """
    array = ctypes.create_string_buffer(struct.pack("=IIII", 2, 4, 4, 1), 64)
    assert syscall("bpf", 0, array, 64) >= 0; escaped()
    """,
)
_attack("userfaultfd", 'assert syscall("userfaultfd", 0) >= 0; escaped()')
_attack(
    "io_uring",
    'assert syscall("io_uring_setup", 1, ctypes.create_string_buffer(120)) >= 0; escaped()',
)
_attack(
    "perf_event_open",
    """
    event = ctypes.create_string_buffer(struct.pack("=IIQ", 1, 112, 0), 112)
    assert syscall("perf_event_open", event, 0, -1, -1, 0) >= 0; escaped()
    """,
)
_attack("fanotify", 'assert syscall("fanotify_init", 0, 0) >= 0; escaped()')

# ---- other processes
_attack("signal a process of the host", 'os.kill(BAIT["victim"], 0); escaped()')
_attack(
    "kill everything",
    """
    for pid in (BAIT["victim"], 1, os.getppid(), -os.getpgrp(), -1):
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
    """,
    control=False,
    trace=victim_is_dead,
)
_attack("slow down a process of the host", 'os.setpriority(os.PRIO_PROCESS, BAIT["victim"], 5); escaped()')
_attack(
    "ptrace",
    """
    for pid in (BAIT["victim"], os.getppid()):
        if syscall("ptrace", 16, pid, 0, 0) == 0:
            escaped(); os.waitpid(pid, 0x40000000); syscall("ptrace", 17, pid, 0, 0); break
    """,
)
_attack(
    "read another process's memory",
    """
    here = ctypes.create_string_buffer(8); there = ctypes.addressof(here)
    vector = ctypes.create_string_buffer(struct.pack("=QQ", there, 8))
    for pid in (BAIT["victim"], 1):
        syscall("process_vm_readv", pid, vector, 1, vector, 1, 0)
        if ctypes.get_errno() not in (errno.EPERM, errno.ESRCH): escaped()
    """,
)
_attack(
    "survive as a daemon",
    """
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in range(3): os.close(fd)
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(30)", BAIT["mark"]])
        os._exit(0)
    time.sleep(0.5)
    """,
    trace=daemon_lives,
)
_attack(
    "keep the answer waiting",
    "if os.fork() == 0:\n    os.setsid(); time.sleep(4); escaped()",
)

# ---- more than its share
_attack("endless loop", "end = time.time() + 6\nwhile time.time() < end: pass\nescaped()", time_s=1.0)
_attack("sleep", "time.sleep(6); escaped()", time_s=1.0)
_attack(
    "sleep, deaf to signals",
    """
    for n in range(1, 65):
        try: signal.signal(n, signal.SIG_IGN)
        except (OSError, ValueError): pass
    time.sleep(6); escaped()
    """,
    time_s=1.0,
)
_attack(
    "cpu time of many processes",
    """
    children = 0
    while os.getpid() and children < 4 and os.fork(): children += 1
    end = time.time() + 6
    while time.time() < end: pass
    escaped()
    """,
    time_s=1.0,
)
_attack(
    "processes",
    """
    for i in range(BAIT["processes"] + 20):
        if os.fork() == 0: os.close(1); os.close(2); time.sleep(30); os._exit(0)
    escaped()
    """,
)
_attack(
    "threads",
    """
    for i in range(BAIT["processes"] + 20): threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    escaped()
    """,
)
_attack("raise a limit", "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (10**6, 10**6)); escaped()")
_attack("memory: one process", 'x = bytearray(b"1") * ((BAIT["memory_mb"] + 100) << 20); escaped()')
_attack("memory: mapped", 'x = mmap.mmap(-1, (BAIT["memory_mb"] + 100) << 20); escaped()')
_attack(
    "memory: many processes",
    """
    children, alive = 6, os.pipe()
    for i in range(children):
        if os.fork() == 0:
            os.close(1); os.close(2); x = bytearray(b"1") * ((BAIT["memory_mb"] // 2) << 20)
            os.write(alive[1], b"."); time.sleep(30); os._exit(0)
    while children: children -= len(os.read(alive[0], 1))
    escaped()
    """,
    whole_program=True,
)
_FILL = """
    name, block = f"FOLDER/fill{os.getpid()}", b"1" * (1 << 20)
    try:
        for part in range(3):
            with open(name + str(part), "wb") as f:
                for i in range((BAIT["files_mb"] + 8) // 3): f.write(block)
        escaped()
    finally:
        for part in range(3):
            if os.path.exists(name + str(part)): os.remove(name + str(part))
    """
_attack("files: fill /tmp", _FILL.replace("FOLDER", "/tmp"))
_attack("files: fill /dev/shm", _FILL.replace("FOLDER", "/dev/shm"))
_attack(
    "files: a huge one",
    """
    name = f"/tmp/huge{os.getpid()}"
    try: open(name, "w").close(); os.truncate(name, 10 << 30); escaped()
    finally: os.remove(name)
    """,
)
_attack(
    "files: many",
    "for i in range(800_000): os.close(os.open(f'/tmp/{i}', os.O_CREAT))\nescaped()",
    control=False,
    whole_program=True,
)
_attack("output", 'sys.stdout.write("x" * (20 << 20)); sys.stdout.flush(); print("ESCAPED", file=sys.stderr)')
_attack("descriptors", "x = [os.open('/dev/null', os.O_RDONLY) for _ in range(1000)]; escaped()")
