"""Attacks from inside an interpreter that was up before its program came, and on the program that starts it.

A program that names one of the packages gets such an interpreter.
"""

from typing import Any

from sandbox.attacks.programs.attack import Attacks

WARM = attack = Attacks()


def cold(answer: dict[str, Any]) -> bool:
    """Whether it did not get an interpreter with its packages: then the other attacks of this kind tried nothing."""
    return "warm" not in answer["run_result"]["stdout"]


attack("warm: it is", "import numpy\nif 'sympy' in sys.modules: print('warm')", control=False, told=cold)
_NEIGHBOUR = """
    import numpy
    SECRET = "neighbour" + BAIT["mark"]; time.sleep(3)
    """
attack(
    "warm: another program, by its objects",
    """
    import numpy
    secret, own = "neighbour" + BAIT["mark"], id(BAIT)
    for seen in gc.get_objects():
        if isinstance(seen, (dict, list, tuple)) and id(seen) != own and seen is not globals():
            for value in list(seen.values() if isinstance(seen, dict) else seen):
                if isinstance(value, str) and value is not secret and value == secret: escaped()
    """,
    control=False,
    neighbour=_NEIGHBOUR,
)
attack(
    "warm: another program, by the frames",
    """
    import numpy
    frame, marker = sys._getframe(), "BAIT" + " = {"
    while frame:
        for value in list(frame.f_locals.values()):
            text = value.get("code", b"") if isinstance(value, dict) else value
            if isinstance(text, bytes) and text.count(marker.encode()) > 1: escaped()
        frame = frame.f_back
    """,
    control=False,
    neighbour=_NEIGHBOUR,
)
attack(
    "warm: another program, by its input",
    """
    import numpy, select
    end = time.time() + 3
    while time.time() < end:
        if select.select([0], [], [], 0.1)[0]:
            data = os.read(0, 65536)
            if data: escaped()
            else: break
    """,
    control=False,
    neighbour=_NEIGHBOUR,
)
attack("warm: inherited descriptors", "import numpy\nfor fd in opened(): escaped()")
attack(
    "warm: what waits in the buffers",
    """
    import numpy
    for stream in (sys.stdin, sys.__stdin__):
        if stream.buffer.peek(): escaped()
        if stream.read(): escaped()
    """,
    control=False,
)
attack(
    "warm: changed by the last program",
    """
    import numpy, scipy, sympy
    if getattr(numpy, "left", 0) or numpy.ones(3).sum() != 3 or sympy.Integer(2) + 2 != 4: escaped()
    for name in ("numpy.py", "sitecustomize.py", "left"):
        if os.path.exists("/tmp/" + name): escaped()
    """,
    control=False,
    before="""
    import numpy, scipy, sympy, builtins
    numpy.left = 1; numpy.ones = lambda n: numpy.zeros(n); sympy.Integer = lambda n: 0; builtins.print = None
    for name in ("numpy.py", "sitecustomize.py", "left"): open("/tmp/" + name, "w").write("raise SystemExit(0)")
    """,
)
attack("warm: memory", 'import numpy\nx = numpy.ones((BAIT["memory_mb"] + 100) << 17); degraded()')
attack(
    "warm: user namespace",  # by a child, because only a process of one thread can have a new one
    """
    import numpy
    if os.fork() == 0: assert libc.unshare(0x10000000) == 0; escaped()
    else: os.wait()
    """,
)
attack(
    "warm: limits",
    """
    import numpy
    for name in ("AS", "NPROC", "NOFILE", "FSIZE", "CPU", "CORE"):
        soft, hard = resource.getrlimit(getattr(resource, "RLIMIT_" + name))
        if not 0 <= soft <= hard < 1 << 40: degraded(); print(name)
    """,
    control=False,
)
attack("warm: priority", "import numpy\nassert os.getpriority(os.PRIO_PROCESS, 0) < 5; degraded()")
attack.alone(
    "warm: run another program first",  # the interpreter's own functions are within reach: they start only this one
    """
    import numpy
    frame = sys._getframe()
    while frame.f_back: frame = frame.f_back
    if "main" in frame.f_globals and frame.f_globals is not globals(): frame.f_globals["main"]()
    """,
    stdin="\0\0\0\1N",
)
attack(
    "warm: end before the answer is complete",
    "import numpy\nprint('x' * 100_000); sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)",
    control=False,
    told=lambda answer: answer["status"] == "Success" or len(answer["run_result"]["stdout"]) != 100_001,
)

# ---- the program that starts programs
attack(
    "a program that is another one when it is spawned",
    """
    import multiprocessing
    if __name__ == "__main__":
        code = "import ctypes; print('ESCAPED' if ctypes.CDLL(None).unshare(1 << 28) == 0 else 'held')"
        open("/tmp/main.py", "w").write(code)
        child = multiprocessing.get_context("spawn").Process(target=print); child.start(); child.join(8)
    """,
    control=False,
)
attack(
    "sys.modules without the main program",
    'sys.modules.clear(); sys.stdout = sys.stderr = None; os._exit = None; raise SystemError("end")',
    control=False,
)
attack("a program that nests too deep", "eval('(' * 100_000 + ')' * 100_000); degraded()", control=False)
attack(
    "a program that takes long to compile",
    "compile('x = ' + ' + '.join(['(1 << 60) ** 2'] * 200_000), '', 'exec'); time.sleep(6); degraded()",
    time_s=2.0,
    control=False,
)
attack("the largest program", "#" + "x" * 900_000, control=False)
