"""Attacks: to take more memory, files, processes or output than the limits say."""

from typing import Any

from sandbox.attacks.programs.attack import FILES_MB, LIMIT_MB, Attacks

MEMORY = attack = Attacks()

TOO_MUCH_MB = LIMIT_MB + 2 * FILES_MB + 512
"""More than a whole program may have, whatever its interpreter has imported."""


def long_answer(answer: dict[str, Any]) -> bool:
    """Whether a client got more output than a program may write (256 KiB on each of two streams, and a line)."""
    return len(answer["run_result"]["stdout"]) + len(answer["run_result"]["stderr"]) > 2 * (256 << 10) + 1000


attack("memory: one process", 'x = bytearray(b"1") * ((BAIT["memory_mb"] + 100) << 20); degraded()')
attack(
    "memory: no limit of its own",
    "resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2); degraded()",
)
attack(
    "memory: many processes",
    """
    children, alive = 6, os.pipe()
    for i in range(children):
        if os.fork() == 0:
            os.close(1); os.close(2); x = bytearray(b"1") * ((BAIT["memory_mb"] * 3 // 4) << 20)
            os.write(alive[1], b"."); time.sleep(30); os._exit(0)
    while children: children -= len(os.read(alive[0], 1))
    degraded()
    """,
    whole_program=True,
)
attack(
    "memory: shared by many processes",
    """
    parts = 8; alive = os.pipe()
    for i in range(parts):
        if os.fork() == 0:
            x = mmap.mmap(-1, (BAIT["too_much_mb"] // parts) << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
            for at in range(0, len(x), 4096): x[at] = 1
            os.write(alive[1], b"."); os.close(1); os.close(2); time.sleep(30); os._exit(0)
    os.close(alive[1])
    while parts:
        got = len(os.read(alive[0], 1)); assert got; parts -= got
    degraded()
    """,
    whole_program=True,
)
attack(
    "memory: temporary files that are open",
    """
    import tempfile
    block, files = b"1" * (1 << 20), []
    for i in range(BAIT["too_much_mb"] // 48):
        files.append(tempfile.TemporaryFile(dir="/dev/shm"))
        for _ in range(48): files[-1].write(block)
    degraded()
    """,
)
attack.alone(
    "memory: pipes of many processes",  # 16 pages each, of which a user has 64 MiB
    """
    held, block = [], b"1" * 65536
    for child in range(BAIT["processes"] - 2):
        if os.fork() == 0: break
    with contextlib.suppress(OSError):
        while True:
            held.append(os.pipe()); os.set_blocking(held[-1][1], False); os.write(held[-1][1], block)
    time.sleep(3)
    """,
)
attack.alone(
    "memory: buffers of unix sockets",
    """
    held, block, mb, told = [], b"1" * 65536, 0, mmap.mmap(-1, 4096)
    for child in range(BAIT["processes"] - 2):
        if os.fork() == 0: break
    else: child = None
    with contextlib.suppress(OSError):
        while True:
            held.append(socket.socketpair())
            for end in held[-1]:
                end.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while True: mb += end.send(block) / 2**20
    time.sleep(3)  # who is there afterwards has it
    if child is not None: told[child] = int(mb); time.sleep(3)
    else:
        time.sleep(2); print(sum(told))
        if sum(told) > BAIT["too_much_mb"]: degraded()
    """,
    whole_program=True,
)
attack.alone(
    "memory: page tables",
    """
    space = mmap.mmap(-1, 200 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_NORESERVE)
    for child in range(BAIT["processes"] - 2):
        if os.fork() == 0: break
    for at in range(0, len(space), 2 << 20): space[at] = 1
    time.sleep(2)
    """,
)
attack(
    "memory: many mappings",
    """
    held = [mmap.mmap(-1, 4096, prot=mmap.PROT_READ if i % 2 else mmap.PROT_WRITE) for i in range(200_000)]
    degraded()
    """,
    control=False,
)
_FILL = """
    name, block = f"FOLDER/fill{os.getpid()}", b"1" * (1 << 20)
    try:
        for part in range(3):
            with open(name + str(part), "wb") as f:
                for i in range((BAIT["files_mb"] + 8) // 3): f.write(block)
        degraded()
    finally:
        for part in range(3):
            if os.path.exists(name + str(part)): os.remove(name + str(part))
    """
