"""At lag 0 a run is verl's synchronous one; so is one that SIGTERM stopped, and that went on over two nodes."""

import contextlib
import re
import shlex
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.fully_async_policy.launch.processes import processes_of
from tests.kit.nodes import cluster, why_not
from tests.kit.small_run import AS_MACHINES_ARE, BATCH, TrainerRun, abandoned
from tests.reliability import nodes
from tests.reliability.faults import left_over
from verl_vcpo.common.run_id import run_in
from verl_vcpo.loop.checkpoint import checkpoints, written_by
from verl_vcpo.report.run_log import METRICS_FILE, SAMPLES_FILE, WEIGHTS_FOLDER, read_metrics
from verl_vcpo.report.sample_log import SAMPLES, read_samples

pytestmark = pytest.mark.e2e

STEPS, SAVED_AFTER, STOPPED_AFTER = 6, 3, 4
CALLS = BATCH * 4  # of the reward, in a step
WEIGHTS_MB = 4.0  # of the small model, in fp32
CANNOT_BE_TWO = why_not()
METRICS = ("critic/score/mean", "actor/loss", "actor/grad_norm", "actor/vcpo/baseline", "actor/vcpo/ess_ratio")
SETTINGS = [
    "async.lag=0",
    "async.deterministic=true",
    # one response at a time: what vLLM computes depends in the last digit on what else is in its batch
    "actor_rollout_ref.rollout.max_num_seqs=1",
    "actor_rollout_ref.rollout.enable_prefix_caching=false",
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={SAVED_AFTER}",
    "samples_every=1",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
]
KEPT = ["save_weights=true", "trainer.max_actor_ckpt_to_keep=1"]
NULS = "\0" * 99 + "\n"
"""A line as a power cut leaves it."""
DEBRIS = re.compile(r"Traceback|never retrieved|was destroyed|Exception ignored")


def waiting_after(steps: int, marks: Path) -> list[str]:
    """The settings of a run that cannot get past so many steps until `marks`/go is there, however slow a test is."""
    marks.mkdir()
    reward = "reward.custom_reward_function"
    fixed = [f"+{reward}.reward_kwargs.{name}={value}" for name, value in (("marks", marks), ("calls", steps * CALLS))]
    return [f"{reward}.name=waits", *fixed, "async.reward_timeout_s=600"]


@dataclass
class Stopped:
    """A run that was stopped while it trained: its folder, its log and output, its exit code and what it left.

    processes: at once; left: soon after, since other runs on the machine have shared memory that they do not map yet.
    """

    run_dir: Path
    log: list[dict[str, Any]]
    output: str
    exit_code: int
    processes: list[Any]
    left: list[str]


