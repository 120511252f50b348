"""The line on the console about gradient norms, and the settings that are against packed norms."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from verl.single_controller.base.decorator import MAGIC_ATTR

from verl_vcpo.actor.engine_workers import VCPOActorWorker
from verl_vcpo.actor.norms_settings import (
    NormsConfig,
    NormsHow,
    against_packing,
    against_packing_experts,
    norms_in_words,
)


def test_a_run_says_how_it_measures_and_why() -> None:
    layers = "the layers of Transformer Engine 2.12.0"
    packed = f"Gradient norms: packed, on {layers}; a second backward forms the gradient"
    assert norms_in_words(NormsHow.PACKED, layers, None).startswith(f"{packed} where groups, ranks or weights")
    assert norms_in_words(NormsHow.TWO_BACKWARDS, layers, None) == f"{packed} (vcpo.norms.how=two_backwards)."
    assert norms_in_words(NormsHow.PACKED, layers, None, experts=True) == f"{packed} (a mixture of experts)."
    slow = norms_in_words(NormsHow.PACKED, layers, "fp8 is not supported")
    assert "one backward per sequence" in slow and slow.endswith(f"{layers}; not packed, because fp8 is not supported.")
    asked = norms_in_words(NormsHow.PER_TRAJECTORY, layers, "fp8 is not supported")
    assert "vcpo.norms.how=per_trajectory" in asked and "fp8" not in asked


def test_the_way_may_be_given_as_a_string() -> None:
    assert NormsConfig(how="two_backwards").how is NormsHow.TWO_BACKWARDS  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"norms\.how"):
        NormsConfig(how="both")  # type: ignore[arg-type]


def test_the_setting_that_is_against_packing_is_named() -> None:
    """Biases of experts for balance count tokens only where they are updated."""

    def of(**settings: float) -> tuple[str | None, str | None]:
        asked = ({"moe_router_bias_update_rate": 0.001} | settings).get
        return against_packing(asked), against_packing_experts(asked)

    assert of() == (None, None)
    assert of(fp8=True) == ("fp8 is not supported", None)
    dense, experts = of(moe_router_enable_expert_bias=True, moe_z_loss_coeff=0)
    assert dense is None and experts == (
        "moe_router_enable_expert_bias=True: a second forward would count a batch's tokens twice"
    )
    fixed = {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0}
    assert of(**fixed) == (None, None)
    assert of(**fixed, moe_z_loss_coeff=0.1) == (None, "moe_z_loss_coeff=0.1: the loss is no sequence's own")


def test_the_worker_asks_its_engine(make_engine: Callable[..., Any]) -> None:
    """Catches a worker that the trainer cannot ask, or that says something else than its engine does."""
    assert hasattr(VCPOActorWorker.layers_for_norms, MAGIC_ATTR), "the trainer's worker group has the method"
    said = {
        model: VCPOActorWorker.layers_for_norms(SimpleNamespace(actor=SimpleNamespace(engine=make_engine(model))))
        for model in ("untied", "moe")
    }
    line = norms_in_words(NormsHow.PACKED, *said["untied"][:2])
    assert line.startswith("Gradient norms: packed, on Megatron's own layers;")
    assert said["moe"] == (*said["untied"][:2], True), "and it has experts"
