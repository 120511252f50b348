"""Packed attention is per-sequence attention."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from verl_vcpo.actor.model.varlen_attention import VarlenAttention

HEADS, GROUPS, SIZE = 4, 2, 8

pytestmark = pytest.mark.usefixtures("process_group")


def attention(**settings: object) -> VarlenAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * SIZE,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        **settings,  # type: ignore[arg-type]
    )
    groups = ProcessGroupCollection(cp=dist.group.WORLD)
    return VarlenAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)


@pytest.mark.parametrize("lengths", [[5], [1, 7, 3], [4, 4]])
def test_packed_equals_one_by_one(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), heads, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    qkv = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=max(lengths))
    got = attention()(*qkv, packed_seq_params=packed)

    expected = []
    for q, k, v in zip(*(x.split(lengths) for x in qkv), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
        expected.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1))
    torch.testing.assert_close(got, torch.cat(expected))
    for mine, theirs in zip(
        torch.autograd.grad(got.sin().sum(), qkv),
        torch.autograd.grad(torch.cat(expected).sin().sum(), qkv),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_padded_batches_have_the_sequence_first() -> None:
    q, k, v = (torch.randn(5, 2, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS))
    alone = attention()(q[:, :1], k[:, :1], v[:, :1])
    torch.testing.assert_close(attention()(q, k, v)[:, :1], alone)


def test_what_it_lacks_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="sliding window"):
        attention(window_size=(4, 0))


def test_everything_is_on_the_device_and_nothing_waits_for_it() -> None:
    """On the meta device a value that the host asks for, and a tensor made elsewhere, are errors."""
    qkv = [torch.empty(11, heads, SIZE, device="meta", requires_grad=True) for heads in (HEADS, GROUPS, GROUPS)]
    offsets = torch.empty(4, dtype=torch.int32, device="meta")
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=7)
    out = attention()(*qkv, packed_seq_params=packed)
    assert out.shape == (11, HEADS * SIZE)
    assert all(gradient.is_meta for gradient in torch.autograd.grad(out.sum(), qkv))
