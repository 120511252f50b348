"""The layout of a launch script or a composed configuration, put in place of a calibration's."""

import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from lab.planner import page
from lab.planner.answers import plan
from lab.planner.calibration import calibrate, trainer_unit
from lab.planner.rates import PlanError, Rates
from verl_vcpo.samplers.admission import gpus_of_sampler, slots_of_sampler

_SCRIPT_S = 300


@dataclass(frozen=True)
class LaunchLayout:
    """What a launch decides of a forecast."""

    trainer_gpus: int
    sampler_gpus: int
    lag: float
    trainer_unit: int
    """GPUs of one replica of the trainer's model."""
    gpus_of_sampler: int
    slots: int
    engines: int
    """Of a sampler."""
    batch: int
    samples: int
    steps: int
    model: str

    def put_into(self, rates: Rates) -> Rates:
        """The rates with these sizes; speeds stay those of the calibration."""
        return replace(
            rates,
            trainer=replace(rates.trainer, unit=self.trainer_unit),
            sampler=replace(rates.sampler, gpus=self.gpus_of_sampler, slots=self.slots, engines=self.engines),
            workload=replace(rates.workload, prompts=self.batch, samples=self.samples),
        )


def of_config(config: DictConfig) -> LaunchLayout:
    """Of a composed configuration."""
    rollout = config.actor_rollout_ref.rollout
    return LaunchLayout(
        trainer_gpus=config.trainer.n_gpus_per_node * config.trainer.nnodes,
        sampler_gpus=rollout.n_gpus_per_node * rollout.nnodes,
        lag=config["async"].lag,
        trainer_unit=trainer_unit(config),
        gpus_of_sampler=gpus_of_sampler(rollout),
        slots=slots_of_sampler(rollout),
        engines=int(rollout.data_parallel_size),
        batch=int(config.data.train_batch_size),
        samples=int(rollout.n),
        steps=int(config.trainer.total_training_steps),
        model=str(config.actor_rollout_ref.model.path),
    )


def of_script(script: Path) -> LaunchLayout:
    """Of a launch script, which prints its configuration and starts nothing.

    Raises:
        PlanError: there is no such script, or it fails.
    """
    if not script.is_file():
        raise PlanError(f"--like {script}: no such file; give a launch script")
    command = ["bash", str(script), "--print-config"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SCRIPT_S, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PlanError(f"--like {script}: it ended with code {done.returncode}: {last}")
    printed: Any = yaml.safe_load(done.stdout)
    if not isinstance(printed, dict) or "async" not in printed:
        raise PlanError(f"--like {script}: it takes no --print-config; give a launch script of this project")
    return of_config(OmegaConf.create(printed))


def print_forecast(config: DictConfig, run: Path) -> None:
    """The forecast of one launch, for its dry run.

    Args:
        config: of the launch.
        run: folder of the run that gives the rates.

    Raises:
        PlanError: it gives none.
    """
    layout = of_config(config)
    split = layout.trainer_gpus, layout.sampler_gpus
    rates = layout.put_into(calibrate([run]))
    if config.trainer.device != "cpu":
        rates = replace(rates, cores=None)
    page.show(plan(rates, sum(split), [layout.lag], layout.steps, only=split))
