"""The line on the console about gradient norms."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from verl.single_controller.base.decorator import MAGIC_ATTR

from verl_vcpo.actor.engine_workers import VCPOActorWorker
from verl_vcpo.actor.norms.settings import NormsHow, in_words


def test_a_run_says_how_it_measures_and_why() -> None:
    layers = "the layers of Transformer Engine 2.12.0"
    packed = f"Gradient norms: packed, on {layers}; a second backward forms the gradient"
    assert in_words(NormsHow.PACKED, layers, None).startswith(f"{packed} where groups, ranks or weights")
    assert in_words(NormsHow.TWO_BACKWARDS, layers, None) == f"{packed} (vcpo.norms.how=two_backwards)."
    assert in_words(NormsHow.PACKED, layers, None, experts=True) == f"{packed} (a mixture of experts)."
    slow = in_words(NormsHow.PACKED, layers, "fp8 is not supported")
    assert "one backward per sequence" in slow and slow.endswith(f"{layers}; not packed, because fp8 is not supported.")
    asked = in_words(NormsHow.PER_TRAJECTORY, layers, "fp8 is not supported")
    assert "vcpo.norms.how=per_trajectory" in asked and "fp8" not in asked


def test_the_worker_asks_its_engine(make_engine: Callable[..., Any]) -> None:
    """Catches a worker that the trainer cannot ask, or that says something else than its engine does."""
    assert hasattr(VCPOActorWorker.layers_for_norms, MAGIC_ATTR), "the trainer's worker group has the method"
    said = {
        model: VCPOActorWorker.layers_for_norms(SimpleNamespace(actor=SimpleNamespace(engine=make_engine(model))))
        for model in ("untied", "moe")
    }
    line = in_words(NormsHow.PACKED, *said["untied"][:2])
    assert line.startswith("Gradient norms: packed, on Megatron's own layers;")
    assert said["moe"] == (*said["untied"][:2], True), "and it has experts"
