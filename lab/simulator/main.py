"""Train at an exact lag, in this process, with the settings of the real stack: any task of one turn.

    python -m lab.simulator.main +task=countdown_lag method=tis_seq async.lag=32 [setting=value ...]

A few seconds to start, less than a minute to run. The run's folder (run_dir) gets metrics.jsonl, one line per step,
summary.json and config.yaml, which scripts.report reads as it reads those of the real stack.
"""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe.command_line import OneLineParser, run_command

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from lab.simulator.simulator import Row, Simulator
    from recipe.fully_async_policy.settings.data import Sample

EXACT_LAG = "async.exact_lag"


def main(argv: list[str] | None = None) -> int:
    """Compose the configuration, check it, run. Returns the exit code: 2 where a setting is wrong, 1 where the reward
    fails in the run."""
    parser = OneLineParser(
        prog="python -m lab.simulator.main",
        description=__doc__,
    )
    parser.add_argument("overrides", nargs="*", metavar="setting=value", help="Hydra overrides; +task=NAME first")
    from recipe.fully_async_policy.launch.older_run import set_aside
    from recipe.fully_async_policy.main import add_config_dir, composed_of
    from recipe.fully_async_policy.settings.own_code import check_reward
    from recipe.fully_async_policy.settings.validate import SettingError
    from verl_vcpo.user_code.errors import UserCodeError

    add_config_dir(parser)
    arguments = parser.parse_intermixed_args(argv)
    try:
        config, samples = _composed(arguments.overrides, arguments.config_dir)
        check_reward(config, samples)
        simulator = prepare(config)
        if moved := set_aside(config):
            print(moved)
    except SettingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        run(config, simulator, composed_of(arguments))
    except UserCodeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def compose(overrides: list[str], config_dir: Path | None = None) -> "DictConfig":
    """The real stack's configuration for these overrides at an exact lag, checked as far as the simulator uses it, but
    for the reward.

    Args:
        overrides: Hydra's.
        config_dir: a folder of presets besides the package's.

    Raises:
        SettingError: the first thing that is wrong.
    """
    return _composed(overrides, config_dir)[0]


def _composed(overrides: list[str], config_dir: Path | None) -> "tuple[DictConfig, list[Sample]]":
    """What `compose` returns, and a row of every data source."""
    from recipe.fully_async_policy import main as real
    from recipe.fully_async_policy.settings.own_files import located
    from recipe.fully_async_policy.settings.validate import validate

    real.prepare_environment(["hardware=cpu"])
    config = real.compose(overrides, config_dir)
    if not any(o.partition("=")[0].lstrip("+") == EXACT_LAG for o in overrides):
        config["async"].exact_lag = True
    with located(overrides, config_dir):
        samples = validate(config)
        check(config)
    return config, samples


def check(config: "DictConfig") -> None:
    """Refuse what the simulator would silently ignore.

    Raises:
        SettingError: the setting and what to set instead.
    """
    from recipe.fully_async_policy.settings.validate import SettingError
    from recipe.tasks.rows import SINGLE_TURN

    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    validation = rollout.val_kwargs
    temperature = validation.temperature if validation.do_sample else 1.0
    for name, value, wanted in (
        (EXACT_LAG, config["async"].exact_lag, True),
        ("trainer.val_only", config.trainer.val_only, False),
        ("trainer.resume_mode", config.trainer.resume_mode, "disable"),
        ("actor_rollout_ref.rollout.agent.default_agent_loop", rollout.agent.default_agent_loop, SINGLE_TURN),
        ("actor_rollout_ref.rollout.temperature", rollout.temperature, 1.0),
        ("actor_rollout_ref.actor.ppo_epochs", actor.ppo_epochs, 1),
        ("actor_rollout_ref.actor.use_kl_loss", actor.use_kl_loss, False),
        ("actor_rollout_ref.actor.entropy_coeff", actor.entropy_coeff, 0),
        ("actor_rollout_ref.actor.optim.optimizer", actor.optim.optimizer, "adam"),
        ("actor_rollout_ref.actor.optim.lr_decay_style", actor.optim.lr_decay_style, "constant"),
        ("algorithm.use_kl_in_reward", config.algorithm.use_kl_in_reward, False),
        ("critic.enable", config.critic.enable, False),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", temperature, 1.0),
        ("actor_rollout_ref.rollout.val_kwargs.top_p", validation.top_p, 1.0),
    ):
        if value != wanted:
            raise SettingError(
                f"{name}={value}: the simulator knows {str(wanted).lower()} only; set it, or leave it out"
            )
    if not config.reward.custom_reward_function.path:
        raise SettingError(
            "reward.custom_reward_function.path=null: the simulator needs a reward of the run's own; name one"
        )


