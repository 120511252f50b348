"""A policy loss of the user's own among verl's: `policy_loss.loss_mode=FILE.py:FUNCTION` or `PACKAGE.MODULE:FUNCTION`.

The function has the parameters of verl's policy losses. Its further keyword-only parameters are settings, given below
`actor_rollout_ref.actor.stabilizer`. Every process that makes the actor's settings loads and registers the function.
verl is imported where it is used: the checks before the start import this module.
"""

import inspect
import math
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_vcpo.user_code.errors import LoadError, UserCodeError, text_of
from verl_vcpo.user_code.function import load_function
from verl_vcpo.user_code.values import as_float, shown

_SETTING = "actor_rollout_ref.actor.policy_loss.loss_mode"
PASSED = ("old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config", "rollout_is_weights")
"""The keyword arguments that verl's `ppo_loss` passes."""
_VERLS = ("entropy", "entropy_loss", "grad_norm", "kl_coef", "kl_loss", "loss", "lr", "mfu", "pg_loss")
_VERLS_GROUPS = ("mtp_losses", "perf/", "vcpo/")
"""Metrics of an update, and beginnings of their names, that are not the loss's."""

_MADE_UP = ", for made-up log-probs"

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
        function = load_function(place if place.endswith(".py") else f"pkg://{place}", name)
        inspect.signature(function)
        return function
    except ValueError:
        raise ValueError(f"{_SETTING}={loss_mode}: {name} has no signature; name a function of Python's") from None
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
    register_policy_loss(loss_mode)(partial(_called, loss_mode))


def _called(loss_mode: str, *, config: Any, **passed: Any) -> tuple[Tensor, dict[str, float]]:
    """Call the loss, in every update. Raises UserCodeError where the result would spoil the weights."""
    return _checked(loss_mode, loaded(loss_mode)(config=config, **passed, **config.stabilizer))


def _checked(loss_mode: str, returned: Any) -> tuple[Tensor, dict[str, float]]:
    """The loss and its metrics, as Python's numbers. Raises UserCodeError."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise _refusal(loss_mode, f"it returned a {type(returned).__name__}", "return (loss, metrics)")
    loss, metrics = returned
    is_number = isinstance(loss, Tensor) and not loss.dim() and loss.is_floating_point()
    if not is_number or loss.layout != torch.strided or loss.is_meta or not isinstance(metrics, dict):
        what = _kind(loss) if isinstance(loss, Tensor) else type(loss).__name__
        fix = "return a tensor of one real number (verl's agg_loss makes it) and a dict of metrics"
        raise _refusal(loss_mode, f"it returned ({what}, {type(metrics).__name__})", fix)
    if not loss.isfinite():
        raise _refusal(loss_mode, f"its loss is {loss.item()}", "make it finite for all log-probs and masks")
    return loss, {name: _metric(loss_mode, name, value) for name, value in metrics.items()}


def _kind(tensor: Tensor) -> str:
    unusual = "" if tensor.layout == torch.strided and not tensor.is_meta else f", {tensor.layout} on {tensor.device}"
    return f"{list(tensor.shape)} of {tensor.dtype}{unusual}"


def _metric(loss_mode: str, name: Any, value: Any) -> float:
    """The value of a metric; NaN where a batch has nothing to measure. Raises UserCodeError."""
    if not isinstance(name, str) or not name:
        raise _refusal(loss_mode, f"a metric has the name {shown(name)}", "make it a text")
    if (own := name.removeprefix("actor/")) in _VERLS or own.startswith(_VERLS_GROUPS):
        raise _refusal(loss_mode, f"its metric {name!r} has the name of another one", "rename it")
    if (number := as_float(value.detach() if isinstance(value, Tensor) else value)) is None:
        raise _refusal(loss_mode, f"its metric {name!r} is {shown(value)}", "make it a number")
    return number


def try_out(config: Any, weighted: bool = False) -> None:
    """Call the loss once, with made-up log-probs of three responses: one is left out, by a mask of zeros.

    Args:
        config: the actor's settings, a VCPOActorConfig; gets the sizes of the made-up batch.
        weighted: verl passes importance weights in the run.

    Raises:
        UserCodeError: the function raises, returns something else than a finite loss and finite metrics, or has no
            finite gradient.
    """
    loss_mode = config.policy_loss.loss_mode
    old, mask = -torch.ones(3, 3), torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]]).bool()
    # The policy and the sampler agree exactly in a token that is certain.
    log_prob = (old - 0.1 * torch.tensor([0.0, 1.0, 1.0])).requires_grad_()
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=5, global_batch_size=3, loss_scale_factor=config.loss_scale_factor
    )
    try:
        returned = loaded(loss_mode)(
            config=config,
            old_log_prob=old,
            log_prob=log_prob,
            advantages=torch.tensor([[1.0], [-1.0], [0.0]]).expand(3, 3),
            response_mask=mask,
            loss_agg_mode=config.loss_agg_mode,
            rollout_is_weights=mask.float() if weighted else None,
            **config.stabilizer,
        )
    except (Exception, SystemExit) as error:
        raise _refusal(loss_mode, f"it raises {_one_line(error)}{_MADE_UP}", "mend the function") from None
    loss, metrics = _checked(loss_mode, returned)
    for name, number in metrics.items():
        if not math.isfinite(number):
            raise _refusal(
                loss_mode, f"its metric {name!r} is {number}{_MADE_UP}", "make it finite where there are tokens"
            )
    try:
        of_log_prob = torch.autograd.grad(loss, log_prob, allow_unused=True)[0] if loss.requires_grad else None
    except (Exception, SystemExit) as error:  # a function of the user's own may have a backward of its own
        raise _refusal(loss_mode, f"its gradient raises {_one_line(error)}{_MADE_UP}", "mend the function") from None
    if of_log_prob is None:
        raise _refusal(loss_mode, "its loss has no gradient", "compute it from log_prob, not detached")
    if not of_log_prob.isfinite().all():
        raise _refusal(
            loss_mode, f"its gradient is not finite{_MADE_UP}", "torch.where keeps NaN of what it leaves out"
        )


def _refusal(loss_mode: str, what: str, fix: str) -> UserCodeError:
    return UserCodeError(f"{_SETTING}={loss_mode}: {what}", fix)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(text_of(error).split())}"
