"""The models that the trainer can build with each installation. Checks and docs/guide/cluster.md use this list.

Megatron-Bridge converts the weights. Without Transformer Engine a model has Megatron's own layers (local_layers.py).
"""

import importlib.util
from dataclasses import dataclass
from enum import StrEnum

from verl_vcpo.common.machine import is_for_cpus


class Install(StrEnum):
    """An environment that a script of ours makes, by the name of that script."""

    CPU = "install.sh"
    GPU = "install_gpu.sh"
    TRANSFORMER_ENGINE = "install_gpu.sh --te"


@dataclass(frozen=True)
class Model:
    """A kind of model that a test has trained a step (tests/actor/test_families.py)."""

    name: str
    """The makers' name of the model."""
    installs: tuple[Install, ...] = (Install.TRANSFORMER_ENGINE,)
    positions: tuple[str, ...] = ("default",)
    """Kinds of rotary positions (`rope_type`) that the bridge builds as transformers does."""
    has_biases: bool = False
    """The bridge builds the biases that `attention_bias` adds."""


MODELS: dict[str, Model] = {
    "qwen2": Model("Qwen2 and Qwen2.5", tuple(Install)),
    "qwen3": Model("Qwen3, dense", tuple(Install)),
    "llama": Model("Llama and SmolLM2", tuple(Install), ("default", "linear", "llama3")),
    "qwen3_moe": Model("Qwen3-MoE", (Install.CPU, Install.TRANSFORMER_ENGINE)),
    "deepseek_v2": Model("DeepSeek-V2", positions=("yarn",)),
    "deepseek_v3": Model("DeepSeek-V3", positions=("default", "yarn")),
    "gemma": Model("Gemma"),
    "gemma3_text": Model("Gemma 3, text", positions=("default", "linear")),
    "glm4_moe": Model("GLM-4.5", has_biases=True),
    "mistral": Model("Mistral"),
    "olmoe": Model("OLMoE"),
}
"""All models, by `model_type` of config.json."""
NOT_BUILT = {
    "gemma2": "Megatron-Bridge's attention of Gemma 2 takes no packed sequences",
    "glm4": "of GLM Megatron-Bridge builds mixtures of experts only",
}
"""Models that are asked for, by `model_type`, and why they are not trained."""


def trained_with(install: Install) -> dict[str, Model]:
    """Return the models that an installation can train."""
    return {kind: model for kind, model in MODELS.items() if install in model.installs}


def install_here(device: str) -> Install | None:
    """Return the installation that this interpreter has for a run on `device` (trainer.device).

    None: the run needs GPUs and this environment is for CPUs, as on a machine that only makes the plan.
    """
    if device == "cpu":
        return Install.CPU
    if is_for_cpus():
        return None
    return Install.TRANSFORMER_ENGINE if importlib.util.find_spec("transformer_engine") else Install.GPU
