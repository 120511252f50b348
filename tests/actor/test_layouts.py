"""Every parallel layout, in real gloo processes, computes what one process computes."""

from pathlib import Path

import pytest

from tests.exactness.layouts import LAYOUTS, compare_all, run_reference
from tests.kit.layout_run import ACTIVATIONS, GRADIENTS, PER_TRAJECTORY, ParallelLayout, Result, make_checkpoint

# The other two share their code with these; `python -m tests.exactness.layouts` runs all of them.
TESTED = [PER_TRAJECTORY, ACTIVATIONS, GRADIENTS]

# Products of settings that other layouts have one by one, or of other factors.
NIGHTLY = {
    "TP2 SP",
    "DP2, dynamic batch, no distributed optimizer",
    "TP2 SP, padded",
    "TP2 SP x DP2",
    "PP2, 2 virtual stages, tied",
    "CP2, tied, padded",
    "CP2 x DP2",
    "MoE EP2 inside TP2 SP",
    "MoE EP2 x ETP2 over TP2 SP x DP2",
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
