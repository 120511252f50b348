"""The plan's formulas give what Megatron's model keeps, to 5 percent, for five published models."""

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from recipe.fully_async_policy.plan.gpu_memory import ENTROPY_BYTES, LOGITS_BYTES, layer_activations
from recipe.fully_async_policy.plan.model_shape import ModelShape, shape_of

# By name: the published config.json, and the published count of parameters.
MODELS: dict[str, tuple[PretrainedConfig, int]] = {
    "Qwen2.5-1.5B": (
        Qwen2Config(
            vocab_size=151936,
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
        1_543_714_304,
    ),
    "Qwen2.5-7B": (
        Qwen2Config(
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            tie_word_embeddings=False,
        ),
        7_615_616_512,
    ),
    "Qwen3-8B": (
        Qwen3Config(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=False,
        ),
        8_190_735_360,
    ),
    "Qwen3-30B-A3B": (
        Qwen3MoeConfig(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            tie_word_embeddings=False,
        ),
        30_532_122_624,
    ),
    "Llama-3.1-8B": (
        LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
        ),
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
