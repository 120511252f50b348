"""Settings of verl and of VCPO that have no effect with some methods, and are refused with these.

Two runs whose settings differ must differ; a setting that is silently ignored makes them look alike. The table names,
for each setting, when it has an effect; whatever is given on the command line without one is refused. What a preset
sets is not: its file is for many methods.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy.settings.agent_loop import SIMPLETIR, TOOL_FILES, TURNS, calls_tools
from recipe.fully_async_policy.settings.errors import SettingError, shown
from recipe.fully_async_policy.settings.other_names import WITH_VCPO
from recipe.tasks.rows import SINGLE_TURN
from vcpo.config import OPOB_BASELINES
from verl_vcpo.actor.own_loss import is_own
from verl_vcpo.actor.vcpo_settings import VCPOSettings
from verl_vcpo.common.on_failure import OnFailure
from verl_vcpo.common.truncated import Truncated
from verl_vcpo.user_code.reward import needs_no_workers

_ACTOR, _CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
_ADAPTERS = ("merge", "alpha", "target_modules", "exclude_modules", "lora_A_init_method", "lora_B_init_method", "dtype")
_DYNAMIC = f"{_ACTOR}.use_dynamic_bsz"
_CLIP_BOUNDS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
_OF_TOOLS = (
    *("format", "max_assistant_turns", "max_user_turns", "max_parallel_calls", "max_tool_response_length"),
    "tool_response_truncate_side",
)
_OWN_LOSSES = ("bapo", "m2po", "oapl", "off_policy_mask", "p3o", "r2vpo", "sat", "tba", "topr", "vespo")

LOSS_SETTINGS: dict[str, tuple[str, ...]] = {
    "vanilla": (*_CLIP_BOUNDS, "clip_ratio_c"),
    "dppo_tv": (*_CLIP_BOUNDS, "clip_ratio_c"),
    "dppo_kl": (*_CLIP_BOUNDS, "clip_ratio_c"),
    "gspo": _CLIP_BOUNDS,
    "geo_mean": _CLIP_BOUNDS,
    "cispo": _CLIP_BOUNDS,
    "sapo": ("tau_pos", "tau_neg"),
    "gpg": (),
    "clip_cov": (*_CLIP_BOUNDS, "policy_loss.clip_cov_ratio", "policy_loss.clip_cov_lb", "policy_loss.clip_cov_ub"),
    "kl_cov": ("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"),
    "dro": ("policy_loss.dro_beta",),
    # clip bounds are read with rollout_correction.loss_type=ppo_clip only
    "bypass_mode": (*_CLIP_BOUNDS, "clip_ratio_c", "policy_loss.rollout_correction"),
    **dict.fromkeys(_OWN_LOSSES, ("stabilizer",)),
}
"""Of each policy loss (`policy_loss.loss_mode`): which settings below `actor_rollout_ref.actor` its code reads."""

ESTIMATOR_SETTINGS: dict[str, tuple[str, ...]] = {
    "gae": ("gamma", "lam", "use_pf_ppo", "pf_ppo"),
    "grpo": ("norm_adv_by_std_in_grpo",),
    "grpo_passk": ("norm_adv_by_std_in_grpo",),
    "reinforce_plus_plus": ("gamma",),
}
"""Of verl's advantage estimators (`algorithm.adv_estimator`): which settings below `algorithm` are read; else none."""


def vcpo_of(config: DictConfig) -> VCPOSettings:
    """The settings `vcpo`. Refuses those that are wrong."""
    try:
        return VCPOSettings.of(config.vcpo)
    except ValueError as error:
        raise SettingError(str(error)) from None


def _uses_opob(config: DictConfig) -> bool:
    """Whether the update subtracts OPOB; of settings that may be wrong, too."""
    return bool(config.vcpo.enable) and config.vcpo.baseline in OPOB_BASELINES


class Rule(NamedTuple):
    """Settings, and when they have an effect."""

    settings: tuple[str, ...]
    """Full names. A name stands for everything below it too."""
    effective: Callable[[DictConfig], bool]
    """Whether they have one with this configuration."""
    why: str
    """Why they have none otherwise, to follow the words "has no effect: "."""


def _read_by(table: dict[str, tuple[str, ...]], above: str, chosen: str, what: str) -> Iterator[Rule]:
    """A rule for each setting of the table, which says what the choice of the setting `chosen` reads below `above`."""
    for name in dict.fromkeys(chain(*table.values())):

        def reads(config: DictConfig, name: str = name) -> bool:
            choice = OmegaConf.select(config, chosen)
            return not config.vcpo.enable and (is_own(str(choice)) or name in table.get(choice, ()))

        yield Rule((f"{above}.{name}",), reads, f"the {what} of this method does not read it")


def _needs(settings: str, decider: str, value: bool, why: str) -> Rule:
    """The rule of settings that are read where `decider` has this value."""

    def effective(config: DictConfig) -> bool:
        return bool(OmegaConf.select(config, decider)) is value

    return Rule(tuple(settings.split()), effective, f"with {decider}={shown(not value)} {why}")


