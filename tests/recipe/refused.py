"""How the tests of bad input run the command: in this process, with one configuration from Hydra."""

import copy
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy import main

ACTOR, ROLLOUT, MEGATRON = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.actor.megatron"
MODEL, REWARD = "actor_rollout_ref.model", "reward.custom_reward_function"
hydras_compose = main.compose_unchecked
_composed: dict[str, DictConfig] = {}


def quick_compose(overrides: list[str], config_dir: Path | None = None) -> DictConfig:
    """As Hydra's, from one configuration of the countdown preset: Hydra takes a third of a second for each."""
    if "+task=countdown" not in overrides or config_dir:
        return hydras_compose(overrides, config_dir)
    if not _composed:
        _composed["countdown"] = hydras_compose(["+task=countdown"])
    config = copy.deepcopy(_composed["countdown"])
    parser, absent = OverridesParser.create(), object()
    for given in overrides:
        if given == "+task=countdown":
            continue
        try:
            override = parser.parse_override(given)
        except HydraException:
            return hydras_compose(overrides)
        name = override.key_or_group
        simple = override.type is OverrideType.CHANGE and not override.is_sweep_override()
        is_group = "." not in name and name != "run_dir"
        if not simple or is_group or OmegaConf.select(config, name, default=absent) is absent:
            return hydras_compose(overrides)
        OmegaConf.update(config, name, override.value(), merge=True)
    return config


def run(overrides: dict[str, str], capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """What the command prints on stderr: a line for each thing that is wrong, most often one."""
    code = main.main([*(f"{name}={value}" for name, value in overrides.items()), *more])
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert code == 2
    assert 1 <= len(errors) <= 2, errors
    assert "search path" not in errors[0] and "hydra.cc" not in errors[0]
    assert not Path(overrides["run_dir"]).exists(), "a refused run must leave nothing behind"
    return "\n".join(errors)


def composed(overrides: dict[str, str]) -> DictConfig:
    main.prepare_environment(["hardware=cpu"])
    return main.compose([f"{name}={value}" for name, value in overrides.items()])
