"""Two machines on this one, made of namespaces, with a Ray cluster over both: for tests of several nodes.

A machine has its own network, process ids, host name and /dev/shm; the file system is shared, as a cluster's is. The
kernel removes a machine with its first process, which is killed when the process that made the machine ends.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.kit import ROOT
from verl_vcpo.cpu import environment

_TOOLS = ("ip", "mount", "nsenter", "setpriv", "unshare")
_NAMESPACES = ("net", "mount", "uts", "pid")
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_INTERFACE, _PORT = "vcpo0", 6379
_WAIT_S, _RAY_WAIT_S = 30.0, 300.0
# The first process of a machine reaps the orphans of the machine, which nobody else does.
_FIRST_PROCESS = """
set -e
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs "$2"
mount --bind "$3" /etc/hosts
ip link set lo up
touch "$2/ready"
while :; do sleep 5 & wait; done
"""


@dataclass(frozen=True)
class Machine:
    """One of the two machines.

    pid: the machine's first process, by its number on the real machine.
    """

    name: str
    address: str
    pid: int

    def command(self, *command: str) -> list[str]:
        """Return the command that runs `command` on the machine, in the checkout."""
        namespaces = [f"--{name}" for name in _NAMESPACES]
        return ["nsenter", "--target", str(self.pid), *namespaces, f"--wd={ROOT}", "--", *command]

    def processes(self) -> list[psutil.Process]:
        """Return the processes on the machine, without the first one."""
        own, found = _process_namespace(self.pid), []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):  # a process that has ended since
                zombie = process.status() == psutil.STATUS_ZOMBIE
                if _process_namespace(process.pid) == own and process.pid != self.pid and not zombie:
                    found.append(process)
        return found

    def shared_memory(self) -> set[str]:
        """Return the files in the machine's /dev/shm, also semaphores."""
        return set(os.listdir(f"/proc/{self.pid}/root/dev/shm"))

    def received_bytes(self) -> int:
        """Return the number of bytes that the machine has received over the network."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()
        (fields,) = [line.split() for line in lines if line.strip().startswith(f"{_INTERFACE}:")]
        return int(fields[1])

    def kill_raylet(self) -> None:
        """Kill the process that makes the machine a node of the cluster, by SIGKILL."""
        for process in self.processes():
            if process.name() == "raylet":
                process.kill()

    def cut_off(self) -> None:
        """Disconnect the machine from the network."""
        _run(self.command("ip", "link", "set", _INTERFACE, "down"))

    def plug_in(self) -> None:
        """Connect the machine to the network."""
        _run(self.command("ip", "link", "set", _INTERFACE, "up"))


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster over two machines; `environment` has the variables that a driver on a machine needs.

    temporary: the folder that both machines have instead of /tmp.
    """

    machines: tuple[Machine, Machine]
    environment: Mapping[str, str]
    temporary: Path

    def sockets(self) -> list[Path]:
        """Return the Unix sockets in `temporary`, and the folders of runs."""
        below = [path for path in self.temporary.rglob("*") if path.is_socket()]
        return sorted({*below, *self.temporary.glob("vcpo-*/*")})


