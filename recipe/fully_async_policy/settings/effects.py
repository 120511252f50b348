"""Settings of verl and of VCPO that have no effect with some methods, and are refused with these.

Two runs whose settings differ must differ; a setting that is silently ignored makes them look alike. The table names,
for each setting, when it has an effect; whatever is given on the command line without one is refused. What a preset
sets is not: its file is for many methods.
"""

from collections.abc import Callable
from dataclasses import dataclass

from omegaconf import DictConfig

from recipe.fully_async_policy.settings.errors import SettingError
from verl_vcpo.actor.norms.settings import NormsHow, NormsKeep
from verl_vcpo.actor.vcpo_settings import VCPOSettings

_ACTOR, _CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
_CLIP_BOUNDS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
_OWN_LOSSES = ("bapo", "m2po", "oapl", "off_policy_mask", "sat", "tba", "topr", "vespo")

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


@dataclass(frozen=True)
class Rule:
    """Settings, and when they have an effect."""

    settings: tuple[str, ...]
    """Full names. A name stands for everything below it too."""
    effective: Callable[[DictConfig], bool]
    """Whether they have one with this configuration."""
    why: str
    """Why they have none otherwise, to follow the words "has no effect: "."""

    def covers(self, setting: str) -> bool:
        """Whether the rule is about this setting."""
        return any(f"{setting}.".startswith(f"{name}.") for name in self.settings)


def _vcpo(config: DictConfig) -> VCPOSettings:
    try:
        return VCPOSettings.of(config.vcpo)
    except ValueError as error:
        raise SettingError(str(error)) from None


def _updates_by_loss(config: DictConfig) -> bool:
    return not config.vcpo.enable


def _loss_reads(setting: str) -> Callable[[DictConfig], bool]:
    def reads(config: DictConfig) -> bool:
        loss = config.actor_rollout_ref.actor.policy_loss
        if loss.loss_mode == "bypass_mode" and setting.startswith("clip") and not _clips_in_bypass_mode(config):
            return False
        return _updates_by_loss(config) and setting in LOSS_SETTINGS.get(loss.loss_mode, (setting,))

    return reads


def _clips_in_bypass_mode(config: DictConfig) -> bool:
    return config.actor_rollout_ref.actor.policy_loss.rollout_correction.loss_type == "ppo_clip"


def _estimator_reads(setting: str) -> Callable[[DictConfig], bool]:
    def reads(config: DictConfig) -> bool:
        return _updates_by_loss(config) and setting in ESTIMATOR_SETTINGS.get(config.algorithm.adv_estimator, ())

    return reads


def _reads_one_clip_ratio(config: DictConfig) -> bool:
    actor = config.actor_rollout_ref.actor
    return actor.clip_ratio_low is None or actor.clip_ratio_high is None


def _packs(config: DictConfig) -> bool:
    return _vcpo(config).packs_gradient_norms


def _never(config: DictConfig) -> bool:
    return False


def _of_loss(setting: str) -> Rule:
    return Rule((f"{_ACTOR}.{setting}",), _loss_reads(setting), "the update of this method does not read it")


def _of_estimator(setting: str) -> Rule:
    return Rule((f"algorithm.{setting}",), _estimator_reads(setting), "the advantages of this method do not read it")


