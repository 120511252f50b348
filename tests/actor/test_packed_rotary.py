"""Rotary positions of packed sequences beside Megatron's own function."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from verl_vcpo.actor.model.packed_rotary import MEGATRONS, rotate_packed


class Ranks:
    """The part of a process group that tells a rank."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.size = lambda: rank, lambda: ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{}, {"mla_rotary_interleaved": True, "mscale": 1.3}, {"rotary_interleaved": True}],
    ids=["halves", "latent attention", "interleaved"],
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_are_rotated_as_by_megatron(ranks: int, settings: dict[str, Any], dtype: torch.dtype) -> None:
    """Catches a row at another position, on a rank that has two chunks of each sequence, and other digits."""
    generator = torch.Generator().manual_seed(0)
    lengths = [(2 * ranks if ranks > 1 else 1) * n for n in (5, 1, 3, 8)]  # verl pads where there are several ranks
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    angles = torch.randn(max(lengths), 1, 1, 12, generator=generator)
    for rank in range(ranks):
        rows = torch.randn(sum(lengths) // ranks, 3, 16, generator=generator).to(dtype).requires_grad_()
        offsets = offsets.clone()  # positions are kept for each tensor of offsets, and ranks have different positions
        found = []
        for rotate in (MEGATRONS, rotate_packed, rotate_packed):
            out = rotate(rows, offsets, angles, cp_group=Ranks(rank, ranks), **settings)
            found.append((out, *torch.autograd.grad(out.float().sin().sum(), rows)))
        for ours in found[1:]:  # of the first layer, and of another one
            assert all(torch.equal(one, two) for one, two in zip(found[0], ours, strict=True))


def test_an_engine_rotates_like_this(make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_thd", MEGATRONS)
    make_engine()
    assert rope_utils._apply_rotary_pos_emb_thd is rotate_packed
