"""The GPU's actor on two GPUs, over the stand-in for NCCL, computes what it computes on one."""

from pathlib import Path

import pytest

from tests.kit.layout_run import Method, ParallelLayout, Result, norm_error, run_layout
from tests.kit.resumption import largest_difference
from verl_vcpo.actor.norms_settings import NormsHow

METHODS = [Method(how.value, {"norms": {"how": how.value}}, whole_groups=True) for how in NormsHow]
TOLERANCE = 1e-6  # of the norms (`norm_error`), and of each parameter (absolute; the largest are about 1)
LAYOUTS = [
    ParallelLayout("TP2 SP", tp=2, sequence_parallel=True),
    ParallelLayout("TP2 SP, recompute", tp=2, sequence_parallel=True, recompute=True),
    ParallelLayout("DP2", dp=2),
    ParallelLayout("PP2", pp=2),
    ParallelLayout("CP2", cp=2),
]


@pytest.fixture(scope="module")
def one_gpu(model: Path) -> dict[str, Result]:
    return run_layout(ParallelLayout("one GPU"), model, METHODS)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_two_gpus_are_one(layout: ParallelLayout, model: Path, one_gpu: dict[str, Result]) -> None:
    for name, result in run_layout(layout, model, METHODS).items():
        wanted = one_gpu[name]
        assert norm_error(result.squared_norm, wanted.squared_norm) < TOLERANCE, name
        assert largest_difference(result.parameters, wanted.parameters) < TOLERANCE, name
