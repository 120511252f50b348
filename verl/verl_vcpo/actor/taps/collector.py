"""The collector of per-sequence norms, and of weighted sums of gradients, from every layer's inputs and outputs."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from vcpo.gradnorm import add_rows, embedding_squared_norms, sequence_sums, squared_norms, tied_rows
from verl_vcpo.actor.taps.layout import MicroBatch
from verl_vcpo.actor.taps.routing import ExpertRows
from verl_vcpo.actor.taps.sums import Sums


@dataclass(frozen=True)
class _Vector:
    """The data kept for a bias or norm weight in one micro-batch: each sequence's gradient, `sums` [n, d]."""

    parameter: Tensor
    micro_batch: MicroBatch
    sums: Tensor
    summed_over_tp: bool
    sharded: bool


class Collector:
    """The squared norms of one pass over a part of the mini-batch, and weighted sums of the sequences' gradients.

    Args:
        size: N, the number of sequences of the pass on all data-parallel ranks, whose tokens a rank's experts may get.
        tied: whether embedding and head share their weight.
        device: the model's device.
        sums: the sums to which every parameter's gradients are added; None: the norms only.
    """

    def __init__(self, size: int, *, tied: bool, device: Any, sums: Sums | None = None) -> None:
        self.size, self.tied = size, tied
        self.micro_batch: MicroBatch | None = None
        """The micro-batch whose forward or backward is running."""
        self._sums = sums
        self._vectors: list[_Vector] = []
        self._cross: dict[str, list[tuple[MicroBatch, Tensor]]] = {"head": [], "embedding": []}
        self._norms = torch.zeros(size, device=device)  # [N] this rank's part
        self._of_micro_batch: dict[int, tuple[MicroBatch, Tensor]] = {}  # [n] this rank's part of its sequences' norms
        self._cp_rank, self._cp = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
        self._tp = mpu.get_tensor_model_parallel_world_size()

    def linear(
        self, weight: Tensor, bias: Tensor | None, x: Tensor, dy: Tensor, *, gather: Any = None, head: bool = False
    ) -> None:
        """Take the inputs and output gradients of a linear layer.

        Args:
            gather: the ranks over which the rows of the inputs are spread, or None.
            head: whether the layer is the output layer.
        """
        micro_batch = self.current()
        if bias is not None:
            self.vector(bias, dy, sharded=True)
        x = micro_batch.gathered(micro_batch.flat(_gathered(x, gather)))
        dy = micro_batch.gathered(micro_batch.flat(dy))
        mine = _share(len(weight), self._cp_rank, self._cp)
        if self.tied and head:
            self._tied_head(micro_batch, weight, x, dy[:, mine], mine)
        self._weight(weight, x, dy, mine)

    def router(self, weight: Tensor, x: Tensor, dy: Tensor, *, gather: Any = None) -> None:
        """Take the inputs and output gradients of a linear layer whose weight every tensor-parallel rank has whole.

        Args:
            gather: the ranks over which the rows of both are spread, or None.
        """
        micro_batch = self.current()
        wide = x.to(dy.dtype)  # a router may compute in a wider format
        x, dy = (micro_batch.gathered(micro_batch.flat(_gathered(part, gather))) for part in (wide, dy))
        part, parts = self._cp_rank, self._cp
        if gather is not None:
            part, parts = part * gather.size() + gather.rank(), parts * gather.size()
        self._weight(weight, x, dy, _share(len(weight), part, parts))

    def _weight(self, weight: Tensor, x: Tensor, dy: Tensor, mine: slice) -> None:
        """Measure a weight, and add its gradients to the sums.

        Ranks that have the same rows of the weight divide the rows: each rank squares some rows, over all tokens.

        Args:
            weight: [out, in].
            x: inputs of all tokens, in the order of `MicroBatch.whole`.
            dy: output gradients of all tokens.
            mine: the rows of the weight that this rank squares.
        """
        micro_batch, dy = self.current(), dy[:, mine]
        norms = self._norms_of(micro_batch)
        if self._sums is None:
            norms.add_(squared_norms(x, dy, micro_batch.whole))
            return
        buffers = [weight.main_grad[mine], *self._sums.second_of(weight)[:, mine]]  # type: ignore[attr-defined]
        self._sums.of_micro_batch(micro_batch)[1].add(x, dy, buffers, norms)

    def experts(self, x: Tensor, dy: Tensor, rows: ExpertRows) -> None:
        """Take the inputs [R, in] and output gradients [R, out] of one linear layer of each of some experts.

        No other rank has both the same rows of a weight and tokens of the same sequences.
        """
        # One call for all experts: a norm needs no weight.
        add_rows(self._norms, rows.sequence_of_run, squared_norms(x[rows.order], dy[rows.order], rows.runs))

    def vector(self, parameter: Tensor, dy: Tensor, *, summed_over_tp: bool = False, sharded: bool = False) -> None:
        """Take the gradients [S, 1 or n, ..., d] of a parameter [d], one for each token.

        Args:
            summed_over_tp: tensor-parallel ranks have different tokens or heads.
            sharded: tensor-parallel ranks have different parts of the parameter.
        """
        micro_batch = self.current()
        per_token = dy.reshape(dy.shape[0] * dy.shape[1], -1, len(parameter))
        per_token = per_token[:, 0] if per_token.shape[1] == 1 else per_token.sum(1)
        sums = micro_batch.sums(per_token, dy)
        self._vectors.append(_Vector(parameter, micro_batch, sums, summed_over_tp, sharded))

    def embedding(self, weight: Tensor, token: Tensor, dy: Tensor) -> None:
        """Take the gradients [B, S, d] of the looked-up rows `token` [B, S]; -1 where another rank has the row."""
        micro_batch = self.current()
        token, dy = token.flatten(), dy.flatten(0, 1).masked_fill(token.flatten()[:, None] < 0, 0.0)
        token = token.clamp(min=0)
        if self._sums is not None:
            self._add_rows(self._sums, weight, token, dy)
        token, dy = micro_batch.gathered(token), micro_batch.gathered(dy)
        if self._cp_rank == 0:
            self._norms_of(micro_batch).add_(embedding_squared_norms(token, dy, micro_batch.whole))
        if self.tied:
            self._cross["embedding"].append((micro_batch, dy))

    def _add_rows(self, sums: Sums, weight: Tensor, token: Tensor, dy: Tensor) -> None:
        """Add an embedding's gradients [T, d] to the rows `token` [T] of the main and of the baseline's buffer."""
        row, main, second = self.current().row, weight.main_grad, sums.second_of(weight)  # type: ignore[attr-defined]
        weighted = sums.on_device[0][row][:, None] * dy.float()
        add_rows(main, token, weighted.to(main.dtype))
        slot = sums.slot_on_device[row]
        weighted = sums.on_device[1 + slot, row][:, None] * dy.float()
        second.index_put_((slot, token), weighted, accumulate=True)  # [S, V, d]

    def _tied_head(self, micro_batch: MicroBatch, weight: Tensor, x: Tensor, dy: Tensor, mine: slice) -> None:
        first = weight.shape[0] * mpu.get_tensor_model_parallel_rank() + (mine.start or 0)
        token = micro_batch.token - first
        token = token.masked_fill((token < 0) | (token >= dy.shape[1]), -1)
        self._cross["head"].append((micro_batch, tied_rows(token, x, dy, micro_batch.whole)))

    def current(self) -> MicroBatch:
        """Return the micro-batch whose forward or backward is running.

        Raises:
            RuntimeError: a backward outside the packed update.
        """
        if self.micro_batch is None:
            raise RuntimeError("a backward outside the packed update")
        return self.micro_batch

    @torch.no_grad()
    def squared_norms(self) -> Tensor:
        """Return [N] float64, this rank's part of ||g_i||^2; the sum over all model-parallel ranks is ||g_i||^2.

        The call ends the pass: the sums are complete afterwards.
        """
        if self._sums is not None:
            self._add_vectors(self._sums)
        self._square_vectors()
        if self.tied:
            self._add_cross_terms()
        for micro_batch, norms in self._of_micro_batch.values():
            self._norms.index_add_(0, micro_batch.rows, norms)
        return self._norms.double()

    def _norms_of(self, micro_batch: MicroBatch) -> Tensor:
        """Return [n], this rank's part of the norms of a micro-batch's sequences."""
        if id(micro_batch) not in self._of_micro_batch:
            self._of_micro_batch[id(micro_batch)] = micro_batch, torch.zeros_like(micro_batch.rows, dtype=torch.float32)
        return self._of_micro_batch[id(micro_batch)][1]

    def _add_vectors(self, sums: Sums) -> None:
        """Add every bias's and norm weight's gradients to its buffers."""
        totals: dict[tuple[int, ...], tuple[list[_Vector], Tensor]] = {}
        for some, values in _side_by_side(self._vectors):
            product = sums.of_micro_batch(some[0].micro_batch)[0] @ values
            key = tuple(id(share.parameter) for share in some)
            totals[key] = some, totals[key][1] + product if key in totals else product
        for some, total in totals.values():
            parts = total.split([share.sums.shape[1] for share in some], dim=1)
            for share, part in zip(some, parts, strict=True):
                buffers = [share.parameter.main_grad, *sums.second_of(share.parameter)]  # type: ignore[attr-defined]
                for buffer, row in zip(buffers, part, strict=True):
                    buffer.add_(row)

    def _square_vectors(self) -> None:
        tp_rank = mpu.get_tensor_model_parallel_rank()
        for summed_over_tp in (False, True):
            vectors = _side_by_side([share for share in self._vectors if share.summed_over_tp == summed_over_tp])
            shares, whole = [some for some, _ in vectors], [sums for _, sums in vectors]
            if summed_over_tp and self._tp > 1:
                whole = _summed(whole, mpu.get_tensor_model_parallel_group())
            if self._cp > 1:
                whole = _summed(whole, mpu.get_context_parallel_group())
            if self._cp_rank:
                continue
            for some, sums in zip(shares, whole, strict=True):
                if tp_rank:  # the others are rank 0's
                    parts = sums.split([share.sums.shape[1] for share in some], dim=1)
                    mine = [part for share, part in zip(some, parts, strict=True) if share.sharded]
                    if not mine:
                        continue
                    sums = torch.cat(mine, dim=1)
                self._norms_of(some[0].micro_batch).add_(sums.square().sum(1))

    def _add_cross_terms(self) -> None:
        """Add 2 <dE_i, dH_i>; with a pipeline the first stage has dE_i, and the last sends dH_i to the first."""
        head, embedding = self._cross["head"], self._cross["embedding"]
        if mpu.get_pipeline_model_parallel_world_size() > 1:
            if not mpu.is_rank_in_embedding_group():
                return
            first, last = dist.get_process_group_ranks(mpu.get_embedding_group())
            if dist.get_rank() == last:
                for _, rows in head:
                    dist.send(rows, first)
                return
            head = []
            for micro_batch, dy in embedding:
                rows = torch.empty_like(dy, dtype=torch.float32)
                dist.recv(rows, last)
                head.append((micro_batch, rows))
        of_head = {id(micro_batch): rows for micro_batch, rows in head}
        for micro_batch, dy in embedding:
            products = (of_head[id(micro_batch)] * dy).sum(1, keepdim=True)
            sums = sequence_sums(products, micro_batch.whole.sequence, len(micro_batch.rows))
            self._norms_of(micro_batch).add_(2 * sums[:, 0])


def _side_by_side(vectors: list[_Vector]) -> list[tuple[list[_Vector], Tensor]]:
    """Return each micro-batch's vectors, with their sums side by side: [n, the sum of all d]."""
    of_micro_batch: dict[int, list[_Vector]] = {}
    for share in vectors:
        of_micro_batch.setdefault(id(share.micro_batch), []).append(share)
    return [(some, torch.cat([share.sums for share in some], dim=1)) for some in of_micro_batch.values()]


def _gathered(part: Tensor, group: Any) -> Tensor:
    """Return the rows of all ranks of the group, rank after rank; `part` where there is no group."""
    if group is None:
        return part
    whole = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole


def _summed(tensors: list[Tensor], group: Any) -> list[Tensor]:
    """Return the sums over the ranks of the group, by one reduction."""
    if not tensors:
        return []
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _share(rows: int, part: int, parts: int) -> slice:
    return slice(rows * part // parts, rows * (part + 1) // parts)
