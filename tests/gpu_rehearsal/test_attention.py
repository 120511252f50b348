"""Which kernel attention takes on a GPU without Transformer Engine, at the heads of all launch scripts."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from recipe.fully_async_policy.plan.model_shape import KNOWN_SHAPES
from tests.kit.fake_cuda import flash_attention, operations
from tests.kit.fake_cuda.__main__ import STAND_INS
from verl_vcpo.actor.model.varlen_attention import VarlenAttention

LENGTHS = [5, 1, 17]
SCRIPTS = {"math, countdown": ("Qwen2.5-7B", 4), "gsm8k": ("Qwen2-1.5B", 2), "multi-turn": ("Qwen2.5-7B", 2)}
"""Of each task the model, and over how many GPUs its heads are spread."""


def attend(model: str, tp: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output of packed sequences of `LENGTHS`, and queries, keys and values."""
    shape = KNOWN_SHAPES[model]
    heads, groups = shape.heads // tp, shape.kv_heads // tp
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * shape.head_size,
        num_attention_heads=heads,
        num_query_groups=groups,
        attention_dropout=0.0,
    )
    attention = VarlenAttention(
        config, 1, AttnMaskType.causal, "self", pg_collection=ProcessGroupCollection(cp=dist.group.WORLD)
    )
    generator = torch.Generator().manual_seed(0)
    sizes = [(sum(LENGTHS), n, shape.head_size) for n in (heads, groups, groups)]
    qkv = [torch.randn(size, generator=generator).to("cuda", dtype).requires_grad_() for size in sizes]
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int().cuda()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=max(LENGTHS))
    return attention(*qkv, packed_seq_params=packed), qkv


counted = pytest.mark.skipif(not STAND_INS, reason="the stand-ins alone count calls")


@counted
@pytest.mark.parametrize("task", SCRIPTS)
@pytest.mark.usefixtures("process_group", "no_operation_without_kernel")
def test_packed_sequences_take_flash_attention_as_they_are(task: str) -> None:
    """Catches padding, and cuDNN, which builds a plan for every new shape."""
    chosen, before = operations.attention_kernels(), flash_attention.calls.copy()
    output, qkv = attend(*SCRIPTS[task], torch.bfloat16)
    torch.autograd.grad(output.float().sin().sum(), qkv)
    assert flash_attention.calls - before == {"forward": 1, "backward": 1}
    assert operations.attention_kernels() == chosen, "no scaled_dot_product_attention"


@pytest.mark.parametrize("task", SCRIPTS)
@pytest.mark.usefixtures("process_group", "no_operation_without_kernel")
def test_packed_sequences_attend_to_themselves(task: str) -> None:
    output, qkv = attend(*SCRIPTS[task], torch.bfloat16)
    gradients = torch.autograd.grad(output.float().sin().sum(), qkv)
    shared = qkv[0].shape[1] // qkv[1].shape[1]
    exact = [x.detach().cpu().float().requires_grad_() for x in qkv]
    expected = []
    for q, k, v in zip(*(x.split(LENGTHS) for x in exact), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)))
        expected.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1))
    torch.testing.assert_close(output.cpu().float(), torch.cat(expected), rtol=2e-2, atol=2e-2)
    wanted = torch.autograd.grad(torch.cat(expected).sin().sum(), exact)
    for gradient, of_exact in zip(gradients, wanted, strict=True):
        assert (gradient.cpu().float() - of_exact).norm() < 2e-2 * of_exact.norm()


@counted
@pytest.mark.usefixtures("process_group", "no_operation_without_kernel")
def test_padded_sequences_do_not_take_cudnn() -> None:
    """Of float32 sequences, which FlashAttention does not take."""
    attend(*SCRIPTS["math, countdown"], torch.float32)
    chosen = operations.attention_kernels()
    assert chosen and "CUDNN_ATTENTION" not in chosen
