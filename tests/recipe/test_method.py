"""`method=NAME` on the real stack: one switch, recorded in the configuration; what contradicts it is refused."""

import inspect
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy import main
from recipe.fully_async_policy.settings import method, own_files
from recipe.fully_async_policy.settings.effects import ESTIMATOR_SETTINGS, LOSS_SETTINGS, RULES, without_effect
from recipe.fully_async_policy.settings.validate import SettingError
from recipe.tasks.tool_use.settings import ToolUseSettings
from vcpo.config import EssPart
from verl_vcpo.actor.vcpo_settings import VCPOSettings

# One of each kind; the simulator's tests compose all of them.
NAMES = ("vcpo_ess", "tis_seq", "ppo", "m2po", "decoupled_ppo")
ACTOR = "actor_rollout_ref.actor"


def composed(good: dict[str, str], *more: str) -> DictConfig:
    main.prepare_environment(["hardware=cpu"])
    return main.compose([*(f"{name}={value}" for name, value in good.items()), *more])


@lru_cache
def of_method(*overrides: str) -> DictConfig:
    main.prepare_environment(["hardware=cpu"])
    return main.compose(["+task=countdown", "method=vcpo", *overrides])


def test_vcpo_is_the_papers_method_and_the_default_caps_its_baseline(good: dict[str, str]) -> None:
    """`VCPOConfig()`, the `vcpo` block and method=vcpo are one thing, but that a run measures the parts of weights."""
    plain = OmegaConf.load(own_files.CONFIG_DIR / "vcpo_trainer.yaml").vcpo
    assert composed(good, "method=vcpo").vcpo == plain and VCPOSettings.of(plain) == VCPOSettings(ess_part=EssPart.LAG)
    default = composed(good)
    assert default.method == "vcpo_capped" and default.vcpo == {**plain, "baseline": "opob_capped"}


def test_every_method_records_its_name_and_says_what_it_is() -> None:
    assert {name: OmegaConf.load(method.FOLDER / f"{name}.yaml").method for name in method.names()} == {
        name: name for name in method.names()
    }
    sentences = [method.description(name) for name in method.names()]
    assert len(set(sentences)) == len(sentences) and min(map(len, sentences)) > 20


@pytest.mark.parametrize("name", NAMES)
def test_every_method_passes_every_check(good: dict[str, str], name: str) -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.utils.config import omega_conf_to_dataclass

    config = composed(good, f"method={name}")
    main.check(config)
    actor: Any = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert config.method == name and actor.vcpo.enable == name.startswith("vcpo")
    assert callable(get_policy_loss_fn(actor.policy_loss.loss_mode))
    correction = actor.policy_loss.rollout_correction
    if actor.policy_loss.loss_mode == "bypass_mode":
        assert correction["loss_type"] == "reinforce", "verl's default would be PPO's clip"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("method=none vcpo.enable=true", "vcpo.enable=true: contradicts method=none, which sets it to false"),
        ("vcpo={enable:false}", "vcpo.enable=false: contradicts method=vcpo"),
        (f"method=ppo {ACTOR}.policy_loss.loss_mode=gspo", "loss_mode=gspo: contradicts method=ppo"),
        ("method=vcpo_minibatch vcpo.opob_scope=group", "opob_scope=group: contradicts method=vcpo_minibatch"),
        (f"method=none {ACTOR}.policy_loss.rollout_correction.rollout_is=token", "rollout_is=token: contradicts"),
    ],
)
def test_what_contradicts_the_method_is_refused(overrides: str, message: str) -> None:
    with pytest.raises(SettingError) as error:
        of_method(*overrides.split())
    assert message in str(error.value) and "method=NAME" in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        "method=tis_seq actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_is_threshold=4",
        f"method=ppo {ACTOR}.clip_ratio_high=0.28",
        f"method=ppo {ACTOR}.clip_ratio_low=null {ACTOR}.clip_ratio=0.1",
        "method=vcpo vcpo.enable=true vcpo.baseline=mean",
        "vcpo.norms.how=two_backwards",
        "method=a2c critic.optim.lr=1e-5 algorithm.lam=0.9",
        f"method=ppo {ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_coef=0.1",
    ],
)
def test_a_methods_parameters_can_be_given(overrides: str) -> None:
    of_method(*overrides.split())


