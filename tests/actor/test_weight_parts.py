"""The engine: parts of weights from the tokens of the trainer's own version, in the step only if that is asked."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu

from tests.actor.conftest import ONE_PROCESS
from tests.actor.test_vcpo_engine import exported, train
from tests.kit.layout_worker import make_batch
from verl_vcpo.actor.mini_batch import COMPUTED_AGAIN
from verl_vcpo.actor.vcpo_settings import VCPOSettings
from verl_vcpo.common.token_versions import token_versions


def squares_of_fresh_tokens(checkpoint: Path, batch: Any) -> torch.Tensor:
    """[n] squared log-ratios, cut at 1, of the first sampled token of each response: version 8's."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32)
    squares = []
    fields = ("input_ids", "prompts", "rollout_log_probs", "response_mask")
    for ids, prompt, rollout, mask in zip(*(batch[name].unbind() for name in fields), strict=True):
        at = int(mask.nonzero()[0])
        with torch.no_grad():
            log_prob = model(ids[None]).logits[0, len(prompt) + at - 1].log_softmax(-1)[ids[len(prompt) + at]]
        squares.append((log_prob - rollout[at]).clamp(-1, 1).square())
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


def test_without_fresh_tokens_those_that_were_computed_again_tell_it(
    make_engine: Callable[..., Any], checkpoints: Callable[[], Path]
) -> None:
    """A batch that is eight updates old: of each response the first sampled token has been computed again."""
    batch = make_batch(ONE_PROCESS)
    tu.assign_non_tensor(batch, policy_version=16)
    tu.assign_non_tensor_stack(batch, "session_id", list(range(len(batch))))
    assert "vcpo/mismatch/rms" not in train(make_engine(), batch.clone(), VCPOSettings())
    rows = zip(tu.get(batch, "uid"), batch["rollout_log_probs"].unbind(), batch["response_mask"].unbind(), strict=True)
    ends = [(uid, of_sampler, int(mask.nonzero()[0]) + 1) for uid, of_sampler, mask in rows]
    again = {f"{uid}_{i}": of_sampler[:end].tolist() for i, (uid, of_sampler, end) in enumerate(ends)}
    tu.assign_non_tensor(batch, **{COMPUTED_AGAIN: json.dumps(again)})
    wanted = squares_of_fresh_tokens(checkpoints(), batch).mean().sqrt().item()
    told = train(make_engine(), batch, VCPOSettings())
    assert told["vcpo/mismatch/rms"] == [pytest.approx(wanted, rel=1e-4)]
    assert told["vcpo/mismatch/tokens_again"] == [len(batch)]


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
