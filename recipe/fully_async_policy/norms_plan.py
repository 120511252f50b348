"""How a launch would measure gradient norms, as far as its settings and its model's config.json tell."""

import json
from pathlib import Path

from omegaconf import DictConfig

from verl_vcpo.workers.config.vcpo import VCPOSettings
from verl_vcpo.workers.engine.megatron.norms import NOT_PACKED, NormsHow, in_words

_OF_TE = "the layers of Transformer Engine, where that is installed, else Megatron's own"


def norms_line(config: DictConfig) -> str | None:
    """Which layers and which way of measuring, and why; None for a method that needs no gradient norms."""
    vcpo = VCPOSettings.of(config.vcpo)
    if not vcpo.needs_gradient_norms:
        return None
    settings = config.actor_rollout_ref.actor.megatron.override_transformer_config
    own = settings.get("transformer_impl") == "local"
    layers = "Megatron's own layers (transformer_impl=local)" if own else _OF_TE
    line = in_words(vcpo.norms.how, layers, obstacle(config))
    checked = vcpo.norms.how is NormsHow.PACKED and not own and not obstacle(config)
    return line + (" The trainer checks the installed version when it starts." if checked else "")


def obstacle(config: DictConfig) -> str | None:
    """Why norms cannot be packed, as far as settings and config.json tell; None if nothing is known against it."""
    settings = config.actor_rollout_ref.actor.megatron.override_transformer_config
    for name in NOT_PACKED:
        if settings.get(name):
            return f"{name} is not supported"
    file = Path(config.actor_rollout_ref.model.path) / "config.json"
    model = json.loads(file.read_text()) if file.is_file() else {}
    if model.get("num_experts") or model.get("num_local_experts"):
        return "the model is a mixture of experts"
    return None