_ROLLOUT = "actor_rollout_ref.rollout"
_OF_OTHER_ENGINES = (
    *("over_sample_rate", "multi_stage_wake_up", "sglang_engine_mode", "engine_kwargs.sglang", "engine_kwargs.trtllm"),
    *("layer_name_map", "skip_tokenizer_init", "standalone_gpu_memory_utilization", "multi_turn.num_repeat_rollouts"),
    *("multi_turn.use_inference_chat_template", "multi_turn.tokenization_sanity_check_mode"),
)
_OF_FSDP = (
    *(f"{_ACTOR}.use_prefix_grouper", "actor_rollout_ref.model.use_liger", "actor_rollout_ref.model.tiled_mlp"),
    "actor_rollout_ref.model.enable_activation_offload",
)
_SAMPLER, _BUFFER = "trainer.v1.sampler", "the lag-k trainer has a replay buffer of its own"
_NEVER = {
    f"{_CORRECTION}.loss_type": f"the update reads {_ACTOR}.policy_loss.rollout_correction.loss_type",
    "algorithm.filter_groups.max_num_gen_batches": "the run ends where filtering keeps none of many groups in a row",
    "algorithm.filter_groups.max_inflight_gen_batches": "async.lag says how many are in flight",
    f"{_SAMPLER}.max_off_policy_threshold": "async.lag bounds the lag of every trajectory",
    f"{_SAMPLER}.max_off_policy_strategy": "async.on_deadline says how the lag of a trajectory is bounded",
    f"{_SAMPLER}.custom_sampler": _BUFFER,
    f"{_SAMPLER}.sync_refill_failed_groups": _BUFFER,
    "trainer.v1.separate_async.num_warmup_batches": "async.lag says how many batches are ahead",
    "trainer.v1.colocate_async": "async.lag says how many batches are ahead",
    **{f"{_ROLLOUT}.{name}": "the samplers are vLLM's, and do not read it" for name in _OF_OTHER_ENGINES},
    f"{_ACTOR}.use_rollout_log_probs": "verl's trainers do not read it",
    **dict.fromkeys(_OF_FSDP, "Megatron's engines do not read it"),
    "trainer.use_v1": "the lag-k trainer is one of verl's v1 trainers",
    "trainer.remove_previous_ckpt_in_save": "trainer.max_actor_ckpt_to_keep says how many are kept",
}
"""Settings that the lag-k trainer does not read, and why."""

