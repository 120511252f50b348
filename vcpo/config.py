"""Every knob of VCPO, validated when it is built."""

import math
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TypeVar


class StepSizeRule(StrEnum):
    """The rule by which the learning rate follows the effective sample size."""

    NONE = "none"
    """The learning rate is never scaled."""
    SQRT = "sqrt"
    """lr * sqrt(min(1, rho / rho_base)): for AdamW-style optimizers."""
    LINEAR = "linear"
    """lr * min(1, rho / rho_base): for SGD."""


class EssWeights(StrEnum):
    """The weights that the ESS ratio is measured on."""

    UNTRUNCATED = "untruncated"
    """The weights w: rho shows how far off policy the batch is, also what truncation hides."""
    TRUNCATED = "truncated"
    """The truncated weights: the concentration of the weights that are really used."""


class EssPart(StrEnum):
    """The part of the weights whose effective sample size the learning rate follows."""

    WHOLE = "whole"
    """The weights as they are: what the lag has made of them, and what arithmetic has."""
    LAG = "lag"
    """The part that the lag has made (`vcpo.mismatch`): long responses do not shorten the step."""


class Baseline(StrEnum):
    """The number that is subtracted from a sequence's reward."""

    NONE = "none"
    """Nothing: REINFORCE."""
    MEAN = "mean"
    """The mean reward of the prompt group: GRPO."""
    LEAVE_ONE_OUT = "leave_one_out"
    """The mean reward of the other sequences of the group: RLOO."""
    LENGTH = "length"
    """The mean reward of the group weighted by response length: OPO (arXiv 2505.23585)."""
    OPOB = "opob"
    """The optimal off-policy baseline: minimises the variance of the update."""


class OpobWeights(StrEnum):
    """The weights that OPOB squares."""

    ESTIMATOR = "estimator"
    """The weights that multiply the gradients in the update: min(w, truncation)."""
    PUBLISHED = "published"
    """w min(w, truncation) times the number of response tokens: what the authors' code computes."""


class OpobScope(StrEnum):
    """The sequences over which one OPOB is computed."""

    GROUP = "group"
    """The sequences of one prompt."""
    MINIBATCH = "minibatch"
    """All sequences of the mini-batch, of every data-parallel rank."""


_E = TypeVar("_E", bound=Enum)


def choice(name: str, value: object, enum: type[_E]) -> _E:
    """Return `value` as a member of `enum`.

    Raises:
        ValueError: naming the setting `vcpo.<name>` and the choices there are.
    """
    try:
        return enum(value)
    except ValueError:
        raise ValueError(f"vcpo.{name}={value!r}: choose one of {', '.join(str(e.value) for e in enum)}") from None


def _number(name: str, value: object, low: float, high: float, *, low_open: bool) -> float:
    """Return `value` as a float in [low, high], or in (low, high] where `low_open`."""
    interval = f"{'(' if low_open else '['}{low:g}, {high:g}]"
    ok = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not ok or (low_open and value == low):
        raise ValueError(f"vcpo.{name}={value!r}: give a number in {interval}")
    return float(value)  # type: ignore[arg-type]  # `ok`: it is a number


@dataclass(frozen=True)
class VCPOConfig:
    """Settings of the VCPO update. Strings are accepted for the enums.

    Raises:
        ValueError: naming the setting and what to set instead; also for a setting that would have no effect.
    """

    truncation: float | None = 8.0
    """The bound c of a sequence's weight min(w, c). None: no truncation."""

    step_size_rule: StepSizeRule = StepSizeRule.SQRT
    """The rule by which the learning rate follows the ESS ratio rho."""

    ess_weights: EssWeights = EssWeights.UNTRUNCATED
    """The weights that rho is measured on. With `step_size_rule=none` rho is reported, and changes nothing."""

    ess_part: EssPart = EssPart.WHOLE
    """The part of the weights whose ESS ratio the learning rate follows: a run's default is `lag`; `whole` is the
    paper's step, which long responses shorten. Until the parts are known, and where arithmetic hardly counts, both are
    the same."""

    base_ess_ratio: float = 1.0
    """rho_base, the ESS ratio that earns the full learning rate: 1.0 single-turn, 0.55 multi-turn."""

    min_step_size_multiplier: float = 0.0
    """The learning rate is never multiplied by less than this."""

    baseline: Baseline = Baseline.OPOB
    """The number that is subtracted from a sequence's reward."""

    opob_scope: OpobScope = OpobScope.GROUP
    """The sequences over which one OPOB is computed."""

    opob_weights: OpobWeights = OpobWeights.ESTIMATOR
    """The weights that OPOB squares."""

    opob_leave_one_out: bool = False
    """A sequence's OPOB is computed from the others: no bias from its own reward, but more variance."""

    norm_by_std: bool = True
    """Divide by the standard deviation of the group's rewards, as GRPO does."""

    def __post_init__(self) -> None:
        for name in ("norm_by_std", "opob_leave_one_out"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"vcpo.{name}={getattr(self, name)!r}: give true or false")
        for name, enum in (
            ("step_size_rule", StepSizeRule),
            ("ess_weights", EssWeights),
            ("ess_part", EssPart),
            ("baseline", Baseline),
            ("opob_scope", OpobScope),
            ("opob_weights", OpobWeights),
        ):
            object.__setattr__(self, name, choice(name, getattr(self, name), enum))
        if self.truncation is not None:
            _number("truncation", self.truncation, 0.0, math.inf, low_open=True)
        _number("base_ess_ratio", self.base_ess_ratio, 0.0, 1.0, low_open=True)
        _number("min_step_size_multiplier", self.min_step_size_multiplier, 0.0, 1.0, low_open=False)
        self._refuse_what_has_no_effect()

    def _refuse_what_has_no_effect(self) -> None:
        """Refuse settings without effect: a setting that is silently ignored makes two different runs look alike."""
        if self.step_size_rule is StepSizeRule.NONE and self.min_step_size_multiplier != 0:
            raise ValueError(
                f"vcpo.min_step_size_multiplier={self.min_step_size_multiplier}: has no effect with "
                "vcpo.step_size_rule=none; leave it out"
            )
        if self.ess_part is EssPart.LAG and self.ess_weights is EssWeights.TRUNCATED:
            raise ValueError(
                "vcpo.ess_weights=truncated: vcpo.ess_part=lag needs the untruncated; set vcpo.ess_part=whole too"
            )
        if self.truncation is None and self.ess_weights is EssWeights.TRUNCATED:
            raise ValueError("vcpo.ess_weights=truncated: nothing is truncated; set vcpo.truncation, or `untruncated`")
        for name in ("opob_scope", "opob_weights", "opob_leave_one_out"):
            if self.baseline is not Baseline.OPOB and getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"vcpo.{name}={getattr(self, name)}: has no effect with vcpo.baseline={self.baseline}; "
                    "set vcpo.baseline=opob, or leave it out"
                )

    @property
    def scales_step_size(self) -> bool:
        """True where the learning rate follows the effective sample size."""
        return self.step_size_rule is not StepSizeRule.NONE

    @property
    def needs_gradient_norms(self) -> bool:
        """True where the update needs each sequence's gradient norm."""
        return self.baseline is Baseline.OPOB

    @property
    def compares_samples_of_a_prompt(self) -> bool:
        """True where a group of one sequence has no signal: the advantage of the sequence is always 0."""
        within_group = self.baseline in (Baseline.MEAN, Baseline.LENGTH) or (
            self.baseline is Baseline.OPOB and self.opob_scope is OpobScope.GROUP
        )
        return within_group or self.norm_by_std
