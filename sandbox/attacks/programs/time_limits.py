"""Attacks: to outlive the time limit, to keep a slot of the server, or to take over what ends the program."""

from typing import Any

from sandbox.attacks.programs.attack import Attacks

TIME_LIMITS = attack = Attacks()


def looks_successful(answer: dict[str, Any]) -> bool:
    """Whether its client was told that the program succeeded."""
    return answer["status"] == "Success" or answer["run_result"]["return_code"] == 0


_LATER = "time.sleep(6); degraded()"
attack("endless loop", "end = time.time() + 6\nwhile time.time() < end: pass\ndegraded()", time_s=1.0)
attack("sleep", _LATER, time_s=1.0)
attack("an endless call of C", "sum(range(10**10)); degraded()", time_s=1.0, control=False)
_DEAF = """
    for n in range(1, 65):
        try: signal.signal(n, signal.SIG_IGN)
        except (OSError, ValueError): pass
    """
attack(
    "cpu time of many processes",
    """
    children = 0
    while os.getpid() and children < 4 and os.fork(): children += 1
    end = time.time() + 6
    while time.time() < end: pass
    degraded()
    """,
    time_s=1.0,
)
attack.alone(
    "stop the first process and itself",
    _DEAF + "    os.kill(1, signal.SIGSTOP); os.kill(os.getpid(), signal.SIGSTOP); " + _LATER,
    time_s=1.0,
)
attack.alone(
    "a stopped child holds the output",
    """
    child = os.fork()
    if child == 0: os.kill(os.getpid(), signal.SIGSTOP); time.sleep(6); degraded()
    os.waitpid(child, os.WUNTRACED)
    """,
)
attack.alone(
    "all signals to the first process",
    """
    for n in range(1, 65):
        with contextlib.suppress(OSError): os.kill(1, n)
    time.sleep(6); degraded()
    """,
    time_s=1.0,
)
attack.alone(
    "without input and output",
    "for fd in range(256):\n    with contextlib.suppress(OSError): os.close(fd)\ntime.sleep(600)",
    time_s=1.0,
)
attack.alone("end at once, leave a child with the output", "if os.fork() == 0: time.sleep(600)\nos._exit(0)")
attack(
    "a time limit of its own",
    "resource.setrlimit(resource.RLIMIT_CPU, (10**6, 10**6)); degraded()",
)
attack.alone(
    "memory that takes long to give back",
    """
    for _ in range(24):
        if os.fork() == 0:
            x = mmap.mmap(-1, 100 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
            for i in range(0, 20 << 20, 4096): x[i] = 1
            time.sleep(600)
    time.sleep(600)
    """,
    time_s=2.0,
    whole_program=True,
)
attack.alone(
    "orphans that multiply",
    """
    def go():
        end = time.time() + 6
        while time.time() < end:
            with contextlib.suppress(OSError):
                if os.fork(): os._exit(0)
    go(); degraded()
    """,
    time_s=2.0,
)
attack.alone(
    "zombies",
    """
    for _ in range(BAIT["processes"] - 4):
        if os.fork() == 0: os._exit(0)
    time.sleep(600)
    """,
    time_s=1.0,
)

# ---- the first process of the namespace, with which all others end
_TAKE_OVER = """
    where = int(open("/proc/1/syscall").read().split()[-1], 16)
    code = b"\\xb8\\x9d\\0\\0\\0" + b"\\xbf\\x01\\0\\0\\0\\x31\\xf6\\x31\\xd2\\x4d\\x31\\xd2\\x4d\\x31\\xc0\\x0f\\x05"
    code += CLOSE + b"\\x6a\\0\\x6a\\x19\\x48\\x89\\xe7\\x31\\xf6\\xb8\\x23\\0\\0\\0\\x0f\\x05"
    code += b"\\xb8\\xe7\\0\\0\\0\\x31\\xff\\x0f\\x05"
    assert os.getpid() != 1 and BAIT["inside"]
    os.pwrite(os.open("/proc/1/mem", os.O_RDWR), code, where)  # prctl(PR_SET_PDEATHSIG, 0); sleep 25 s; exit
    if os.fork() == 0:
        if os.fork() == 0: time.sleep(0.3)
        os._exit(0)
    os.wait(); time.sleep(0.6); degraded()
    while True: time.sleep(0.2)
    """
_CLOSE = 'b"".join(b"\\xb8\\x03\\0\\0\\0\\xbf" + struct.pack("<I", fd) + b"\\x0f\\x05" for fd in range(3))'
attack.alone("take over the first process", _TAKE_OVER.replace("CLOSE +", ""), time_s=2.0)
attack.alone(
    "take over the first process, and be a daemon",
    _TAKE_OVER.replace("CLOSE", _CLOSE).replace("while True: time.sleep(0.2)", "os._exit(0)"),
    time_s=2.0,
)
attack.alone(
    "kill the first process",
    "os.kill(1, signal.SIGKILL); os.kill(1, signal.SIGTERM); time.sleep(6); degraded()",
    time_s=1.0,
)

# ---- what the server is told about the end
attack(
    "forge the report of the end",
    """
    for fd in range(256):
        with contextlib.suppress(OSError): os.write(fd, b'{ "exit-code": 0 }\\n{ "child-pid": 1 }\\n')
    os.kill(os.getpid(), signal.SIGKILL)
    """,
    control=False,
    told=looks_successful,
)
attack(
    "forge the report of readiness",
    'os.write(1, b"\\n" * 100); os.write(1, b"\\0" * 100); os._exit(3)',
    control=False,
    told=lambda answer: looks_successful(answer) or answer["run_result"]["stdout"] != "\n" * 100 + "\0" * 100,
)
attack(
    "end as a success at the limit of memory",
    "import atexit\natexit.register(os._exit, 0)\nx = bytearray(b'1') * (1 << 30)\nprint('has it'); os._exit(7)",
    control=False,
    told=lambda answer: "has it" in answer["run_result"]["stdout"],
)
attack(
    "exec of another program",
    """
    code = "import resource as r, time; print(r.getrlimit(r.RLIMIT_AS)[1] < 0 and 'DEGRADED')"
    code += "; time.sleep(6); print('DEGRADED')"
    os.execv(sys.executable, [sys.executable, "-c", code])
    """,
    time_s=2.0,
    alone=True,
)
