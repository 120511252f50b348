"""Train a language model with lag-k asynchronous RL, stabilized by VCPO.

    python -m recipe.fully_async_policy.main +task=countdown async.lag=8 [method=NAME] [setting=value ...]

Any setting of verl can be given as well. The run's folder (run_dir) gets metrics.jsonl, one line per step;
samples.jsonl, some of the responses; summary.json; config.yaml; command.txt; verl.log; tensorboard/; and model/, the
trained model.
"""

import argparse
import contextlib
import importlib.resources
import io
import os
import shlex
import sys
import time
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipe.command_line import OneLineParser, interruption_kept, run_command
from recipe.fully_async_policy.launch import processes
from recipe.fully_async_policy.launch.session import LOGGING, ray_session
from recipe.fully_async_policy.settings.errors import SettingError, paths_that_fail
from recipe.fully_async_policy.settings.other_names import of_hydra
from recipe.fully_async_policy.settings.variables import check_variables
from verl_vcpo.common import console, held_folders, machine, start_up


def main(argv: list[str] | None = None) -> int:
    """Compose the configuration, check it, train. Returns the exit code: 2 where a setting is wrong."""
    args = _arguments(argv)
    run_id = processes.new_run_id()
    with processes.sigterm_is_ctrl_c():
        try:
            with interruption_kept():
                config = _checked(args)
                if config is None:
                    return 0
                in_its_folders = _folders(config, run_id)
        except SettingError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except (KeyboardInterrupt, Exception) as error:
            code = processes.code_of_interruption(error)
            if code is None:
                raise
            # Nothing is imported here: an interrupted import of torch that is begun again crashes the process
            again = shlex.join(["python", "-m", __spec__.name, *composed_of(args)])
            print(f"interrupted before the run started. To start it:\n  {again}", file=sys.stderr)
            return code
        with in_its_folders:
            return launch(config, run_id, composed_of(args))


def _checked(args: argparse.Namespace) -> DictConfig | None:
    """The configuration to train with; None where it was to be printed alone."""
    from recipe.fully_async_policy.settings import own_files

    prepare_environment(args.overrides)
    config = compose(args.overrides, args.config_dir)
    if args.print_config:
        print(OmegaConf.to_yaml(config, resolve=True))
        return None
    with own_files.located(args.overrides, args.config_dir):
        check(config, files=not args.dry_run)
    if not args.dry_run:
        return config
    from recipe.fully_async_policy.plan import gpu_plan

    gpu_plan.print_plan(config)
    if args.forecast:
        from recipe.fully_async_policy.plan.step_time import forecast

        print(forecast(config, args.forecast))
    return None


def _folders(config: DictConfig, launch: str) -> contextlib.ExitStack:
    """The run's folders, held, with nothing in them that is another run's. A console may go away meanwhile."""
    from recipe.fully_async_policy.launch.older_run import VERL_LOG, take_over
    from recipe.fully_async_policy.settings.run_folder import held

    with held(config) as both:
        if moved := take_over(config, launch):
            print(moved)
        both.enter_context(console.outlived(held_folders.through(config.run_dir) / VERL_LOG))
        return both.pop_all()


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m recipe.fully_async_policy.main", description=__doc__, instead_of=of_hydra)
    parser.add_argument("overrides", nargs="*", metavar="setting=value", help="Hydra overrides; +task=NAME first")
    parser.add_argument("--print-config", action="store_true", help="print the whole configuration and stop")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        default=os.environ.get("DRY_RUN") == "1",
        help="check the settings, print those that matter and the GPU plan, and stop (also: DRY_RUN=1)",
    )
    parser.add_argument(
        "--forecast", type=Path, metavar="RUN", help="with --dry-run: what a step would take, by the rates of this run"
    )
    add_config_dir(parser)
    args = parser.parse_intermixed_args(argv)
    if args.forecast and not args.dry_run:
        parser.error("--forecast is of the plan that --dry-run prints: add --dry-run")
    return args


