"""Attacks: to change what is not the program's own, and to leave something for the next one."""

from typing import Any

from sandbox.attacks.programs.attack import Attacks

CHANGES = attack = Attacks()


def bait_is_changed(bait: dict[str, Any]) -> bool:
    """Whether the host's secret file is not what it was."""
    with open(bait["file"]) as file:
        return bait["secret"] not in file.read()


attack(
    "write outside /tmp",
    """
    for place in BAIT["places"]:
        try: open(place + "/" + BAIT["mark"], "w").close(); escaped()
        except OSError: pass
    """,
)
attack("write to the root folder", 'open("/" + BAIT["mark"], "w").close(); os.remove("/" + BAIT["mark"]); escaped()')
attack("change a package", 'open("/packages/numpy/__init__.py", "a").close(); escaped()', control=False)
attack("change the interpreter", 'open(os.__file__, "a").close(); escaped()')
attack("change the interpreter's rights", "os.chmod(os.__file__, os.stat(os.__file__).st_mode); escaped()")
attack("change what starts programs", 'open("/interpreter.py", "a").close(); escaped()', control=False)
attack(
    "write by a mapping of the interpreter",
    """
    with open(os.__file__, "rb") as file:
        shared = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE); escaped()
    """,
    control=False,
)
attack("sysrq", 'os.open("/proc/sysrq-trigger", os.O_WRONLY); escaped()')
attack("core_pattern", 'os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY); escaped()')
attack("control groups", 'assert os.listdir("/sys/fs/cgroup"); escaped()')
attack("memory of the first process, by /proc", 'os.open("/proc/1/mem", os.O_RDWR); degraded()')
attack("its own memory, by /proc", 'os.open("/proc/self/mem", os.O_RDWR); degraded()')
attack(
    "device nodes: find one",
    """
    for name in ("mem", "kmsg", "kvm", "fuse", "vda", "sda", "nvme0n1", "loop-control", "net/tun", "vhost-net",
                 "nvidia0", "nvidiactl", "dri/card0", "uinput", "vsock", "userfaultfd", "cuse", "btrfs-control"):
        try: os.open("/dev/" + name, os.O_RDONLY | os.O_NONBLOCK); escaped()
        except OSError: pass
    """,
)
attack("the terminal", 'os.open("/dev/tty", os.O_RDWR); escaped()', control=False)
attack(
    "a race of links",  # for a server that looks at a program's files
    """
    end, link = time.time() + 2, "/tmp/main.py"
    while time.time() < end:
        for target in (BAIT["file"], "/dev/null"):
            os.symlink(target, link + ".new"); os.replace(link + ".new", link)
    open(link, "w").write("changed")
    """,
    control=False,
    trace=bait_is_changed,
)

# ---- what is left for the next program
_LEAVE = """
    for folder in ("/tmp", "/dev/shm"):
        with open(f"{folder}/left-{BAIT['mark']}", "w") as file: file.write("left")
    """
attack(
    "files that the last program left",
    """
    for folder in ("/tmp", "/dev/shm"):
        name = f"{folder}/left-{BAIT['mark']}"
        if os.path.exists(name): os.remove(name); escaped()
    """,
    before=_LEAVE,
)
attack(
    "modules that the last program left",
    """
    import textwrap, json
    if getattr(json, "left", False) or {"sitecustomize.py", "numpy.py"} & set(os.listdir("/tmp")): escaped()
    """,
    before="""
    import json
    json.left = True
    for name in ("sitecustomize", "usercustomize", "numpy"): open(f"/tmp/{name}.py", "w").write("print('ESCAPED')")
    """,
    control=False,
)
attack(
    "semaphores that the last program left",
    """
    name = ("/" + BAIT["mark"]).encode(); libc.sem_open.restype = ctypes.c_void_p
    if libc.sem_open(ctypes.c_char_p(name), 0): libc.sem_unlink(ctypes.c_char_p(name)); escaped()
    """,
    before="""
    libc.sem_open.restype = ctypes.c_void_p
    libc.sem_open(ctypes.c_char_p(("/" + BAIT["mark"]).encode()), os.O_CREAT, 0o666, 1)
    """,
)
attack(
    "processes that the last program left",
    """
    with contextlib.suppress(OSError):
        s = socket.socket(socket.AF_UNIX); s.connect("\\0left" + BAIT["mark"]); escaped()
    """,
    before="""
    if os.fork() == 0:
        with contextlib.suppress(OSError): os.setsid()
        if os.fork() == 0:
            s = socket.socket(socket.AF_UNIX); s.bind("\\0left" + BAIT["mark"]); s.listen()
            for fd in range(3): os.close(fd)
            time.sleep(30)
        os._exit(0)
    for _ in range(40):
        time.sleep(0.05)
        with contextlib.suppress(OSError):
            socket.socket(socket.AF_UNIX).connect("\\0left" + BAIT["mark"]); break
    """,
)
attack(
    "another program's files",
    """
    end = time.time() + 4
    while time.time() < end:
        if os.path.exists("/tmp/" + BAIT["mark"]): escaped(); break
        time.sleep(0.05)
    """,
    neighbour='open("/tmp/" + BAIT["mark"], "w").close(); time.sleep(4); os.remove("/tmp/" + BAIT["mark"])',
)
attack(
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
