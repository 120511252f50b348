"""A policy loss of the user's own among verl's: `policy_loss.loss_mode=FILE.py:FUNCTION` or `PACKAGE.MODULE:FUNCTION`.

The function has the parameters of verl's policy losses. Its further keyword-only parameters are settings, given below
`actor_rollout_ref.actor.stabilizer`. Every process that makes the actor's settings loads and registers the function.
verl is imported where it is used: the checks before the start import this module.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_vcpo.user_code.errors import LoadError
from verl_vcpo.user_code.function import load_function

_SETTING = "actor_rollout_ref.actor.policy_loss.loss_mode"
PASSED = ("old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config", "rollout_is_weights")
"""The keyword arguments that verl's `ppo_loss` passes."""

Loss = Callable[..., tuple[Tensor, dict[str, Any]]]


def is_own(loss_mode: str) -> bool:
    """Return True where the setting names a function instead of one of the registered losses."""
    return ":" in loss_mode


def absolute(loss_mode: str) -> str:
    """Return the setting with its file's absolute path: the trainer's processes may work in another folder."""
    place, _, name = loss_mode.rpartition(":")
    return f"{Path(place).expanduser().absolute()}:{name}" if place.endswith(".py") else loss_mode


@lru_cache
def loaded(loss_mode: str) -> Loss:
    """Import and return the function.

    Raises:
        ValueError: there is none, or its module does not load.
    """
    place, _, name = loss_mode.rpartition(":")
    try:
        return load_function(place if place.endswith(".py") else f"pkg://{place}", name)
    except LoadError as error:
        raise ValueError(f"{_SETTING}={loss_mode}: it {error.what}; give FILE.py:FUNCTION or MODULE:FUNCTION") from None


def register(loss_mode: str, settings: dict[str, Any]) -> None:
    """Have verl find the function under the setting's value.

    Raises:
        ValueError: the function does not load, or cannot be called with what verl passes and these settings.
    """
    from verl.trainer.ppo.core_algos import register_policy_loss

    function = loaded(loss_mode)
    try:
        inspect.signature(function).bind(**dict.fromkeys(PASSED), **settings)
    except TypeError as error:
        raise ValueError(
            f"{_SETTING}={loss_mode}: {error}; verl passes {', '.join(PASSED)}, and "
            "actor_rollout_ref.actor.stabilizer gives the function's other parameters"
        ) from None
    register_policy_loss(loss_mode)(partial(_called, function))


def _called(function: Loss, *, config: Any, **passed: Any) -> tuple[Tensor, dict[str, Any]]:
    return function(config=config, **passed, **config.stabilizer)


def try_out(config: Any) -> None:
    """Call the loss once, with made-up log-probs of two responses.

    Args:
        config: the actor's settings, a VCPOActorConfig; gets the sizes of the made-up batch.

    Raises:
        ValueError: the function raises, returns something else than a loss and metrics, or has no gradient.
    """
    loss_mode = config.policy_loss.loss_mode
    old, mask = -torch.ones(2, 3), torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=5, global_batch_size=2, loss_scale_factor=config.loss_scale_factor
    )
    try:
        returned = _called(
            loaded(loss_mode),
            config=config,
            old_log_prob=old,
            log_prob=(old - 0.1).requires_grad_(),
            advantages=torch.tensor([[1.0], [-1.0]]).expand(2, 3),
            response_mask=mask,
            loss_agg_mode=config.loss_agg_mode,
            rollout_is_weights=None,
        )
    except Exception as error:
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{_SETTING}={loss_mode}: it raises {words}, for made-up log-probs") from None
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ValueError(f"{_SETTING}={loss_mode}: it returned a {type(returned).__name__}; return (loss, metrics)")
    loss, metrics = returned
    if not isinstance(loss, Tensor) or loss.dim() or not isinstance(metrics, dict):
        shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"{_SETTING}={loss_mode}: it returned ({shape}, {type(metrics).__name__}); return a tensor of one number "
            "(verl's agg_loss makes it) and a dict of metrics"
        )
    if not loss.requires_grad:
        raise ValueError(f"{_SETTING}={loss_mode}: its loss has no gradient; compute it from log_prob, not detached")