RULES: tuple[Rule, ...] = (
    # The update
    _of_loss("clip_ratio"),
    Rule((f"{_ACTOR}.clip_ratio",), _reads_one_clip_ratio, "verl's losses read clip_ratio_low and clip_ratio_high"),
    *map(_of_loss, ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg", "stabilizer")),
    *map(_of_loss, ("policy_loss.clip_cov_ratio", "policy_loss.clip_cov_lb", "policy_loss.clip_cov_ub")),
    *map(_of_loss, ("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef", "policy_loss.dro_beta")),
    _of_loss("policy_loss.rollout_correction"),
    Rule((f"{_ACTOR}.policy_loss",), _updates_by_loss, "VCPO's update has no policy loss"),
    Rule((f"{_ACTOR}.calculate_entropy",), _updates_by_loss, "VCPO's update does not report it"),
    Rule(
        (f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type"),
        lambda config: config.actor_rollout_ref.actor.use_kl_loss,
        "with actor_rollout_ref.actor.use_kl_loss=false no KL loss is computed",
    ),
    # The advantages
    Rule(("algorithm.adv_estimator",), _updates_by_loss, "VCPO's update has its own: vcpo.baseline, vcpo.norm_by_std"),
    *map(_of_estimator, ("gamma", "lam", "norm_adv_by_std_in_grpo", "use_pf_ppo", "pf_ppo")),
    Rule(
        ("algorithm.kl_penalty", "algorithm.kl_ctrl"),
        lambda config: config.algorithm.use_kl_in_reward,
        "with algorithm.use_kl_in_reward=false rewards have no KL penalty",
    ),
    Rule((f"{_CORRECTION}.bypass_mode",), _updates_by_loss, "VCPO's update reads the samplers' log-probs"),
    Rule(
        (f"{_CORRECTION}.loss_type",),
        _never,
        f"the trainer does not read it; the update reads {_ACTOR}.policy_loss.rollout_correction.loss_type",
    ),
    Rule(
        (_CORRECTION,),
        lambda config: _updates_by_loss(config) and not config.algorithm.rollout_correction.bypass_mode,
        f"the trainer corrects in decoupled mode only (method=decoupled_ppo); in bypass mode the update reads "
        f"{_ACTOR}.policy_loss.rollout_correction",
    ),
    Rule(
        ("critic",),
        lambda config: _updates_by_loss(config) and config.critic.enable and config.algorithm.adv_estimator == "gae",
        "this method has no critic; method=a2c has one",
    ),
    Rule(("distillation",), _updates_by_loss, "VCPO's update has no distillation loss"),
    Rule(("algorithm.filter_groups.max_num_gen_batches",), _never, "the lag-k trainer has no limit of batches"),
    Rule(("algorithm.filter_groups.max_inflight_gen_batches",), _never, "async.lag says how many are in flight"),
    Rule(
        (f"{_ACTOR}.ppo_micro_batch_size_per_gpu",),
        lambda config: not config.actor_rollout_ref.actor.use_dynamic_bsz,
        f"{_ACTOR}.use_dynamic_bsz=true makes micro-batches by {_ACTOR}.ppo_max_token_len_per_gpu",
    ),
    Rule(
        (f"{_ACTOR}.ppo_max_token_len_per_gpu",),
        lambda config: config.actor_rollout_ref.actor.use_dynamic_bsz,
        f"{_ACTOR}.use_dynamic_bsz=false makes micro-batches by {_ACTOR}.ppo_micro_batch_size_per_gpu",
    ),
    # VCPO
    Rule(
        ("vcpo.norms.tokens",),
        lambda config: _packs(config) and config.vcpo.norms.keep in (NormsKeep.AUTO, NormsKeep.ACTIVATIONS),
        "only vcpo.norms.how=packed with vcpo.norms.keep=activations or auto reads it",
    ),
    Rule(
        ("vcpo.norms.keep",),
        lambda config: not _vcpo(config).needs_gradient_norms or config.vcpo.norms.how == NormsHow.PACKED,
        "only vcpo.norms.how=packed reads it",
    ),
    Rule(
        ("vcpo.norms",),
        lambda config: _vcpo(config).needs_gradient_norms,
        "gradient norms are measured for vcpo.baseline=opob only",
    ),
    Rule(("vcpo",), lambda config: config.vcpo.enable, "only VCPO's update reads it"),
    # The lag-k trainer
    Rule(
        ("trainer.v1.sampler.max_off_policy_threshold", "trainer.v1.sampler.max_off_policy_strategy"),
        _never,
        "async.lag bounds the lag of every trajectory, async.on_deadline says how",
    ),
    Rule(
        ("trainer.v1.sampler.custom_sampler", "trainer.v1.sampler.sync_refill_failed_groups"),
        _never,
        "the lag-k trainer has a replay buffer of its own",
    ),
    Rule(
        ("trainer.v1.separate_async.num_warmup_batches", "trainer.v1.colocate_async"),
        _never,
        "async.lag says how many batches are ahead",
    ),
    Rule(
        ("save_weights", "trainer.max_actor_ckpt_to_keep"),
        lambda config: config.trainer.save_freq != -1,
        "with trainer.save_freq=-1 no checkpoint is written",
    ),
    Rule(("trainer.remove_previous_ckpt_in_save",), _never, "trainer.max_actor_ckpt_to_keep says how many are kept"),
)
"""In order: the first rule that covers a setting, and says that it has no effect, gives the reason."""


def without_effect(config: DictConfig, setting: str) -> str | None:
    """Why this setting has no effect with this configuration, or None."""
    for rule in RULES:
        if rule.covers(setting) and not rule.effective(config):
            return rule.why
    return None
