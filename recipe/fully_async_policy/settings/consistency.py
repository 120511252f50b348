"""Settings that are right each for itself and wrong together."""

import os
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from recipe.fully_async_policy.settings.errors import SettingError, choices, shown
from verl_vcpo.actor.vcpo_settings import VCPOSettings
from verl_vcpo.loop.checkpoint import NAME
from verl_vcpo.loop.deadlines import OnDeadline
from verl_vcpo.samplers.kv_cache import KVCache

_ENDLESS = 100_000
"""`trainer.total_epochs` of vcpo_trainer.yaml: the number of steps decides."""
BACKENDS = ("nccl", "nixl", "mooncake", "kimi_ckpt_engine", "delta_sharded")
"""verl's ways of sending weights to samplers on devices of their own."""
_OWN_MODULES = ("verl_vcpo.cpu.weight_file", "verl_vcpo.weights.nccl", None)
_ATTENTION = {"auto": "111", "flash": "100", "fused": "010", "unfused": "001", "local": "000"}
"""For each attention_backend what Megatron wants of NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN."""
_AFTER_THE_FORWARD = ("optimal_token_baseline", "tir_optimal_token_baseline")


def consistency_checks(config: DictConfig, vcpo: VCPOSettings) -> list[Callable[[], None]]:
    """The checks that refuse what contradicts itself, apart from sizes (`layout.py`). Each raises SettingError."""
    return [
        lambda: _check_async(config),
        lambda: _check_groups(config, vcpo),
        lambda: _check_log_probs(config.actor_rollout_ref.rollout),
        lambda: check_length(config),
        lambda: _check_schedule(config),
        lambda: _check_weights_backend(config),
        lambda: _check_attention(config),
        lambda: _check_estimator(config),
        lambda: _check_rewards(config, vcpo),
    ]


def _check_rewards(config: DictConfig, vcpo: VCPOSettings) -> None:
    if config.reward.custom_reward_function.path and config.reward.reward_manager.name == "remote":
        raise SettingError(
            "reward.reward_manager.name=remote: a custom reward function has processes of its own already, which end "
            "at async.reward_timeout_s; use naive"
        )
    if vcpo.enable and config.algorithm.use_kl_in_reward:
        raise SettingError(
            "algorithm.use_kl_in_reward=true: VCPO's update uses raw rewards; set it to false, or another method"
        )


def check_lag(config: DictConfig) -> None:
    """Refuse a lag beyond the run's length, for the trainer; the lag simulator samples nothing ahead.

    Raises:
        SettingError: the lag is larger than the number of steps.
    """
    lag, steps = config["async"].lag, config.trainer.total_training_steps
    if None not in (lag, steps) and lag > steps and not config.trainer.val_only:
        raise SettingError(
            f"async.lag={lag}: more than trainer.total_training_steps={steps}, so that batches are "
            f"sampled which no step trains on; set it to {steps} or less, or train for more steps"
        )


def check_length(config: DictConfig) -> None:
    """Refuse prompts and responses that are longer together than what the samplers take.

    Raises:
        SettingError: they are.
    """
    longest, prompt, response = (
        config.actor_rollout_ref.rollout.max_model_len,
        config.data.max_prompt_length,
        config.data.max_response_length,
    )
    if longest is not None and prompt + response > longest:
        raise SettingError(
            f"actor_rollout_ref.rollout.max_model_len={longest}: data.max_prompt_length={prompt} and "
            f"data.max_response_length={response} together are {prompt + response} tokens; raise it, or shorten one"
        )
    for kind, length in (("prompt", prompt), ("response", response)):
        given = config.actor_rollout_ref.rollout[f"{kind}_length"]
        if given != length:
            setting = f"actor_rollout_ref.rollout.{kind}_length={given}"
            raise SettingError(f"{setting}: data.max_{kind}_length={length} decides; leave it out")


def _check_async(config: DictConfig) -> None:
    settings = config["async"]
    if settings.on_deadline == OnDeadline.REISSUE and settings.lag == 0:
        raise SettingError(
            "async.on_deadline=reissue: at async.lag=0 the trainer has nothing else to train on; use wait"
        )
    if settings.kv_cache == KVCache.KEEP and config.actor_rollout_ref.rollout.free_cache_engine:
        raise SettingError(
            "async.kv_cache=keep: actor_rollout_ref.rollout.free_cache_engine=true frees the cache at every update; "
            "set it to false"
        )
    if settings.exact_lag and (settings.lag != int(settings.lag) or settings.on_deadline != OnDeadline.WAIT):
        raise SettingError("async.exact_lag=true: needs a whole async.lag and async.on_deadline=wait")


