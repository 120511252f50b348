"""The predicted rounding of two sums, beside the same formulas written as loops."""

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from vcpo import OpobScope, OpobWeights, estimate
from vcpo.estimator import log_packed_weights
from verl_vcpo.actor.update.mini_batch import MiniBatch
from verl_vcpo.actor.update.rounding import predicted
from verl_vcpo.actor.vcpo_settings import VCPOSettings

EPS = 2.0**-24
"""The largest relative error of rounding a float32 number once."""
LOST = 1e12 * 2.0**-126
B = 24


def mini_batch(
    log_weight: Tensor, reward: Tensor, group: Tensor, tokens: Tensor, squared_norm: Tensor | None
) -> MiniBatch:
    zeros = torch.zeros_like(reward)
    others = {field.name: zeros for field in fields(MiniBatch)} | {"masked": zeros.bool()}
    return MiniBatch(
        **others
        | {
            "log_weight": log_weight,
            "reward": reward,
            "group": group,
            "tokens": tokens,
            "squared_norm": squared_norm,
        }  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("settings", [dict(), dict(opob_scope="minibatch"), dict(opob_weights="published")], ids=str)
@pytest.mark.parametrize(("log_weight", "size"), [(0.0, 8), (-40.0, 8), (0.0, 2)])
def test_the_prediction_is_that_of_the_module(settings: dict[str, Any], log_weight: float, size: int) -> None:
    """One sequence of eight has most of the weight, and one is not usable. A sum of few sequences is rounded once."""
    config, draw = VCPOSettings(**settings), torch.Generator().manual_seed(0)
    values = torch.rand(4, B, dtype=torch.float64, generator=draw)
    logs = log_weight + 2 * values[0]
    logs[::8] += 4
    logs[5] = math.nan
    group = torch.arange(B) // size
    zeros, tokens = torch.zeros(B, dtype=torch.float64), 1.0 + torch.arange(B).double() % 3
    batch = mini_batch(logs, values[1], group, tokens, 1 + values[2])
    step = estimate(config, logs, values[1], group, squared_norm=batch.squared_norm, length=tokens)
    common, scale = zeros + 0.25, 0.1 + values[3]
    cancellation, underflow = predicted(config, batch, step, common, scale, baselines=3)

    used = log_packed_weights(config, logs)
    minibatch = config.opob_scope is OpobScope.MINIBATCH
    errors, left, doubt = 0.0, 0.0, 0.0
    for i in step.usable.nonzero().flatten().tolist():
        mine = [j for j in range(B) if step.usable[j] and (minibatch or group[j] == group[i])]
        norm = [float(batch.squared_norm[j]) ** 0.5 * math.exp(used[j]) for j in range(B)]
        in_second = max(1, len(mine) / 4) ** 0.5
        in_main = max(1, 3 * len(mine) / 4) ** 0.5
        of_main, of_second = abs(values[1][i] - common[i]), abs(step.baseline[i] - common[i])
        errors += (EPS * float(scale[i]) * norm[i] * float(in_main * of_main + in_second * of_second)) ** 2
        left += float(step.coefficient[i]) ** 2 * float(batch.squared_norm[i])
        share = {}
        for j in mine:
            share[j] = norm[j] ** 2 + LOST
            if minibatch:
                share[j] *= float(scale[j]) ** 2
            if config.opob_weights is OpobWeights.PUBLISHED:
                share[j] *= (math.exp(logs[j]) * float(tokens[j])) ** 2
        unknown = {j: LOST / (norm[j] ** 2 + LOST) * abs(float(values[1][j] - step.baseline[j])) for j in mine}
        of_baseline = sum(share[j] * unknown[j] for j in mine) / sum(share.values())
        doubt += of_baseline * float(scale[i]) * (norm[i] ** 2 + LOST) ** 0.5
    assert cancellation == pytest.approx((errors / left) ** 0.5, rel=1e-9, abs=0)
    assert underflow == pytest.approx(doubt / left**0.5, rel=1e-9, abs=0)
    assert (underflow > 1e-3) == (log_weight < 0)


def test_what_has_no_prediction() -> None:
    """Without norms, a usable sequence or a scale nothing is lost; where nothing is left, everything."""
    config, two = VCPOSettings(opob_scope="minibatch"), torch.zeros(2, dtype=torch.float64)

    def of(reward: list[float], norm: float | None, log_weight: float = 0.0, scale: float = 1.0) -> tuple[float, float]:
        squared = None if norm is None else two + norm
        rewards = torch.tensor(reward, dtype=torch.float64)
        batch = mini_batch(two + log_weight, rewards, two.long(), two, squared)
        step = estimate(config, two + log_weight, rewards, two.long(), squared_norm=two + (norm or 0.0))
        return predicted(config, batch, step, two + 0.5, two + scale, baselines=1)

    assert of([0.0, 1.0], None) == of([0.0, 1.0], 1.0, math.nan) == of([0.0, 1.0], 1.0, scale=0.0) == (0.0, 0.0)
    assert of([0.5, 0.5], 1.0) == (0.0, 0.0), "all sums are 0"
    assert of([1.0, 1.0], 1.0)[0] == math.inf
