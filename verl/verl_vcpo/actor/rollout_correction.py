"""verl's importance weights where all weights of a micro-batch are masked to 0 (`method=mis`, `mis_seq`).

Extends verl/trainer/ppo/rollout_corr_helper.py, whose metrics divide by the mean of the squared weights: such a
micro-batch ended the run with a ZeroDivisionError (verl pull request 7559). Its effective sample size is 0.
"""

import functools
from collections.abc import Callable

from torch import Tensor
from verl.trainer.ppo import rollout_corr_helper

_TINY = 1e-12  # added to weights that are all 0, for the metrics


def _defined_for_zeros(compute: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    @functools.wraps(compute)
    def compute_is_metrics(rollout_is_weights: Tensor, *args: object, **kwargs: object) -> dict[str, float]:
        if rollout_is_weights.any():
            return compute(rollout_is_weights, *args, **kwargs)
        return compute(rollout_is_weights + _TINY, *args, **kwargs) | {"rollout_is_eff_sample_size": 0.0}

    return compute_is_metrics


rollout_corr_helper.compute_is_metrics = _defined_for_zeros(rollout_corr_helper.compute_is_metrics)