attack("files: fill /tmp", _FILL.replace("FOLDER", "/tmp"))
attack("files: fill /dev/shm", _FILL.replace("FOLDER", "/dev/shm"))
attack(
    "files: a huge one",
    """
    name = f"/tmp/huge{os.getpid()}"
    try: open(name, "w").close(); os.truncate(name, 10 << 30); degraded()
    finally: os.remove(name)
    """,
)
attack(
    "files: many",
    "for i in range(800_000): os.close(os.open(f'/tmp/{i}', os.O_CREAT))\ndegraded()",
    control=False,
    whole_program=True,
)
attack.alone(
    "files: deep folders",  # for a server that removes them
    """
    for i in range(20_000): os.mkdir("d"); os.chdir("d")
    open("file", "w").close()
    """,
)
attack(
    "processes",
    """
    for i in range(BAIT["processes"] + 20):
        if os.fork() == 0: os.close(1); os.close(2); time.sleep(30); os._exit(0)
    degraded()
    """,
)
attack(
    "threads",
    """
    for i in range(BAIT["processes"] + 20): threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    degraded()
    """,
)
attack("raise a limit", "resource.setrlimit(resource.RLIMIT_NPROC, (10**6, 10**6)); degraded()")
attack.alone(
    "limits of the first process",  # which reports how the program ended
    """
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_AS):
        with contextlib.suppress(OSError): resource.prlimit(1, limit, (0, 0))
    os._exit(7)
    """,
    told=lambda answer: answer["run_result"]["return_code"] not in (7, 137),
)
attack(
    "limits that are missing",  # of what is counted per user, or holds memory that nothing else counts
    """
    limits = {"NOFILE": 4096, "MEMLOCK": 8 << 20, "MSGQUEUE": 819200, "NICE": 0, "RTPRIO": 0, "SIGPENDING": 4096}
    for name, most in limits.items():
        number = {"SIGPENDING": 11, "MSGQUEUE": 12, "NICE": 13, "RTPRIO": 14, "MEMLOCK": 8, "NOFILE": 7}[name]
        if not 0 <= resource.getrlimit(number)[1] <= most: degraded(); print(name)
    """,
    control=False,
)
attack("descriptors", "x = [os.open('/dev/null', os.O_RDONLY) for _ in range(1000)]; degraded()")
attack(
    "arguments of 100 MB",
    """
    code = "print('DEGRADED')"
    os.execv(sys.executable, [sys.executable, "-c", code, *["x" * 100_000] * 1000])
    """,
    control=False,
)
attack(
    "a core dump by the host's handler",  # a limit of 1, unlike 0, is the one that pipes keep
    """
    if BAIT["core_pattern"].startswith("|") and resource.getrlimit(resource.RLIMIT_CORE)[0] != 1: degraded()
    os.abort()
    """,
)

# ---- output
attack("output", 'sys.stdout.write("x" * (20 << 20)); sys.stdout.flush(); print("DEGRADED", file=sys.stderr)')
attack.alone(
    "output of many processes",
    """
    for child in range(20):
        if os.fork() == 0: break
    while True: os.write(1, b"x" * 4096); os.write(2, b"y" * 4096)
    """,
    told=long_answer,
)
attack(
    "output that grows as JSON",
    "os.write(1, bytes(range(32)) * 8000); os.write(2, b'\\xff\\xfe\\x00' * 80_000)",
    control=False,
    told=long_answer,
)
attack("input that nobody reads", "time.sleep(0.5)", control=False, stdin="x" * 900_000, alone=True)
