"""Attacks: to get rights, namespaces or users that the program has not got; to reach other processes."""

import contextlib
from typing import Any

from sandbox.attacks.programs.attack import Attacks

RIGHTS = attack = Attacks()


def daemon_lives(bait: dict[str, Any]) -> bool:
    """Whether a process with the mark of the daemon is there."""
    import psutil

    mark = f"{bait['mark']}-1"
    return any(mark in (process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))


def victim_is_dead(bait: dict[str, Any]) -> bool:
    """Whether the host's process that was laid out is gone."""
    import psutil

    return not psutil.pid_exists(bait["victim"]) or psutil.Process(bait["victim"]).status() == "zombie"


def victim_is_slow(bait: dict[str, Any]) -> bool:
    """Whether the host's process that was laid out has got a lower priority. It has its old one afterwards."""
    import psutil

    victim = psutil.Process(bait["victim"])
    if victim.nice() != 19:
        return False
    with contextlib.suppress(psutil.AccessDenied):
        victim.nice(0)
    return True


attack("chroot", 'os.chroot("/tmp"); escaped()')
attack("unshare: user namespace", "assert libc.unshare(0x10000000) == 0; escaped()")
attack(
    "clone: user namespace",
    """
    for namespaces in (0x10000000, 0x7E020000):
        pid = syscall("clone", namespaces | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0: os._exit(0)
        if pid > 0: os.waitpid(pid, 0); escaped()
    """,
)
attack(
    "give a file to another user",
    """
    name = f"/tmp/own{os.getpid()}"; open(name, "w").close()
    try: os.chown(name, 1, 1); escaped()
    finally: os.remove(name)
    """,
)
attack(
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
attack("capabilities: keep them", "assert libc.prctl(8, 1, 0, 0, 0) == 0; degraded()")
attack("capabilities: the bounding set", "assert libc.prctl(23, 21, 0, 0, 0) == 1; escaped()")
attack("new privileges by exec", "assert libc.prctl(39, 0, 0, 0, 0) == 0; escaped()")
attack("no filter of system calls", "assert libc.prctl(21, 0, 0, 0, 0) == 0; escaped()")
attack("the parent's death signal", "assert libc.prctl(1, 0, 0, 0, 0) == 0; degraded()")
attack("the reaper of orphans", "assert libc.prctl(36, 1, 0, 0, 0) == 0; degraded()")
attack("who may trace", "assert libc.prctl(4, 1, 0, 0, 0) == 0; degraded()")

# ---- other processes
attack("signal a process of the host", 'os.kill(BAIT["victim"], 0); escaped()')
attack(
    "kill everything",
    """
    for pid in (BAIT["victim"], 1, os.getppid(), -os.getpgrp(), -1):
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
    """,
    control=False,
    trace=victim_is_dead,
)
attack("slow down a process of the host", 'os.setpriority(os.PRIO_PROCESS, BAIT["victim"], 5); escaped()')
attack(
    "slow down the user's processes",
    "for user in (os.getuid(), 0, BAIT['victim_user']):\n"
    "    with contextlib.suppress(OSError): os.setpriority(os.PRIO_USER, user, 19)",
    control=False,
    trace=victim_is_slow,
)
attack(
    "survive as a daemon",
    """
    if os.fork() == 0:
        with contextlib.suppress(OSError): os.setsid()
        if os.fork() == 0:
            for fd in range(3): os.close(fd)
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(30)", BAIT["mark"] + "-1"])
        os._exit(0)
    time.sleep(0.5)
    """,
    trace=daemon_lives,
)
attack("keep the answer waiting", "if os.fork() == 0:\n    os.setpgid(0, 0); time.sleep(4); escaped()")
