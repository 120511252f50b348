"""Everything that can be known to be wrong before a process starts. Each error names the setting and the fix.

Each kind of input has a file. Its checks raise SettingError: a line for each thing that is wrong.
"""

from collections.abc import Callable

from omegaconf import DictConfig

from recipe.fully_async_policy.settings.agent_loop import check_agent_loop
from recipe.fully_async_policy.settings.consistency import check_consistency
from recipe.fully_async_policy.settings.data import Sample, check_data, check_given
from recipe.fully_async_policy.settings.effects import vcpo_of
from recipe.fully_async_policy.settings.errors import SettingError as SettingError
from recipe.fully_async_policy.settings.errors import check_each
from recipe.fully_async_policy.settings.logger import check_logger
from recipe.fully_async_policy.settings.model import check_model, check_trainable
from recipe.fully_async_policy.settings.own_code import check_own_loss
from recipe.fully_async_policy.settings.reasoning_gym import make_files
from recipe.fully_async_policy.settings.run_folder import (
    check_checkpoint,
    check_disk_space,
    check_folders,
    check_paths,
)
from recipe.fully_async_policy.settings.values import check_types
from recipe.fully_async_policy.settings.variables import cluster_address


def check_values(config: DictConfig) -> None:
    """Check each setting by itself. All other checks take values of the right types, and paths that may be there."""
    check_each(lambda: check_given(config.data), lambda: check_types(config), lambda: vcpo_of(config))
    check_paths(config)


def validate(config: DictConfig, files: bool = True) -> list[Sample]:
    """`check_values`, then `check_together`."""
    check_values(config)
    return check_together(config, files)


def check_together(config: DictConfig, files: bool) -> list[Sample]:
    """Check what settings of the right types make together, all at once.

    Args:
        files: False: all but the data, the run's folder, the sandbox, and of the model all but its kind.

    Returns:
        With `files`, a row of every data source.
    """
    samples: list[Sample] = []

    def check_model_and_data() -> None:
        make_files(config)
        tokenizer = check_model(config)
        here = not cluster_address(config.ray_kwargs.ray_init)  # the trainer of a cluster may have another disk
        check_each(
            lambda: check_disk_space(config) if here else None,
            lambda: samples.extend(check_data(config, tokenizer)),
        )

    of_files: list[Callable[[], object]] = [
        lambda: check_folders(config),
        lambda: check_checkpoint(config),
        check_model_and_data,
    ]
    check_each(
        lambda: check_consistency(config),
        lambda: check_logger(config),
        lambda: check_agent_loop(config, files),
        lambda: check_trainable(config),
        lambda: check_own_loss(config.actor_rollout_ref.actor, config.algorithm.rollout_correction),
        *(of_files if files else []),
    )
    return samples
