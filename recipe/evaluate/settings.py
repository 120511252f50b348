"""The settings of an evaluation: those of a task's preset, or those of a run, whose validation it repeats."""

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.fully_async_policy import main as trainer
from recipe.fully_async_policy.launch.next_steps import of_several_turns
from recipe.fully_async_policy.settings.errors import SettingError
from recipe.tasks.rows import SINGLE_TURN
from verl_vcpo.report.run_log import CONFIG_FILE

_MODEL_PATH = "actor_rollout_ref.model.path"
_VALIDATION = "actor_rollout_ref.rollout.val_kwargs"
_DECIDE = (
    *("data.val_files", "data.val_max_samples", "data.max_prompt_length", "data.max_response_length"),
    *("data.apply_chat_template_kwargs", "actor_rollout_ref.model.custom_chat_template"),
    *(f"{_VALIDATION}.{name}" for name in ("n", "temperature", "top_p", "top_k")),
    *(f"actor_rollout_ref.rollout.{name}" for name in ("dtype", "seed", "max_model_len")),
    *(f"actor_rollout_ref.model.{name}" for name in ("tokenizer_path", "override_config")),
    *("data.seed", "data.shuffle", "data.validation_shuffle"),  # they draw the first data.val_max_samples
    *("reward.custom_reward_function", "reward.reward_manager", "reward.reward_kwargs"),
)
"""Settings by which the results of one model differ."""
_WITH_TOOLS = "answers of several turns, with tools, come from the whole stack"


def of_task(task: str, model: Path, samples: int | None, overrides: list[str], config_dir: Path | None) -> DictConfig:
    """Return the preset's configuration; `val_kwargs` says how responses are sampled.

    Raises:
        SettingError: a wrong setting, or a task with tools.
    """
    _refuse_model_path(overrides)
    config = trainer.compose([f"+task={task}", *overrides], config_dir)
    return _sampled(config, samples, f"--task {task}: {_WITH_TOOLS}: {of_several_turns(task, model, config_dir)}")


def of_run(run: Path, samples: int | None, overrides: list[str]) -> DictConfig:
    """Return the configuration of a run, as the run wrote it; `val_kwargs` says how responses are sampled.

    Raises:
        SettingError: no run, a wrong setting, or a task with tools.
    """
    from recipe.fully_async_policy.settings import names, own_files
    from recipe.fully_async_policy.settings.overrides import composed

    _refuse_model_path(overrides)
    file = run / CONFIG_FILE
    if not file.is_file():
        raise SettingError(f"{run}: no {CONFIG_FILE}; give the folder (run_dir) of a run")
    for given in overrides:
        if own_files.chooses_a_file(given):
            raise SettingError(f"{given}: chooses a preset, and the settings are those of {run}; give single settings")

    def compose(given: list[str], _: Path | None) -> DictConfig:
        with hydra.initialize_config_dir(str(run.resolve()), version_base="1.3"):
            return hydra.compose(file.stem, given)

    config, forced = composed(overrides, None, compose, lambda: _loaded(file))
    names.check_known(config, overrides, None, [], lambda: _loaded(file), forced)
    tools = f"{run}: {_WITH_TOOLS}: the run itself evaluates, every trainer.test_freq steps"
    return _sampled(config, samples, tools, as_it_is=True)


def on_cpu(run: Path | None) -> bool:
    """Return True for a run on a CPU, whose models a machine with GPUs evaluates on its CPU, too."""
    file = run and run / CONFIG_FILE
    return bool(file and file.is_file() and OmegaConf.select(_loaded(file), "trainer.device") == "cpu")


def deciding(config: DictConfig) -> dict[str, Any]:
    """Return the settings by which the results of one model differ, with their values."""
    values = {name: OmegaConf.select(config, name) for name in _DECIDE}
    return {
        name: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for name, value in values.items()
    }


def _loaded(file: Path) -> DictConfig:
    try:
        config = OmegaConf.load(file)
    except (OmegaConfBaseException, OSError) as error:
        raise SettingError(f"{file}: {' '.join(str(error).split())}") from None
    assert isinstance(config, DictConfig)
    return config


def _refuse_model_path(overrides: list[str]) -> None:
    if any(given.lstrip("+").startswith(f"{_MODEL_PATH}=") for given in overrides):
        raise SettingError(f"{_MODEL_PATH}: the command names the models itself; leave the setting out")


def _sampled(config: DictConfig, samples: int | None, of_several: str, *, as_it_is: bool = False) -> DictConfig:
    """Set how responses are sampled.

    Args:
        samples: of each problem; None: as many as `config` has.
        of_several: is said of a task with tools.
        as_it_is: several greedy samples stay greedy, where `config` has them.
    """
    rollout = config.actor_rollout_ref.rollout
    if rollout.agent.default_agent_loop != SINGLE_TURN:
        raise SettingError(of_several)
    if samples is not None and samples < 1:
        raise SettingError(f"--samples {samples}: give 1 or more")
    sampling = rollout.val_kwargs
    sampling.n = samples or sampling.n
    if sampling.n > 1 and sampling.temperature == 0 and not (as_it_is and samples is None):
        sampling.temperature, sampling.top_p, sampling.top_k = rollout.temperature, rollout.top_p, rollout.top_k
    return config
