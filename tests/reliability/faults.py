"""Faults injected into the real stack on CPU: `python -m tests.reliability.faults [--only TEXT] [--json]`.

Each fault hits a run of its own (lag 2, a small model) after its third step, or inside the weight update or the
checkpoint that follows. Samplers are replaced while the run goes on; any other fault ends the run with one line, and
the same command with trainer.resume_mode=auto goes on. In the end every due prompt has been trained on once, nothing
was older than its bound, no failure became a reward, and no process, shared memory, semaphore, socket or folder is
left. A fault takes about two and a half minutes on 2 cores.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow.parquet as pq
from tqdm import tqdm

from recipe.command_line import OneLineParser, run_command
from recipe.fully_async_policy.launch.processes import processes_of
from tests.kit.small_run import BATCH, SEED, TrainerRun, abandoned, make_assets
from tests.reliability.moments import (
    after_the_text,
    between_steps,
    inside_a_step,
    inside_a_weight_update,
    marks,
    while_saving,
    while_validating,
)
from verl_vcpo.common.step_lines import read_lines
from verl_vcpo.report.run_log import SKIPPED_FILE

LAG, STEPS = 2, 7
ENGINE = "VLLM::EngineCore"
SETTINGS = [
    f"async.lag={LAG}",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=2",
    "async.sampler_timeout_s=20",
]
_CLEAN_UP_S = 30
_OTHER_RUN_S = 300  # another run on the machine removes the shared memory of its dead samplers when it replaces them


@dataclass(frozen=True)
class Fault:
    """An action on a run, and whether the run survives the action."""

    name: str
    inject: Callable[[TrainerRun], None]
    survives: bool = False
    says: str = "error:"
    """A text in the output of a run that ends."""
    prepare: Callable[[Path], list[str]] = lambda run_dir: []
    """A preparation for the run's folder, which returns more settings."""
    when: Callable[[TrainerRun], None] = between_steps
    """A wait that ends at the moment of the fault."""


def kill(title: str, signum: int = signal.SIGKILL) -> Callable[[TrainerRun], None]:
    """Return a fault: signal the first process with `title` in its title."""

    def inject(run: TrainerRun) -> None:
        victims = run.processes(title)
        if not victims:
            raise RuntimeError(
                f"no process {title!r} among {[' '.join(p.cmdline()) for p in processes_of(run.run_id)]}"
            )
        victims[0].send_signal(signum)

    return inject


def kill_twice(title: str) -> Callable[[TrainerRun], None]:
    """Return a fault: kill a process, and then its replacement."""

    def inject(run: TrainerRun) -> None:
        kill(title)(run)
        after_the_text(run, "1 sampler(s) restarted")
        kill(title)(run)

    return inject


def slow_validation(run_dir: Path) -> list[str]:
    """Prepare a validation before step 1 that marks its begin, and samples one response after the other."""
    marks(run_dir).mkdir()
    return [
        "trainer.val_before_train=true",
        "actor_rollout_ref.rollout.max_num_seqs=1",
        "reward.custom_reward_function.name=slow_in_validation",
        f"+reward.custom_reward_function.reward_kwargs.marks={marks(run_dir)}",
    ]


def two_samplers(run_dir: Path) -> list[str]:
    return ["actor_rollout_ref.rollout.n_gpus_per_node=2"]


def one_straggler(run_dir: Path) -> list[str]:
    """Prepare a response of step 1 whose reward takes longer than the run, and which begins again when it is due."""
    marks(run_dir).mkdir()
    return [
        "async.on_deadline=reissue",
        "reward.custom_reward_function.name=straggles_once",
        f"+reward.custom_reward_function.reward_kwargs.marks={marks(run_dir)}",
    ]


def look_for_prompt_begun_again(run: TrainerRun) -> None:
    """Raise RuntimeError if no prompt was begun again."""
    if not sum(line.get("vcpo/async/reissued_prompts", 0) for line in run.lines()):
        raise RuntimeError("no prompt was begun again")


def signal_driver(signum: int) -> Callable[[TrainerRun], None]:
    return lambda run: run.process.send_signal(signum)


