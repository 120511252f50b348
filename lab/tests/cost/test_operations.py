"""What packed norms and sums add to an update of a GPU, counted on the meta device at the published sizes."""

from collections.abc import Iterator

import pytest
from megatron.core import parallel_state

from lab.cost.operations import CASES, Case, count
from verl_vcpo.actor.norms.settings import NormsHow

pytestmark = pytest.mark.usefixtures("alone")
MOST = {"math": 0.4, "countdown": 0.4, "gsm8k": 0.61, "multi-turn": 0.4}
LAUNCHES = 3000  # of a micro-batch of 28 layers


@pytest.fixture
def alone(process_group: None) -> Iterator[None]:
    """Megatron's parallel state, of one process."""
    made = not parallel_state.model_parallel_is_initialized()
    if made:
        parallel_state.initialize_model_parallel()
    yield
    if made:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.task)
def test_two_sums_add_little(case: Case) -> None:
    """Catches a gradient of the model's size that is read or written once more for every sequence."""
    counted = count(case, NormsHow.PACKED)
    assert 0 < counted.added <= MOST[case.task]
    assert counted.launches <= LAUNCHES


def test_the_samples_are_those_of_the_case() -> None:
    for case in CASES:
        assert sum(case.lengths) == pytest.approx(case.samples * case.mean_tokens, rel=0.02)
        rows = [row for micro_batch in case.micro_batches for row in micro_batch]
        assert sorted(rows) == list(range(case.samples))
