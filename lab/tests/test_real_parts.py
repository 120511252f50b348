"""Parts that are known come back: v of the sampler's arithmetic, and the right factor of the lag."""

import math
from pathlib import Path

import pytest
import torch

from lab import real_parts

V, RATIO = 4e-4, 0.5


def test_the_factors_of_known_parts() -> None:
    draw, shape = torch.Generator().manual_seed(0), (1024, 1024)
    arithmetic, of_lag = (
        variance**0.5 * torch.randn(shape, generator=draw, dtype=torch.float64) - variance / 2
        for variance in (V, -math.log(RATIO) / 1024)
    )
    recorded = -torch.ones(shape, dtype=torch.float64)
    fresh = recorded + arithmetic
    found = real_parts.factors(recorded, fresh, {8: fresh + of_lag})
    assert [(of.tokens, of.responses) for of in found] == [(512, 1024), (1024, 512)]
    for of, ratio in zip(found, (RATIO**0.5, RATIO), strict=True):
        assert of.right == pytest.approx(ratio**0.5, rel=0.1) and of.normal == pytest.approx(of.right, rel=0.1)
        assert of.whole < of.right and 0.7 <= of.told / of.right <= 1.1
    of_v, tails, _ = real_parts.tables(found, {"made": fresh - recorded}, {8: of_lag})
    assert of_v.columns == ["of", "0-128", "128-512", "512-1024", "all"]
    assert all(float(v) == pytest.approx(V, rel=0.02) for v in of_v.rows[0][1:])
    assert tails.rows[0][0] == "8" and float(tails.rows[0][3]) == pytest.approx(3, abs=0.5), "a normal's kurtosis"


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert real_parts.main([str(tmp_path)]) == 2
    assert "no folder of a run" in capsys.readouterr().err
