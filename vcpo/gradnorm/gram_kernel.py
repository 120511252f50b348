"""The Gram form of ||dW_i||^2 in one kernel: ||dW_i||^2 = sum_{t,u} (x_t . x_u) (dy_t . dy_u).

A program multiplies one pair of tiles of a sequence's tokens, once in the inputs and once in the output gradients, and
adds up the product of both results. The matrices [L, L] are never in memory, no row is copied, and of two tiles on both
sides of the diagonal one is computed. Importing the module imports Triton, which torch's CUDA build brings.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vcpo.gradnorm.segments import Segments, add_rows

# Of each tile's size the columns of a step, warps and stages: the fastest of eight on an H200, at the layers of
# Qwen2.5-1.5B and 7B (lab.cost.layers has the shapes).
_SETTINGS: dict[int, tuple[int, dict[str, Any]]] = {
    64: (128, {"num_warps": 4, "num_stages": 3}),
    128: (64, {"num_warps": 8, "num_stages": 3}),
}
_FEW = 100
"""Programs that leave a large GPU idle: with fewer of large tiles, tiles are small."""

_MEMBERS = 1 << 22
"""The most numbers of the matrix that adds up a sequence's pairs."""


@triton.jit
def _tile(rows, stride, first, second, first_real, second_real, width, TILE: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return [TILE, TILE] float32 dot products of some rows with others; of rows that are not real, 0."""
    products = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, width, STEP):
        column = start + tl.arange(0, STEP)
        inside = column[None, :] < width
        left = tl.load(rows + first[:, None] * stride + column[None, :], mask=first_real[:, None] & inside, other=0.0)
        right = tl.load(
            rows + second[:, None] * stride + column[None, :], mask=second_real[:, None] & inside, other=0.0
        )
        products = tl.dot(left, tl.trans(right), products)
    return products


@triton.jit
def _pair(  # type: ignore[no-untyped-def]
    x, dy, pairs, out, inputs, outputs, x_stride, dy_stride, TILE: tl.constexpr, STEP: tl.constexpr
):
    number = tl.program_id(0)
    first = tl.load(pairs + 3 * number)
    second = tl.load(pairs + 3 * number + 1)
    end = tl.load(pairs + 3 * number + 2)
    one = (first + tl.arange(0, TILE)).to(tl.int64)
    other = (second + tl.arange(0, TILE)).to(tl.int64)
    products = _tile(x, x_stride, one, other, one < end, other < end, inputs, TILE, STEP)
    products *= _tile(dy, dy_stride, one, other, one < end, other < end, outputs, TILE, STEP)
    total = tl.sum(tl.sum(products, 1), 0)
    tl.store(out + number, tl.where(first == second, total, 2.0 * total))


class Tiles:
    """The pairs of tiles of some sequences, which all layers share."""

    def __init__(self, segments: Segments, some: tuple[int, ...]) -> None:
        lengths = [segments.lengths[i] for i in some]
        large = sum(count * (count + 1) // 2 for count in (-(-length // 128) for length in lengths))
        self.tile = 128 if large >= _FEW else 64
        pairs, owners = [], []
        for i in some:
            start, end = segments.bounds[i : i + 2]
            tiles = range(start, end, self.tile)
            of_sequence = [(one, other, end) for one in tiles for other in tiles if other <= one]
            pairs += of_sequence
            owners += [i] * len(of_sequence)
        self.pairs = torch.tensor(pairs, dtype=torch.int32).view(-1, 3).to(segments.device, non_blocking=True)
        """[P, 3] the first row of each tile, and the end of the sequence."""
        self.owner = torch.tensor(owners, dtype=torch.long).to(segments.device, non_blocking=True)
        """[P] the sequence of each pair."""
        self.members = None
        """[n, P] 1 where the pair is of the sequence; None where the matrix would be large, as of many experts."""
        if len(segments) * len(owners) <= _MEMBERS:
            numbers = torch.arange(len(segments), device=segments.device)
            self.members = (numbers[:, None] == self.owner).float()

    def add_norms(self, x: Tensor, dy: Tensor, norms: Tensor) -> None:
        """Add ||dW_i||^2 of the sequences to norms [n]; x [T, in] and dy [T, out] have two bytes per number."""
        if not len(self.pairs):
            return
        x, dy = (rows if rows.stride(1) == 1 else rows.contiguous() for rows in (x, dy))
        out = torch.empty(len(self.pairs), device=x.device)
        step, settings = _SETTINGS[self.tile]
        _pair[(len(self.pairs),)](
            x, dy, self.pairs, out, x.shape[1], dy.shape[1], x.stride(0), dy.stride(0), self.tile, step, **settings
        )
        if self.members is None:
            add_rows(norms, self.owner, out)
        else:
            norms.addmv_(self.members, out)  # one launch; add_rows sorts
