"""Truncated responses: a limit ended them, not the model. `async.truncated` says what becomes of them."""

from enum import StrEnum

import torch
from torch import Tensor

from vcpo import Estimate

TRUNCATED = "truncated"
"""In the `extra_fields` of training trajectories: whether the response is truncated. In the tags of those that are left
out of the loss: `mask` or `drop`. In the data of an update: the setting `async.truncated`."""
SHARE = "vcpo/truncated/share"
"""The share of the batch's trajectories that are truncated."""


class Truncated(StrEnum):
    """The treatment of truncated responses."""

    TRAIN = "train"
    """Truncated responses are trained on as all others."""
    MASK = "mask"
    """Truncated responses have no part in the loss, and keep their part in their prompt's baseline."""
    DROP = "drop"
    """Truncated responses have no part in the loss, nor in their prompt's baseline."""
    PENALTY = "penalty"
    """Long responses, truncated or not, have a penalty in their rewards."""

    @property
    def leaves_out(self) -> bool:
        """True where truncated responses have no part in the loss."""
        return self in (Truncated.MASK, Truncated.DROP)


def soft_length_penalty(length: int, limit: int, buffer: int, factor: float) -> float:
    """Return what is added to the reward of a response of `length` tokens (DAPO, arXiv 2503.14476): 0 up to
    `limit - buffer` tokens, and from there on a straight line, down to `-factor` at `limit`."""
    return -factor * max(0, length - (limit - buffer)) / buffer


def gradient_sizes(step: Estimate, squared_norm: Tensor) -> Tensor:
    """Return [B] |c_i| ||g_i||, the sizes of the sequences' parts of an update; 0 for what is not usable."""
    return torch.where(step.usable, step.coefficient.abs() * squared_norm.sqrt(), 0.0)


def parts_of_update(step: Estimate, truncated: Tensor, squared_norm: Tensor | None) -> dict[str, float]:
    """Return the mean weights of truncated and of finished responses, of those there are, and the truncated ones' share
    of sum_i |c_i| ||g_i||, where norms are measured.

    Args:
        step: of an update of B sequences.
        truncated: [B] bool.
        squared_norm: [B] ||g_i||^2, or None.
    """
    kinds = {"vcpo/truncated/weight": step.usable & truncated, "vcpo/finished/weight": step.usable & ~truncated}
    parts = {name: step.weight[rows].mean().item() for name, rows in kinds.items() if rows.any()}
    if squared_norm is not None:
        size = gradient_sizes(step, squared_norm)
        parts["vcpo/truncated/gradient_share"] = (size[truncated].sum() / (size.sum() or 1.0)).item()
    return parts