# What passed the checks once and did nothing.
IGNORED_BY_VCPO = (
    f"{ACTOR}.policy_loss.loss_mode=gspo",
    f"+{ACTOR}.stabilizer.tau=1",
    f"{ACTOR}.clip_ratio_high=0.3",
    f"{ACTOR}.calculate_entropy=true",
    "algorithm.adv_estimator=rloo",
    "algorithm.gamma=0.9",
    "algorithm.rollout_correction.rollout_is=token",
    "critic.enable=true",
    "vcpo.baseline=mean vcpo.norms.how=per_trajectory",
    "tool_use.max_turns=9",
    "reasoning_gym.seed=3",
    "trainer.v1.sampler.max_off_policy_threshold=2",
    "+trainer.remove_previous_ckpt_in_save=true",
    "trainer.use_v1=false",
)


@pytest.mark.parametrize("overrides", IGNORED_BY_VCPO)
def test_what_vcpo_would_ignore_is_refused(overrides: str) -> None:
    with pytest.raises(SettingError, match=r"has no effect with method=vcpo: .*; leave it out"):
        of_method(*overrides.split())


@pytest.mark.parametrize(
    "overrides",
    [
        "method=none vcpo.truncation=4",
        "method=ppo vcpo.norms.how=per_trajectory",
        f"method=ppo {ACTOR}.clip_ratio=0.3",
        f"method=ppo +{ACTOR}.policy_loss.rollout_correction.rollout_is=token",
        f"method=ppo {ACTOR}.policy_loss.clip_cov_ratio=0.1",
        "method=opo algorithm.norm_adv_by_std_in_grpo=false",
    ],
)
def test_what_another_method_would_ignore_is_refused(overrides: str) -> None:
    with pytest.raises(SettingError, match=r"has no effect with method="):
        of_method(*overrides.split())


def test_every_rule_refuses_somewhere_and_passes_where_it_says() -> None:
    """No rule is hidden behind another, or about a setting that does not exist."""
    kl = f"{ACTOR}.use_kl_loss=true"
    some = [(), ("vcpo.norms.how=per_trajectory",), ("vcpo.baseline=mean",), ("method=ppo", kl)]
    some += [
        (f"{ACTOR}.use_dynamic_bsz=true",),
        ("trainer.save_freq=5",),
        ("async.truncated=penalty", "async.overlong_buffer_len=8"),
        ("actor_rollout_ref.model.lora.rank=4",),
        ("actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",),
        ("data.shares=[1]", "data.levels=[1]"),
        ("async.on_failure=skip",),
        ("+agent=simpletir",),
        ("+agent=simpletir", "tool_use.latency_median_s=1"),
        ("reward.reward_manager.name=dapo",),
        ("reward.custom_reward_function.path=null",),
    ]
    some += [
        (f"method={name}",) for name in ("none", "tis_seq", "sapo", "clip_cov", "m2po", "decoupled_ppo", "a2c", "tba")
    ]
    configs = [of_method(*overrides) for overrides in some]
    for rule in RULES:
        for setting in rule.settings:
            reasons = [without_effect(config, setting) for config in configs]
            of_its_value = rule.why.endswith(" decides")  # refused where it contradicts what decides
            assert any(reasons) or of_its_value, f"{setting}: never refused"
            never = "loss_type" in setting or "do not read it" in rule.why
            if not never and not setting.startswith(("trainer.", "algorithm.filter_groups")):
                only_elsewhere = (
                    "dppo",
                    "kl_cov",
                    "dro_beta",
                    "ppo_kl_coef",
                    ".clip_ratio",
                    "distillation",
                    "reasoning_gym",
                )
                assert None in reasons or any(part in setting for part in only_elsewhere), f"{setting}: always refused"


