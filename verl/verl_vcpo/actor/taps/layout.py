"""The layout of a micro-batch on this rank: which rows of an activation belong to which sequence."""

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from vcpo.gradnorm import Segments, sequence_sums
from vcpo.gradnorm.segments import batches


@dataclass(frozen=True)
class MicroBatch:
    """n sequences of one forward pass, padded as verl pads them for tensor and context parallelism.

    Activations are [S, 1, d] (packed: all sequences one after the other) or [S, n, d] (padded). Under context
    parallelism a rank has the same share of every sequence; under sequence parallelism layers may see a rank's part of
    the S rows.
    """

    numbers: tuple[int, ...]
    """The numbers of the n sequences in the pass, which counts all data-parallel ranks' sequences."""
    segments: Segments
    """The sequences in this rank's T tokens."""
    whole: Segments
    """The sequences in the CP * T tokens of all context-parallel ranks; `segments` without context parallelism."""
    by_sequence: Tensor | None
    """[CP * T] indices that put the tokens of all context-parallel ranks, rank after rank, in the order of `whole`."""
    sequence: Tensor
    """[S, 1] or [S, n]: the sequence of each row of an activation."""
    token: Tensor
    """[CP * T] token ids in the order of `whole`; 0 on padding."""

    @cached_property
    def rows(self) -> Tensor:
        """[n] the numbers, on the device."""
        return torch.tensor(self.numbers).to(self.sequence.device, non_blocking=True)

    @cached_property
    def row(self) -> Tensor:
        """[T] the number in the pass of each token's sequence."""
        return self.rows[self.segments.sequence]

    def flat(self, activation: Tensor) -> Tensor:
        """Flatten [S, 1 or n, d] to [T, d], the tokens in the order of `segments`."""
        return activation.transpose(0, 1).reshape(-1, activation.shape[-1])

    def activation(self, rows: Tensor) -> Tensor:
        """Restore an activation that its layer has flattened: [S * n, d] or [S / TP * n, d] -> [.., 1 or n, d]."""
        return rows.view(-1, self.sequence.shape[1], rows.shape[-1])

    def gathered(self, flat: Tensor) -> Tensor:
        """Gather [T, ...] of this rank to [CP * T, ...] of all context-parallel ranks, in the order of `whole`."""
        if self.by_sequence is None:
            return flat
        ranks = mpu.get_context_parallel_world_size()
        out = flat.new_empty(ranks * len(flat), *flat.shape[1:])
        dist.all_gather_into_tensor(out, flat.contiguous(), group=mpu.get_context_parallel_group())
        return out[self.by_sequence]

    def sums(self, value: Tensor, activation: Tensor) -> Tensor:
        """Sum the rows [R, d] of an activation over each sequence's tokens: [n, d] float32."""
        sequence = self.sequence_of(activation)
        if not batches(value):
            return sequence_sums(value, sequence, len(self.rows))
        # One product on a GPU adds in float32, and rounds the sums as a plain backward rounds the sum of all tokens.
        if (key := (len(sequence), value.dtype)) not in self._members:
            numbers = torch.arange(len(self.rows), device=sequence.device)[:, None]
            self._members[key] = (sequence == numbers).to(value.dtype)  # [n, R]
        return (self._members[key] @ value).float()

    @cached_property
    def _members(self) -> dict[tuple[int, torch.dtype], Tensor]:
        return {}

    def sequence_of(self, activation: Tensor) -> Tensor:
        """Return the sequence of each row of an activation [S or S / TP, 1 or n, ...], flattened."""
        sequence = self.sequence
        if len(activation) != len(sequence):
            ranks = mpu.get_tensor_model_parallel_world_size()
            if len(activation) * ranks != len(sequence):
                raise RuntimeError(f"an activation of {len(activation)} rows, not {len(sequence)} or 1/{ranks} of it")
            sequence = sequence.chunk(ranks)[mpu.get_tensor_model_parallel_rank()]
        return sequence.flatten()


def micro_batch(data: TensorDict, packed: bool, device: torch.device | str) -> MicroBatch:
    """Return the layout that verl's preprocessing (verl/models/mcore/util.py) will give `data`.

    Args:
        data: `input_ids` (nested, n sequences) and `vcpo_row` [n].
        packed: sequences one after the other, or padded to the longest.
        device: the activations' device.
    """
    ids = data["input_ids"]
    parts = ids.cpu().unbind()
    ranks = mpu.get_context_parallel_world_size()
    align = mpu.get_tensor_model_parallel_world_size() * (2 * ranks if ranks > 1 else 1)
    lengths = [len(part) for part in parts]
    if not packed:
        lengths = [tu.get_non_tensor_data(data, "forced_max_seqlen", None) or max(lengths)] * len(lengths)
    lengths = [-(-length // align) * align for length in lengths]
    mine = [length // ranks for length in lengths]
    segments = Segments.of_lengths(mine, device)
    whole = segments if ranks == 1 else Segments.of_lengths(lengths, device)
    token = torch.cat(
        [
            _as_held(torch.nn.functional.pad(part, (0, n - len(part))), ranks)
            for part, n in zip(parts, lengths, strict=True)
        ]
    )
    sequence = segments.sequence[:, None] if packed else torch.arange(len(mine), device=device).expand(mine[0], -1)
    return MicroBatch(
        numbers=tuple(data["vcpo_row"].tolist()),
        segments=segments,
        whole=whole,
        by_sequence=None if ranks == 1 else _by_sequence(segments.bounds, ranks).to(device, non_blocking=True),
        sequence=sequence,
        token=token.to(device, non_blocking=True),
    )


def _as_held(token: Tensor, ranks: int) -> Tensor:
    """Reorder a sequence's tokens rank after rank: of 2 * ranks chunks rank r has chunk r and the r-th from the end."""
    if ranks == 1:
        return token
    chunks = token.chunk(2 * ranks)
    return torch.cat([chunk for r in range(ranks) for chunk in (chunks[r], chunks[2 * ranks - 1 - r])])


def _by_sequence(bounds: tuple[int, ...], ranks: int) -> Tensor:
    tokens = torch.arange(ranks * bounds[-1]).view(ranks, -1)
    return torch.cat([tokens[:, start:end].flatten() for start, end in itertools.pairwise(bounds)])
