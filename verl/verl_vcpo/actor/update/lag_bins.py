"""Rewards, weights and gradients of a mini-batch by the lag of its responses."""

import math

from torch import Tensor

from vcpo import Estimate
from verl_vcpo.common.truncated import gradient_sizes

BINS = {"0": 0, "1-3": 1, "4-15": 4, "16-63": 16, "64-up": 64}
"""By name, the smallest lag of each bin."""
FIRST = "0"
"""The bin that a mini-batch has whatever its lags are, be it empty."""
SHARE, REWARD, WEIGHT, GRADIENT_SHARE = (
    f"vcpo/lag/{{}}/{name}" for name in ("share", "reward", "weight", "gradient_share")
)


def of_lags(lag: Tensor, step: Estimate, reward: Tensor, squared_norm: Tensor | None) -> dict[str, float]:
    """Return, for each bin, its responses' share of all, mean reward and mean weight; where norms are measured, their
    share in the sum of the sequences' gradient norms, too.

    Bins above the largest lag are left out, and an empty one below it has shares of 0 alone.

    Args:
        lag: [B] updates since a response's oldest token; NaN where it is unknown.
        step: the estimate of an update of B sequences.
        reward: [B] raw rewards.
        squared_norm: [B] ||g_i||^2, or None.
    """
    known = step.usable & lag.isfinite()
    if not known.any():
        return {}
    size = None if squared_norm is None else gradient_sizes(step, squared_norm).where(known, 0.0)
    found, ends = {}, [*list(BINS.values())[1:], math.inf]
    for (name, least), end in zip(BINS.items(), ends, strict=True):
        if least > lag[known].max():
            break
        rows = known & (lag >= least) & (lag < end)
        found[SHARE.format(name)] = (rows.sum() / known.sum()).item()
        if size is not None:
            found[GRADIENT_SHARE.format(name)] = (size[rows].sum() / (size.sum() or 1.0)).item()
        if rows.any():
            found[REWARD.format(name)] = reward[rows].mean().item()
            found[WEIGHT.format(name)] = step.weight[rows].mean().item()
    return found
