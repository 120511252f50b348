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


class EssPart(StrEnum):
    """The part of the weights whose effective sample size the learning rate follows."""

    WHOLE = "whole"
    """The weights as they are: what the lag has made of them, and what arithmetic has."""
    LAG = "lag"
    """The part that the lag has made (`vcpo.mismatch`), as far as arithmetic is known: long responses alone do not
    shorten the step."""


class Baseline(StrEnum):
    """The number that is subtracted from a sequence's reward."""

    NONE = "none"
    """Nothing: REINFORCE."""
    MEAN = "mean"
    """The mean reward of the prompt group: GRPO."""
    HALF_MEAN = "half_mean"
    """Halfway from the lowest reward of the prompt group to its mean: half of the mean where wrong answers have 0. With
    more than two different rewards in a group it is nearer to the mean."""
    OPOB = "opob"
    """The optimal off-policy baseline: minimises the variance of the update."""
    OPOB_CAPPED = "opob_capped"
    """OPOB, but never above the mean reward of the sequences over which OPOB is computed. With more than two
    different rewards it is not far below that mean, either."""


OPOB_BASELINES = (Baseline.OPOB, Baseline.OPOB_CAPPED)
"""The baselines that are OPOB, with or without a cap."""


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


def _positive(name: str, value: object, high: float) -> None:
    """Refuse what is not a number in (0, high]."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= high:
        raise ValueError(f"vcpo.{name}={value!r}: give a number in (0, {high:g}]")


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

    ess_part: EssPart = EssPart.WHOLE
    """The part of the weights whose ESS ratio the learning rate follows. `whole` is the paper's step, which long
    responses shorten; a run, which measures the parts, has `lag`. Until the parts are known both are the same, and
    where arithmetic hardly counts they hardly differ."""

    base_ess_ratio: float = 1.0
    """rho_base, the ESS ratio that earns the full learning rate: 1.0 single-turn, 0.55 multi-turn."""

    baseline: Baseline = Baseline.OPOB
    """The number that is subtracted from a sequence's reward: `opob` is the paper's, and `method=NAME` decides."""

    opob_scope: OpobScope = OpobScope.GROUP
    """The sequences over which one OPOB is computed."""

    opob_weights: OpobWeights = OpobWeights.ESTIMATOR
    """The weights that OPOB squares."""

    norm_by_std: bool = True
    """Divide by the standard deviation of the group's rewards, as GRPO does."""

    def __post_init__(self) -> None:
        if not isinstance(self.norm_by_std, bool):
            raise ValueError(f"vcpo.norm_by_std={self.norm_by_std!r}: give true or false")
        for name, enum in (
            ("step_size_rule", StepSizeRule),
            ("ess_part", EssPart),
            ("baseline", Baseline),
            ("opob_scope", OpobScope),
            ("opob_weights", OpobWeights),
        ):
            object.__setattr__(self, name, choice(name, getattr(self, name), enum))
        if self.truncation is not None:
            _positive("truncation", self.truncation, math.inf)
        _positive("base_ess_ratio", self.base_ess_ratio, 1.0)
        self._refuse_what_has_no_effect()

    def _refuse_what_has_no_effect(self) -> None:
        """Refuse settings without effect: a setting that is silently ignored makes two different runs look alike."""
        for name in ("opob_scope", "opob_weights"):
            if not self.uses_opob and getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"vcpo.{name}={getattr(self, name)}: has no effect with vcpo.baseline={self.baseline}; "
                    "set vcpo.baseline=opob, or leave it out"
                )

    @property
    def scales_step_size(self) -> bool:
        """True where the learning rate follows the effective sample size."""
        return self.step_size_rule is not StepSizeRule.NONE

    @property
    def uses_opob(self) -> bool:
        """True where the baseline is OPOB, with or without a cap."""
        return self.baseline in OPOB_BASELINES

    @property
    def needs_gradient_norms(self) -> bool:
        """True where the update needs each sequence's gradient norm.

        Otherwise a coefficient is the sequence's own weight times a factor of the rewards alone
        (`vcpo.estimator.reward_factors`), so that the pass that gives the weights forms the gradient too.
        """
        return self.uses_opob

    @property
    def compares_samples_of_a_prompt(self) -> bool:
        """True where a group of one sequence has no signal: the advantage of the sequence is always 0."""
        within_group = self.baseline in (Baseline.MEAN, Baseline.HALF_MEAN) or (
            self.uses_opob and self.opob_scope is OpobScope.GROUP
        )
        return within_group or self.norm_by_std
