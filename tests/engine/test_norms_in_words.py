"""The line on the console about gradient norms."""

from verl_vcpo.workers.engine.megatron.norms import NormsHow, in_words


def test_a_run_says_how_it_measures_and_why() -> None:
    layers = "the layers of Transformer Engine 2.12.0"
    assert in_words(NormsHow.PACKED, layers, None) == f"Gradient norms: packed, on {layers}."
    slow = in_words(NormsHow.PACKED, layers, "fp8 is not supported")
    assert "one backward per sequence" in slow and slow.endswith(f"{layers}; not packed, because fp8 is not supported.")
    asked = in_words(NormsHow.PER_TRAJECTORY, layers, "fp8 is not supported")
    assert "vcpo.norms.how=per_trajectory" in asked and "fp8" not in asked
