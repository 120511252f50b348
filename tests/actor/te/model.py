"""A whole GPTModel of Transformer Engine's layers, small, on packed sequences."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from tests.actor.te.oracle import BOUNDS, LENGTHS, TOKENS, Errors, errors, is_this_ranks, packed_layout
from verl_vcpo.actor.model.local_layers import layer_spec
from verl_vcpo.actor.model.varlen_attention import VarlenAttention
from verl_vcpo.actor.taps.tapping import plug_in
from verl_vcpo.cpu.megatron_shims import TRANSFORMER_CONFIG, install, megatron_on_cpu, seed_everything

VOCABULARY = 96
QWEN2, QWEN3 = {"add_qkv_bias": True}, {"qk_layernorm": True}
MOE = dict(
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=32,
    moe_router_load_balancing_type="none",
    moe_shared_expert_intermediate_size=48,
)


class SmallModel:
    """The model, tapped.

    Args:
        tied: whether output layer and embedding share their weight.
        local: whether all layers but the last norm are Megatron's own.
        fused: whether Transformer Engine's layers add their gradients to `main_grad` themselves.
        config: settings of TransformerConfig to change.
    """

    def __init__(self, *, tied: bool = False, local: bool = False, fused: bool = False, **config: Any) -> None:
        install()
        seed_everything(1)
        self.tied = tied
        generator = torch.Generator().manual_seed(0)
        self.token, self.target = torch.randint(0, VOCABULARY, (2, TOKENS), generator=generator)
        self.position = torch.cat([torch.arange(n) for n in LENGTHS])
        settings = TransformerConfig(
            **{
                **TRANSFORMER_CONFIG,
                **dict(num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2),
                **dict(kv_channels=16, normalization="RMSNorm", gated_linear_unit=True, activation_func=F.silu),
                **dict(add_bias_linear=False, tensor_model_parallel_size=mpu.get_tensor_model_parallel_world_size()),
                **config,
            }
        )
        spec = layer_spec(settings, VarlenAttention) if local else self._spec(settings)
        with megatron_on_cpu():
            self.module = GPTModel(
                settings,
                spec,
                vocab_size=VOCABULARY,
                max_sequence_length=128,
                parallel_output=False,
                share_embeddings_and_output_weights=tied,
                position_embedding_type="rope",
            )
        self._fill()
        if fused:
            for layer in self.module.modules():
                if hasattr(layer, "fuse_wgrad_accumulation"):
                    layer.fuse_wgrad_accumulation = True
        self.tap = plug_in([self.module])
        assert self.tap.untapped is None, self.tap.untapped

    def _spec(self, settings: TransformerConfig) -> ModuleSpec:
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=settings.num_moe_experts,
            moe_grouped_gemm=settings.moe_grouped_gemm,
            qk_layernorm=settings.qk_layernorm,
        )
        spec.submodules.self_attention.submodules.core_attention = VarlenAttention
        return spec

    def _fill(self) -> None:
        """Numbers with which no gradient is near zero; copies on tensor-parallel ranks stay alike."""
        rank = mpu.get_tensor_model_parallel_rank()
        for i, (name, p) in enumerate(self.module.named_parameters()):
            seed = 100 * i + (rank if is_this_ranks(p) else 0)
            values = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                p.copy_(values * 0.2 + ("norm" in name))

    def backward(self, weight: Tensor) -> Tensor:
        """As `oracle.Backward`; the score of a token is its target's log-probability."""
        bounds = torch.tensor(BOUNDS, dtype=torch.int32)
        sequences = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=max(LENGTHS),
            max_seqlen_kv=max(LENGTHS),
        )
        with megatron_on_cpu():
            logits = self.module(self.token[None], self.position[None], None, packed_seq_params=sequences)
        score = logits.view(TOKENS, -1).float().log_softmax(-1).gather(1, self.target[:, None])[:, 0]
        (score * weight).sum().backward()
        return score.detach()

    def errors(self) -> Errors:
        experts = bool(self.module.config.num_moe_experts)
        return errors(self.module, self.tap, self.backward, packed_layout(self.token), self.tied, experts)
