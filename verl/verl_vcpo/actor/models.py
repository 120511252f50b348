"""The models that the trainer can build with each installation. Checks and docs/guide/cluster.md use this list.

Megatron-Bridge converts the weights. Without Transformer Engine a model has Megatron's own layers (local_layers.py).
"""

import importlib.util
from dataclasses import dataclass
from enum import StrEnum


class Install(StrEnum):
    """An environment that a script of ours makes, by the name of that script."""

    CPU = "install.sh"
    GPU = "install_gpu.sh"
    TRANSFORMER_ENGINE = "install_gpu.sh --te"


@dataclass(frozen=True)
class Model:
    """A kind of model that has a bridge."""

    name: str
    """The makers' name of the model."""
    installs: tuple[Install, ...] = (Install.TRANSFORMER_ENGINE,)
    positions: tuple[str, ...] | None = None
    """Kinds of rotary positions (`rope_type`) that the bridge builds; None: not known here."""


MODELS: dict[str, Model] = {
    "qwen2": Model("Qwen2 and Qwen2.5", tuple(Install), ("default",)),
    "qwen3": Model("Qwen3, dense", tuple(Install), ("default",)),
    "llama": Model("Llama and SmolLM2", tuple(Install), ("default", "linear", "llama3")),
    "qwen3_moe": Model("Qwen3-MoE", (Install.CPU, Install.TRANSFORMER_ENGINE), ("default",)),
    "deepseek_v2": Model("DeepSeek-V2"),
    "deepseek_v3": Model("DeepSeek-V3"),
    "gemma": Model("Gemma"),
    "gemma2": Model("Gemma 2"),
    "gemma3_text": Model("Gemma 3, text"),
    "glm4_moe": Model("GLM-4.5"),
    "mistral": Model("Mistral"),
    "olmoe": Model("OLMoE"),
}
"""All models, by `model_type` of config.json."""


def trained_with(install: Install) -> dict[str, Model]:
    """Return the models that an installation can train."""
    return {kind: model for kind, model in MODELS.items() if install in model.installs}


def install_here(device: str) -> Install | None:
    """Return the installation that this interpreter has for a run on `device` (trainer.device).

    None: the run needs GPUs and this environment is for CPUs, as on a machine that only makes the plan.
    """
    if device == "cpu":
        return Install.CPU
    import torch

    if torch.version.cuda is None:
        return None
    return Install.TRANSFORMER_ENGINE if importlib.util.find_spec("transformer_engine") else Install.GPU
