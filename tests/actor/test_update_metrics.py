"""What the responses of each lag make of an update: by hand, in the engine, and in the report."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from scripts.report import payload
from tests.actor.conftest import ONE_PROCESS
from tests.actor.test_vcpo_engine import train
from tests.kit.layout_worker import make_batch
from vcpo import VCPOConfig, estimate
from verl_vcpo.actor.update.metrics import of_lags
from verl_vcpo.actor.vcpo_settings import VCPOSettings

LAG = torch.tensor([0.0, 2, 3, 20, math.nan, 20], dtype=torch.float64)
REWARD = torch.tensor([1.0, 0, 1, 0, 1, 1], dtype=torch.float64)
LOG_WEIGHT = torch.tensor([0.0, 0.5, -0.5, 1, 0, math.nan], dtype=torch.float64)


def found(squared_norm: torch.Tensor | None) -> dict[str, float]:
    step = estimate(VCPOConfig(baseline="mean"), LOG_WEIGHT, REWARD, torch.zeros(6).long(), squared_norm=squared_norm)  # type: ignore[arg-type]
    return {name.removeprefix("vcpo/lag/"): value for name, value in of_lags(LAG, step, REWARD, squared_norm).items()}


def test_shares_rewards_and_weights_of_usable_responses_of_a_known_lag() -> None:
    parts = found(None)
    assert [parts[f"{name}/share"] for name in ("0", "1-3", "4-15", "16-63")] == [0.25, 0.5, 0, 0.25]
    assert [parts[f"{name}/reward"] for name in ("0", "1-3", "16-63")] == [1, 0.5, 0]
    weights = [parts[f"{name}/weight"] for name in ("0", "1-3", "16-63")]
    assert weights == pytest.approx([1, (math.exp(0.5) + math.exp(-0.5)) / 2, math.e])
    assert not any(name.startswith("64") or "gradient" in name for name in parts) and "4-15/weight" not in parts


def test_the_shares_of_the_gradient_are_those_of_what_has_a_lag() -> None:
    norm = torch.tensor([1.0, 4, 1, 1, 9, 9], dtype=torch.float64)
    parts = found(norm)
    shares = [parts[f"{name}/gradient_share"] for name in ("0", "1-3", "4-15", "16-63")]
    assert sum(shares) == pytest.approx(1) and shares[2] == 0 and shares[1] > shares[0] > 0


def test_the_engine_and_the_report(make_engine: Callable[..., Any]) -> None:
    batch = make_batch(ONE_PROCESS)
    metrics = train(make_engine(), batch, VCPOSettings())
    lags = [0 if i % 4 == 0 else 1 + i % 8 for i in range(len(batch))]
    wanted = [sum(lag in which for lag in lags) / len(lags) for which in ((0,), (1, 2, 3), range(4, 16))]
    line = {f"actor/{name}": value[0] for name, value in metrics.items() if name.startswith("vcpo/lag/")}
    assert [line[f"actor/vcpo/lag/{name}/share"] for name in ("0", "1-3", "4-15")] == pytest.approx(wanted)
    rows = payload.of_lags([{"step": 0}, {"step": 1, **line}, {"step": 2, **line}])
    assert [row[0] for row in rows] == ["0", "1-3", "4-15"]
    assert rows[0][3] == f"{wanted[0]:.0%}" and rows[0][1] == f"{line['actor/vcpo/lag/0/reward']:.3g}"
    without = {name: value for name, value in line.items() if "gradient_share" not in name}
    rows_without = payload.of_lags([{"step": 1, **without}])
    assert [row[:4] for row in rows_without] == [row[:4] for row in rows] and {row[4] for row in rows_without} == {"-"}
    assert payload.of_lags([{"step": 0}, {"step": 1}]) == []
