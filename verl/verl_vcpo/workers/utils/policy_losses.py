"""Our stabilizers among verl's policy losses (extends verl/trainer/ppo/core_algos.py); registered by the import.

The module is below workers/ and not below trainer/, because the workers compute losses.
"""

import inspect
from functools import partial
from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss

import verl_vcpo.workers.utils.rollout_corr_helper  # noqa: F401  # applies a fix to verl's module
from vcpo.stabilizers import TOKEN_LOSSES
from vcpo.stabilizers.tba import tba_tokens

_LOSSES = TOKEN_LOSSES | {"tba": tba_tokens}


def check_settings(loss_mode: str, settings: dict[str, Any]) -> None:
    """Refuse a setting that the policy loss does not have.

    Raises:
        ValueError: naming the setting and those there are.
    """
    known: list[str] = []
    if loss := _LOSSES.get(loss_mode):
        parameters = inspect.signature(loss).parameters.values()
        known = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    for name in settings:
        if name not in known:
            raise ValueError(
                f"actor_rollout_ref.actor.stabilizer.{name}: policy_loss.loss_mode={loss_mode} has "
                + (f"the settings {', '.join(known)} only" if known else "no settings there; leave it out")
            )


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
    """A stabilizer in verl's signature; `old_log_prob` are the sampler's (bypass mode; tba ignores them)."""
    losses = _LOSSES[name](log_prob, old_log_prob, advantages, response_mask, **config.stabilizer)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    return loss, {}


for _name in _LOSSES:
    register_policy_loss(_name)(partial(_policy_loss, _name))
