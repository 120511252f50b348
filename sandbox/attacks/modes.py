"""Ways to start the sandbox's server: as root or a user, with control groups or without, as a container's first one.

As root all of them are made on this machine, in namespaces of their own; an ordinary user has one.
"""

import os
import pwd
import shlex
import stat
import sys
from pathlib import Path

from tests.kit import ROOT
from tests.kit.sandbox_server import Mode

_USERS = range(60706, 61184)  # systemd gives these to nobody
_SHELL = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-ec"]


def modes() -> list[Mode]:
    """Those that can be tried here. Whether the first of them has control groups shows once it runs."""
    if os.geteuid() != 0:
        return [Mode("user")]
    return [
        Mode("root, control groups", bounded=True),
        Mode("root, no control groups", (*_SHELL, f'{_HIDE_GROUPS}exec "$@"', "sh"), bounded=False),
        _as_user(),
        Mode("root, first process", ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"), first=True),
    ]


def not_here() -> dict[str, str]:
    """The ways that cannot be tried here, and why not."""
    missing: dict[str, str] = {}
    if os.geteuid() != 0:
        reason = "only root can start it so"
        missing |= dict.fromkeys(("root, control groups", "root, no control groups", "root, first process"), reason)
    controllers = [path for path in _ROOTS_OF_VERSION_2 if path.exists()]
    if not any({"memory", "pids"} <= set(path.read_text().split()) for path in controllers):
        missing["control groups of version 2"] = "they have no memory and pids controllers here"
    return missing


_ROOTS_OF_VERSION_2 = [Path("/sys/fs/cgroup/cgroup.controllers"), Path("/sys/fs/cgroup/unified/cgroup.controllers")]
_HIDE_GROUPS = "[ ! -d /sys/fs/cgroup ] || mount -t tmpfs -o mode=555 none /sys/fs/cgroup\n"


def _as_user() -> Mode:
    taken = {entry.pw_uid for entry in pwd.getpwall()}
    user = next(user for user in _USERS if user not in taken)
    drop = [
        "setpriv",
        f"--reuid={user}",
        f"--regid={user}",
        "--clear-groups",
        "--inh-caps=-all",
        "--",
        "env",
        "HOME=/tmp",
    ]
    return Mode(
        "user, no control groups",
        (*_SHELL, f'{_HIDE_GROUPS}{_reachable()}cd {shlex.quote(str(ROOT))}; exec "$@"', "sh", *drop),
        bounded=False,
        user=user,
    )


def _reachable() -> str:
    """Shell commands: the interpreter, its packages and the project where every user can reach them.

    Folders on the way that others cannot enter (/root, often) get an empty one in front of them, with only the way.
    """
    paths = {Path(path).resolve() for path in (sys.base_prefix, sys.prefix, ROOT)}
    closed: dict[Path, list[Path]] = {}
    for path in sorted(paths):
        for parent in reversed(path.parents):
            if not parent.stat().st_mode & stat.S_IXOTH:
                closed.setdefault(parent, []).append(path)
                break
    lines = ["mount -t tmpfs none /mnt"] if closed else []
    for folder, inside in closed.items():
        lines += [f"mkdir /mnt/{i}; mount --rbind {shlex.quote(str(path))} /mnt/{i}" for i, path in enumerate(inside)]
        lines.append(f"mount -t tmpfs -o mode=755 none {shlex.quote(str(folder))}")
        for i, path in enumerate(inside):
            lines.append(
                f"mkdir -p {shlex.quote(str(path))}; mount --move /mnt/{i} {shlex.quote(str(path))}; rmdir /mnt/{i}"
            )
    if closed:
        lines.append("umount /mnt")
    return "".join(f"{line}\n" for line in lines)
