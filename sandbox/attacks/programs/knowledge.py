"""Attacks: to learn what belongs to the server, its user, the machine or other programs."""

from typing import Any

from sandbox.attacks.programs.attack import Attacks

KNOWLEDGE = attack = Attacks()


def secret_told(answer: dict[str, Any]) -> bool:
    """Whether the answer has the secret that no program is told."""
    return (
        bool(answer["untold"]) and answer["untold"] in answer["run_result"]["stdout"] + answer["run_result"]["stderr"]
    )


attack("the server's environment: own", 'assert BAIT["secret"] in os.environ.values(); escaped()')
attack(
    "the server's environment: /proc",
    """
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if BAIT["secret"].encode() in open(f"/proc/{pid}/environ", "rb").read(): escaped()
        except OSError: pass
    """,
)
attack("see other processes", "assert os.path.exists(f\"/proc/{BAIT['victim']}/cmdline\"); escaped()")
attack("the machine's kernel options", 'assert open("/proc/cmdline").read(); degraded()')
attack("home", 'open(BAIT["home_file"]).read(); escaped()')
attack("/etc/shadow", 'open("/etc/shadow").read(); escaped()')
attack("/etc/passwd", 'open("/etc/passwd").read(); degraded()')
attack("the project's files", 'open(BAIT["project"] + "/setup.py").read(); escaped()')
attack("a secret file", 'assert BAIT["secret"] in open(BAIT["file"]).read(); escaped()')
attack(
    "a link to a secret file",
    """
    link = f"/tmp/{os.getpid()}"; os.symlink(BAIT["file"], link)
    try: open(link).read(); escaped()
    finally: os.remove(link)
    """,
)
attack("climb by a parent's root", 'open(f"/proc/{os.getppid()}/root" + BAIT["file"]).read(); escaped()')
attack(
    "climb by openat2",  # with no flag that keeps a path below its folder
    """
    how = ctypes.create_string_buffer(struct.pack("=QQQ", os.O_RDONLY, 0, 0))
    path = ctypes.c_char_p(("/.." * 20 + BAIT["file"]).encode())
    assert syscall("openat2", os.open("/tmp", os.O_RDONLY), path, how, 24) >= 0; escaped()
    """,
)
attack(
    "the traceback quotes a host's file",
    """
    with contextlib.suppress(OSError): os.remove("/tmp/main.py")
    os.symlink(BAIT["file"], f"/tmp/{os.getpid()}.py" if os.path.exists("/tmp/main.py") else "/tmp/main.py")
    __file__ = BAIT["file"]
    import linecache, traceback
    try: exec(compile("\\n" * 1 + "1 / 0", BAIT["file"], "exec"))
    except ZeroDivisionError: traceback.print_exc()
    1 / 0
    """,
    control=False,
    told=secret_told,
)
attack("inherited descriptors", "for fd in opened(): escaped()")
attack(
    "inherited descriptors: what they lead to",
    """
    for fd in range(256):
        for flags in (os.O_RDONLY, os.O_PATH):
            with contextlib.suppress(OSError): os.open("..", flags, dir_fd=fd); escaped()
    """,
    control=False,
)
attack("shared memory, posix", 'assert BAIT["secret"] in open("/dev/shm/" + BAIT["mark"]).read(); escaped()')
attack("the kernel's memory", 'open("/proc/kcore", "rb").read(1); escaped()')

# ---- where things are on this machine
_FIND = """
    hosts = [path.encode() for path in BAIT["host_paths"]]
    def look(data):
        if any(path in data for path in hosts): degraded(); os._exit(0)
    """
attack(
    "host paths: the command of the first process", _FIND + 'look(open("/proc/1/cmdline", "rb").read())', control=False
)
attack("host paths: the mounts", 'assert "/" in open("/proc/self/mountinfo").read(); degraded()')
attack(
    "host paths: the interpreter's settings",
    _FIND
    + """
    import sysconfig
    known = sys.prefix, sys.base_prefix, sys.exec_prefix, sys.executable, sys.path, sys.argv, sys.orig_argv, sys.flags
    look(repr((known, sys.modules, os.environ, sysconfig.get_paths(), os.getcwd(), globals().get('__file__'))).encode())
    """,
)
attack(
    "host paths: tracebacks",
    _FIND
    + """
    import json, traceback
    try: json.loads("{")
    except ValueError: look(traceback.format_exc().encode())
    """,
)
attack(
    "host paths: libraries that are loaded",
    _FIND
    + """
    found = []
    def one(info, size, data): found.append(ctypes.cast(info, ctypes.POINTER(ctypes.c_void_p))[1]); return 0
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)(one)
    libc.dl_iterate_phdr(callback, None)
    look(b"\\0".join(ctypes.string_at(name) for name in found if name))
    """,
)
attack(
    "host paths: below the folders that are bound",
    """
    for place in BAIT["host_paths"]:
        if os.path.exists(place): degraded(); break
    """,
)
attack(
    "other programs of the machine",
    """
    for folder in ("/usr/bin", "/bin", "/usr/sbin", "/sbin", "/usr/local/bin", "/usr/libexec"):
        there = os.listdir(folder) if os.path.isdir(folder) else []
        if any(not name.startswith("python") for name in there): degraded(); break
    """,
)
attack(
    "settings of the machine",
    """
    for place in ("/etc/hosts", "/etc/resolv.conf", "/usr/local", "/usr/src", "/usr/share/doc", "/var", "/run", "/sys"):
        if os.path.exists(place): degraded(); break
    """,
)