@pytest.fixture(scope="module")
def stopped(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    before = abandoned()
    folder = tmp_path_factory.mktemp("lag0")
    run = TrainerRun(
        assets,
        folder / "run",
        *SETTINGS,
        *KEPT,
        *waiting_after(STOPPED_AFTER, folder / "marks"),
        environment=AS_MACHINES_ARE,
    )
    run.wait_for_step(STOPPED_AFTER)
    assert processes_of(run.run_id), "the run's processes are not found, so their absence proves nothing"
    run.process.send_signal(signal.SIGTERM)
    exit_code = run.wait()
    processes = processes_of(run.run_id)
    return Stopped(run.run_dir, run.lines(), run.tail(), exit_code, processes, left_over(run.run_id, before))


@dataclass
class Resumed:
    """The same run, gone on with over two nodes where this machine can be two, else on one.

    network_mb: what came to the samplers' node, in MB; left: what is left of the run on the two nodes.
    """

    log: list[dict[str, Any]]
    output: str
    places: nodes.NodesVerdict
    network_mb: float
    left: list[str]


@pytest.fixture(scope="module")
def resumed(assets: Path, stopped: Stopped) -> Resumed:
    for name in (METRICS_FILE, SAMPLES_FILE):
        with open(stopped.run_dir / name, "a") as log:
            log.write(NULS)
            log.write('{"step": 5, "rew')  # as if kill -9 had come while a line was written
    marks = stopped.run_dir.with_name("marks-of-resumed")
    waiting = waiting_after(STEPS - 1 - SAVED_AFTER, marks)
    settings = [*SETTINGS, *KEPT, *waiting, "trainer.resume_mode=auto"]
    places, network, left = nodes.NodesVerdict("resumed"), [0], list[str]()
    with contextlib.ExitStack() as stack:
        both = None if CANNOT_BE_TWO else stack.enter_context(cluster())
        machines = both.machines if both else ()
        before = [machine.shared_memory() for machine in machines]
        received = [machine.received_bytes() for machine in machines]
        run = TrainerRun(assets, stopped.run_dir, *settings, cluster=both)
        run.wait_for_step(STEPS - 1)
        if both:
            nodes.note_places(places, run, both)
        (marks / "go").touch()
        assert run.wait() == 0, run.tail()
        if both:
            network = [
                m.received_bytes() - r for m, r in zip(machines, received, strict=True) if m.name in places.samplers
            ]
            left = nodes.left_over(run.run_id, both, before)
    return Resumed(run.lines(), run.tail(), places, sum(network) / 1e6, left)


@pytest.fixture(scope="module")
def synchronous(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of verl's own trainer."""
    run = TrainerRun(assets, tmp_path_factory.mktemp("sync") / "run", *SETTINGS, module="tests.e2e.sync_trainer")
    assert run.wait() == 0, run.tail()
    return run.run_dir


def weights(run_dir: Path, step: int) -> dict[str, Any]:
    """What the checkpoint of `step` holds, under Hugging Face names."""
    (file,) = (run_dir / "checkpoints" / f"global_step_{step}").rglob("*.safetensors")
    return load_file(file)


def kept(run_dir: Path, step: int) -> dict[str, Any]:
    """What is kept of the checkpoint of `step`, whether or not that is still there."""
    return load_file(run_dir / WEIGHTS_FOLDER / f"step_{step}" / "model.safetensors")


def same_weights(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, weight in a.items():
        assert (weight - b[name]).abs().max() <= 1e-4 * weight.abs().max(), name


def same_updates(ours: list[dict[str, Any]], verls: list[dict[str, Any]]) -> None:
    for a, b in zip(ours, verls, strict=True):
        assert a["step"] == b["step"] and a["lag_max"] == 0
        for name in METRICS:
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), (name, a["step"])


def test_sigterm_ends_a_run_and_leaves_nothing(stopped: Stopped) -> None:
    assert stopped.exit_code == 143
    assert not stopped.processes
    assert not stopped.left
    assert len(stopped.log) == STOPPED_AFTER
    assert not DEBRIS.search(stopped.output), stopped.output
    (again,) = re.findall(rf"^To go on from global_step_{SAVED_AFTER}:\n  (.*)$", stopped.output, re.MULTILINE)
    assert {*SETTINGS, *KEPT, f"run_dir={stopped.run_dir}", "trainer.resume_mode=auto"} <= {*shlex.split(again)}


def test_lag_0_is_verls_synchronous_trainer(stopped: Stopped, synchronous: Path) -> None:
    same_updates(stopped.log, read_metrics(synchronous)[: len(stopped.log)])
    same_weights(kept(stopped.run_dir, SAVED_AFTER), weights(synchronous, SAVED_AFTER))


def test_stopped_and_resumed_it_is_the_same_run(stopped: Stopped, resumed: Resumed, synchronous: Path) -> None:
    assert f"after step {SAVED_AFTER}" in resumed.output, "it began anew, so it proves nothing"
    assert [line["step"] for line in resumed.log] == list(range(1, STEPS + 1))
    rows = [row for line in resumed.log for row in line["trained_rows"]]
    assert len(rows) == len(set(rows)) == STEPS * BATCH
    of_samples = [sample["step"] for sample in read_samples(stopped.run_dir)]
    assert of_samples == [step for step in range(1, STEPS + 1) for _ in range(SAMPLES)], "each step once"
    for a, b in zip(stopped.log, resumed.log, strict=False):  # the last of them were trained twice
        for name in ("trained_rows", "reward"):
            assert a[name] == b[name], (name, a["step"])
    same_updates(resumed.log, read_metrics(synchronous))
    same_weights(weights(stopped.run_dir, STEPS), weights(synchronous, STEPS))


def test_a_line_that_cannot_be_read_was_skipped(stopped: Stopped, resumed: Resumed) -> None:
    for name in (METRICS_FILE, SAMPLES_FILE):
        assert f"{stopped.run_dir / name}: 1 line(s) cannot be read: skipped" in resumed.output


def test_old_checkpoints_go_and_their_weights_stay(stopped: Stopped, resumed: Resumed) -> None:
    (newest,) = checkpoints(stopped.run_dir / "checkpoints")
    assert newest.name == f"global_step_{STEPS}"
    assert written_by(newest) == run_in(stopped.run_dir) is not None, "of the run, not of the launch that went on"
    for step in (SAVED_AFTER, STEPS):
        folder, files = stopped.run_dir / WEIGHTS_FOLDER / f"step_{step}", kept(stopped.run_dir, step)
        policy = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        same_weights(files, {name: policy[name] for name in files})
        AutoTokenizer.from_pretrained(folder)
    same_weights(kept(stopped.run_dir, STEPS), weights(stopped.run_dir, STEPS))


@pytest.mark.skipif(bool(CANNOT_BE_TWO), reason=f"this machine cannot be two: {CANNOT_BE_TWO}")
def test_it_went_on_over_two_nodes_and_left_nothing_there(resumed: Resumed) -> None:
    assert resumed.places.complaints == [], "trainer and sampler on different nodes"
    assert resumed.network_mb > WEIGHTS_MB * (STEPS - SAVED_AFTER)
    assert resumed.left == []
