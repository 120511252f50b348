"""Rotary positions of packed sequences, for all sequences of a micro-batch at a time.

Megatron's own function makes a dozen launches for each sequence, in every layer, for queries and for keys, and waits
for the GPU to learn the lengths: most of the 42,900 launches of a step on an H200 were these. Megatron's kernel needs
Transformer Engine and `apply_rope_fusion`.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

MEGATRONS: Any = rope_utils._apply_rotary_pos_emb_thd
"""The function whose place `rotate_packed` takes."""

_positions: Any = WeakIdKeyDictionary()
"""Of the offsets of a micro-batch, which all its layers share: the position of each row."""


def rotate_packed(
    t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *settings: Any, cp_group: Any = None, **named: Any
) -> Tensor:
    """Rotate packed queries or keys as Megatron's `_apply_rotary_pos_emb_thd` does, to the last bit.

    Args:
        t: [T, heads, d] this context-parallel rank's rows.
        cu_seqlens: [n + 1] the first row of each sequence, on all ranks together.
        freqs: [longest, 1, 1, d] the angles of each position.
        settings, named: the arguments of the function for sequences that are not packed.

    Returns:
        [T, heads, d].
    """
    positions = _positions.get(cu_seqlens)
    if positions is None:
        positions = _positions[cu_seqlens] = _positions_of(cu_seqlens.long(), len(t), cp_group.rank(), cp_group.size())
    rotated: Tensor = rope_utils._apply_rotary_pos_emb_bshd(t[:, None], freqs[positions], *settings, **named)
    return rotated[:, 0]


def _positions_of(first: Tensor, rows: int, rank: int, ranks: int) -> Tensor:
    """Return [T] the position of each of a rank's rows in its sequence.

    Of 2 * ranks equal chunks of a sequence a rank has the `rank`-th from the front, and the `rank`-th from the end.
    """
    row = torch.arange(rows, device=first.device)
    sequence = torch.searchsorted(first[1:] // ranks, row, right=True)
    inside = row - first[sequence] // ranks
    if ranks == 1:
        return inside
    length = first[sequence + 1] - first[sequence]
    chunk = length // (2 * ranks)
    behind = length - (rank + 1) * chunk - chunk  # of the second chunk's first row, as if it came after the first chunk
    return inside + torch.where(inside < chunk, rank * chunk, behind)


def install() -> None:
    """Let Megatron rotate packed sequences like this, in this process."""
    rope_utils._apply_rotary_pos_emb_thd = rotate_packed
