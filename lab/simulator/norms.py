"""Exact norms of every sequence's gradient from one backward of the whole batch, without any per-sequence gradient.

A linear layer's gradient of one sequence is sum_t b_t a_t^T, with a the inputs and b the gradients of the outputs. Its
squared norm is sum_{t,s} (a_t . a_s)(b_t . b_s) (I. Goodfellow, "Efficient per-example gradient computations", 2015;
for sequences: X. Li et al., arXiv 2110.05679). The same a and b make the update, whatever the coefficients turn out to
be: no second backward is needed.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from lab.simulator.policy import EMBEDDING, ParameterTap, Policy, Taps
from lab.simulator.tree import TokenTree


@dataclass(frozen=True)
class BlockGradient:
    """The gradients of B sequences with respect to one block of parameters, by what they are made of."""

    kind: str
    """linear, bias, scale or embedding."""
    taken: Tensor | None
    """[B, S, d_in] inputs; [B, S] token ids of an embedding; None for a bias."""
    given: Tensor
    """[B, S, d_out] row i: the gradient of score_i with respect to the outputs."""


def block_gradients(score: Tensor, taps: Taps) -> dict[str, BlockGradient]:
    """By block.

    Args:
        score: [B]; score_i depends on sequence i only.
        taps: of the forward pass that led to `score`.
    """
    given = torch.autograd.grad(score.sum(), [tap.given for tap in taps.blocks.values()])
    blocks = zip(taps.blocks.items(), given, strict=True)
    return {name: _by_sequence(tap, of, taps.tree) for (name, tap), of in blocks}


@torch.no_grad()
def squared_norms(gradients: dict[str, BlockGradient]) -> Tensor:
    """[B] float64: ||g_i||^2 of g_i = grad score_i with respect to all parameters."""
    return cast(Tensor, sum(_squared_norm(g).double() for g in gradients.values()))  # not 0: a model has parameters


@torch.no_grad()
def weighted_gradient(coefficient: Tensor, gradients: dict[str, BlockGradient], policy: Policy) -> Tensor:
    """[1, D] the gradient of sum_i coefficient_i score_i with respect to `policy.flat`.

    Args:
        coefficient: [B].
        gradients: from `block_gradients`.
    """
    factor, tokens = coefficient.float(), policy.parameters[EMBEDDING].shape[1]
    return policy.joined({name: _weighted(g, factor, tokens) for name, g in gradients.items()})


def _by_sequence(tap: ParameterTap, given: Tensor, tree: TokenTree) -> BlockGradient:
    """From [1, M or M - C, ...] of nodes; `given` is 0 on padding."""
    listed, filled = tree.listed[0], tree.filled[0]
    if given.shape[1] < tree.token.shape[1]:
        first = tree.prompt_length - 1
        listed, filled = (listed[:, first:] - tree.context).clamp(min=0), filled[:, first:]

    def spread(of_nodes: Tensor) -> Tensor:
        return of_nodes[0].index_select(0, listed.flatten()).unflatten(0, listed.shape)

    taken = None if tap.taken is None else spread(tap.taken)
    return BlockGradient(tap.kind, taken, spread(given).mul_(filled[..., None]))


def _squared_norm(gradient: BlockGradient) -> Tensor:
    """[B]"""
    taken, given = gradient.taken, gradient.given
    if gradient.kind == "bias":
        return given.sum(dim=1).square().sum(dim=-1)
    assert taken is not None  # all others take something in
    match gradient.kind:
        case "scale":
            return (given * taken).sum(dim=1).square().sum(dim=-1)
        case "embedding":
            same = taken[:, :, None] == taken[:, None, :]  # [B, S, S]
            return (same * (given @ given.mT)).sum(dim=(1, 2))
    length, d_in, d_out = given.shape[1], taken.shape[2], given.shape[2]
    if length * (d_in + d_out) < d_in * d_out:
        return ((taken @ taken.mT) * (given @ given.mT)).sum(dim=(1, 2))
    return (given.mT @ taken).square().sum(dim=(1, 2))


def _weighted(gradient: BlockGradient, factor: Tensor, tokens: int) -> Tensor:
    """The block's gradient, summed over the sequences with `factor` [B]; the embedding's has `tokens` rows."""
    taken, given = gradient.taken, gradient.given
    if gradient.kind == "bias":
        return factor @ given.sum(dim=1)
    assert taken is not None
    match gradient.kind:
        case "scale":
            return factor @ (given * taken).sum(dim=1)
        case "embedding":
            rows = given.new_zeros(tokens, given.shape[-1])
            return rows.index_add_(0, taken.flatten(), (given * factor[:, None, None]).flatten(0, 1))
    if taken.shape[-1] < given.shape[-1]:  # the smaller one is copied
        taken = taken * factor[:, None, None]
    else:
        given = given * factor[:, None, None]
    return given.flatten(0, 1).mT @ taken.flatten(0, 1)
