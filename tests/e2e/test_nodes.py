"""Runs over two Ray nodes (tests/kit/nodes.py) on this machine. tests/e2e/test_resume.py has one in every tier."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.nodes import why_not
from tests.kit.small_run import TrainerRun
from tests.reliability.nodes import CASES, LAG, REPEATABLE, STEPS, Case, NodesVerdict, try_case

REASON = why_not()
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.skipif(bool(REASON), reason=f"this machine cannot be two: {REASON}"),
]

WEIGHTS_MB = 4.0  # of the small model, in fp32


def tried(case: Case, assets: Path, folder: Path, one_node: Callable[[], Path] = Path) -> NodesVerdict:
    verdict = try_case(case, assets, folder / "run", one_node)
    assert verdict.complaints == []
    return verdict


def test_trainer_and_sampler_on_different_nodes(assets: Path, tmp_path: Path) -> None:
    verdict = tried(CASES[0], assets, tmp_path)
    assert [verdict.trainer] != verdict.samplers
    assert verdict.steps == STEPS and 0 < verdict.lag_max <= LAG
    assert verdict.network_mb > WEIGHTS_MB * verdict.steps


def test_at_lag_0_two_nodes_compute_what_one_does(assets: Path, tmp_path: Path) -> None:
    one_node = TrainerRun(assets, tmp_path / "one", *REPEATABLE)
    assert one_node.wait() == 0, one_node.tail()
    for i, case in enumerate(case for case in CASES if case.same):
        (folder := tmp_path / str(i)).mkdir()
        verdict = tried(case, assets, folder, lambda: one_node.run_dir)
        assert verdict.difference is not None and verdict.difference <= 1e-4


@pytest.mark.parametrize("case", [case for case in CASES if case.inject], ids=lambda case: case.name)
def test_a_node_or_the_driver_is_lost(case: Case, assets: Path, tmp_path: Path) -> None:
    assert tried(case, assets, tmp_path).steps == 7