class Reads:
    """A configuration that notes which of its settings are read."""

    def __init__(self, config: Any, above: str, seen: set[str]) -> None:
        self.__dict__.update(_config=config, _above=above, _seen=seen)

    def _note(self, name: str, value: Any) -> Any:
        self._seen.add(f"{self._above}{name}")
        return Reads(value, f"{self._above}{name}.", self._seen) if name == "policy_loss" else value

    def __getattr__(self, name: str) -> Any:
        return self._note(name, getattr(self._config, name))

    def get(self, name: str, default: Any = None) -> Any:
        return self._note(name, self._config.get(name, default))


def actor_config(loss_mode: str, seen: set[str]) -> Any:
    from verl.workers.config import ActorConfig, PolicyLossConfig

    class NotingConfig(ActorConfig):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if not name.startswith("_") and not callable(value):
                seen.add(name)
            return Reads(value, f"{name}.", seen) if name == "policy_loss" else value

    bypass = {"bypass_mode": True, "loss_type": "ppo_clip", "rollout_is": "token", "rollout_is_threshold": 2.0}
    policy_loss: dict[str, Any] = {"loss_mode": loss_mode, "dro_beta": 1.0, "rollout_correction": bypass}
    config = NotingConfig(
        strategy="megatron",
        ppo_micro_batch_size_per_gpu=1,
        rollout_n=1,
        policy_loss=PolicyLossConfig(**policy_loss),
        clip_ratio_low=None,  # then clip_ratio is read
        clip_ratio_high=None,
    )
    config.global_batch_info.update(dp_size=1, batch_num_tokens=20, global_batch_size=4, loss_scale_factor=None)
    object.__setattr__(config, "stabilizer", {})
    seen.clear()
    return config


def test_the_table_of_losses_is_what_their_code_reads() -> None:
    """Each of the registered policy losses is called once, with a configuration that notes what is read."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    import verl_vcpo.actor.policy_losses  # noqa: F401  # registers ours

    everywhere = {"policy_loss", "global_batch_info"}
    read: dict[str, set[str]] = {}
    for name, loss in POLICY_LOSS_REGISTRY.items():
        seen: set[str] = set()
        config = actor_config(name, seen)
        loss(
            old_log_prob=torch.full((4, 5), -1.0),
            log_prob=torch.full((4, 5), -1.1, requires_grad=True),
            advantages=torch.ones(4, 5),
            response_mask=torch.ones(4, 5),
            loss_agg_mode="seq-mean-token-mean",
            config=config,
            rollout_is_weights=None,
        )
        read[name] = seen - everywhere
    assert read == {name: set(settings) for name, settings in LOSS_SETTINGS.items()}


def test_the_table_of_estimators_is_what_their_code_reads() -> None:
    """By their source: `config.NAME`, `config.get("NAME", ...)` or a parameter that verl's trainer passes."""
    from verl.trainer.ppo import core_algos, ray_trainer

    names = ("gamma", "lam", "norm_adv_by_std_in_grpo", "use_pf_ppo")
    read: dict[str, set[str]] = {}
    for name, estimator in core_algos.ADV_ESTIMATOR_REGISTRY.items():
        source = inspect.getsource(estimator)
        read[str(name)] = {s for s in names if f"config.{s}" in source or f'config.get("{s}"' in source}
    passed = inspect.getsource(ray_trainer.compute_advantage).split("GRPO:")
    assert "gamma=gamma" in passed[0] and "lam=lam" in passed[0] and "use_pf_ppo" in passed[0]
    assert "norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo" in passed[1]
    read["gae"] |= {"gamma", "lam", "use_pf_ppo"}
    read["grpo"] |= {"norm_adv_by_std_in_grpo"}
    table = {name: set(settings) - {"pf_ppo"} for name, settings in ESTIMATOR_SETTINGS.items()}
    assert {name: settings for name, settings in read.items() if settings} == table


