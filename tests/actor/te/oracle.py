"""Packed gradients of a module beside its own, of one backward per sequence."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from vcpo.gradnorm import Segments
from verl_vcpo.actor.taps.collector import Collector
from verl_vcpo.actor.taps.layout import MicroBatch
from verl_vcpo.actor.taps.modules import Tap
from verl_vcpo.actor.taps.sums import Sums

LENGTHS = [40, 3, 65, 20]
TOKENS = sum(LENGTHS)
BOUNDS = [0, *itertools.accumulate(LENGTHS)]
COEFFICIENT = torch.tensor([0.3, -1.0, 2.0, 0.1])

Backward = Callable[[Tensor], Tensor]
"""Runs a forward, and the backward of the sum of per-token scores times weights [T]; returns the scores."""


@dataclass(frozen=True)
class Errors:
    """Largest relative errors of packed gradients."""

    norms: float
    sums: float
    """Of each tensor's largest entry."""

    def within(self, tolerance: float) -> bool:
        return self.norms <= tolerance and self.sums <= tolerance  # NaN is not


def packed_layout(token: Tensor | None = None) -> MicroBatch:
    """The sequences of `LENGTHS`, one after the other."""
    segments = Segments.of_lengths(LENGTHS)
    return MicroBatch(
        numbers=tuple(range(len(LENGTHS))),
        segments=segments,
        whole=segments,
        by_sequence=None,
        sequence=segments.sequence[:, None],
        token=torch.zeros(TOKENS, dtype=torch.long) if token is None else token,
    )


def errors(
    model: torch.nn.Module,
    tap: Tap,
    backward: Backward,
    layout: MicroBatch | None = None,
    tied: bool = False,
    experts: bool = False,
) -> Errors:
    """Packed norms and weighted sums against one backward per sequence, in which the tap has no collector.

    Raises:
        AssertionError: the packed forward gives other scores, or autograd or the module forms a gradient all the same.
    """
    layout = packed_layout() if layout is None else layout
    n = len(layout.numbers)
    sequence = layout.sequence.T.flatten()
    every = torch.ones(len(sequence))
    one_by_one = [own_gradients(model, backward, every * (sequence == i)) for i in range(n)]
    norms = torch.stack([_squared_norm(model, gradient) for gradient in one_by_one])
    coefficient = COEFFICIENT[:n]
    scores = backward(every)
    _clear(model)
    second = {p: torch.zeros(1, *p.shape) for p in trained(model).values()}
    both = torch.stack([coefficient, coefficient * 0])
    sums_of_pass = None if experts else Sums(both, torch.zeros(n, dtype=torch.long), second)
    collector = Collector(n, tied=tied, device="cpu", sums=sums_of_pass)
    collector.micro_batch, tap.collector = layout, collector
    try:
        assert backward(every).equal(scores), "the packed forward is another one"
    finally:
        tap.collector = None
    _as_ddp(model)
    squared = collector.squared_norms()
    collected = {name: p.main_grad.clone() for name, p in trained(model).items()}
    if dist.is_initialized():
        dist.all_reduce(squared, group=mpu.get_tensor_model_parallel_group())
    sums = 0.0
    for name, gradient in collected.items():
        if experts:
            assert not gradient.any(), "a gradient was formed in the backward"
            continue
        wanted = sum(c * one[name] for c, one in zip(coefficient.tolist(), one_by_one, strict=True))
        sums = max(sums, ((gradient - wanted).abs().max() / wanted.abs().max()).item(), key=_nan_is_most)
    return Errors(((squared - norms).abs() / norms).max().item(), sums)


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def is_this_ranks(parameter: torch.nn.Parameter) -> bool:
    """Whether other tensor-parallel ranks have other numbers: a shard, or an expert of expert parallelism."""
    return getattr(parameter, "tensor_model_parallel", False) or not getattr(parameter, "allreduce", True)


def own_gradients(model: torch.nn.Module, backward: Backward, weight: Tensor) -> dict[str, Tensor]:
    """What the modules themselves leave of a backward in the gradient buffers."""
    _clear(model)
    backward(weight)
    _as_ddp(model)
    return {name: p.main_grad.clone() for name, p in trained(model).items()}


def _clear(model: torch.nn.Module) -> None:
    for p in trained(model).values():
        p.main_grad, p.grad = torch.zeros(p.shape), None
        p.grad_added_to_main_grad = False


def _as_ddp(model: torch.nn.Module) -> None:
    """What the hooks of Megatron's DDP do with a gradient."""
    for p in trained(model).values():
        if p.grad is not None and not p.grad_added_to_main_grad:
            p.main_grad += p.grad
        p.grad = None


def _squared_norm(model: torch.nn.Module, gradient: dict[str, Tensor]) -> Tensor:
    """Over tensor-parallel ranks, as Megatron sums: shards add up, partial gradients are summed, copies count once."""
    total = torch.zeros((), dtype=torch.float64)
    group, rank = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_rank()
    for name, p in trained(model).items():
        of_p = gradient[name].double()
        if not is_this_ranks(p):
            if getattr(p, "sequence_parallel", False) or ".q_layernorm" in name or ".k_layernorm" in name:
                dist.all_reduce(of_p, group=group)
            if rank:
                continue
        total += of_p.square().sum()
    dist.all_reduce(total, group=group)
    return total


def _nan_is_most(value: float) -> float:
    return value if value == value else float("inf")
