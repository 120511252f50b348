"""A small run of the real stack on CPU, with a task and a model that take seconds a step, for tests of the whole."""

import contextlib
import ipaddress
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import psutil

from recipe.fully_async_policy.launch import processes
from recipe.fully_async_policy.launch.processes import processes_of
from tests.kit import ROOT
from tests.kit.nodes import Cluster
from verl_vcpo.common import shared_memory
from verl_vcpo.common.run_folder import private_folder
from verl_vcpo.report.run_log import METRICS_FILE, read_metrics

BATCH = 4
SEED = os.environ.get("VCPO_TEST_SEED")
"""The seed of all draws of a run; None: the seeds of the product's settings."""
_TAUGHT = ["--steps", "20", *(["--seed", SEED] if SEED else [])]
AS_MACHINES_ARE = {
    "CUDA_VISIBLE_DEVICES": "NoDevFiles",
    "ROCR_VISIBLE_DEVICES": "0",
    "VLLM_PORT": "tcp://10.43.1.39:8000",
    "http_proxy": "http://127.0.0.1:9",
    "LC_ALL": "C",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONUTF8": "0",
}
"""Variables that SLURM, Kubernetes and users set, and that end a run that does not adapt its environment."""
_TIMEOUT_S = 900
_OF_A_RUN = re.compile(r"(?:vcpo-)?([0-9a-f]{12})(?:-weights-|[0-9a-f]{4}$)")


def make_assets(folder: Path, environment: dict[str, str] | None = None) -> Path:
    """Make data/{train,val}.parquet and model/, a warm start of a few steps, by the project's commands.

    Args:
        folder: the folder of the assets.
        environment: the variables of the commands; None: this process's.
    """
    for command in (
        ["scripts.prepare_data", "countdown", "--out", f"{folder}/data", "--train", "64", "--val", "16"],
        ["recipe.warm_start.train", "--data", f"{folder}/data", "--out", f"{folder}/model", *_TAUGHT],
    ):
        subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment, check=True, capture_output=True)
    return folder


def seeds() -> list[str]:
    """Return the settings that `VCPO_TEST_SEED` stands for: the order of prompts, the samplers and the trainer."""
    actor = "actor_rollout_ref.actor"
    names = "data.seed", "actor_rollout_ref.rollout.seed", f"{actor}.megatron.seed", f"{actor}.data_loader_seed"
    return [f"{name}={SEED}" for name in names] if SEED else []


def small_task(assets: Path, run_dir: Path) -> list[str]:
    """Return the countdown preset on `assets`, with a reward from which a few steps can learn."""
    return [
        "+task=countdown",
        "method=vcpo",
        f"data.train_files={assets}/data/train.parquet",
        f"data.val_files={assets}/data/val.parquet",
        f"actor_rollout_ref.model.path={assets}/model",
        f"run_dir={run_dir}",
        "reward.custom_reward_function.path=pkg://tests.kit.digits_reward",
        # small enough for seconds, large enough for groups with unequal rewards
        f"data.train_batch_size={BATCH}",
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=3",
        # of 128 tokens each: a tenth of the memory that vLLM would fill with keys and values
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=256",
        *seeds(),
    ]


def abandoned() -> set[str]:
    """Return unused shared memory, semaphores, sockets and folders of runs on this machine.

    A process that has mapped shared memory uses it; a run uses its weights and its private folder.
    """
    memory = {file.path for file in shared_memory.files() - shared_memory.mapped_by(psutil.process_iter())}
    owners = {path: _OF_A_RUN.match(Path(path).name) for path in memory | {*map(str, private_folder().iterdir())}}
    return {path for path, run in owners.items() if not (run and processes_of(run[1]))}


class Listener(NamedTuple):
    """A TCP port on which a process takes connections."""

    process: str
    address: str
    port: int

    @property
    def on_loopback(self) -> bool:
        address = ipaddress.ip_address(self.address)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def listening(processes: list[psutil.Process]) -> list[Listener]:
    """Return the ports on which processes take connections, from other machines too unless `on_loopback`."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):  # a process that has ended since
            name = " ".join(process.cmdline()[:5]).strip()  # Ray's actors write theirs there
            ports = [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            found |= {Listener(name, local.ip, local.port) for local in ports}
    return sorted(found)


def run_id_of(launcher: psutil.Process) -> str:
    """Return the id that a launcher gave its run: an argument of the process that cleans up after the launcher."""
    for process in launcher.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # a process that has ended since
            command = process.cmdline()
            if processes.__name__ in command:
                return command[command.index(processes.__name__) + 1]
    raise RuntimeError(f"process {launcher.pid} has started no run")


class TrainerRun:
    """One launch of the trainer, or of another `module` that takes the same settings.

    Args:
        cluster: the launcher runs on the cluster's first machine, and joins the cluster's Ray.
        environment: variables in addition to this process's.
        task: the settings of the task, of `assets` and `run_dir`.
    """

    def __init__(
        self,
        assets: Path,
        run_dir: Path,
        *overrides: str,
        module: str = "recipe.fully_async_policy.main",
        cluster: Cluster | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        task: Callable[[Path, Path], list[str]] = small_task,
    ) -> None:
        self.run_dir = run_dir
        without_validation = ["trainer.val_before_train=false", "trainer.test_freq=-1"]
        arguments = [*task(assets, run_dir), *without_validation, *overrides]
        command = [sys.executable, "-u", "-m", module, *arguments]
        self._output = run_dir.parent / f"{run_dir.name}.log"
        with open(self._output, "a") as output:
            self.process = psutil.Popen(
                cluster.machines[0].command(*command) if cluster else command,
                cwd=ROOT,
                env={**(cluster.environment if cluster else os.environ), **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a process group of its own, as a terminal gives it
                # a shell's background job ignores Ctrl-C, and so would all that it starts
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        self.run_id = ""
        self._entered = cluster is not None

    @property
    def launcher(self) -> psutil.Process:
        """The process that gets signals; on another machine, a child of the process that entered the machine."""
        return self.process.children()[0] if self._entered else self.process

    def wait_for_step(self, step: int) -> None:
        """Wait until `step` is in metrics.jsonl."""
        deadline = time.monotonic() + _TIMEOUT_S
        while max((line["step"] for line in self.lines()), default=0) < step:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"step {step} was not reached:\n{self.tail()}")
            time.sleep(0.2)
        self.run_id = run_id_of(self.process)

    def wait(self) -> int:
        """Wait for the end of the run, and return the exit code."""
        try:
            return self.process.wait(_TIMEOUT_S)
        except psutil.TimeoutExpired:
            for process in [*self.process.children(recursive=True), self.process]:
                process.kill()
            raise RuntimeError(f"the run hangs:\n{self.tail()}") from None

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the run's processes with `name` in their title."""
        found = []
        for process in processes_of(self.run_id):
            with contextlib.suppress(psutil.Error):  # a process that has ended since
                if name in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def lines(self) -> list[dict[str, Any]]:
        return read_metrics(self.run_dir) if (self.run_dir / METRICS_FILE).is_file() else []

    def tail(self) -> str:
        return self._output.read_text()[-3000:]
