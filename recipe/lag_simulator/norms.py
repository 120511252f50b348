"""Exact norms of every sequence's gradient from one backward of the whole batch, without any per-sequence gradient.

A linear layer's gradient of one sequence is sum_t b_t a_t^T, with a the inputs and b the gradients of the outputs. Its
squared norm is sum_{t,s} (a_t . a_s)(b_t . b_s) (I. Goodfellow, "Efficient per-example gradient computations", 2015;
for sequences: X. Li et al., arXiv 2110.05679). The same a and b make the update, whatever the coefficients turn out to
be: no second backward is needed.
"""

from typing import cast

import torch
from torch import Tensor

from recipe.lag_simulator.policy import ParameterTap


def output_gradients(score: Tensor, taps: list[ParameterTap]) -> list[Tensor]:
    """Per tap, [B, S, d_out]: row i is the gradient of score_i.

    Args:
        score: [B]; score_i depends on sequence i only.
        taps: of the forward pass that led to `score`.
    """
    return list(torch.autograd.grad(score.sum(), [tap.given for tap in taps]))


@torch.no_grad()
def squared_norms(gradients: list[Tensor], taps: list[ParameterTap]) -> Tensor:
    """[B] float64: ||g_i||^2 of g_i = grad score_i with respect to all parameters."""
    norms = (_squared_norm(tap, gradient).double() for tap, gradient in zip(taps, gradients, strict=True))
    return cast(Tensor, sum(norms))  # not 0: a model has parameters


@torch.no_grad()
def weighted_gradients(coefficient: Tensor, gradients: list[Tensor], taps: list[ParameterTap]) -> dict[str, Tensor]:
    """The gradient of sum_i coefficient_i score_i, by parameter name.

    Args:
        coefficient: [B].
        gradients: from `output_gradients`.
    """
    total: dict[str, Tensor] = {}
    for tap, gradient in zip(taps, gradients, strict=True):
        whole = _gradient(tap, gradient * coefficient.to(gradient.dtype)[:, None, None])
        total |= zip(tap.names, whole.split(tap.sizes), strict=True)
    return total


def _squared_norm(tap: ParameterTap, gradient: Tensor) -> Tensor:
    """[B], of the parameters behind one tap; `gradient` [B, S, d_out]."""
    if tap.kind == "bias":
        return gradient.sum(dim=1).square().sum(dim=-1)
    taken = tap.taken
    assert taken is not None  # all others take something in
    match tap.kind:
        case "scale":
            return (gradient * taken).sum(dim=1).square().sum(dim=-1)
        case "embedding":
            same = taken[:, :, None] == taken[:, None, :]  # [B, S, S]
            return (same * (gradient @ gradient.mT)).sum(dim=(1, 2))
    length, d_in, d_out = gradient.shape[1], taken.shape[2], gradient.shape[2]
    if length * (d_in + d_out) < d_in * d_out:
        return ((taken @ taken.mT) * (gradient @ gradient.mT)).sum(dim=(1, 2))
    return (gradient.mT @ taken).square().sum(dim=(1, 2))


def _gradient(tap: ParameterTap, gradient: Tensor) -> Tensor:
    """The gradient of the parameters behind one tap, summed over the batch; `gradient` [B, S, d_out]."""
    if tap.kind == "bias":
        return gradient.sum(dim=(0, 1))
    taken = tap.taken
    assert taken is not None
    match tap.kind:
        case "scale":
            return (gradient * taken).sum(dim=(0, 1))
        case "embedding":
            rows = gradient.new_zeros(tap.sizes[0], gradient.shape[-1])
            return rows.index_add_(0, taken.flatten(), gradient.flatten(0, 1))
    return gradient.flatten(0, 1).mT @ taken.flatten(0, 1)
