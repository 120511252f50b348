"""What every engine builds without Transformer Engine, and with `transformer_impl=local`."""

from collections.abc import Callable
from typing import Any

import pytest
from megatron.core.tensor_parallel import layers
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from verl_vcpo.actor.model import local_layers
from verl_vcpo.actor.model.local_layers import RMSNorm, local_block
from verl_vcpo.actor.model.varlen_attention import VarlenAttention


@pytest.mark.parametrize("model", ["untied", "qk_norms", "llama"])
def test_local_layers_can_be_tapped(make_engine: Callable[..., Any], model: str) -> None:
    provider = make_engine(model).provider
    assert provider.transformer_impl == "local" and provider.transformer_layer_spec is local_block
    block = local_block(provider)
    assert block.layer_norm is RMSNorm and len(block.layer_specs) == provider.num_layers
    layer = block.layer_specs[0].submodules
    assert layer.input_layernorm is layer.pre_mlp_layernorm is RMSNorm
    attention, mlp = layer.self_attention.submodules, layer.mlp.keywords["submodules"]
    assert attention.core_attention is VarlenAttention  # this machine has no Transformer Engine
    assert (attention.linear_qkv, mlp.linear_fc1) == (layers.ColumnParallelLinear,) * 2
    assert (attention.linear_proj, mlp.linear_fc2) == (layers.RowParallelLinear,) * 2


@pytest.mark.parametrize(("asked", "local"), [("local", True), ("transformer_engine", False)])
def test_with_transformer_engine_the_setting_decides(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, asked: str, local: bool
) -> None:
    engine = make_engine()
    engine.provider.transformer_impl, engine.provider.transformer_layer_spec = asked, "upstream's"
    monkeypatch.setattr(local_layers, "HAVE_TE", True)
    monkeypatch.setattr(MegatronEngineWithLMHead, "_build_tf_config", lambda self: None)
    engine._build_tf_config()
    assert engine.provider.transformer_layer_spec == (local_block if local else "upstream's")
