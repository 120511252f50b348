"""The line on the console about gradient norms."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from verl.single_controller.base.decorator import MAGIC_ATTR

from verl_vcpo.actor.engine_workers import VCPOActorWorker
from verl_vcpo.actor.norms.settings import NormsHow, NormsKeep, in_words


def test_a_run_says_how_it_measures_and_why() -> None:
    layers = "the layers of Transformer Engine 2.12.0"
    auto = (
        "vcpo.norms.keep=auto: gradients where groups and ranks allow it, else activations "
        "(actor/vcpo/activations_kept)"
    )
    assert in_words(NormsHow.PACKED, layers, None) == f"Gradient norms: packed, on {layers}, {auto}."
    kept = in_words(NormsHow.PACKED, layers, None, keep=NormsKeep.GRADIENTS)
    assert kept == f"Gradient norms: packed, on {layers}, vcpo.norms.keep=gradients."
    slow = in_words(NormsHow.PACKED, layers, "fp8 is not supported")
    assert "one backward per sequence" in slow and slow.endswith(f"{layers}; not packed, because fp8 is not supported.")
    experts = in_words(NormsHow.PACKED, layers, None, NormsKeep.ACTIVATIONS)
    assert experts == f"Gradient norms: packed, on {layers}, a mixture of experts: vcpo.norms.keep=activations."
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
    assert line.startswith("Gradient norms: packed, on Megatron's own layers, vcpo.norms.keep=auto")
    assert said["moe"] == (*said["untied"][:2], True), "and it has experts"