RULES: tuple[Rule, ...] = (
    *(Rule((setting,), lambda config: False, why) for setting, why in _NEVER.items()),
    *_read_by(LOSS_SETTINGS, _ACTOR, f"{_ACTOR}.policy_loss.loss_mode", "update"),
    Rule(
        tuple(f"{_ACTOR}.{name}" for name in (*_CLIP_BOUNDS, "clip_ratio_c")),
        lambda config: (
            config.actor_rollout_ref.actor.policy_loss.loss_mode != "bypass_mode"
            or config.actor_rollout_ref.actor.policy_loss.rollout_correction.loss_type == "ppo_clip"
        ),
        "the update of this method does not read it",
    ),
    *_read_by(ESTIMATOR_SETTINGS, "algorithm", "algorithm.adv_estimator", "advantages"),
    _needs(f"{_ACTOR}.kl_loss_coef {_ACTOR}.kl_loss_type", f"{_ACTOR}.use_kl_loss", True, "no KL loss is computed"),
    _needs("algorithm.kl_penalty algorithm.kl_ctrl", "algorithm.use_kl_in_reward", True, "rewards have no KL penalty"),
    _needs(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", _DYNAMIC, False, f"{_ACTOR}.ppo_max_token_len_per_gpu is read"),
    _needs(f"{_ACTOR}.ppo_max_token_len_per_gpu", _DYNAMIC, True, f"{_ACTOR}.ppo_micro_batch_size_per_gpu is read"),
    _needs(f"{_ACTOR}.policy_loss", "vcpo.enable", False, "the update has no policy loss"),
    _needs(f"{_ACTOR}.calculate_entropy", "vcpo.enable", False, "the update does not report it"),
    _needs("algorithm.adv_estimator", "vcpo.enable", False, "vcpo.baseline and vcpo.norm_by_std take its place"),
    _needs(f"{_CORRECTION}.bypass_mode", "vcpo.enable", False, "the update reads the samplers' log-probs"),
    *(_needs(name, "vcpo.enable", False, why) for name, why in WITH_VCPO.items()),
    _needs("distillation", "vcpo.enable", False, "the update has no distillation loss"),
    _needs("vcpo", "vcpo.enable", True, "nothing reads it"),
    Rule(
        (f"{_ACTOR}.clip_ratio",),
        lambda config: None in (config.actor_rollout_ref.actor[name] for name in _CLIP_BOUNDS),
        "verl's losses read clip_ratio_low and clip_ratio_high",
    ),
    Rule(
        (_CORRECTION,),
        lambda config: not config.vcpo.enable and not OmegaConf.select(config, f"{_CORRECTION}.bypass_mode"),
        f"the trainer corrects in decoupled mode only (method=decoupled_ppo); in bypass mode the update reads "
        f"{_ACTOR}.policy_loss.rollout_correction",
    ),
    Rule(
        ("critic",),
        lambda config: not config.vcpo.enable and config.critic.enable and config.algorithm.adv_estimator == "gae",
        "this method has no critic; method=a2c has one",
    ),
    Rule(
        tuple(f"actor_rollout_ref.model.lora.{name}" for name in _ADAPTERS),
        lambda config: config.actor_rollout_ref.model.lora.rank > 0,
        "without actor_rollout_ref.model.lora.rank all weights are trained",
    ),
    Rule(
        tuple(f"{TURNS}.{name}" for name in (*_OF_TOOLS, *TOOL_FILES)),
        lambda config: config.actor_rollout_ref.rollout.agent.default_agent_loop != SIMPLETIR,
        "+agent=simpletir has tools of its own; give tool_use.sandbox_url, tool_use.max_turns",
    ),
    Rule(
        tuple(f"{TURNS}.{name}" for name in _OF_TOOLS),
        calls_tools,
        "actor_rollout_ref.rollout.agent.default_agent_loop calls no tools; tool_agent does",
    ),
    Rule(
        ("async.overlong_buffer_len", "async.overlong_penalty_factor"),
        lambda config: config["async"].truncated == Truncated.PENALTY,
        "only async.truncated=penalty reads it",
    ),
    Rule(
        ("async.tool_timeout_s",),
        lambda config: config.actor_rollout_ref.rollout.agent.default_agent_loop != SIMPLETIR,
        "+agent=simpletir has tools of its own; give tool_use.call_timeout_s",
    ),
    Rule(
        ("async.reward_timeout_s",),
        lambda config: config.reward.custom_reward_function.path is not None,
        "only a function of reward.custom_reward_function has this limit",
    ),
    Rule(
        ("data.level_mark", "data.level_answers"),
        lambda config: bool(config.data.levels or OmegaConf.select(config, "reasoning_gym.levels")),
        "without data.levels there is one level",
    ),
    Rule(
        ("vcpo.ess_part", "vcpo.base_ess_ratio"),
        lambda config: not config.vcpo.enable or config.vcpo.step_size_rule != "none",
        "with vcpo.step_size_rule=none the step does not follow the ESS",
    ),
    Rule(
        ("reward.num_workers",),
        lambda config: not needs_no_workers(config),
        f"the agent-loop workers call the reward function: {_ROLLOUT}.agent.num_workers",
    ),
    Rule(
        ("data.dataloader_num_workers",),
        lambda config: not config.data.levels,
        "with data.levels no worker reads rows ahead",
    ),
    Rule(
        ("async.max_skipped",),
        lambda config: config["async"].on_failure == OnFailure.SKIP,
        "only async.on_failure=skip reads it",
    ),
    Rule(
        (f"{_ROLLOUT}.val_kwargs.do_sample",),
        lambda config: _of_validation(config).do_sample == (_of_validation(config).temperature > 0),
        f"{_ROLLOUT}.val_kwargs.temperature decides",
    ),
    Rule(
        (f"{_ROLLOUT}.multi_turn.enable",),
        lambda config: (
            config.actor_rollout_ref.rollout.multi_turn.enable
            == (config.actor_rollout_ref.rollout.agent.default_agent_loop != SINGLE_TURN)
        ),
        f"{_ROLLOUT}.agent.default_agent_loop decides",
    ),
    Rule(
        ("vcpo.norms",),
        _uses_opob,
        "gradient norms are measured for vcpo.baseline=opob and opob_capped only",
    ),
    Rule(
        ("vcpo.opob_scope", "vcpo.opob_weights"),
        _uses_opob,
        "the baseline is not OPOB; method=vcpo_capped and method=vcpo have it",
    ),
    Rule(
        ("tool_use",),
        lambda config: config.actor_rollout_ref.rollout.agent.default_agent_loop == SIMPLETIR,
        "only +agent=simpletir reads it",
    ),
    Rule(
        ("tool_use.latency_sigma",),
        lambda config: OmegaConf.select(config, "tool_use.latency_median_s") != 0,
        "with tool_use.latency_median_s=0 no call waits",
    ),
    Rule(
        ("reasoning_gym",),
        lambda config: "levels" in (config.get("reasoning_gym") or ()),
        "only a task of reasoning-gym reads it (+task=reasoning_gym, +task=sums)",
    ),
    Rule(
        ("save_weights", "trainer.max_actor_ckpt_to_keep"),
        lambda config: config.trainer.save_freq != -1,
        "with trainer.save_freq=-1 no checkpoint is written; give trainer.save_freq=10",
    ),
)
"""In order: the first rule that covers a setting, and says that it has no effect, gives the reason."""


def _of_validation(config: DictConfig) -> DictConfig:
    return config.actor_rollout_ref.rollout.val_kwargs


def without_effect(config: DictConfig, setting: str) -> str | None:
    """Why this setting has no effect with this configuration, or None."""
    for rule in RULES:
        covers = any(f"{setting}.".startswith(f"{name}.") for name in rule.settings)
        if covers and not rule.effective(config):
            return rule.why
    return None
