"""How a launch would measure gradient norms, as far as its settings and its model's config.json tell."""

import json
from pathlib import Path

from omegaconf import DictConfig

from verl_vcpo.actor.models import Install, install_here
from verl_vcpo.actor.norms.settings import against_packing, against_packing_experts, in_words
from verl_vcpo.actor.vcpo_settings import VCPOSettings

_LAYERS = {
    None: "the layers of Transformer Engine, where that is installed, else Megatron's own",
    Install.GPU: "Megatron's own layers (Transformer Engine is not installed)",
    Install.TRANSFORMER_ENGINE: "the layers of Transformer Engine",
}
"""Of a run on GPUs, by the installation of this machine."""


def norms_line(config: DictConfig) -> str | None:
    """Which layers and which way of measuring, and why; None for a method that needs no gradient norms."""
    vcpo = VCPOSettings.of(config.vcpo)
    if not vcpo.needs_gradient_norms:
        return None
    settings = config.actor_rollout_ref.actor.megatron.override_transformer_config
    asked, install = settings.get("transformer_impl") == "local", install_here("cuda")
    own = asked or install is Install.GPU
    layers = "Megatron's own layers (transformer_impl=local)" if asked else _LAYERS[install]
    experts, reason = _has_experts(config), obstacle(config)
    line = in_words(vcpo.norms.how, layers, reason, experts)
    checked = vcpo.packs_gradient_norms and not reason and (experts or not own)
    what = "its experts' settings and layers" if experts else "the installed version"
    return line + (f" The trainer checks {what} when it starts." if checked else "")


def _has_experts(config: DictConfig) -> bool:
    file = Path(config.actor_rollout_ref.model.path) / "config.json"
    model = json.loads(file.read_text()) if file.is_file() else {}
    return bool(model.get("num_experts") or model.get("num_local_experts") or model.get("n_routed_experts"))


def obstacle(config: DictConfig) -> str | None:
    """Why norms cannot be packed, as far as settings and config.json tell; None if nothing is known against it."""
    settings = config.actor_rollout_ref.actor.megatron.override_transformer_config
    return against_packing(settings.get) or (against_packing_experts(settings.get) if _has_experts(config) else None)
