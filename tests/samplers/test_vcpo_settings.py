"""The settings `vcpo.*` of the trainer, beside the algorithm's own."""

import pytest

from verl_vcpo.actor.vcpo_settings import VCPOSettings


def test_a_trainer_without_vcpo_asks_nothing_of_it() -> None:
    on, off = VCPOSettings(), VCPOSettings(enable=False)
    for name in (
        "scales_step_size",
        "needs_gradient_norms",
        "packs_gradient_norms",
        "compares_samples_of_a_prompt",
    ):
        assert (getattr(on, name), getattr(off, name)) == (True, False), name


def test_enable_is_true_or_false() -> None:
    with pytest.raises(ValueError, match="vcpo.enable='yes': give true or false"):
        VCPOSettings(enable="yes")  # type: ignore[arg-type]
