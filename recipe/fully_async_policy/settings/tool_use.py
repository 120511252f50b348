"""Tool use: its settings, and the sandbox."""

import requests
from omegaconf import DictConfig

from recipe.fully_async_policy.settings.errors import SettingError
from recipe.tasks.tool_use.settings import ToolUseSettings
from verl_vcpo.actor.vcpo_settings import VCPOSettings


def check_tool_use(config: DictConfig, vcpo: VCPOSettings, files: bool) -> None:
    """Refuse wrong settings of tool use, where the run has any; `files=False`: the sandbox is not asked.

    Raises:
        SettingError: the first of them.
    """
    if config.actor_rollout_ref.rollout.agent.default_agent_loop == "simpletir":
        settings = _check_settings(config, vcpo)
        if files:
            _check_sandbox(settings)


def _check_settings(config: DictConfig, vcpo: VCPOSettings) -> ToolUseSettings:
    if "tool_use" not in config:
        raise SettingError("actor_rollout_ref.rollout.agent.default_agent_loop=simpletir: add +agent=simpletir")
    try:
        settings = ToolUseSettings.of(config.tool_use)
    except ValueError as error:
        raise SettingError(str(error)) from None
    if settings.drop_void_turns and not vcpo.enable:
        raise SettingError(
            f"tool_use.drop_void_turns=true: the update of method={config.method} would count the rewards of void "
            "trajectories in its baseline; set it to false"
        )
    return settings


def _check_sandbox(settings: ToolUseSettings) -> None:
    url, token = settings.sandbox_url, settings.sandbox_token()
    try:
        requests.get(f"{url.rstrip('/')}/v1/ping", timeout=10).raise_for_status()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        refused = requests.get(f"{url.rstrip('/')}/stats", headers=headers, timeout=10).status_code == 401
    except requests.RequestException as error:
        raise SettingError(
            f"tool_use.sandbox_url={url}: no sandbox answers ({type(error).__name__}); start one with "
            "`python -m code_sandbox`"
        ) from None
    if refused:
        file = settings.sandbox_token_file
        raise SettingError(
            f"tool_use.sandbox_token_file={file}: the sandbox at {url} asks for another token; give its --token-file"
        )
