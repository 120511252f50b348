"""The settings `vcpo.*`: those of the algorithm, and those of the engine's measurements for the algorithm."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from vcpo import VCPOConfig
from verl_vcpo.actor.norms_settings import NormsConfig, NormsHow


@dataclass(frozen=True)
class VCPOSettings(VCPOConfig):
    """Everything below `vcpo` in the configuration. A mapping is accepted for `norms`.

    Raises:
        ValueError: naming the setting and what to set instead; also for a setting that would have no effect.
    """

    enable: bool = True
    """False: the trainer runs verl's own policy loss (GRPO, PPO, ...) on the same data path. `method=NAME` decides."""

    norms: NormsConfig = field(default_factory=NormsConfig)
    """The settings that say how each sequence's gradient norm is measured."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.enable, bool):
            raise ValueError(f"vcpo.enable={self.enable!r}: give true or false")
        if not isinstance(self.norms, NormsConfig):
            object.__setattr__(self, "norms", NormsConfig(**self.norms))

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Return the settings of the group `vcpo` in a composed configuration."""
        return cls(**{name: value for name, value in settings.items() if name != "_target_"})

    @property
    def scales_step_size(self) -> bool:
        """True where VCPO is on and the learning rate follows the effective sample size."""
        return self.enable and super().scales_step_size

    @property
    def needs_gradient_norms(self) -> bool:
        """True where VCPO is on and the update needs each sequence's gradient norm."""
        return self.enable and super().needs_gradient_norms

    @property
    def compares_samples_of_a_prompt(self) -> bool:
        """True where VCPO is on and a group of one sequence has no signal: its advantage is always 0."""
        return self.enable and super().compares_samples_of_a_prompt

    @property
    def packs_gradient_norms(self) -> bool:
        """True where norms come from packed backwards, if the model allows packing."""
        return self.needs_gradient_norms and self.norms.how is not NormsHow.PER_TRAJECTORY

    @property
    def fits_two_sums(self) -> bool:
        """True where the update may be a difference of two sums that are known before the norms."""
        return self.needs_gradient_norms and self.norms.how is NormsHow.PACKED