def why_not() -> str:
    """Return why this machine cannot be two; empty if it can."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)} (util-linux, iproute2)"
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    # A veth pair inside a namespace of its own, which ends with the command.
    pair = ["ip", "link", "add", _INTERFACE, "type", "veth", "peer", "name", f"{_INTERFACE}p"]
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", *pair], capture_output=True, text=True)
    return f"the kernel makes no network namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@contextlib.contextmanager
def cluster(gpus: tuple[int, int] = (1, 1), cpus: int = 32) -> Iterator[Cluster]:
    """Run two machines with a raylet each, for the block.

    Args:
        gpus: logical devices of the first machine, where Ray's head is, and of the second.
        cpus: logical processors of each machine.

    Raises:
        RuntimeError: a machine or its Ray did not come up.
    """
    token = secrets.token_hex(32)
    # A raylet that was running before a run has nothing of that run's environment.
    ours = ("RAY_", "VCPO_RUN_", "VERL_", "TQ_", *environment.ENVIRONMENT)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    given = plain | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_raylet_start_wait_time_s": "180"}
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="vcpo-nodes-"))
        stack.callback(shutil.rmtree, folder)
        temporary = folder / "tmp"
        temporary.mkdir()
        given["TMPDIR"] = str(temporary)
        machines = stack.enter_context(_machines(folder))
        head = f"{machines[0].address}:{_PORT}"
        for machine, devices in zip(machines, gpus, strict=True):
            _start_ray(machine, head, devices, cpus, folder / "ray", given)
        yield Cluster(machines, given | {"RAY_ADDRESS": head}, temporary)


@contextlib.contextmanager
def _machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """Run two connected machines. Each has a file system of its own at `folder`/ray."""
    with contextlib.ExitStack() as stack:
        (folder / "ray").mkdir()
        names = ("node-a", "node-b")
        hosts = folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{a} {n}" for a, n in zip(_ADDRESSES, names, strict=True))]
        hosts.write_text("\n".join(lines) + "\n")
        a, b = (
            stack.enter_context(_machine(name, address, folder, hosts))
            for name, address in zip(names, _ADDRESSES, strict=True)
        )
        pair = f"name {_INTERFACE} netns {a.pid} type veth peer name {_INTERFACE} netns {b.pid}"
        _run(["ip", "link", "add", *pair.split()])
        for machine in (a, b):
            _run(machine.command("ip", "address", "add", f"{machine.address}/24", "dev", _INTERFACE))
            machine.plug_in()
        yield a, b


@contextlib.contextmanager
def _machine(name: str, address: str, folder: Path, hosts: Path) -> Iterator[Machine]:
    """Run a machine that is not connected yet."""
    unshare = ["unshare", *(f"--{n}" for n in _NAMESPACES), "--fork", "--kill-child", "--mount-proc"]
    first_process = ["bash", "-c", _FIRST_PROCESS, "first-process", name, f"{folder}/ray", str(hosts)]
    with open(folder / f"{name}.log", "wb") as log:
        holder = psutil.Popen(
            ["setpriv", "--pdeathsig", "KILL", *unshare, "--propagation", "private", *first_process],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + _WAIT_S
        while not (children := holder.children()) or not _ready(children[0].pid, folder):
            if holder.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} does not come up: {(folder / f'{name}.log').read_text().strip()}")
            time.sleep(0.05)
        yield Machine(name, address, children[0].pid)
    finally:
        holder.kill()
        holder.wait(_WAIT_S)
        psutil.wait_procs(children, timeout=_WAIT_S)


def _ready(first_process: int, folder: Path) -> bool:
    return Path(f"/proc/{first_process}/root{folder}/ray/ready").exists()


def _start_ray(machine: Machine, head: str, gpus: int, cpus: int, folder: Path, given: Mapping[str, str]) -> None:
    is_head = head.startswith(f"{machine.address}:")
    where = ["--head", f"--port={_PORT}", "--include-dashboard=false"] if is_head else [f"--address={head}"]
    if is_head:
        where.append(f"--temp-dir={folder}")  # the other node takes the head's
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *where, f"--node-ip-address={machine.address}"]
    resources = [f"--num-cpus={cpus}", f"--num-gpus={gpus}", "--object-store-memory=500000000"]
    said = folder.parent / f"{machine.name}-ray.log"  # no pipe: what `ray start` leaves running may hold on to it
    with open(said, "w") as output:
        starting = subprocess.Popen(
            machine.command(*ray, *resources, "--disable-usage-stats"), env=dict(given), stdout=output, stderr=output
        )
        try:
            code = starting.wait(_RAY_WAIT_S)
        except subprocess.TimeoutExpired:
            starting.kill()
            code = starting.wait()
    if code:
        raise RuntimeError(f"`ray start` on {machine.name} ended with {code}: {said.read_text()[-2000:]}")


def _process_namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
