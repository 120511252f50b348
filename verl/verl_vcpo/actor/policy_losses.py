"""The stabilizers as policy losses of verl, and the advantages of OAPL; importing the module registers them.

Extends verl/trainer/ppo/core_algos.py. And verl's importance weights where all weights of a micro-batch are masked to 0
(`method=mis`, `mis_seq`): the metrics of verl/trainer/ppo/rollout_corr_helper.py divide by the mean of the squared
weights, so such a micro-batch ended the run with a ZeroDivisionError (verl pull request 7559).
"""

import inspect
import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo import rollout_corr_helper
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss

from vcpo.stabilizers import TOKEN_LOSSES
from vcpo.stabilizers.oapl import optimal_advantages
from vcpo.stabilizers.tba import tba_tokens
from verl_vcpo.actor import own_loss

_LOSSES = TOKEN_LOSSES | {"tba": tba_tokens}

_SHARES = ("positive_share", "quantile")
"""Settings that are at most 1."""


def check_settings(loss_mode: str, settings: dict[str, Any]) -> None:
    """Refuse a setting or value that the policy loss does not have; register a loss of the user's own.

    Raises:
        ValueError: naming the setting, with the settings or values to choose from; or why there is no such loss.
    """
    known: dict[str, Any] = {}
    is_own = own_loss.is_own(loss_mode)
    if loss := own_loss.loaded(loss_mode) if is_own else _LOSSES.get(loss_mode):
        parameters = [p for p in inspect.signature(loss).parameters.values() if p.name not in own_loss.PASSED]
        known = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    for name, value in settings.items():
        if name not in known:
            raise ValueError(
                f"actor_rollout_ref.actor.stabilizer.{name}: policy_loss.loss_mode={loss_mode} has "
                + (f"the settings {', '.join(known)} only" if known else "no settings there; leave it out")
            )
        if isinstance(known[name], float) and not is_own:
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (name in _SHARES and value > 1):
                wanted = "in [0, 1]" if name in _SHARES else "of at least 0"
                raise ValueError(f"actor_rollout_ref.actor.stabilizer.{name}={value!r}: give a number {wanted}")
    if is_own:
        own_loss.register(loss_mode, settings)


def _policy_loss(
    name: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Compute a stabilizer in verl's signature; `old_log_prob` are the sampler's (bypass mode; tba ignores them)."""
    losses = _LOSSES[name](log_prob, old_log_prob, advantages, response_mask, **config.stabilizer)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    return loss, {}


@register_adv_est("oapl")
def oapl_advantages(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Return A* of each sequence on each of its tokens [B, T], twice: advantages and returns, as verl's estimators do.

    Args:
        token_level_rewards: [B, T]; their sum is the sequence's reward.
        index: [B] equal for the sequences of one prompt.
    """
    group = torch.from_numpy(np.unique(index, return_inverse=True)[1]).to(token_level_rewards.device)
    advantage = optimal_advantages(token_level_rewards.sum(dim=-1), group)[:, None] * response_mask
    return advantage, advantage


for _name in _LOSSES:
    register_policy_loss(_name)(partial(_policy_loss, _name))


def _defined_for_zeros(compute: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    @wraps(compute)
    def compute_is_metrics(rollout_is_weights: Tensor, *args: object, **kwargs: object) -> dict[str, float]:
        if rollout_is_weights.any():
            return compute(rollout_is_weights, *args, **kwargs)
        tiny = 1e-12  # added to weights that are all 0: their effective sample size is 0
        return compute(rollout_is_weights + tiny, *args, **kwargs) | {"rollout_is_eff_sample_size": 0.0}

    return compute_is_metrics


rollout_corr_helper.compute_is_metrics = _defined_for_zeros(rollout_corr_helper.compute_is_metrics)
