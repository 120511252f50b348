"""The engine: parts of weights from the tokens of the trainer's own version, in the step only if that is asked."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu

from tests.actor.conftest import ONE_PROCESS
from tests.actor.test_vcpo_engine import exported, train
from tests.kit.layout_worker import make_batch
from vcpo import Mismatch
from verl_vcpo.actor.update.mini_batch import MiniBatch
from verl_vcpo.actor.update.sequences import COMPUTED_AGAIN
from verl_vcpo.actor.vcpo_settings import VCPOSettings
from verl_vcpo.common.token_versions import token_versions


def squares_of_fresh_tokens(checkpoint: Path, batch: Any) -> torch.Tensor:
    """[n] squared log-ratios without jumps, of the first sampled token of each response: version 8's."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32)
    squares = []
    fields = ("input_ids", "prompts", "rollout_log_probs", "response_mask")
    for ids, prompt, rollout, mask in zip(*(batch[name].unbind() for name in fields), strict=True):
        at = int(mask.nonzero()[0])
        with torch.no_grad():
            log_prob = model(ids[None]).logits[0, len(prompt) + at - 1].log_softmax(-1)[ids[len(prompt) + at]]
        log_ratio = log_prob - rollout[at]
        squares.append((log_ratio * (1 - (2 * log_ratio.abs() - 1).clamp(0, 1))).square())
    return torch.stack(squares)


@pytest.mark.parametrize(
    "vcpo",
    [VCPOSettings(), VCPOSettings(baseline="mean"), VCPOSettings(enable=False)],  # type: ignore[arg-type]
    ids=["opob", "mean", "none"],
)
def test_fresh_tokens_tell_the_arithmetic(
    make_engine: Callable[..., Any], checkpoints: Callable[[], Path], vcpo: VCPOSettings
) -> None:
    batch = make_batch(ONE_PROCESS)
    metrics = train(make_engine(), batch.clone(), vcpo)
    wanted = squares_of_fresh_tokens(checkpoints(), batch).mean().sqrt().item()
    assert metrics["vcpo/mismatch/rms"] == [pytest.approx(wanted, rel=1e-4)]
    assert 0 < metrics["vcpo/mismatch/rms_error"][0] < wanted
    assert metrics["vcpo/ess_ratio"] <= metrics["vcpo/ess/lag"] <= [1.0] and metrics["vcpo/ess/arithmetic"] < [0.99]


def test_tokens_computed_again_get_to_the_measurement(make_engine: Callable[..., Any]) -> None:
    """Of each response the first sampled token has been computed again, exactly as sampled: the share is 1."""
    batch = make_batch(ONE_PROCESS)
    tu.assign_non_tensor_stack(batch, "session_id", list(range(len(batch))))
    rows = zip(tu.get(batch, "uid"), batch["rollout_log_probs"].unbind(), batch["response_mask"].unbind(), strict=True)
    ends = [(uid, of_sampler, int(mask.nonzero()[0]) + 1) for uid, of_sampler, mask in rows]
    again = {f"{uid}_{i}": of_sampler[:end].tolist() for i, (uid, of_sampler, end) in enumerate(ends)}
    tu.assign_non_tensor(batch, **{COMPUTED_AGAIN: json.dumps(again)})
    engine = make_engine()
    assert train(engine, batch, VCPOSettings())["vcpo/mismatch/tokens_again"] == [len(batch)]
    ((_, fresh),) = engine.mismatch._fresh_again
    assert fresh.tokens == len(batch) and fresh.share == (pytest.approx(1), pytest.approx(0, abs=1e-4))


def test_masked_responses_count_neither_in_rho_nor_in_its_lag_part() -> None:
    """A batch that is half masked has the parts of the other half, whatever the masked ones are like."""

    def parts(masked: bool) -> Any:
        log_weight = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        tokens = torch.full((64,), 100.0)
        squares, fresh = torch.full((64,), 0.9), torch.tensor([[100, 0.9]]).repeat(64, 1)
        ends = torch.arange(64) >= 32
        if masked:
            log_weight, tokens, squares = log_weight + 5 * ends, tokens + 8000 * ends, squares + 80 * ends
        rows = slice(0, 64 if masked else 32)
        again = torch.zeros(64, 2, 3)
        for i in range(64):
            again[i, i % 2] = torch.tensor([50, 0.4, 0.2 if i < 32 else 0.02])
        columns = {"log_weight": log_weight, "tokens": tokens, "squares": squares, "jump": torch.zeros(64)}
        columns |= {"fresh": fresh, "again": again}
        batch = SimpleNamespace(**{name: x[rows] for name, x in columns.items()})
        batch.masked = ends[rows]
        return MiniBatch.weight_parts(batch, Mismatch(), True)  # type: ignore[arg-type]

    first = parts(masked=True)
    assert first == parts(masked=False) and first is not None


def test_without_versions_nothing_is_said(make_engine: Callable[..., Any]) -> None:
    batch = make_batch(ONE_PROCESS)
    tu.pop(batch, "policy_version")
    metrics = train(make_engine(), batch, VCPOSettings(ess_part="lag"))  # type: ignore[arg-type]
    assert not any("mismatch" in name or "ess/" in name for name in metrics)
    assert metrics["vcpo/lr_multiplier"][0] == math.sqrt(metrics["vcpo/ess_ratio"][0])


def test_the_step_follows_the_lag_part_only_where_that_is_set(make_engine: Callable[..., Any]) -> None:
    unknown = make_batch(ONE_PROCESS)
    tu.pop(unknown, "policy_version")
    weights = []
    for batch, part in ((unknown, "whole"), (make_batch(ONE_PROCESS), "whole"), (make_batch(ONE_PROCESS), "lag")):
        engine = make_engine()
        metrics = train(engine, batch, VCPOSettings(ess_part=part))  # type: ignore[arg-type]
        weights.append(exported(engine))
    assert metrics["vcpo/lr_multiplier"][0] == math.sqrt(metrics["vcpo/ess/lag"][0])
    assert metrics["vcpo/ess/lag"] > metrics["vcpo/ess_ratio"]
    assert all(weight.equal(weights[1][name]) for name, weight in weights[0].items())
    assert not all(weight.equal(weights[2][name]) for name, weight in weights[0].items())


@pytest.mark.parametrize(
    ("fields", "runs"),
    [
        ({"min_global_steps": 3, "max_global_steps": 3}, [[3, 5]]),
        ({"min_global_steps": 2, "max_global_steps": 3}, [[None, 5]]),
        ({}, [[None, 5]]),
        ({"min_global_steps": 2, "max_global_steps": 3, "token_versions": [[2, 4], [3, 1]]}, [[2, 4], [3, 1]]),
        ({"min_global_steps": 2, "max_global_steps": 2, "token_versions": [[2, 4], [2, 4]]}, [[2, 5]]),
    ],
    ids=["one", "several", "unknown", "recorded", "of other tokens"],
)
def test_versions_of_tokens(fields: dict[str, Any], runs: list[list[Any]]) -> None:
    assert token_versions(fields, 5) == runs
