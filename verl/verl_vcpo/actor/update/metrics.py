"""The metrics of one update of a mini-batch; rewards, weights and gradients also by the lag of its responses."""

import math

from torch import Tensor

from vcpo import Estimate
from vcpo.mismatch import WeightParts
from verl_vcpo.actor.update.mini_batch import Measured
from verl_vcpo.common.truncated import gradient_sizes, parts_of_update

BINS = {"0": 0, "1-3": 1, "4-15": 4, "16-63": 16, "64-up": 64}
"""By name, the smallest lag of each bin."""
FIRST = "0"
"""The bin that a mini-batch has whatever its lags are, be it empty."""
SHARE, REWARD, WEIGHT, GRADIENT_SHARE = (
    f"vcpo/lag/{{}}/{name}" for name in ("share", "reward", "weight", "gradient_share")
)


def of_update(measured: Measured, step: Estimate, parts: WeightParts | None) -> dict[str, float]:
    """Return the metrics of an update: docs/reference/metrics.md explains them.

    Args:
        parts: of the weights, what lag and arithmetic make of them, where that is known.
    """
    batch, usable = measured.batch, step.usable
    metrics = {
        "vcpo/ess_ratio": step.ess_ratio,
        "vcpo/ess_ratio/min": step.ess_ratio,  # verl takes the minimum over mini-batches, by the name
        "vcpo/lr_multiplier": step.step_size_multiplier,
        "vcpo/baseline": _mean(step.baseline[usable]),
        "vcpo/weight/max": step.weight.max().item(),
        "vcpo/kl_rollout_policy": (batch.kl[usable].sum() / batch.tokens[usable].sum().clamp(min=1)).item(),
        "vcpo/excluded_sequences": int((~usable & ~batch.padding & ~batch.dropped).sum()),
        "vcpo/dropped_sequences": int(batch.dropped.sum()),
        "vcpo/skipped_updates": int(not batch.moves(step)),
        "vcpo/second_backwards": int(measured.outputs is None and batch.moves(step)),
        **parts_of_update(step, batch.truncated, batch.squared_norm),
        **of_lags(batch.lag, step, batch.reward, batch.squared_norm),
    }
    if batch.squared_norm is not None:
        metrics["vcpo/sequence_grad_norm"] = _mean(batch.squared_norm[usable].sqrt())
    if parts:
        metrics |= {
            "vcpo/ess/lag": max(step.ess_ratio, parts.lag),
            "vcpo/ess/arithmetic": parts.arithmetic,
            "vcpo/mismatch/rms": parts.rms,
            "vcpo/mismatch/rms_error": parts.rms_error,
            "vcpo/mismatch/tokens_again": int(batch.again[:, :, 0].sum()),
        }
    return metrics


def _mean(values: Tensor) -> float:
    return values.mean().item() if values.numel() else math.nan


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
