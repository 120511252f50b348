"""The sizes of a decoder with grouped-query attention and gated MLPs or experts, from transformers' configuration."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.fully_async_policy.settings.model import read_config

# The models of Megatron-Bridge that a `ModelShape` describes.
MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in every layer."""

    number: int
    per_token: int
    intermediate: int
    """Of one expert."""
    shared: int = 0
    """Intermediate size of the expert that all tokens visit; 0: there is none."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes that decide the memory of a model. Counts of parameters are those of Megatron's model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    """Of the MLP; without meaning where there are experts."""
    vocabulary: int
    tied: bool = False
    """Whether embedding and head are one matrix."""
    qkv_bias: bool = False
    qk_norms: bool = False
    """Whether queries and keys of every head are normalized."""
    experts: Experts | None = None
    fused_activation: bool = False
    """Whether Megatron-Bridge sets `bias_activation_fusion`."""

    @property
    def queries(self) -> int:
        """Width of all heads' queries."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Width of all heads' keys, and of their values."""
        return self.kv_heads * self.head_size

    @property
    def expert_parameters(self) -> int:
        """Parameters of a layer that expert parallelism splits."""
        return 3 * self.hidden * self.experts.intermediate * self.experts.number if self.experts else 0

    @property
    def dense_parameters(self) -> int:
        """Parameters of a layer that all tokens use."""
        h, qkv = self.hidden, self.queries + 2 * self.keys
        attention = h * qkv + self.queries * h + self.qkv_bias * qkv + self.qk_norms * 2 * self.head_size
        if self.experts is None:
            return attention + 3 * h * self.intermediate + 2 * h
        shared = self.experts.shared
        router = h * self.experts.number + (3 * h * shared + h if shared else 0)
        return attention + router + 2 * h

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of the adapters of a layer's four linear layers; with experts, of the attention's two."""
        h, mlp = self.hidden, self.intermediate
        attention = (h + self.queries + 2 * self.keys) + (self.queries + h)
        return rank * (attention if self.experts else attention + (h + 2 * mlp) + (mlp + h))

    @property
    def per_layer(self) -> int:
        """Parameters of a layer."""
        return self.dense_parameters + self.expert_parameters

    @property
    def embedding(self) -> int:
        """Parameters of one embedding table."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return self.layers * self.per_layer + self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def largest_matrix(self) -> int:
        """Parameters of the largest matrix: of the embedding, or of an MLP's first layer."""
        return max(self.embedding, 0 if self.experts else 2 * self.intermediate * self.hidden)


# From the models' published config.json: the models of the launch scripts, where the checkpoint is not on this machine.
KNOWN_SHAPES = {
    "Qwen2-1.5B": ModelShape(1536, 28, 12, 2, 128, 8960, 151936, tied=True, qkv_bias=True),
    "Qwen2.5-7B": ModelShape(3584, 28, 28, 4, 128, 18944, 152064, qkv_bias=True),
}


def read_shape(path: str) -> ModelShape | None:
    """The model's shape from its config.json, or by its name where that is not here; None: not known, or no such model.

    Raises:
        SettingError: the config.json cannot be read.
    """
    if not (Path(path) / "config.json").is_file():
        return KNOWN_SHAPES.get(Path(path).name)
    settings = read_config(Path(path))
    if settings["model_type"] not in MODEL_TYPES:
        return None
    from transformers import AutoConfig

    return shape_of(AutoConfig.for_model(**settings))


def shape_of(model: Any) -> ModelShape | None:
    """The shape that transformers' configuration of a model gives; None for a model of another kind."""
    kind = model.model_type
    mixed = getattr(model, "mlp_only_layers", None) or getattr(model, "decoder_sparse_step", 1) != 1
    if kind not in MODEL_TYPES or mixed:
        return None
    return ModelShape(
        hidden=model.hidden_size,
        layers=model.num_hidden_layers,
        heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads or model.num_attention_heads,
        head_size=getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads,
        intermediate=model.intermediate_size,
        vocabulary=model.vocab_size,
        tied=bool(model.tie_word_embeddings),
        qkv_bias=kind == "qwen2",
        qk_norms=kind in ("qwen3", "qwen3_moe"),
        experts=_experts(model),
        fused_activation=kind == "llama",
    )


def _experts(model: Any) -> Experts | None:
    number = getattr(model, "num_experts", None) or getattr(model, "num_local_experts", None)
    if not number:
        return None
    return Experts(
        number=number,
        per_token=model.num_experts_per_tok,
        intermediate=getattr(model, "moe_intermediate_size", None) or model.intermediate_size,
        shared=getattr(model, "shared_expert_intermediate_size", None) or 0,
    )