def spoil_newest_checkpoint(spoil: Callable[[Path], None]) -> Callable[[TrainerRun], None]:
    """Return a fault: end the run, then damage the largest file of the newest checkpoint."""

    def inject(run: TrainerRun) -> None:
        run.wait_for_step(5)  # two checkpoints
        run.process.send_signal(signal.SIGTERM)
        run.wait()
        folder = max(
            (run.run_dir / "checkpoints").glob("global_step_*"), key=lambda path: int(path.name.split("_")[-1])
        )
        spoil(max((p for p in folder.rglob("*") if p.is_file()), key=lambda path: path.stat().st_size))

    return inject


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path) -> None:
    with open(file, "r+b") as f:
        f.seek(file.stat().st_size // 2)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 1]))


def disk_for_one_checkpoint(run_dir: Path) -> list[str]:
    """Mount a file system that is full before the second checkpoint is written. Needs the right to mount one."""
    disk = run_dir.with_name(f"{run_dir.name}-disk")
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        raise RuntimeError(f"no right to mount a small file system: {mounted.stderr.decode().strip()}")
    return [f"trainer.default_local_dir={disk}"]


def make_room(run: TrainerRun) -> None:
    """Wait until the run has ended for want of space, then enlarge the file system."""
    run.wait()
    disk = run.run_dir.with_name(f"{run.run_dir.name}-disk")
    subprocess.run(["mount", "-o", "remount,size=1g", str(disk)], check=True)


FAULTS = [
    Fault("kill -9 of a vLLM engine", kill(ENGINE), survives=True),
    Fault("kill -9 of a vLLM server", kill("ray::CPUvLLMHttpServer"), survives=True),
    Fault("kill -9 of what receives a sampler's weights", kill("CheckpointEngineWorker"), survives=True),
    Fault("a sampler that hangs", kill(ENGINE, signal.SIGSTOP), survives=True),
    Fault("a straggler, begun again when it is due", look_for_prompt_begun_again, True, prepare=one_straggler),
    Fault("kill -9 of an agent-loop worker", kill("ray::LagKAgentLoopWorker")),
    Fault("kill -9 of a trainer worker", kill("ray::WorkerDict")),
    Fault("kill -9 of the TransferQueue storage", kill("ray::SimpleStorageUnit")),
    Fault("SIGTERM to the driver, between steps", signal_driver(signal.SIGTERM), says="interrupted"),
    Fault(
        "SIGTERM to the driver, inside a step", signal_driver(signal.SIGTERM), says="interrupted", when=inside_a_step
    ),
    Fault("kill -9 of the driver, between steps", signal_driver(signal.SIGKILL), says=""),
    Fault("kill -9 of the driver, inside a step", signal_driver(signal.SIGKILL), says="", when=inside_a_step),
    Fault("kill -9 of a vLLM engine, inside a weight update", kill(ENGINE), survives=True, when=inside_a_weight_update),
    Fault(
        "kill -9 of a vLLM engine, while validating", kill(ENGINE), True, prepare=slow_validation, when=while_validating
    ),
    Fault("kill -9 of a vLLM engine, twice in a row", kill_twice(ENGINE), survives=True),
    Fault("kill -9 of one of two vLLM engines", kill(ENGINE), survives=True, prepare=two_samplers),
    Fault(
        "kill -9 of one of two vLLM engines, inside a weight update",
        kill(ENGINE),
        survives=True,
        prepare=two_samplers,
        when=inside_a_weight_update,
    ),
    Fault("kill -9 of a trainer worker, inside a weight update", kill("ray::WorkerDict"), when=inside_a_weight_update),
    Fault("kill -9 of a trainer worker, while saving", kill("ray::WorkerDict"), when=while_saving),
    Fault("kill -9 of the driver, while saving", signal_driver(signal.SIGKILL), says="", when=while_saving),
    Fault("a full disk while saving", make_room, says="MB free", prepare=disk_for_one_checkpoint),
    Fault("a truncated checkpoint", spoil_newest_checkpoint(truncate), says=""),
    Fault("a bit flipped in a checkpoint", spoil_newest_checkpoint(flip_a_bit), says=""),
]


@dataclass(frozen=True)
class FaultVerdict:
    """The verdict on a run with a fault."""

    fault: str
    lost: int
    """The number of due prompts that were never trained on."""
    duplicated: int
    lag_violations: int
    complaint: str
    """All other mistakes, in words; empty if there are none."""
    seconds: float

    @property
    def ok(self) -> bool:
        return not (self.lost or self.duplicated or self.lag_violations or self.complaint)


def order_of_rows(assets: Path, rows: int) -> list[int]:
    """Return `extra_info.index` of the first `rows` prompts, in the order of submission."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import create_rl_sampler

    indices = [info["index"] for info in pq.read_table(assets / "data/train.parquet")["extra_info"].to_pylist()]
    sampler = create_rl_sampler(OmegaConf.create({"shuffle": True, "seed": int(SEED or 1)}), indices)
    return [indices[i] for i, _ in zip(sampler, range(rows), strict=False)]


def try_fault(fault: Fault, assets: Path, run_dir: Path) -> FaultVerdict:
    """Run into the fault, go on after it, and account for every prompt."""
    start, before, complaints = time.monotonic(), abandoned(), []
    settings = [*SETTINGS, *fault.prepare(run_dir)]
    run = TrainerRun(assets, run_dir, *settings)
    fault.when(run)
    fault.inject(run)
    code = run.wait()
    if fault.survives and code:
        complaints.append(f"the run ended with exit code {code}: {run.tail()[-300:]}")
    if not fault.survives:
        if code == 0:
            complaints.append("the run went on to its end as if nothing had happened")
        if fault.says not in run.tail():
            complaints.append(f"its output does not say {fault.says!r}: {run.tail()[-300:]}")
        complaints += left_over(run.run_id, before)
        if TrainerRun(assets, run_dir, *settings, "trainer.resume_mode=auto").wait():
            complaints.append(f"it does not resume: {run.tail()[-300:]}")
    complaints += left_over(run.run_id, before)
    counts = account(run, order_of_rows(assets, (STEPS - LAG) * BATCH), complaints)
    return FaultVerdict(
        fault.name, **counts, complaint="; ".join(complaints), seconds=round(time.monotonic() - start, 1)
    )


def left_over(run_id: str, before: set[str]) -> list[str]:
    """Return what an ended run has left on this machine, after the time for its clean-up.

    Args:
        before: `abandoned` before the run.
    """
    start = time.monotonic()
    # The clean-up after a killed driver takes a moment.
    while processes_of(run_id) and time.monotonic() < start + _CLEAN_UP_S:
        time.sleep(0.5)
    found = []
    if processes := processes_of(run_id):
        found.append(f"processes left: {[p.name() for p in processes]}")
    files = abandoned() - before
    while files and time.monotonic() < start + _OTHER_RUN_S:
        time.sleep(0.5)
        files &= abandoned()  # other runs' files come and go; files that this run has left stay
    if files:
        found.append(f"files left: {sorted(files)}")
    return found


def account(run: TrainerRun, due: list[int], complaints: list[str]) -> dict[str, int]:
    """Count prompts lost and duplicated, and lags above the bound, from the run's metrics and its skipped prompts."""
    steps, record = [line for line in run.lines() if line["step"]], run.run_dir / SKIPPED_FILE
    skipped = [line["row"] for line in (read_lines(record) if record.is_file() else ()) if not line["held_out"]]
    if [line["step"] for line in steps] != list(range(1, STEPS + 1)):
        complaints.append(f"metrics.jsonl has the steps {[line['step'] for line in steps]}")
    if any(not line["reward"] > 0 for line in steps):
        complaints.append("a step has a reward of zero, which this task does not give")
    left = Counter(row for line in steps for row in line["trained_rows"]) + Counter(skipped)
    return {
        "lost": sum(row not in left for row in due),
        "duplicated": sum(times - 1 for times in left.values()),
        "lag_violations": sum(line["lag_max"] > LAG for line in steps),
    }


def print_table(verdicts: list[FaultVerdict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("fault", "lost", "duplicated", "lag > k", "seconds", "")
    for v in verdicts:
        outcome = "ok" if v.ok else v.complaint or "WRONG"
        table.add_row(v.fault, str(v.lost), str(v.duplicated), str(v.lag_violations), f"{v.seconds:.0f}", outcome)
    Console(width=120).print(table)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--only", metavar="TEXT", help="faults whose name contains TEXT")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args()
    chosen = [fault for fault in FAULTS if (arguments.only or "") in fault.name]
    if not chosen:
        names = "; ".join(fault.name for fault in FAULTS)
        parser.error(f"--only {arguments.only}: no such fault; choose from {names}")
    folder = Path(tempfile.mkdtemp(prefix="vcpo-faults-"))
    make_assets(folder)
    verdicts = []
    for i, fault in enumerate(tqdm(chosen, desc="faults")):
        try:
            verdicts.append(try_fault(fault, folder, folder / f"run{i}"))
        except RuntimeError as error:
            verdicts.append(FaultVerdict(fault.name, 0, 0, 0, str(error)[-400:], 0.0))
        tqdm.write(f"{verdicts[-1]}", file=sys.stderr)
    print_table(verdicts)
    for disk in folder.glob("*-disk"):
        subprocess.run(["umount", str(disk)], check=True)
    if all(verdict.ok for verdict in verdicts):
        shutil.rmtree(folder)
    else:
        print(f"The runs and their outputs are in {folder}")
    if arguments.json:
        totals = {name: sum(getattr(v, name) for v in verdicts) for name in ("lost", "duplicated", "lag_violations")}
        rows = [asdict(verdict) for verdict in verdicts]
        print(json.dumps({"faults": len(verdicts), **totals, "rows": rows}))
    return 0 if all(verdict.ok for verdict in verdicts) else 1


if __name__ == "__main__":
    run_command(main)
