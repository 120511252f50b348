"""Runs of the real stack, and what the planner says of them when it has seen one run at lag 0 only."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from recipe.cluster_planner.calibration import calibrate
from recipe.cluster_planner.rates import Layout, Rates
from recipe.cluster_planner.simulation import Simulation
from scripts.bench.cost.overlap import SLOW_TOOL, STEPS, WARM_UP
from testkit.small_run import TrainerRun
from verl_vcpo.metrics_file import read_metrics
from verl_vcpo.trainer.ppo.v1.run_log import SUMMARY_FILE

_TOOL = (
    f"actor_rollout_ref.rollout.agent.agent_loop_config_path={SLOW_TOOL}",
    "actor_rollout_ref.rollout.agent.default_agent_loop=slow_tool",
)
_SEEDS = 8


@dataclass(frozen=True)
class Case:
    """A run to measure and to forecast."""

    name: str
    lag: int
    tool: bool = True
    slots: int | None = None
    """max_num_seqs, where it is not the preset's."""

    @property
    def settings(self) -> list[str]:
        slots = [f"actor_rollout_ref.rollout.max_num_seqs={self.slots}"] if self.slots else []
        return [f"async.lag={self.lag}", f"trainer.total_training_steps={STEPS}", *(_TOOL if self.tool else ()), *slots]

    def put_into(self, rates: Rates) -> Rates:
        """The calibration's rates, with what the case changes."""
        if not self.tool:
            rates = replace(rates, workload=replace(rates.workload, outside_s=np.zeros(1)))
        return replace(rates, sampler=replace(rates.sampler, slots=self.slots)) if self.slots else rates


CALIBRATION = Case("lag 0", 0)
CASES = (
    Case("lag 1", 1),
    Case("lag 2", 2),
    Case("lag 4", 4),
    Case("lag 8", 8),
    Case("2 slots, lag 4", 4, tool=False, slots=2),
    Case("no tool, lag 4", 4, tool=False),
)


@dataclass(frozen=True)
class Outcome:
    """Means over the steps after the warm-up."""

    step_s: float
    trainer_idle: float
    sampler_idle: float
    lag_mean: float


def run_once(case: Case, assets: Path, folder: Path) -> Path:
    """Train, unless the folder has the whole run already. Returns the run's folder."""
    run_dir = folder / case.name.replace(" ", "_").replace(",", "")
    if not (run_dir / SUMMARY_FILE).is_file():
        run = TrainerRun(assets, run_dir, *case.settings)
        if run.wait():
            raise RuntimeError(f"the run {run_dir.name} failed:\n{run.tail()}")
    return run_dir


def measured(run_dir: Path) -> Outcome:
    """What the run did."""
    lines = [line for line in read_metrics(run_dir) if line["step"] > WARM_UP]

    def over_time(name: str) -> float:
        return sum(line[name] * line["step_s"] for line in lines) / sum(line["step_s"] for line in lines)

    return Outcome(
        _mean([line["step_s"] for line in lines]),
        over_time("trainer_idle_share"),
        over_time("sampler_idle_share"),
        _mean([line["lag_mean"] for line in lines]),
    )


def forecast(case: Case, calibration: Path) -> Outcome:
    """What the planner says of the same steps: the mean over simulated runs, as the lengths of one are drawn."""
    rates = case.put_into(calibrate([calibration]))
    layout = Layout(rates.trainer.gpus, rates.sampler.gpus, case.lag)
    kept = [step for seed in range(_SEEDS) for step in Simulation(rates, layout, seed=seed).run(STEPS)[WARM_UP:]]

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
