"""Small random checkpoints of the families of models that the trainer builds, made with transformers."""

import math
from pathlib import Path
from typing import Any

import torch

from tests.kit.layout_run import SMALL, write_checkpoint

_HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32)  # vLLM has no smaller ones on a CPU
_LLAMA_3: dict[str, Any] = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0)
_LLAMA_3 |= dict(high_freq_factor=4.0, original_max_position_embeddings=8192)
_LINEAR: dict[str, Any] = dict(
    full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
    sliding_attention=dict(rope_type="default", rope_theta=1e4),
)
_YARN: dict[str, Any] = dict(rope_type="yarn", rope_theta=1e4, factor=40, beta_fast=32, beta_slow=1, mscale=0.707)
_YARN |= dict(mscale_all_dim=0.707, original_max_position_embeddings=4096)
_YARN_V3 = _YARN | dict(mscale=1.0, mscale_all_dim=1.0)
_GEMMA_3 = dict(_HEADS, num_hidden_layers=6, sliding_window=4, query_pre_attn_scalar=32)  # the sixth sees all tokens
_EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
_GLM = dict(_HEADS, **_EXPERTS, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, attention_bias=True)
_DEEPSEEK = dict(
    **dict(_EXPERTS, n_routed_experts=4, n_shared_experts=2, first_k_dense_replace=1),
    **dict(num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=512, qk_rope_head_dim=64),  # as vLLM wants
    **dict(qk_nope_head_dim=32, v_head_dim=32),
)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3": ("llama", dict(_HEADS, rope_parameters=_LLAMA_3)),
    "SmolLM2": ("llama", dict(_HEADS, tie_word_embeddings=True)),
    "Qwen2.5": ("qwen2", dict(num_attention_heads=2, num_key_value_heads=1)),
    "Qwen3": ("qwen3", _HEADS),
    "Qwen3-MoE": ("qwen3_moe", dict(_HEADS, **_EXPERTS, num_experts=4, norm_topk_prob=True)),
    "Gemma": ("gemma", _HEADS),
    "Gemma 3, 1B": ("gemma3_text", _GEMMA_3),
    "Gemma 3, 4B and more": ("gemma3_text", dict(_GEMMA_3, rope_parameters=_LINEAR)),
    "Mistral": ("mistral", dict(_HEADS, sliding_window=None)),
    "Mistral, sliding window": ("mistral", dict(_HEADS, sliding_window=4)),
    "GLM-4.5": ("glm4_moe", dict(_GLM, use_qk_norm=True)),
    "GLM-4.5-Air": ("glm4_moe", dict(_GLM, num_nextn_predict_layers=1)),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        dict(_DEEPSEEK, q_lora_rank=None, n_group=1, topk_group=1, rope_parameters=_YARN),
    ),
    "DeepSeek-V3": ("deepseek_v3", dict(_DEEPSEEK, q_lora_rank=32, n_group=2, topk_group=1, rope_parameters=_YARN_V3)),
    "Moonlight": ("deepseek_v3", dict(_DEEPSEEK, q_lora_rank=None, n_group=1, topk_group=1)),
    "OLMoE": ("olmoe", dict(num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)),
}
"""The `model_type` of each, and what makes a small one: settings of its configuration beside those that all have."""


def make(name: str, folder: Path) -> Path:
    """Write a checkpoint of two layers (Gemma 3: six) into `folder`, and return its folder."""
    import transformers

    kind, settings = FAMILIES[name]
    shape = {**SMALL, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**shape, **settings})
    path = folder / name.replace(" ", "_")
    write_checkpoint(transformers.AutoModelForCausalLM.from_config(config), path)
    return path


def by_transformers(folder: Path) -> Any:
    """Return the model in `folder` as transformers computes it.

    DeepSeek-V2's attention gets the scale of its makers' code, of Megatron and of vLLM: transformers leaves out the
    part of `mscale_all_dim`.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    if model.config.model_type == "deepseek_v2":
        yarn = model.config.rope_parameters
        for layer in model.model.layers:
            layer.self_attn.scaling *= (0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1) ** 2
    return model