def _check_groups(config: DictConfig, vcpo: VCPOSettings) -> None:
    n = config.actor_rollout_ref.rollout.n
    if vcpo.compares_samples_of_a_prompt and n < 2:
        raise SettingError(
            f"actor_rollout_ref.rollout.n={n}: vcpo.baseline={vcpo.baseline}, vcpo.norm_by_std={vcpo.norm_by_std} "
            "compare the samples of a prompt; set n to 2 or more, or vcpo.baseline=none vcpo.norm_by_std=false"
        )


def _check_log_probs(rollout: DictConfig) -> None:
    """Refuse what makes recorded log-probs others than those that the trainer's policy would have; not validation's."""
    mode, t = rollout.logprobs_mode, rollout.temperature
    if mode != "processed_logprobs" and (mode != "raw_logprobs" or t != 1):
        raise SettingError(
            f"actor_rollout_ref.rollout.logprobs_mode={mode}: not of the distribution sampled at temperature={t}; set "
            "it to processed_logprobs"
        )


def _check_schedule(config: DictConfig) -> None:
    trainer, optim = config.trainer, config.actor_rollout_ref.actor.optim
    steps = trainer.total_training_steps
    if steps is None and trainer.total_epochs == _ENDLESS:
        raise SettingError(
            f"trainer.total_training_steps=null: the run would last {_ENDLESS} epochs; give a number of steps, or "
            "trainer.total_epochs"
        )
    if trainer.resume_mode == "resume_path" and not NAME.fullmatch(Path(str(trainer.resume_from_path)).name):
        raise SettingError(
            f"trainer.resume_from_path={shown(trainer.resume_from_path)}: trainer.resume_mode=resume_path needs a "
            "checkpoint's folder, .../global_step_N; resume_mode=auto finds the newest"
        )
    if trainer.resume_from_path and trainer.resume_mode != "resume_path":
        raise SettingError(
            f"trainer.resume_from_path={trainer.resume_from_path}: has no effect with trainer.resume_mode="
            f"{trainer.resume_mode}; set that to resume_path"
        )
    if trainer.val_only and not trainer.val_before_train:
        raise SettingError(
            "trainer.val_only=true: only validates before training, which trainer.val_before_train=false leaves "
            "out; set that to true"
        )
    if optim.lr_warmup_steps and steps and optim.lr_warmup_steps >= steps:
        raise SettingError(
            f"actor_rollout_ref.actor.optim.lr_warmup_steps={optim.lr_warmup_steps}: the warm-up has to end before "
            f"trainer.total_training_steps={steps}; lower it, or set it to 0 and lr_warmup_steps_ratio below 1"
        )


def _check_weights_backend(config: DictConfig) -> None:
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    if engine.custom_backend_module not in _OWN_MODULES:  # which may register any name
        return
    allowed = ("weight_file",) if config.trainer.device == "cpu" else BACKENDS
    if engine.backend not in allowed:
        raise SettingError(
            f"actor_rollout_ref.rollout.checkpoint_engine.backend={shown(engine.backend)}: does not reach samplers "
            f"with devices of their own here; {choices(engine.backend, allowed)}"
        )


def _check_attention(config: DictConfig) -> None:
    """Refuse what Megatron refuses when a trainer's process builds the model."""
    name = "actor_rollout_ref.actor.megatron.override_transformer_config.attention_backend"
    backend = config.actor_rollout_ref.actor.megatron.override_transformer_config.get("attention_backend") or "auto"
    if backend not in _ATTENTION:
        raise SettingError(f"{name}={shown(backend)}: {choices(backend, _ATTENTION)}")
    for kernel, wanted in zip(("FLASH", "FUSED", "UNFUSED"), _ATTENTION[backend], strict=True):
        variable = f"NVTE_{kernel}_ATTN"
        if os.environ.get(variable, wanted) != wanted:
            raise SettingError(
                f"{variable}={os.environ[variable]} in the environment: {name}={backend} decides, and Megatron refuses "
                f"another value than {wanted}; unset {variable}, or set attention_backend to what you want"
            )


def _check_estimator(config: DictConfig) -> None:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    import verl_vcpo.actor.policy_losses  # noqa: F401  # registers ours

    estimator, bypass = config.algorithm.adv_estimator, config.algorithm.rollout_correction.bypass_mode
    measured = config.actor_rollout_ref.actor.calculate_sum_pi_squared and not bypass
    if estimator not in ADV_ESTIMATOR_REGISTRY:
        raise SettingError(f"algorithm.adv_estimator={shown(estimator)}: {choices(estimator, ADV_ESTIMATOR_REGISTRY)}")
    if estimator in _AFTER_THE_FORWARD and not measured:
        raise SettingError(
            f"algorithm.adv_estimator={estimator}: needs the policy's probabilities before the update; set "
            "actor_rollout_ref.actor.calculate_sum_pi_squared=true, algorithm.rollout_correction.bypass_mode=false"
        )
