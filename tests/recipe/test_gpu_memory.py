"""The plan's formulas give what Megatron's model keeps, to 5 percent, for five published models."""

from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from recipe.fully_async_policy.plan.gpu_memory import ENTROPY_BYTES, LOGITS_BYTES, layer_activations
from recipe.fully_async_policy.plan.model_shape import ModelShape, shape_of

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def published(kind: type[PretrainedConfig], *sizes: int, kv_heads: int, tied: bool = False, **more: Any) -> Any:
    """The published config.json, as far as sizes go."""
    named = dict(zip(_SIZES, sizes, strict=True))
    return kind(**named, num_key_value_heads=kv_heads, tie_word_embeddings=tied, **more)


_EXPERTS = dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
# By name: the configuration, and the published count of parameters.
MODELS: dict[str, tuple[PretrainedConfig, int]] = {
    "Qwen2.5-1.5B": (published(Qwen2Config, 151936, 1536, 8960, 28, 12, kv_heads=2, tied=True), 1_543_714_304),
    "Qwen2.5-7B": (published(Qwen2Config, 152064, 3584, 18944, 28, 28, kv_heads=4), 7_615_616_512),
    "Qwen3-8B": (published(Qwen3Config, 151936, 4096, 12288, 36, 32, kv_heads=8, head_dim=128), 8_190_735_360),
    "Qwen3-30B-A3B": (
        published(Qwen3MoeConfig, 151936, 2048, 6144, 48, 32, kv_heads=4, head_dim=128, **_EXPERTS),
        30_532_122_624,
    ),
    "Llama-3.1-8B": (
        published(LlamaConfig, 128256, 4096, 14336, 32, 32, kv_heads=8, rms_norm_eps=1e-5),
        8_030_261_248,
    ),
}
RECOMPUTED = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
TOLERANCE = 0.05


def small_enough(name: str) -> tuple[PretrainedConfig, ModelShape, int]:
    """Model, shape and tokens for a measurement: a mixture has real tensors, and fewer experts."""
    model, tokens = MODELS[name][0], 1024
    if getattr(model, "num_experts", None):
        model, tokens = type(model)(**model.to_dict() | {"num_experts": 16}), 128
    shape = shape_of(model)
    assert shape is not None
    return model, shape, tokens


@pytest.mark.parametrize("name", MODELS)
def test_published_counts(name: str) -> None:
    model, parameters = MODELS[name]
    shape = shape_of(model)
    assert shape is not None and shape.parameters == parameters


@pytest.mark.parametrize("name", MODELS)
def test_what_a_layer_keeps(process_group: None, name: str) -> None:
    from tests.actor.layer_memory import measure

    model, shape, tokens = small_enough(name)
    measured = measure(model, tokens)
    assert measured.layer == shape.per_layer
    assert measured.rest == shape.parameters - shape.layers * shape.per_layer
    assert layer_activations(shape) == pytest.approx(measured.saved_by_layer, rel=TOLERANCE)
    assert 4 * shape.hidden == pytest.approx(measured.saved_by_rest, rel=TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_recomputed_layer_keeps(process_group: None, name: str) -> None:
    from tests.actor.layer_memory import measure

    model, shape, tokens = small_enough(name)
    assert 2 * shape.hidden == pytest.approx(measure(model, tokens, **RECOMPUTED).saved_by_layer, rel=TOLERANCE)


def test_what_a_layer_keeps_with_a_fused_activation(process_group: None) -> None:
    from tests.actor.layer_memory import measure

    model, shape, tokens = small_enough("Qwen2.5-7B")
    measured = measure(model, tokens, bias_activation_fusion=True)
    assert layer_activations(shape, fused=True) == pytest.approx(measured.saved_by_layer, rel=TOLERANCE)


@pytest.mark.parametrize("entropy", [False, True])
def test_logits(process_group: None, entropy: bool) -> None:
    from tests.actor.layer_memory import logits_peak

    expected = LOGITS_BYTES + (ENTROPY_BYTES if entropy else 0)
    assert expected == pytest.approx(logits_peak(entropy=entropy), rel=TOLERANCE)
