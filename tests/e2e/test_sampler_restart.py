"""A sampler that is killed is replaced while the run goes on, and nothing is lost."""

from pathlib import Path

import pytest

from scripts.bench.reliability.faults import FAULTS, try_fault

pytestmark = pytest.mark.e2e


def test_kill_9_of_a_vllm_engine(assets: Path, tmp_path: Path) -> None:
    verdict = try_fault(FAULTS[0], assets, tmp_path / "run")
    assert verdict.ok, verdict
