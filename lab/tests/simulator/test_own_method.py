"""The method file and the loss of docs/reference/methods.md, which are those of method=tis_token."""

from pathlib import Path

import pytest

from lab.simulator import main
from tests.kit.own_method import written
from verl_vcpo.report.run_log import read_metrics


def test_a_method_of_ones_own(overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def rewards(name: str, *method: str) -> list[tuple[float, float]]:
        assert main.main([*overrides, "async.lag=2", f"run_dir={name}", *method]) == 0
        return [(line["reward"], line["grad_norm"]) for line in read_metrics(name)[1:]]

    own, known = rewards("own", *written(tmp_path)), rewards("known", "method=tis_token")
    assert len(own) == 6 and own[-1][1] > 0
    assert own == [pytest.approx(step, rel=1e-4) for step in known]