def test_the_advantages_of_oapl_are_one_number_per_response() -> None:
    """In verl's signature: rewards on the last tokens, prompts by name, in any order."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    import verl_vcpo.actor.policy_losses  # noqa: F401  # registers ours
    from vcpo.stabilizers.oapl import optimal_advantages

    rewards, mask = torch.tensor([[0.0, 1.0], [0.3, 0.0], [0.0, 0.0]]), torch.tensor([[1, 1], [1, 0], [1, 1]])
    prompts = np.array(["b", "a", "b"], dtype=object)
    advantages, returns = get_adv_estimator_fn("oapl")(
        token_level_rewards=rewards, response_mask=mask, index=prompts, config=None
    )
    wanted = optimal_advantages(torch.tensor([1.0, 0.3, 0.0]), torch.tensor([1, 0, 1]))
    torch.testing.assert_close(advantages, wanted[:, None] * mask)
    assert torch.equal(advantages, returns)


@pytest.mark.parametrize(("name", "limit"), [("dppo_tv", 0.15), ("dppo_kl", 0.05)])
def test_dppo_masks_by_the_papers_divergence(name: str, limit: float) -> None:
    """By hand, of tokens whose probability goes from mu to pi: the gradient is -A min(pi / mu, 20), or 0 if masked."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.utils.config import omega_conf_to_dataclass

    actor = omega_conf_to_dataclass(of_method(f"method={name}").actor_rollout_ref.actor)
    both = [(0.5, 0.70), (0.5, 0.60), (0.70, 0.5), (0.001, 0.03), (0.02, 0.15), (0.9, 0.99), (0.01, 0.17)]
    wanted, advantages = [], [1.0, -1.0]
    for mu, pi in both:
        kl = mu * np.log(mu / pi) + (1 - mu) * np.log((1 - mu) / (1 - pi))
        far = abs(pi - mu) > limit if name == "dppo_tv" else kl > limit
        wanted.append([0.0 if far and (pi > mu) == (a > 0) else -a * min(pi / mu, 20.0) for a in advantages])
    mu, pi = (torch.tensor([[pair[i]] * 2 for pair in both]).log() for i in (0, 1))
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=pi.numel(), global_batch_size=1, loss_scale_factor=None)
    pi.requires_grad_()
    given, mask = torch.tensor(advantages).expand_as(pi), torch.ones_like(pi)
    get_policy_loss_fn(actor.policy_loss.loss_mode)(mu, pi, given, mask, "token-mean", actor)[0].backward()
    assert pi.grad is not None and 0 < np.equal(wanted, 0).sum() < len(both)
    torch.testing.assert_close(pi.grad * pi.numel(), torch.tensor(wanted, dtype=pi.dtype), rtol=1e-4, atol=1e-6)


def test_a_default_stands_once() -> None:
    """vcpo_trainer.yaml and config/agent/simpletir.yaml say what the dataclasses say, but for the step's part."""
    plain = OmegaConf.to_container(OmegaConf.load(own_files.CONFIG_DIR / "vcpo_trainer.yaml").vcpo)
    assert isinstance(plain, dict)
    defaults = asdict(VCPOSettings()) | {"ess_part": "lag"}
    assert {name: value for name, value in plain.items() if name != "_target_"} == defaults
    assert OmegaConf.load(own_files.CONFIG_DIR / "agent/simpletir.yaml").tool_use == asdict(ToolUseSettings())


def test_a_setting_of_another_stabilizer_is_refused(good: dict[str, str]) -> None:
    with pytest.raises(SettingError, match="stabilizer.delta: policy_loss.loss_mode=m2po has the settings tau only"):
        main.check(composed(good, "method=m2po", f"+{ACTOR}.stabilizer.delta=1"))
    with pytest.raises(SettingError, match="stabilizer.tau=1: has no effect with method=ppo"):
        composed(good, "method=ppo", f"+{ACTOR}.stabilizer.tau=1")


def test_the_token_baseline_lacks_probabilities(good: dict[str, str]) -> None:
    with pytest.raises(SettingError, match=r"adv_estimator=optimal_token_baseline: needs .*; choose another"):
        main.check(composed(good, "method=none", "algorithm.adv_estimator=optimal_token_baseline"))
