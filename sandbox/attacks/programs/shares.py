"""Attacks: to take what other programs, or the user's processes, need. A neighbour says whether it still has it."""

from sandbox.attacks.programs.attack import Attacks

SHARES = attack = Attacks()

_NEEDS_CORE = """
    time.sleep(1.5); start = time.time()
    sum(i * i for i in range(3_000_000))
    assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, timeout=8).stdout == b"1\\n"
    print(took := time.time() - start)
    if took > 4: degraded()
    """
_BURN = """
    end = time.time() + 8
    while time.time() < end: pass
    """
attack.alone(
    "fork bomb",
    """
    end = time.time() + 8
    while time.time() < end:
        with contextlib.suppress(OSError): os.fork()
    """,
    neighbour=_NEEDS_CORE,
)
attack.alone(
    "burn all cores, each process in a session of its own",  # which the scheduler may give a share of its own
    """
    for child in range(BAIT["processes"] - 2):
        if os.fork() == 0:
            with contextlib.suppress(OSError): os.setsid()
            break
    """
    + _BURN,
    neighbour=_NEEDS_CORE,
)
attack.alone(
    "churn of processes",
    """
    end = time.time() + 8
    while time.time() < end:
        with contextlib.suppress(OSError):
            if os.fork() == 0: os._exit(0)
        with contextlib.suppress(OSError): os.waitpid(-1, os.WNOHANG)
    """,
    neighbour=_NEEDS_CORE,
)
attack.alone(
    "thrash the page cache and the disk",
    """
    end, names = time.time() + 6, ("/tmp", "/dev/shm")
    while time.time() < end:
        for folder in names:
            with contextlib.suppress(OSError), open(folder + "/x", "wb") as f:
                for _ in range(60): f.write(b"1" * (1 << 20))
                os.fsync(f.fileno())
    """,
    neighbour=_NEEDS_CORE,
)
attack.alone(
    "pages of pipes",
    """
    for child in range(BAIT["processes"] - 2):
        if os.fork() == 0: break
    held = []
    with contextlib.suppress(OSError):
        while True: held.append(os.pipe())
    time.sleep(7)
    """,
    neighbour="""
    time.sleep(3); end = time.time() + 2
    while time.time() < end:
        read, write = os.pipe(); os.set_blocking(write, False)
        if os.write(write, b"1" * 65536) < 65536: degraded(); break
        os.close(read); os.close(write)
    child = subprocess.run([sys.executable, "-c", "print('x' * 100000)"], capture_output=True)
    if len(child.stdout) != 100001: degraded()
    """,
)
attack.alone(
    "signals that wait",  # the kernel counts them per user
    """
    libc.sigqueue.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN]); sent = 0
    while sent < 2_000_000 and libc.sigqueue(os.getpid(), signal.SIGRTMIN, None) == 0: sent += 1
    print(sent, flush=True); time.sleep(5)
    """,
    neighbour="""
    libc.sigqueue.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN]); time.sleep(1.5); end = time.time() + 3
    while time.time() < end:
        if libc.sigqueue(os.getpid(), signal.SIGRTMIN, None) != 0: degraded(); break
        signal.sigtimedwait([signal.SIGRTMIN], 0); time.sleep(0.05)
    """,
)
attack.alone(
    "locks on files that all programs have",
    """
    import fcntl, glob
    shared = [os.__file__, sys.executable, "/packages", *glob.glob("/python/lib/*"), *glob.glob("/packages/*")]
    for name in shared:
        with contextlib.suppress(OSError):
            fd = os.open(name, os.O_RDONLY)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    for name in ("/dev/null", "/dev/urandom"):
        with contextlib.suppress(OSError): fcntl.lockf(os.open(name, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    time.sleep(7)
    """,
    neighbour="""
    import fcntl, multiprocessing, sqlite3, tempfile
    time.sleep(1.5); start = time.time()
    base = sqlite3.connect("/tmp/base"); base.execute("create table t (x)"); base.commit()
    with tempfile.NamedTemporaryFile() as file: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with multiprocessing.Pool(2) as pool: assert pool.map(abs, [-1, -2]) == [1, 2]
    child = subprocess.run([sys.executable, "-c", "import json; print(1)"], stdin=-3, stdout=-1, timeout=5)
    if child.stdout != b"1\\n" or time.time() - start > 5: degraded()
    """,
)

# ---- priority
attack("priority: nice", "os.nice(-5); degraded()")
attack("priority: an ordinary one", "assert os.getpriority(os.PRIO_PROCESS, 0) < 5; degraded()")
attack("priority: of its session", 'open("/proc/self/autogroup", "w").write("-5"); degraded()')
attack("priority: not the first to go without memory", 'open("/proc/self/oom_score_adj", "w").write("0"); degraded()')
attack(
    "priority: the first process is not the first to go",
    'open("/proc/1/oom_score_adj", "w").write("-1000"); degraded()',
    control=False,
)
