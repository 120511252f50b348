"""Whether the trainer can build the model: from its config.json, and from what is installed."""

import math
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recipe.fully_async_policy.settings.errors import SettingError, wrong
from recipe.fully_async_policy.settings.model import has_experts, read_config
from verl_vcpo.actor.model.models import MODELS, NOT_BUILT, Install, install_here, trained_with
from verl_vcpo.actor.model.rotary import kind_of, lost_scaling

_BIASES = ("attention_bias", "mlp_bias")
_OF_ATTENTION = ("linear_qkv", "linear_proj")
"""Megatron's names of the linear layers of attention; the last part of a pattern that matches them alone."""


def check_trainable(config: DictConfig) -> None:
    """Refuse a model that the trainer cannot build here, or of which it would build another; none of the hub."""
    paths = {"actor_rollout_ref.model.path": config.actor_rollout_ref.model.path}
    if config.critic.enable:
        paths["critic.model.path"] = config.critic.model.path
    for setting, path in paths.items():
        if path and (Path(path) / "config.json").is_file():
            model = read_config(Path(path))
            if why := _obstacle(model, install_here(config.trainer.device)):
                raise SettingError(f"{setting}={path}: {why}")
            _check_vocabulary(config, path, model)
            of_actor = setting.startswith("actor_rollout_ref.")
            if of_actor and has_experts(model):
                _check_adapters(config, model)
            if of_actor and not has_experts(model) and config.actor_rollout_ref.rollout.enable_rollout_routing_replay:
                words = f"{path} is no mixture of experts; leave it out"
                raise wrong(config, "actor_rollout_ref.rollout.enable_rollout_routing_replay", words)


def _check_adapters(config: DictConfig, model: dict[str, Any]) -> None:
    """Refuse a mixture's adapters but those of grouped-query attention, merged for the samplers.

    Megatron-Bridge gives the experts of a rank one adapter, so the adapters of experts depend on the layout. With
    tensor parallelism it computes adapters of latent attention's lower projections from other tokens.
    """
    lora, setting = config.actor_rollout_ref.model.lora, "actor_rollout_ref.model.lora"
    if not lora.rank:
        return
    if model.get("kv_lora_rank"):
        raise wrong(config, f"{setting}.rank", "adapters of latent attention are not supported; set it to 0")
    if not lora.merge:
        words = "vLLM would hold an adapter for every expert of a mixture, and none is trained; set it to true"
        raise wrong(config, f"{setting}.merge", words)
    names = lora.target_modules or ["every layer"]
    if any("|" in name or name.split(".")[-1] not in _OF_ATTENTION for name in names):
        words = f"a mixture of experts has adapters of attention alone; set it to [{','.join(_OF_ATTENTION)}]"
        raise wrong(config, f"{setting}.target_modules", words)


def _check_vocabulary(config: DictConfig, path: str, model: dict[str, Any]) -> None:
    """Refuse a vocabulary that the trainer's ranks cannot share.

    Padding it would not do: rows of the head that belong to no token would take probability from the others.
    """
    setting = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
    size = model.get("vocab_size") or model.get("text_config", {}).get("vocab_size")
    if isinstance(size, int) and size % (ranks := config.actor_rollout_ref.actor.megatron.tensor_model_parallel_size):
        words = f"does not divide the {size} tokens of {path}/config.json; set it to a divisor of {size}"
        raise wrong(config, setting, f"{words}, such as {math.gcd(size, ranks)}")


def needs_transformer_engine(path: str) -> str | None:
    """The name of the model in this folder, if an installation without Transformer Engine cannot train it."""
    if not (Path(path) / "config.json").is_file():
        return None
    model = MODELS.get(read_config(Path(path))["model_type"])
    return model.name if model and Install.GPU not in model.installs else None


def _obstacle(config: dict[str, Any], install: Install | None) -> str | None:
    """Why an installation cannot train a model, and what to do. `install=None`: that for GPUs which trains most."""
    kind = config["model_type"]
    trained, model = trained_with(install or Install.TRANSFORMER_ENGINE), MODELS.get(kind)
    instead = f"take a model of type {', '.join(sorted(trained))}"
    if model is None:
        why = NOT_BUILT.get(kind, "no test has trained one, so the trainer might compute something else")
        return f"model_type={kind} is not supported: {why}; {instead}"
    if kind not in trained:
        cure = f"install it (scripts/{Install.TRANSFORMER_ENGINE}), or " if install is Install.GPU else ""
        return f"model_type={kind} needs Transformer Engine, which is not installed here; {cure}{instead}"
    if config.get("quantization_config"):
        return (
            "its weights are quantized (quantization_config in its config.json), and those that the trainer makes are "
            "not, so that no sampler could load them; take the model without quantization"
        )
    positions = config.get("rope_parameters") or config.get("rope_scaling") or {}
    of_layers = [part for part in positions.values() if isinstance(part, dict)] or [positions]
    if other := next((found for found in map(kind_of, of_layers) if found not in model.positions), None):
        return (
            f"the trainer has no rotary positions of type {other} for model_type={kind}, and would "
            f"compute other log-probs than the samplers; take a model with {' or '.join(model.positions)}"
        )
    if lost := lost_scaling(positions):
        return lost
    if config.get("topk_method") == "group_limited_greedy":
        return f"Megatron limits groups of experts by another rule than its topk_method; {instead}"
    left_out = [name for name in _BIASES if config.get(name) and not (model.has_biases and name == "attention_bias")]
    if left_out:
        return f"the trainer would leave out the biases that {left_out[0]}=true in its config.json adds; {instead}"
    return None
