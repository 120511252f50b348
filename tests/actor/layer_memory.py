"""Counts what a forward of the engine's model keeps for its backward: bytes per token, without a GPU.

The model is Megatron's GPTModel with Megatron-Bridge's configuration and Megatron's own layers, in bfloat16, on the
meta device: tensors have sizes and no memory. Where token counts decide sizes on the host, as they do between the
experts of a mixture, the tensors are real and few. Two kernels that need a GPU have stand-ins that keep what the
kernels keep:

    attention    torch's flash attention: queries, keys, values, outputs, and one float32 per head and token
    norms        torch's fused RMSNorm: inputs, and one float32 per row
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import float16_to_fp32
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from verl_vcpo.actor.model.local_layers import block_spec, layer_spec
from verl_vcpo.actor.model.megatron_bridge import AutoBridge
from verl_vcpo.actor.model.varlen_attention import VarlenAttention
from verl_vcpo.cpu import megatron_shims


@dataclass(frozen=True)
class Measured:
    """What was counted of a model."""

    layer: int
    """Parameters of one layer."""
    rest: int
    """Parameters beside the layers."""
    saved_by_layer: float
    """Bytes per token that one layer keeps."""
    saved_by_rest: float
    """Bytes per token that the embedding, the last norm and the head keep; without the loss."""


class _Attention(VarlenAttention):
    """Offsets are real, because the rotary embedding reads them on the host."""

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, length: Tensor, longest: int) -> Tensor:
        return super()._packed(query, key, value, length.to(query.device), longest)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, H, S, D] each; the numbers are 0."""
        out = torch.zeros_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_zeros(q.shape[:3], dtype=torch.float32))
        return out


class _FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """[..., d]; the numbers are 0."""
        ctx.save_for_backward(x, weight, x.new_zeros(x.shape[:-1], dtype=torch.float32))
        return torch.zeros_like(x)


def _flash(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    return _Flash.apply(query, key, value)


def _rms_norm(x: Tensor, _: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    return _FusedRMSNorm.apply(x, weight)


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Megatron in the block builds its modules there, and the two kernels have stand-ins."""
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (torch.cuda, "current_device", lambda: device),
            (torch.nn.functional, "scaled_dot_product_attention", _flash),
            (torch.nn.functional, "rms_norm", _rms_norm),
            (torch._dynamo.config, "disable", True),
        ):
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(device)
        yield


def _start() -> None:
    megatron_shims.install()
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel()


def _transformer_config(model: Any, layers: int, settings: dict[str, Any]) -> Any:
    """Megatron-Bridge's configuration for one process."""
    named = type(model)(**model.to_dict() | {"architectures": [ARCHITECTURES[model.model_type]]})
    provider = AutoBridge.from_hf_config(named).to_megatron_provider(load_weights=False)
    own = dict(
        perform_initialization=False, attention_dropout=0.0, num_layers=layers, moe_router_load_balancing_type="none"
    )
    without_kernels = dict(moe_grouped_gemm=False, moe_permute_fusion=False, apply_rope_fusion=False)
    provider.apply_overrides_and_finalize(dtype=torch.bfloat16, overrides=own | without_kernels | settings)
    return provider


def _saved(model: Any, layers: int, tokens: int, settings: dict[str, Any]) -> tuple[int, int]:
    """(parameters, bytes kept by a forward) of so many layers."""
    device = torch.device("cpu" if getattr(model, "num_experts", None) else "meta")
    with _on(device):
        config = _transformer_config(model, layers, settings)
        network = GPTModel(
            config,
            block_spec(layer_spec(config, _Attention), config),
            model.vocab_size,
            tokens,
            share_embeddings_and_output_weights=model.tie_word_embeddings,
            position_embedding_type="rope",
        ).bfloat16()
        own = {p.untyped_storage()._cdata for p in network.parameters()}
        kept: dict[int, Any] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage  # held, so that no other storage gets its address
            return tensor

        token = torch.zeros(1, tokens, dtype=torch.long)
        offsets = torch.tensor([0, tokens], dtype=torch.int32, device="cpu")
        packed = PackedSeqParams("thd", offsets, offsets, max_seqlen_q=tokens, max_seqlen_kv=tokens)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            network(token, token, None, packed_seq_params=packed)
    return sum(p.numel() for p in network.parameters()), sum(storage.nbytes() for storage in kept.values())


def measure(model: Any, tokens: int = 1024, **settings: Any) -> Measured:
    """Count the parameters of a model and what its forward keeps.

    Args:
        model: transformers' configuration of the model. Of a mixture of experts the tensors are real: give few experts.
        tokens: of the forward, in one sequence.
        settings: of Megatron's TransformerConfig.
    """
    _start()
    (one, saved_by_one), (two, saved_by_two) = (_saved(model, layers, tokens, settings) for layers in (1, 2))
    layer, saved = two - one, saved_by_two - saved_by_one
    return Measured(layer, one - layer, saved / tokens, (saved_by_one - saved) / tokens)


class _Live(TorchDispatchMode):
    """The largest sum of the bytes of all tensors that were made in the block and not freed."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._live = 0, dict[int, int]()

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live:
                    self._live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self._live.values()))
        return out


def logits_peak(tokens: int = 256, vocabulary: int = 32768, *, entropy: bool = False) -> float:
    """Bytes per token and word at the worst moment of head, log-probs and their backward: verl's code, real tensors."""
    _start()
    weight = torch.zeros(vocabulary, 16, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.zeros(1, tokens, 16, dtype=torch.bfloat16, requires_grad=True)
    label, temperature = torch.zeros(1, tokens, dtype=torch.long), torch.ones(1, tokens)
    engine = SimpleNamespace(engine_config=SimpleNamespace(entropy_from_logits_with_chunking=False))
    with patch.object(torch._dynamo.config, "disable", True), _Live() as live:
        out = MegatronEngineWithLMHead._lm_head_logits_processor(
            engine,
            float16_to_fp32(torch.nn.functional.linear(hidden, weight)),
            label,
            temperature,
            calculate_sum_pi_squared=False,
            calculate_entropy=entropy,
            distillation_use_topk=False,
            distillation_only=False,
            logits_processor_func=None,
            batch=None,
            data_format="thd",
        )
        sum(value.sum() for value in out.values()).backward()
    return live.peak / (tokens * vocabulary)
