"""Llama: its weights pass through the trainer unchanged, and its rotary positions are those of transformers.

What it computes is compared with transformers in test_export.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from verl_vcpo.actor.model.megatron_bridge import AutoBridge
from verl_vcpo.actor.model.rotary import lost_scaling
from verl_vcpo.cpu.megatron_shims import megatron_on_cpu

LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA_3_2 = LLAMA_3_1 | {"factor": 32.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize("model", ["llama", "llama_tied"])
def test_weights_pass_through_unchanged(
    make_engine: Callable[..., Any], checkpoints: Callable[[str], Path], model: str
) -> None:
    engine = make_engine(model)
    with megatron_on_cpu(), torch.no_grad():
        exported = {
            name: weight.clone() for name, weight in engine.bridge.export_hf_weights(engine.module, show_progress=False)
        }
    loaded = load_file(checkpoints(model) / "model.safetensors")
    assert set(exported) - {"lm_head.weight"} == set(loaded) - {"lm_head.weight"}
    assert all(torch.equal(weight, exported[name]) for name, weight in loaded.items())


@pytest.mark.parametrize("positions", [LLAMA_3_1, LLAMA_3_2, LINEAR], ids=["Llama 3.1", "Llama 3.2", "linear"])
def test_scaled_positions_are_those_of_transformers(positions: dict[str, Any]) -> None:
    """Catches positions without their scaling: log-probs that look right, and are those of another model."""
    config = LlamaConfig(
        hidden_size=2048, num_attention_heads=16, rope_parameters=dict(positions), architectures=["LlamaForCausalLM"]
    )
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    rotary = RotaryEmbedding(
        128,
        provider.rotary_percent,
        rotary_base=provider.rotary_base,
        seq_len_interpolation_factor=provider.seq_len_interpolation_factor,
        rope_scaling=provider.rope_scaling,
        rope_scaling_factor=provider.rope_scaling_factor,
        use_cpu_initialization=True,
    )
    angles = rotary.get_freqs_non_repeated(9000)[[1, 100, 8999]]
    expected = torch.tensor([1.0, 100.0, 8999.0])[:, None] * LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(angles, expected, rtol=1e-5, atol=0)


def test_positions_that_megatron_does_not_have() -> None:
    assert lost_scaling({"rope_theta": 10000.0}) is lost_scaling(LLAMA_3_2) is None
    assert "llama3 needs" in (lost_scaling(LLAMA_3_1 | {"original_max_position_embeddings": 4096}) or "")
