"""Runs over two Ray nodes, made of this machine: `python -m tests.reliability.nodes [--only TEXT] [--json]`.

Each case is a run of the real stack on CPU with a small model: trainer and samplers on different nodes, equal at lag 0
to the same run on one node, within the bound at lag 2; a node whose raylet is killed, or whose link is cut; a driver
that is killed. After each case nothing of the run is left on either node. The command needs root. A case takes three to
eight minutes on 2 busy cores.
"""

import functools
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tqdm import tqdm

from recipe.command_line import OneLineParser, run_command
from recipe.fully_async_policy.launch.processes import processes_of
from tests.kit.nodes import Cluster, cluster, why_not
from tests.kit.small_run import BATCH, TrainerRun, make_assets

STEPS, LAG = 5, 2
# The settings of a run at lag 0 that must equal the run on one node; one response at a time, because the last digits of
# vLLM's results depend on the other responses of a batch.
REPEATABLE = [
    *("async.lag=0", "async.deterministic=true"),
    *("actor_rollout_ref.rollout.max_num_seqs=1", "actor_rollout_ref.rollout.enable_prefix_caching=false"),
    *(f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={STEPS}"),
]
LAGGING = [f"async.lag={LAG}", f"trainer.total_training_steps={STEPS}"]
LOSING = [f"async.lag={LAG}", "trainer.total_training_steps=7", "trainer.save_freq=3", "async.sampler_timeout_s=20"]
METRICS = ("critic/score/mean", "actor/loss", "actor/grad_norm", "actor/vcpo/baseline", "actor/vcpo/ess_ratio")
_TRAINER, _SAMPLER = "ray::WorkerDict", "ray::CPUvLLMHttpServer"
_LOST_AFTER = 3
_CLEAN_UP_S = 180  # a node that is cut off notices after a minute


@dataclass(frozen=True)
class Case:
    """A run on a cluster of two nodes.

    gpus: logical devices of the nodes. The trainer takes one of the node with more, the samplers the others.
    inject: the fault, after step `_LOST_AFTER`.
    says: a text in the output of a run that ends.
    same: whether metrics and weights must equal those of the run on one node.
    """

    name: str
    gpus: tuple[int, int]
    settings: list[str]
    inject: Callable[[TrainerRun, Cluster], None] | None = None
    says: str = "error: "
    same: bool = False

    @property
    def samplers(self) -> int:
        return sum(self.gpus) - 1


@dataclass
class NodesVerdict:
    """The verdict on a run over two nodes.

    trainer, samplers: the nodes of the trainer and of each sampler.
    network_mb: the MB that the node without the trainer received over the network.
    difference: the largest relative difference of a metric or a weight from the run on one node; None: not compared.
    """

    case: str
    trainer: str = ""
    samplers: list[str] = field(default_factory=list)
    steps: int = 0
    lag_max: int = 0
    weight_sync_s: float = 0.0
    network_mb: float = 0.0
    difference: float | None = None
    outcome: str = ""
    complaints: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.complaints


def lose_raylet(run: TrainerRun, both: Cluster) -> None:
    """Kill the second node's raylet."""
    both.machines[1].kill_raylet()


def cut_link(run: TrainerRun, both: Cluster) -> None:
    """Cut the second node's link."""
    both.machines[1].cut_off()


def kill_driver(run: TrainerRun, both: Cluster) -> None:
    """Kill the driver, by SIGKILL."""
    run.launcher.kill()


CASES = [
    Case("trainer and sampler on different nodes, lag 2", (1, 1), LAGGING),
    Case("trainer and sampler on different nodes, lag 0", (1, 1), REPEATABLE, same=True),
    Case("samplers on both nodes, lag 0", (2, 1), REPEATABLE, same=True),
    Case("a raylet killed, samplers on both nodes", (2, 1), LOSING, lose_raylet),
    Case("a link cut, samplers on both nodes", (2, 1), LOSING, cut_link),
    Case("kill -9 of the driver", (1, 1), LOSING, kill_driver, says=""),
]


def try_case(case: Case, assets: Path, run_dir: Path, one_node: Callable[[], Path]) -> NodesVerdict:
    """Run a case on two nodes, check its results, and look for its remains on both nodes.

    Args:
        one_node: a function that makes the same run on one node, for cases that need it, and returns its folder.
    """
    start, verdict = time.monotonic(), NodesVerdict(case.name)
    with cluster(gpus=case.gpus) as both:
        before = [machine.shared_memory() for machine in both.machines]
        run = TrainerRun(
            assets, run_dir, *case.settings, f"actor_rollout_ref.rollout.nnodes={case.samplers}", cluster=both
        )
        received = [machine.received_bytes() for machine in both.machines]
        run.wait_for_step(1)
        note_places(verdict, run, both)
        if case.inject:
            run.wait_for_step(_LOST_AFTER)
            case.inject(run, both)
        code = run.wait()
        for machine, earlier in zip(both.machines, received, strict=True):
            if machine.name != verdict.trainer:
                verdict.network_mb = round((machine.received_bytes() - earlier) / 1e6, 1)
        verdict.outcome = _outcome(run, code)
        verdict.complaints += left_over(run.run_id, both, before)
        if code and not case.inject:
            verdict.complaints.append(f"exit code {code}: {run.tail()[-500:]}")
        elif code:
            _resume(case, assets, run, both, verdict)
    _account(run.lines(), case, verdict)
    if case.same:
        verdict.difference = difference(run_dir, one_node())
        if verdict.difference > 1e-4:
            verdict.complaints.append("another result than on one node")
    verdict.seconds = round(time.monotonic() - start, 1)
    return verdict


def note_places(verdict: NodesVerdict, run: TrainerRun, both: Cluster) -> None:
    """Note the nodes of trainer and samplers, which have to be on both nodes."""
    for machine in both.machines:
        on_machine = set(machine.processes())
        if on_machine & set(run.processes(_TRAINER)):
            verdict.trainer = machine.name
        verdict.samplers += [machine.name for _ in on_machine & set(run.processes(_SAMPLER))]
    if {verdict.trainer, *verdict.samplers} != {machine.name for machine in both.machines}:
        verdict.complaints.append("trainer and samplers are not on both nodes")


def _outcome(run: TrainerRun, code: int) -> str:
    """Return the run's line about its end; the progress bar may come before it in the same line."""
    said = re.search(r"error: .*" if code else r"the run goes on with \d+", run.tail())
    return said[0].strip() if said else f"exit code {code}" if code else "to its end"


def _resume(case: Case, assets: Path, run: TrainerRun, both: Cluster, verdict: NodesVerdict) -> None:
    """Run the same command on the remaining node, which has a device for one sampler."""
    if not verdict.outcome.startswith(case.says):
        verdict.complaints.append(f"no line says why it ended: {run.tail()[-500:]}")
    settings = [*case.settings, "trainer.resume_mode=auto"]
    resumed = TrainerRun(assets, run.run_dir, *settings, cluster=both)
    if resumed.wait():
        verdict.complaints.append(f"it does not resume: {resumed.tail()[-500:]}")
    verdict.outcome += "; resumed"


def _account(lines: list[dict[str, Any]], case: Case, verdict: NodesVerdict) -> None:
    steps = [line for line in lines if line["step"]]
    verdict.steps = len(steps)
    if not steps:
        return
    verdict.lag_max = int(max(line["lag_max"] for line in steps))
    verdict.weight_sync_s = round(sorted(line["weight_sync_s"] for line in steps)[len(steps) // 2], 2)
    bound = 0 if case.same else LAG
    if verdict.lag_max > bound:
        verdict.complaints.append(f"lag {verdict.lag_max} is above {bound}")
    rows = [row for line in steps for row in line["trained_rows"]]
    if len(rows) != len(set(rows)) or len(rows) != len(steps) * BATCH:
        verdict.complaints.append("a prompt was trained on twice, or not at all")


def difference(run_dir: Path, reference: Path) -> float:
    """Return the largest relative difference of two runs in a step's metric or a weight after the last step."""
    from verl_vcpo.report.run_log import read_metrics

    ours, theirs = ([line for line in read_metrics(folder) if line["step"]] for folder in (run_dir, reference))
    if [line["step"] for line in ours] != [line["step"] for line in theirs]:
        raise RuntimeError(f"{len(ours)} steps cannot be compared with {len(theirs)}")
    found = [
        abs(a[name] - b[name]) / max(abs(b[name]), 1e-2) for a, b in zip(ours, theirs, strict=True) for name in METRICS
    ]
    a, b = _weights(run_dir), _weights(reference)
    return float(max(found + [float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in b]))


def _weights(run_dir: Path) -> dict[str, Any]:
    """Return the weights in the checkpoint of the last step, under Hugging Face names."""
    (file,) = (run_dir / "checkpoints" / f"global_step_{STEPS}").rglob("*.safetensors")
    return load_file(file)


def left_over(run_id: str, both: Cluster, before: list[set[str]]) -> list[str]:
    """Return what an ended run has left on both machines, after the time for its clean-up."""
    deadline = time.monotonic() + _CLEAN_UP_S
    while True:
        found = []
        for machine, had in zip(both.machines, before, strict=True):
            if processes := set(processes_of(run_id)) & set(machine.processes()):
                found.append(f"processes left on {machine.name}: {sorted(' '.join(p.cmdline()) for p in processes)}")
            if memory := machine.shared_memory() - had:
                found.append(f"shared memory left on {machine.name}: {sorted(memory)}")
        if sockets := both.sockets():
            found.append(f"sockets left: {[str(path) for path in sockets]}")
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def print_table(verdicts: list[NodesVerdict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "trainer", "samplers", "steps", "lag", "sync s", "MB", "difference", "outcome", "wrong")
    for v in verdicts:
        difference = "" if v.difference is None else f"{v.difference:.0e}"
        numbers = (str(v.steps), str(v.lag_max), f"{v.weight_sync_s:.2f}", f"{v.network_mb:.0f}", difference)
        table.add_row(
            v.case, v.trainer, " ".join(v.samplers), *numbers, v.outcome, "; ".join(v.complaints) or "nothing"
        )
    Console(width=160).print(table)


def run_on_one_node(assets: Path, run_dir: Path) -> Path:
    """Make the run that runs at lag 0 are compared with, and return its folder."""
    run = TrainerRun(assets, run_dir, *REPEATABLE)
    if run.wait():
        raise RuntimeError(f"the run on one node fails: {run.tail()[-500:]}")
    return run_dir


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--only", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args()
    cases = [case for case in CASES if (arguments.only or "") in case.name]
    if not cases:
        parser.error(f"--only {arguments.only}: no such case; choose from {'; '.join(case.name for case in CASES)}")
    if reason := why_not():
        parser.error(f"this machine cannot be two: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="vcpo-nodes-bench-"))
    assets, verdicts = make_assets(folder), []
    one_node = functools.cache(lambda: run_on_one_node(assets, folder / "one"))
    for i, case in enumerate(tqdm(cases, desc="cases")):
        try:
            verdicts.append(try_case(case, assets, folder / f"run{i}", one_node))
        except RuntimeError as error:
            verdicts.append(NodesVerdict(case.name, complaints=[str(error)[-500:]]))
    print_table(verdicts)
    if all(verdict.ok for verdict in verdicts):
        shutil.rmtree(folder)
    else:
        print(f"The runs and their outputs are in {folder}")
    if arguments.json:
        print(json.dumps({"cases": len(verdicts), "rows": [asdict(verdict) for verdict in verdicts]}))
    return 0 if all(verdict.ok for verdict in verdicts) else 1


if __name__ == "__main__":
    run_command(main)
