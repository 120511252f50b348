"""A sampler of another arithmetic, and responses longer than those that are drawn."""

import json
import math
from pathlib import Path

import pytest
import torch

from lab.simulator import main
from lab.simulator.arithmetic import Arithmetic
from lab.simulator.grid import LAG_PART, Folder, GridRun, config_of
from lab.simulator.simulator import Simulator

LONG = Arithmetic(rms=0.03, tokens=2048)


def rows(overrides: list[str], arithmetic: Arithmetic | None, *more: str) -> list[dict[str, float]]:
    return Simulator(main.compose([*overrides, *more]), arithmetic).run()


def test_the_weights_of_fresh_responses_have_the_mean_1() -> None:
    tokens, log_ratio, squares, again, _ = LONG.draw(4096, torch.Generator().manual_seed(0)).unbind(dim=1)
    assert (tokens == 2048).all() and squares.sum() / tokens.sum() == pytest.approx(0.03**2, rel=0.01)
    assert again.sum() / tokens.sum() == pytest.approx(0.03**2, rel=0.01)
    assert log_ratio.std() == pytest.approx(math.sqrt(LONG.variance), rel=0.05)
    assert log_ratio.exp().mean() == pytest.approx(1, abs=0.15)


def test_kinds_that_are_not_normal() -> None:
    drawn = {
        kind: Arithmetic(0.01, 2048, kind).draw(4096, torch.Generator().manual_seed(0), done=1.0, stale=True)
        for kind in ("tails", "falls", "jumps")
    }
    expected = {"tails": 1e-4, "falls": 0.5e-4, "jumps": 1e-4}
    for kind, of in drawn.items():
        assert of[:, 2].sum() / of[:, 0].sum() == pytest.approx(expected[kind], rel=0.02)
        assert of[:, 1].exp().mean() == pytest.approx(1, abs=0.1), "the mean weight"
    assert drawn["tails"][:, 2].var() > 10 * drawn["jumps"][:, 2].var(), "few tokens have most of the square"
    assert (drawn["jumps"][:, 4] > 0).double().mean() == pytest.approx(0.05, abs=0.01)
    fresh = Arithmetic(0.01, 2048, "jumps").draw(4096, torch.Generator().manual_seed(0))
    assert not fresh[:, 4].any(), "only the lag moves a token that far"


def test_answers_do_not_change_and_their_weights_do(overrides: list[str]) -> None:
    run = Simulator(main.compose(overrides), LONG)
    run.roll_out(version=0)
    (batch,) = run.queue
    assert batch.arithmetic is not None
    moved = (batch.exact_log_prob - batch.rollout_log_prob).sum(dim=1)
    torch.testing.assert_close(moved.double(), batch.arithmetic[:, 1], rtol=0, atol=1e-5)
    last = batch.mask.sum(dim=1) - 1
    assert ((batch.exact_log_prob != batch.rollout_log_prob).nonzero()[:, 1] == last).all()
    assert batch.rows(slice(2, 4)).arithmetic.equal(batch.arithmetic[2:4])  # type: ignore[union-attr]
    exact, noisy = (rows(overrides, given, "async.lag=2")[1] for given in (None, LONG))
    assert all(noisy[name] == exact[name] for name in ("reward", "tokens")) and noisy["kl"] < 1e-9
    assert noisy["ess_ratio"] < 0.9 < exact["ess_ratio"]


def test_a_method_without_weights_does_not_see_it(overrides: list[str]) -> None:
    exact, noisy = (rows(overrides, given, "method=none", "async.lag=2") for given in (None, LONG))
    assert [row["grad_norm"] for row in exact[1:]] == [row["grad_norm"] for row in noisy[1:]]


def test_the_lag_part_of_fresh_responses_is_1(overrides: list[str]) -> None:
    whole, of_lag = (rows(overrides, LONG, "async.lag=0", f"vcpo.ess_part={part}")[1:] for part in ("whole", "lag"))
    assert all(row["lr_multiplier"] < 0.9 for row in whole)
    assert all(row["right_multiplier"] > 0.99 for row in of_lag)
    factors = [row["lr_multiplier"] for row in of_lag]
    assert sum(factors) / len(factors) > 0.8, "small batches of 2,048 tokens: the measured ratio is near its floor"


def test_a_folder_has_one_arithmetic(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "model" / "warm_start.json").write_text('{"settings": {}}')
    exact, long = (Folder(tmp_path / "out", "countdown_lag", (), given) for given in (None, LONG))
    long.open(tmp_path / "model")
    assert json.loads((tmp_path / "out/settings.json").read_text())["arithmetic"]["tokens"] == 2048
    with pytest.raises(ValueError, match="other settings"):
        exact.open(tmp_path / "model")


def test_the_step_by_the_lag_part_is_a_setting_of_the_run(folder_settings: tuple[str, ...], tmp_path: Path) -> None:
    folder = Folder(tmp_path, "countdown_lag", folder_settings)
    parts = [config_of(GridRun(name, 2, 1, 1e-3), folder).vcpo.ess_part for name in ("vcpo", LAG_PART)]
    assert parts == ["whole", "lag"]
