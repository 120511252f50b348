"""Runs of the real stack, and what the planner says of them when it has seen one run at lag 0 only."""

import itertools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from lab.cost.overlap import SLOW_TOOL, WARM_UP
from lab.planner.calibration import calibrate
from lab.planner.rates import Layout, Rates
from lab.planner.simulation import Simulation
from tests.kit import ROOT
from tests.kit.small_run import TrainerRun, make_assets
from verl_vcpo.report.metrics_file import read_metrics
from verl_vcpo.report.run_log import SUMMARY_FILE

_TOOL = (
    f"actor_rollout_ref.rollout.agent.agent_loop_config_path={SLOW_TOOL}",
    "actor_rollout_ref.rollout.agent.default_agent_loop=slow_tool",
)
# Responses of a policy that learns have other lengths in each run, which no forecast from another run foresees.
_NOTHING_LEARNT = "actor_rollout_ref.actor.optim.lr=0"
_QUICKSTART_MODEL = "quickstart-model"
_SEEDS = 8
_LONG = 96


def quickstart(folder: Path) -> list[str]:
    """The sizes of scripts/quickstart.sh (+task=countdown_lag), in place of those of `small_task`."""
    return [
        f"actor_rollout_ref.model.path={folder}/{_QUICKSTART_MODEL}",
        "async.exact_lag=true",
        "data.max_prompt_length=24",
        "data.max_response_length=16",
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.max_model_len=64",
    ]


def long_responses() -> list[str]:
    """Responses that no end token ends: sampling takes several times as long as training."""
    rollout = "actor_rollout_ref.rollout"
    return [f"data.max_response_length={_LONG}", f"{rollout}.max_model_len={2 * _LONG}", f"{rollout}.ignore_eos=true"]


class Work(StrEnum):
    """What a run's samplers and trainer do."""

    TOOL = "tool"
    """The workload of lab.overlap: most of a response's time is a tool's."""
    NO_TOOL = "no tool"
    """The same responses without the tool."""
    LONG = "long responses"
    QUICKSTART = "quickstart"
    """The quickstart's sizes, in fewer steps."""

    def settings(self, folder: Path) -> Sequence[str]:
        match self:
            case Work.TOOL:
                return _TOOL
            case Work.NO_TOOL:
                return ()
            case Work.LONG:
                return long_responses()
            case Work.QUICKSTART:
                return quickstart(folder)


@dataclass(frozen=True)
class Case:
    """A run to measure and to forecast."""

    name: str
    lag: int
    work: Work = Work.TOOL
    slots: int | None = None
    """max_num_seqs, where it is not the preset's."""
    steps: int = 29

    @property
    def calibration(self) -> "Case":
        """The run at lag 0 that gives the rates."""
        return next(case for case in CALIBRATIONS if case.work is self.work)

    def settings(self, folder: Path) -> list[str]:
        slots = [f"actor_rollout_ref.rollout.max_num_seqs={self.slots}"] if self.slots else []
        steps = [f"async.lag={self.lag}", f"trainer.total_training_steps={self.steps}", _NOTHING_LEARNT]
        return [*steps, *self.work.settings(folder), *slots]

    def put_into(self, rates: Rates) -> Rates:
        """The calibration's rates, with what the case changes."""
        return replace(rates, sampler=replace(rates.sampler, slots=self.slots)) if self.slots else rates


CALIBRATIONS = (
    Case("lag 0", 0, steps=58),  # the tool's durations are exponential, and so vary much
    Case("long responses, 2 slots, lag 0", 0, Work.LONG, slots=2),
    Case("quickstart, lag 0", 0, Work.QUICKSTART),
    Case("no tool, lag 0", 0, Work.NO_TOOL),
)
CASES = (
    Case("lag 1", 1),
    Case("lag 2", 2),
    Case("lag 4", 4),
    Case("lag 8", 8),
    Case("long responses, 2 slots, lag 4", 4, Work.LONG, slots=2),
    Case("quickstart, lag 32", 32, Work.QUICKSTART, steps=40),
    Case("no tool, lag 4", 4, Work.NO_TOOL),
    Case("2 slots, lag 4", 4, Work.NO_TOOL, slots=2),
    Case("1 slot, lag 4", 4, Work.NO_TOOL, slots=1),
)


