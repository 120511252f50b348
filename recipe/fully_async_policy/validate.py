"""Everything that can be known to be wrong before a process starts. Each error names the setting and the fix.

Each kind of input has a file in `checks/`.
"""

from omegaconf import DictConfig

from recipe.fully_async_policy.checks.agent_loop import check_agent_loop
from recipe.fully_async_policy.checks.consistency import check_consistency
from recipe.fully_async_policy.checks.data import Sample, check_data, check_given
from recipe.fully_async_policy.checks.errors import SettingError as SettingError
from recipe.fully_async_policy.checks.layout import check_layout
from recipe.fully_async_policy.checks.logger import check_logger
from recipe.fully_async_policy.checks.model import check_model
from recipe.fully_async_policy.checks.run_folder import check_checkpoint, check_folders, check_nothing_replaced
from recipe.fully_async_policy.checks.settings import check_types
from recipe.fully_async_policy.checks.tool_use import check_tool_use
from recipe.fully_async_policy.checks.trainable import check_trainable
from verl_vcpo.workers.config.vcpo import VCPOSettings


def validate(config: DictConfig, files: bool = True) -> list[Sample]:
    """Check the composed configuration; `files=False`: all but the data, the run's folder, the sandbox, and of the
    model all but its kind.

    Returns:
        With `files`, a row of every data source.

    Raises:
        SettingError: the first thing that is wrong.
    """
    check_given(config.data)
    check_types(config)
    vcpo = _vcpo(config.vcpo)
    check_consistency(config, vcpo)
    check_layout(config)
    check_logger(config)
    check_agent_loop(config.actor_rollout_ref.rollout, files)
    check_tool_use(config, vcpo, files)
    check_trainable(config)
    if not files:
        return []
    check_folders(config)
    check_nothing_replaced(config)
    check_checkpoint(config.trainer)
    return check_data(config, check_model(config))


def _vcpo(settings: DictConfig) -> VCPOSettings:
    try:
        return VCPOSettings.of(settings)
    except ValueError as error:
        raise SettingError(str(error)) from None