def launch(config: DictConfig, run_id: str, given: list[str]) -> int:
    """Train with a checked configuration, composed from `given`, and say how that went. Returns the exit code."""
    from recipe.fully_async_policy.launch import next_steps
    from recipe.fully_async_policy.settings.method import description

    print(f"method={config.method}, async.lag={config['async'].lag:g}, run_dir={config.run_dir}")
    print(f"{config.method}: {description(config.method)}.", flush=True)
    try:
        print(f"{train(config, run_id, given)}\nTo see it: vcpo report {config.run_dir}")
        if what_now := next_steps.after_training(config, given):
            print(what_now)
        return 0
    except BaseException as error:
        if code := processes.code_of_interruption(error):
            print(next_steps.after_interruption(config, given), file=sys.stderr)
            return code
        print(next_steps.after_error(error, config, given), file=sys.stderr)
        return 1


def prepare_environment(overrides: list[str]) -> None:
    """Decide between CPU and GPU, and set what has to be set before verl, Ray and vLLM are imported.

    Raises:
        SettingError: an environment variable has a value that no package can read, or caches have no folder.
    """
    try:
        start_up.set_up_process()
    except OSError as error:
        raise SettingError(str(error)) from None
    check_variables()
    given = [o.removeprefix("hardware=") for o in overrides if o.startswith("hardware=")]
    if given:
        hardware = given[-1]
    else:
        import torch

        hardware = "gpu" if torch.cuda.is_available() and not machine.is_for_cpus() else "cpu"
    os.environ["VCPO_HARDWARE"] = hardware
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # otherwise a Ray call after the run's end starts a new Ray
    for name, value in LOGGING.items():
        os.environ.setdefault(name, value)
    if hardware == "cpu":
        from verl_vcpo.cpu import environment

        environment.apply()


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    """The option that names a folder of presets of the user's own."""
    parser.add_argument(
        "--config-dir",
        type=Path,
        metavar="DIR",
        help="presets of your own: +task=NAME finds DIR/task/NAME.yaml, method=NAME DIR/method/NAME.yaml",
    )


def composed_of(arguments: argparse.Namespace) -> list[str]:
    """The arguments that a configuration was composed of, for the run's record."""
    folder = ["--config-dir", str(arguments.config_dir)] if arguments.config_dir else []
    return [*folder, *arguments.overrides]


@paths_that_fail()
def compose(overrides: list[str], config_dir: Path | None = None) -> DictConfig:
    """The configuration for these overrides. Refuses what names no setting, contradicts the method or has no effect."""
    from recipe.fully_async_policy.launch import ray_access
    from recipe.fully_async_policy.settings import names, own_files, reasoning_gym
    from recipe.fully_async_policy.settings import overrides as command_line
    from recipe.fully_async_policy.settings.data_file import expanded
    from recipe.fully_async_policy.settings.errors import check_each
    from recipe.fully_async_policy.settings.method import check_overrides, given_settings
    from recipe.fully_async_policy.settings.values import check_sections, check_types

    def of_the_package() -> DictConfig:
        return compose_unchecked([given for given in overrides if own_files.chooses_a_file(given)])

    own_files.check_folder(config_dir)
    config, forced = command_line.composed(overrides, config_dir, compose_unchecked, of_the_package)
    own = own_files.written(overrides, config_dir)
    given = (*given_settings(overrides), *(one.name for one in own if not one.is_section))
    with own_files.located(overrides, config_dir):
        check_sections(config)
        check_each(
            lambda: names.check_known(config, overrides, config_dir, own, of_the_package, forced),
            lambda: check_overrides(config, overrides, own),
            lambda: check_types(config, given),
        )
        reasoning_gym.name_files(config)
    for files in ("train_files", "val_files"):
        config.data[files] = expanded(config.data[files])
    ray_access.without_own_nodes(config.ray_kwargs.ray_init, given_settings(overrides))
    rollout = config.actor_rollout_ref.rollout
    if rollout.router_config_path is None:
        rollout.router_config_path = str(own_files.CONFIG_DIR.parent / "router.yaml")  # verl wants an absolute path
    rollout.agent.agent_loop_config_path = packaged_file(rollout.agent.agent_loop_config_path)
    for section, name in (
        (config.reward.custom_reward_function, "path"),
        (rollout.multi_turn, "function_tool_path"),
        (rollout.multi_turn, "tool_config_path"),
        (rollout.agent, "agent_loop_config_path"),
    ):
        if section[name] and Path(section[name]).is_file():
            section[name] = str(Path(section[name]).resolve())  # the processes that load the file may work elsewhere
    return config