def make_models(folder: Path) -> None:
    """What the runs are trained on, unless the folder has it: `make_assets`, and a model of the quickstart's shape."""
    if not (folder / "model").is_dir():
        make_assets(folder)
    if not (folder / _QUICKSTART_MODEL).is_dir():
        shape = ["--layers", "2", "--heads", "2", "--steps", "100"]
        files = ["--data", f"{folder}/data", "--out", f"{folder}/{_QUICKSTART_MODEL}"]
        command = [sys.executable, "-m", "recipe.warm_start.train", *files, *shape]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


@dataclass(frozen=True)
class Outcome:
    """Means over the steps after the warm-up."""

    step_s: float
    trainer_idle: float
    sampler_idle: float
    lag_mean: float


def folder_of(case: Case, folder: Path) -> Path:
    """Of the case's run."""
    return folder / case.name.replace(" ", "_").replace(",", "")


def is_done(case: Case, folder: Path) -> bool:
    """Whether the folder has the whole run."""
    return (folder_of(case, folder) / SUMMARY_FILE).is_file()


def run_once(case: Case, folder: Path) -> Path:
    """Train, unless the folder has the whole run already. Returns the run's folder."""
    run_dir = folder_of(case, folder)
    if not is_done(case, folder):
        run = TrainerRun(folder, run_dir, *case.settings(folder))
        if run.wait():
            raise RuntimeError(f"the run {run_dir.name} failed:\n{run.tail()}")
    return run_dir


def measured(run_dir: Path) -> Outcome:
    """What the run did. A step lasts until the next one begins."""
    lines = read_metrics(run_dir)
    periods = {b["step"]: b["wall_clock_s"] - a["wall_clock_s"] for a, b in itertools.pairwise(lines)}
    kept = [line for line in lines if line["step"] > WARM_UP]
    seconds = sum(periods[line["step"]] for line in kept)
    return Outcome(
        seconds / len(kept),
        sum(line["trainer_idle_share"] * line["step_s"] for line in kept) / seconds,
        sum(line["sampler_idle_share"] * periods[line["step"]] for line in kept) / seconds,
        _mean([line["lag_mean"] for line in kept]),
    )


def forecast(case: Case, calibration: Path) -> Outcome:
    """What the planner says of the same steps: the mean over simulated runs, as the lengths of one are drawn."""
    rates = case.put_into(calibrate([calibration]))
    layout = Layout(rates.trainer.gpus, rates.sampler.gpus, case.lag, exact=case.work is Work.QUICKSTART)
    kept = [step for seed in range(_SEEDS) for step in Simulation(rates, layout, seed=seed).run(case.steps)[WARM_UP:]]

    def over_time(values: list[float]) -> float:
        return sum(v * s.seconds for v, s in zip(values, kept, strict=True)) / sum(s.seconds for s in kept)

    return Outcome(
        _mean([step.seconds for step in kept]),
        sum(step.wait_s for step in kept) / sum(step.seconds for step in kept),
        over_time([step.sampler_idle for step in kept]),
        _mean([_mean(list(map(float, step.lags))) for step in kept]),
    )


def _mean(values: list[float]) -> float:
    return float(np.mean(values))


def errors(real: Outcome, said: Outcome) -> dict[str, float]:
    """Of seconds per step a share; of idle shares and of the lag differences."""
    idle = (said.trainer_idle - real.trainer_idle, said.sampler_idle - real.sampler_idle)
    return {
        "step": said.step_s / real.step_s - 1,
        "idle": max(idle, key=abs),
        "lag": said.lag_mean - real.lag_mean,
    }


def worst(found: list[dict[str, Any]], name: str) -> float:
    """The largest of these errors."""
    return max(abs(row["errors"][name]) for row in found)
