"""What a GPU builds with `transformer_impl=local`. Its names and gradients are those of every engine on CPU."""

from collections.abc import Callable
from typing import Any

import pytest
from mbridge.core import bridge as registry
from mbridge.core.llm_bridge import LLMBridge
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import TransformerConfig

from verl_vcpo.actor.local_layers import RMSNorm
from verl_vcpo.actor.varlen_attention import VarlenAttention


@pytest.fixture(params=["LocalQwen2Bridge", "LocalQwen3Bridge", "LocalLlamaBridge"])
def bridge_with(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Builds the bridge; its registration does not outlast the test."""
    monkeypatch.setattr(registry, "_MODEL_REGISTRY", dict(registry._MODEL_REGISTRY))
    from verl_vcpo.actor import bridge as ours

    def make(**settings: Any) -> Any:
        bridge = object.__new__(getattr(ours, request.param))  # its constructor wants a GPU
        bridge.config = TransformerConfig(
            num_layers=2, hidden_size=64, num_attention_heads=2, normalization="RMSNorm", **settings
        )
        return bridge

    return make


@pytest.mark.parametrize("installed", [True, False])
def test_local_layers_can_be_tapped(
    make_engine: Callable[..., Any], bridge_with: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    make_engine()  # Megatron's parallel state
    monkeypatch.setattr("verl_vcpo.actor.bridge.HAVE_TE", installed)
    bridge = bridge_with(transformer_impl="local") if installed else bridge_with()
    block = bridge._get_transformer_layer_spec()
    assert bridge.config.transformer_impl == "local"
    assert block.layer_norm is RMSNorm and len(block.layer_specs) == 2
    layer = block.layer_specs[0].submodules
    assert layer.input_layernorm is layer.pre_mlp_layernorm is RMSNorm
    attention, mlp = layer.self_attention.submodules, layer.mlp.submodules
    assert attention.core_attention is VarlenAttention  # this machine has no Transformer Engine
    assert (attention.linear_qkv, mlp.linear_fc1) == (layers.ColumnParallelLinear,) * 2
    assert (attention.linear_proj, mlp.linear_fc2) == (layers.RowParallelLinear,) * 2


def test_otherwise_the_layers_are_mbridges(monkeypatch: pytest.MonkeyPatch, bridge_with: Callable[..., Any]) -> None:
    bridge = bridge_with()
    monkeypatch.setattr("verl_vcpo.actor.bridge.HAVE_TE", True)
    monkeypatch.setattr(LLMBridge, "_get_transformer_layer_spec", lambda self, vp_stage: ("upstream's", vp_stage))
    assert bridge._get_transformer_layer_spec(1) == ("upstream's", 1)
