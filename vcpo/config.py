"""Every knob of VCPO, validated when it is built."""

import math
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from typing import TypeVar


class StepSizeRule(StrEnum):
    """How the learning rate follows the effective sample size."""

    NONE = "none"
    """The learning rate is never scaled."""
    SQRT = "sqrt"
    """lr * sqrt(min(1, rho / rho_base)): for AdamW-style optimizers."""
    LINEAR = "linear"
    """lr * min(1, rho / rho_base): for SGD."""


class Baseline(StrEnum):
    """What is subtracted from a sequence's reward."""

    NONE = "none"
    """Nothing: REINFORCE."""
    MEAN = "mean"
    """The mean reward of the prompt group: GRPO."""
    LEAVE_ONE_OUT = "leave_one_out"
    """The mean reward of the other sequences of the group: RLOO."""
    OPOB = "opob"
    """The optimal off-policy baseline: minimises the variance of the update."""


class OpobWeights(StrEnum):
    """Which weights OPOB squares."""

    ESTIMATOR = "estimator"
    """The weights that multiply the gradients in the update: min(w, truncation)."""
    PAPER = "paper"
    """The untruncated weights w, as published."""


class GradientNorms(StrEnum):
    """How the gradient norm of each sequence is measured."""

    PER_TRAJECTORY = "per_trajectory"
    """One backward per sequence. Exact on any model, slow: the reference."""


_E = TypeVar("_E", bound=Enum)


def _choice(name: str, value: object, enum: type[_E]) -> _E:
    try:
        return enum(value)
    except ValueError:
        raise ValueError(f"vcpo.{name}={value!r}: choose one of {', '.join(str(e.value) for e in enum)}") from None


def _number(name: str, value: object, low: float, high: float, *, low_open: bool) -> float:
    """`value` as a float in [low, high], or in (low, high] where `low_open`."""
    interval = f"{'(' if low_open else '['}{low:g}, {high:g}]"
    ok = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not ok or (low_open and value == low):
        raise ValueError(f"vcpo.{name}={value!r}: give a number in {interval}")
    return float(value)  # type: ignore[arg-type]


@dataclass(frozen=True)
class VCPOConfig:
    """Settings of the VCPO update. Strings are accepted for the enums.

    Raises:
        ValueError: naming the setting and what to set instead.
    """

    enable: bool = True
    """False: the trainer runs verl's own policy loss (GRPO, PPO, ...) on the same data path."""

    truncation: float | None = 8.0
    """c: a sequence's weight is min(w, c). None: no truncation."""

    step_size_rule: StepSizeRule = StepSizeRule.SQRT
    """How the learning rate follows the ESS ratio rho."""

    base_ess_ratio: float = 1.0
    """rho_base, the ESS ratio at which the full learning rate is used: 1.0 single-turn, 0.55 multi-turn."""

    min_step_size_multiplier: float = 0.0
    """The learning rate is never multiplied by less than this."""

    baseline: Baseline = Baseline.OPOB
    """What is subtracted from a sequence's reward, within its prompt group."""

    opob_weights: OpobWeights = OpobWeights.ESTIMATOR
    """Which weights OPOB squares."""

    norm_by_std: bool = True
    """Divide by the standard deviation of the group's rewards, as GRPO does."""

    gradient_norms: GradientNorms = GradientNorms.PER_TRAJECTORY
    """How per-sequence gradient norms are measured; used by `baseline=opob` only."""

    def __post_init__(self) -> None:
        for name in ("enable", "norm_by_std"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"vcpo.{name}={getattr(self, name)!r}: give true or false")
        for name, enum in (
            ("step_size_rule", StepSizeRule),
            ("baseline", Baseline),
            ("opob_weights", OpobWeights),
            ("gradient_norms", GradientNorms),
        ):
            object.__setattr__(self, name, _choice(name, getattr(self, name), enum))
        if self.truncation is not None:
            _number("truncation", self.truncation, 0.0, math.inf, low_open=True)
        _number("base_ess_ratio", self.base_ess_ratio, 0.0, 1.0, low_open=True)
        _number("min_step_size_multiplier", self.min_step_size_multiplier, 0.0, 1.0, low_open=False)

    @property
    def needs_gradient_norms(self) -> bool:
        """Whether the update has to know each sequence's gradient norm."""
        return self.baseline is Baseline.OPOB

    @classmethod
    def names(cls) -> list[str]:
        """The settings' names, in the order of this file."""
        return [f.name for f in fields(cls)]
