"""The command's truth is the truth, and it says what the page says."""

import json
import math

import pytest
import torch

from lab.long_responses import RMS, Case, draw, main, measure
from vcpo.ess import ess_ratio


@pytest.mark.parametrize("case", Case)
def test_the_parts_are_those_asked_for(case: Case) -> None:
    drawn = draw(case, 500, 0.5, 2000, torch.Generator().manual_seed(0))
    assert ess_ratio(drawn.of_lag) == pytest.approx(0.5, abs=0.08)
    assert sum(tokens for spans in drawn.spans for _, tokens, _ in spans) == drawn.tokens.sum()
    arithmetic = drawn.log_weight - drawn.of_lag
    assert (arithmetic.var() / drawn.tokens.double().mean()).sqrt().item() == pytest.approx(RMS, rel=0.05)
    assert drawn.log_weight.exp().mean().item() == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("case", Case)
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_the_step_follows_the_lag(case: Case, ratio: float) -> None:
    row = measure(case, 1000, ratio, batch=128, batches=12)
    assert abs(row.lag - row.right) < 0.08 < abs(row.whole - row.right)
    assert row.rms == pytest.approx(RMS, rel=0.05)


def test_the_command_prints_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--tokens", "32", "--batch", "64", "--batches", "6"]
    assert main([*small, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["case"] for row in rows} == set(Case) and all(math.isfinite(row["lag_error"]) for row in rows)
    assert main(small) == 0
    assert "factor on the learning rate" in capsys.readouterr().out
