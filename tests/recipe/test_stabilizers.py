"""`stabilizer=NAME` on the real stack: one setting, checked before a process starts, known to verl's registry."""

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy import main
from recipe.fully_async_policy.validate import SettingError
from tests.recipe.test_bad_input import good as good  # a fixture

# One of each kind; the simulator's tests compose all of them.
NAMES = ("vcpo_ess", "tis_seq", "ppo", "m2po", "decoupled_ppo")


def composed(good: dict[str, str], *more: str) -> DictConfig:
    main.prepare_environment(["hardware=cpu"])
    return main.compose([*(f"{name}={value}" for name, value in good.items()), *more])


def test_the_default_is_vcpo(good: dict[str, str]) -> None:
    both = [OmegaConf.to_container(composed(good, *more)) for more in ((), ("stabilizer=vcpo",))]
    assert both[0] == both[1]
    plain = OmegaConf.load(main.CONFIG_DIR / "vcpo_trainer.yaml").vcpo
    assert composed(good).vcpo == plain, "it changes nothing"


@pytest.mark.parametrize("name", NAMES)
def test_every_stabilizer_passes_every_check(good: dict[str, str], name: str) -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.utils.config import omega_conf_to_dataclass

    config = composed(good, f"stabilizer={name}")
    main.check(config)
    actor: Any = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.vcpo.enable == name.startswith("vcpo")
    assert callable(get_policy_loss_fn(actor.policy_loss.loss_mode))
    correction = actor.policy_loss.rollout_correction
    if actor.policy_loss.loss_mode == "bypass_mode":
        assert correction["loss_type"] == "reinforce", "verl's default would be PPO's clip"


def test_a_setting_of_another_stabilizer_is_refused(good: dict[str, str]) -> None:
    with pytest.raises(SettingError, match="stabilizer.delta: policy_loss.loss_mode=m2po has the settings tau only"):
        main.check(composed(good, "stabilizer=m2po", "+actor_rollout_ref.actor.stabilizer.delta=1"))
    with pytest.raises(SettingError, match="stabilizer.tau: policy_loss.loss_mode=vanilla has no settings there"):
        main.check(composed(good, "stabilizer=ppo", "+actor_rollout_ref.actor.stabilizer.tau=1"))


@pytest.mark.parametrize(
    "setting",
    ["algorithm.rollout_correction.bypass_mode=true", "actor_rollout_ref.actor.calculate_sum_pi_squared=false"],
)
def test_the_token_baseline_needs_probabilities(good: dict[str, str], setting: str) -> None:
    with pytest.raises(SettingError, match=r"adv_estimator=optimal_token_baseline: needs .*; set .*bypass_mode=false"):
        main.check(composed(good, "stabilizer=otb", setting))


def test_an_unknown_stabilizer_names_those_there_are(good: dict[str, str]) -> None:
    with pytest.raises(SettingError, match="magic") as error:
        composed(good, "stabilizer=magic")
    assert "m2po" in str(error.value)
