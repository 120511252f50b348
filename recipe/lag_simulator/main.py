"""Train at an exact lag, in this process, with the settings of the real stack.

    python -m recipe.lag_simulator.main +task=countdown_lag method=tis_seq async.lag=32 [setting=value ...]

A few seconds to start, less than a minute to run. The run's folder (run_dir) gets metrics.jsonl, one line per step, and
config.yaml.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main(argv: list[str] | None = None) -> int:
    """Compose the configuration, check it, run. Returns the exit code: 2 where a setting is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe.lag_simulator.main",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="setting=value", help="Hydra overrides; +task=NAME first")
    arguments = parser.parse_args(argv)

    from recipe.fully_async_policy.validate import SettingError

    try:
        config = compose(arguments.overrides)
    except SettingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    run(config)
    return 0


def compose(overrides: list[str]) -> "DictConfig":
    """The real stack's configuration for these overrides, checked as far as the simulator uses it.

    Raises:
        SettingError: the first thing that is wrong.
    """
    from recipe.fully_async_policy import main as real
    from recipe.fully_async_policy.validate import validate

    real.prepare_environment(["hardware=cpu"])
    config = real.compose(overrides)
    validate(config)
    check(config)
    return config


def check(config: "DictConfig") -> None:
    """Refuse what the simulator would silently ignore.

    Raises:
        SettingError: the setting and what to set instead.
    """
    from recipe.fully_async_policy.validate import SettingError

    actor, validation = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.val_kwargs
    tba = actor.policy_loss.loss_mode == "tba"  # whose loss has the penalty in it
    temperature = validation.temperature if validation.do_sample else 1.0
    for name, value, wanted in (
        ("async.exact_lag", config["async"].exact_lag, True),
        ("actor_rollout_ref.actor.ppo_epochs", actor.ppo_epochs, 1),
        ("actor_rollout_ref.actor.use_kl_loss", actor.use_kl_loss, False),
        ("actor_rollout_ref.actor.entropy_coeff", actor.entropy_coeff, 0),
        ("actor_rollout_ref.actor.optim.optimizer", actor.optim.optimizer, "adam"),
        ("actor_rollout_ref.actor.optim.lr_decay_style", actor.optim.lr_decay_style, "constant"),
        ("algorithm.use_kl_in_reward", config.algorithm.use_kl_in_reward, tba),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", temperature, 1.0),
        ("actor_rollout_ref.rollout.val_kwargs.top_p", validation.top_p, 1.0),
    ):
        if value != wanted:
            raise SettingError(
                f"{name}={value}: the simulator knows {str(wanted).lower()} only; set it, or leave it out"
            )


def run(config: "DictConfig") -> None:
    """One run, a progress bar on the terminal, a line per step in `metrics.jsonl`."""
    import torch
    from omegaconf import OmegaConf
    from tqdm import tqdm

    from recipe.lag_simulator.simulator import Row, Simulator
    from verl_vcpo.trainer.ppo.v1.run_log import CONFIG_FILE, METRICS_FILE
    from verl_vcpo.whole_file import write_whole

    torch.set_num_threads(1)
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(OmegaConf.to_yaml(config))
    with tqdm(total=config.trainer.total_training_steps, unit="step", disable=None) as progress:

        def on_step(row: Row) -> None:
            progress.update()
            progress.set_postfix(reward=f"{row['reward']:.2f}", ess=f"{row['ess_ratio']:.3f}", refresh=False)

        rows = Simulator(config).run(on_step)
    lines = [json.dumps({name: None if value != value else value for name, value in row.items()}) for row in rows]
    write_whole(folder / METRICS_FILE, "\n".join(lines) + "\n")
    before, after = rows[0]["val_accuracy"], [row["val_accuracy"] for row in rows if "val_accuracy" in row][-1]
    print(f"{folder}: accuracy {before:.1%} -> {after:.1%} in {len(rows) - 1} steps at lag {config['async'].lag}")


if __name__ == "__main__":
    sys.exit(main())
