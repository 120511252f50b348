"""The models that the trainer can build with each installation. Checks and docs/guide/cluster.md use this list.

Without Transformer Engine a model takes a bridge of ours (`bridge.py`, `cpu/bridge.py`), which builds Megatron's own
layers. With Transformer Engine all bridges of mbridge work.
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
    "deepseek_v3": Model("DeepSeek-V3"),
    "gemma3": Model("Gemma 3"),
    "glm4_moe": Model("GLM-4.5"),
    "glm4v": Model("GLM-4.1V"),
    "glm4v_moe": Model("GLM-4.5V"),
    "internvl_chat": Model("InternVL3"),
    "mimo": Model("MiMo"),
    "mixtral": Model("Mixtral"),
    "qwen2_5_vl": Model("Qwen2.5-VL"),
    "qwen2_moe": Model("Qwen2-MoE"),
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
