"""Every parallel layout, in real gloo processes, computes what one process computes."""

from pathlib import Path

import pytest

from tests.exactness.layouts import LAYOUTS, REFERENCE, compare_all, run_reference
from tests.kit.layout_run import PACKED, PER_TRAJECTORY, STEPS, TWO_BACKWARDS, ParallelLayout, Result, make_checkpoint

# The other shares its code with these; `python -m tests.exactness.layouts` runs all of them.
TESTED = [PER_TRAJECTORY, TWO_BACKWARDS, PACKED]

# Products of settings that other layouts have one by one, or settings that other layouts have in a product.
NIGHTLY = {
    "TP2 SP x PP2, tied",
    "MoE EP2 inside TP2 SP, x DP2",
    "LoRA, TP2 SP x PP2",
    "activation recompute",
    "PP2",
    "MoE EP2 (DP2)",
    "MoE EP2 x PP2",
    "LoRA, recompute",
    "LoRA, CP2 x DP2",
    "TP2 SP",
    "DP2, dynamic batch, no distributed optimizer",
    "TP2 SP, padded",
    "TP2 SP x DP2",
    "PP2, 2 virtual stages, tied",
    "CP2 x DP2",
    "MoE EP2 x ETP2 over TP2 SP x DP2",
    "LoRA of attention, MoE, TP2 SP",
}
CASES = [
    pytest.param(layout, id=layout.name, marks=[pytest.mark.nightly] if layout.name in NIGHTLY else [])
    for layout in LAYOUTS
]


class Models:
    """Checkpoints, and what one process makes of them; each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, tuple[Path, dict[str, Result]]] = {}

    def __call__(self, model: str) -> tuple[Path, dict[str, Result]]:
        if model not in self._made:
            checkpoint = make_checkpoint(model, self._folder)
            self._made[model] = checkpoint, run_reference(model, checkpoint)
        return self._made[model]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("layout", CASES)
def test_equals_one_process(layout: ParallelLayout, models: Models) -> None:
    checkpoint, reference = models(layout.model)
    for comparison in compare_all(layout, checkpoint, reference, TESTED):
        assert comparison.ok, comparison


@pytest.mark.parametrize("model", list(REFERENCE))
def test_the_reference_is_worth_comparing_with(model: str, models: Models) -> None:
    from safetensors.torch import load_file

    checkpoint, references = models(model)
    reference = references["group"]
    assert reference.ess_ratio.shape == (STEPS,) and (reference.ess_ratio < 0.9).all(), "off policy"
    assert (reference.squared_norm.amax(1) > 2 * reference.squared_norm.amin(1)).all(), "norms differ"
    if REFERENCE[model].lora_rank:
        return  # no weight of the checkpoint is trained
    before = load_file(checkpoint / "model.safetensors")
    for name, after in reference.parameters.items():
        moved = (after - before[name]).abs().max() / before[name].abs().max()
        assert moved > 1e-3, f"{name} moved by {moved:.1e}"