def compose_unchecked(overrides: list[str], config_dir: Path | None = None) -> DictConfig:
    """Hydra's configuration for these overrides. Raises HydraException and OmegaConfBaseException."""
    import hydra

    from recipe.fully_async_policy.settings.own_files import CONFIG_DIR, CONFIG_NAME, search_path

    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        ordered = sorted(overrides, key=lambda given: given.startswith("+gpus="))  # a task's sizes give way to it
        return hydra.compose(CONFIG_NAME, [*ordered, *search_path(config_dir)])


def packaged_file(path: str | None) -> str | None:
    """The file that `pkg://package.module/file` names, as verl writes it of modules; other paths as they are."""
    if path is None or not path.startswith("pkg://"):
        return path
    package, _, name = path.removeprefix("pkg://").partition("/")
    try:
        return str(importlib.resources.files(package) / name)
    except ModuleNotFoundError:
        setting = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={path}"
        raise SettingError(f"{setting}: no package {package}; give pkg://package/file or a file's path") from None


@paths_that_fail()
def check(config: DictConfig, files: bool = True) -> None:
    """Our checks, then verl's; `files=False`: data, model, sandbox and Ray cluster need not be there."""
    with processes.interrupted_afterwards():
        import verl  # noqa: F401  # loads the plugin; verl keeps quiet where that fails

    from recipe.fully_async_policy.launch.ray_access import check_access
    from recipe.fully_async_policy.plan.devices import check_gpus
    from recipe.fully_async_policy.plan.fitting import check_layout, micro_batch
    from recipe.fully_async_policy.settings.consistency import check_consistency, lag
    from recipe.fully_async_policy.settings.data import Sample
    from recipe.fully_async_policy.settings.errors import check_each
    from recipe.fully_async_policy.settings.own_code import check_agent_code, check_reward
    from recipe.fully_async_policy.settings.validate import check_together, check_values

    if "verl_vcpo.plugin" not in sys.modules:
        raise SettingError("verl did not load this package's plugin: install it with `bash scripts/install.sh`")
    check_values(config)
    samples: list[Sample] = []
    check_each(
        lambda: samples.extend(check_together(config, files)),
        lambda: check_consistency(config, lag, micro_batch),
        lambda: check_access(config.ray_kwargs.ray_init, connect=files),
        lambda: check_gpus(config) if files else None,
        lambda: check_layout(config) if files and config.trainer.device == "cuda" else None,
    )

    from hydra.errors import InstantiationException
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints that it passed
            validate_config(config, need_reference_policy(config), need_critic(config))
    except (AssertionError, ValueError, InstantiationException) as error:
        raise SettingError(" ".join(str(error.__cause__ or error).split())) from None
    check_reward(config, samples)
    if files:
        check_agent_code(config, samples)


def train(config: DictConfig, run_id: str, given: list[str]) -> str:
    """One run: train, summarise. Nothing of it is left on any node afterwards. Returns the summary in words."""
    from recipe.fully_async_policy.launch.next_steps import after_death
    from verl_vcpo.report.run_log import summary_in_words, write_command, write_summary

    start = time.perf_counter()
    with ray_session(config, run_id, after_death(config, given)) as run:
        write_command(config.run_dir, "recipe.fully_async_policy.main", given)
        from recipe.fully_async_policy.launch.cluster_nodes import wait_for_nodes
        from verl_vcpo.loop.main import LagKTaskRunner

        wait_for_nodes(config)
        LagKTaskRunner().run(config, observe_processes=run.observe)
        took = time.perf_counter() - start
        # Before the processes are ended, which can be interrupted: the run is whole.
        return summary_in_words(write_summary(config.run_dir, config.method, config["async"].lag, took))


if __name__ == "__main__":
    run_command(main)