def prepare(config: "DictConfig") -> "Simulator":
    """The run before its first step.

    Raises:
        SettingError: the rows, the reward or the model are such that the simulator cannot use them.
    """
    import torch

    from lab.simulator.simulator import Simulator
    from recipe.fully_async_policy.settings.validate import SettingError

    torch.set_num_threads(1)
    try:
        return Simulator(config)
    except ValueError as error:
        raise SettingError(str(error)) from None


def run(config: "DictConfig", simulator: "Simulator", given: list[str]) -> None:
    """One run, a progress bar on the terminal, a line per step in `metrics.jsonl`, a summary at the end.

    Args:
        given: arguments of this command, for the run's record.
    """
    from omegaconf import OmegaConf
    from tqdm import tqdm

    from verl_vcpo.report.run_log import (
        CONFIG_FILE,
        METRICS_FILE,
        SUMMARY_FILE,
        summary_in_words,
        write_command,
        write_summary,
    )

    answers = len(simulator.task.held_out) * config.actor_rollout_ref.rollout.val_kwargs.n
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    (folder / CONFIG_FILE).write_text(OmegaConf.to_yaml(config))
    write_command(folder, "lab.simulator.main", given)
    start = last = time.perf_counter()
    with (
        open(folder / METRICS_FILE, "w") as metrics,
        tqdm(total=config.trainer.total_training_steps, unit="step", disable=None) as progress,
    ):

        def on_step(row: "Row") -> None:
            nonlocal last
            now = time.perf_counter()
            metrics.write(json.dumps(metrics_line(row, now - start, now - last, answers)) + "\n")
            metrics.flush()
            last = now
            if row["step"]:
                progress.update()
                progress.set_postfix(reward=f"{row['reward']:.2f}", ess=f"{row['ess_ratio']:.3f}", refresh=False)

        simulator.run(on_step)
    summary = write_summary(folder, config.method, config["async"].lag, time.perf_counter() - start)
    print(f"{folder}: {summary_in_words(summary)}")


def metrics_line(row: "Row", wall_clock_s: float, step_s: float, answers: int) -> dict[str, Any]:
    """A row under the real stack's names: null where the simulator measures nothing, or no number came out.

    Args:
        row: of the simulator.
        wall_clock_s: seconds since the run's start.
        step_s: seconds that the step took, with its evaluation.
        answers: of an evaluation.
    """
    from verl_vcpo.report.run_log import ACCURACIES, ANSWERS, HEADLINES, held_out_accuracies

    line: dict[str, Any] = {"step": row["step"], "wall_clock_s": round(wall_clock_s, 3), "val_accuracy": None}
    line |= dict.fromkeys(HEADLINES) | row
    if line["val_accuracy"] is not None:
        line[ANSWERS] = answers
    if row["step"]:
        line |= {"lag_min": row["lag_max"], "lag_mean": row["lag_max"]}  # all of a batch are of one version
        line |= {"tokens_per_s": row["tokens"] / step_s, "step_s": step_s}
    if accuracies := held_out_accuracies(row):
        line[ACCURACIES] = accuracies
    return {name: None if value != value else value for name, value in line.items()}


if __name__ == "__main__":
    run_command(main)
