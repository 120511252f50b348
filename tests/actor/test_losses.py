"""The losses of an update and the rows of a mini-batch, of a few made-up sequences: each number by hand, no engine."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from vcpo import VCPOConfig
from verl_vcpo.actor.update import sequences
from verl_vcpo.actor.update.checks import check_lengths
from verl_vcpo.actor.update.losses import (
    TOKEN_MEAN,
    TOKEN_SUM,
    TOKEN_SUM_NORM,
    loss_of_trained,
    note_longest_response,
    response_rows,
    weighted_score_loss,
)
from verl_vcpo.actor.update.mini_batch import MiniBatch
from verl_vcpo.actor.update.sequence_weights import SequenceWeights
from verl_vcpo.actor.update.sequences import COMPUTED_AGAIN, Sequences
from verl_vcpo.common.token_versions import FIELD
from verl_vcpo.common.truncated import TRUNCATED, Truncated

PROMPTS = [2, 1, 3, 1]
MASKS = [[1, 0, 1], [1], [], [1, 1, 1, 1]]  # a hole, one token, an empty response
ROLLOUT = [[-1.0, 0.0, -2.0], [-0.5], [], [-1.0, -1.0, -1.0, -1.0]]
REWARD = [[0.0, 0.0, 1.5], [0.25], [], [0.5, 0.0, 0.0, 0.5]]


def nested(rows: list[Any]) -> Tensor:
    return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


def batch(**more: Any) -> TensorDict:
    floats = {"rollout_log_probs": ROLLOUT, "rm_scores": REWARD}
    lengths = [len(mask) for mask in MASKS]
    tensors: dict[str, Any] = {
        "prompts": nested([torch.zeros(n) for n in PROMPTS]),
        "responses": nested([torch.zeros(n) for n in lengths]),
        "input_ids": nested([torch.zeros(n + m) for n, m in zip(PROMPTS, lengths, strict=True)]),
        "response_mask": nested([torch.tensor(mask, dtype=torch.int64) for mask in MASKS]),
        **{name: nested([torch.tensor(row, dtype=torch.float32) for row in rows]) for name, rows in floats.items()},
        "uid": ["a", "b", "a", "b"],
    }
    data = tu.get_tensordict(tensors | more, {"dp_size": 2})
    note_longest_response(data)
    return data


def log_probs() -> Tensor:
    """[17] those of whole sequences: at position t of token t + 1. Response tokens have -0.1, -0.2, ..."""
    values, number = [], 0
    for prompt, mask in zip(PROMPTS, MASKS, strict=True):
        row = torch.full((prompt + len(mask),), -100.0)
        for t in range(len(mask)):
            number += 1
            row[prompt - 1 + t] = -0.1 * number
        values.append(row)
    return torch.cat(values).requires_grad_()


def as_output(values: Tensor) -> dict[str, Tensor]:
    lengths = [n + len(mask) for n, mask in zip(PROMPTS, MASKS, strict=True)]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return {"log_probs": torch.nested.nested_tensor_from_jagged(values, offsets)}


def test_rows_of_responses() -> None:
    policy, rollout = response_rows(as_output(log_probs())["log_probs"], batch(), "rollout_log_probs")
    torch.testing.assert_close(
        policy.detach(),
        torch.tensor([[-0.1, -0.2, -0.3, 0.0], [-0.4, 0.0, 0.0, 0.0], [0.0] * 4, [-0.5, -0.6, -0.7, -0.8]]),
    )
    torch.testing.assert_close(
        rollout, torch.tensor([[-1.0, 0.0, -2.0, 0.0], [-0.5, 0.0, 0.0, 0.0], [0.0] * 4, [-1.0] * 4])
    )
    with pytest.raises(RuntimeError, match="log-probs of other sequences"):
        response_rows(nested([torch.zeros(3)]), batch())


@pytest.mark.parametrize(
    ("mode", "divisors"), [(TOKEN_MEAN, [2, 1, 1, 4]), (TOKEN_SUM, [1] * 4), (TOKEN_SUM_NORM, [5] * 4)]
)
def test_the_loss_is_the_weighted_sum_of_scores(mode: str, divisors: list[int]) -> None:
    values, coefficient = log_probs(), torch.tensor([2.0, -3.0, 7.0, 0.5])
    loss, _ = weighted_score_loss(
        as_output(values), batch(vcpo_coefficient=coefficient), loss_agg_mode=mode, loss_scale_factor=5.0
    )
    scores = [-0.4 / divisors[0], -0.4 / divisors[1], 0.0, -2.6 / divisors[3]]
    assert loss.item() == pytest.approx(-2 * sum(c * s for c, s in zip(coefficient.tolist(), scores, strict=True)))
    (gradient,) = torch.autograd.grad(loss, values)
    each = [-2 * c / d for c, d in zip(coefficient.tolist(), divisors, strict=True)]
    wanted = [0, each[0], 0, each[0], 0, each[1], 0, 0, 0, 0, each[3], each[3], each[3], each[3], 0]
    torch.testing.assert_close(gradient, torch.tensor(wanted, dtype=torch.float32))


def test_a_coefficient_of_zero_excludes_a_score_that_is_not_finite() -> None:
    values = log_probs().detach()
    values[5] = math.nan  # the response token of the second sequence
    values.requires_grad_()
    data = batch(vcpo_coefficient=torch.tensor([1.0, 0.0, 0.0, 0.0]))
    for importance in (None, VCPOConfig()):
        loss, _ = weighted_score_loss(as_output(values), data, loss_agg_mode=TOKEN_SUM, importance=importance)
        assert loss.isfinite()
    data = batch(vcpo_coefficient=torch.ones(4))
    loss, _ = weighted_score_loss(as_output(values), data, loss_agg_mode=TOKEN_SUM, importance=importance)
    assert loss.isfinite(), "a weight of NaN is 0"


def test_importance_weights_are_constants_of_the_packed_loss() -> None:
    values, coefficient = log_probs(), torch.tensor([2.0, -3.0, 7.0, 0.5])
    loss, _ = weighted_score_loss(
        as_output(values),
        batch(vcpo_coefficient=coefficient),
        importance=VCPOConfig(truncation=3.0),
        loss_agg_mode=TOKEN_SUM,
    )
    weights = [3.0, math.exp(0.1), 1.0, 3.0]  # e^2.6, e^0.1, none, e^1.4
    scores = [-0.4, -0.4, 0.0, -2.6]
    products = (c * w * s for c, w, s in zip(coefficient.tolist(), weights, scores, strict=True))
    assert loss.item() == pytest.approx(-2 * sum(products)) and loss.dtype == torch.float32
    (gradient,) = torch.autograd.grad(loss, values)
    assert gradient[5].item() == pytest.approx(2 * 3 * math.exp(0.1)), "no gradient of the weight"


def test_only_a_micro_batch_whose_tokens_are_all_masked_has_no_loss() -> None:
    def counted(**given: Any) -> tuple[Tensor, dict[str, Any]]:
        calls.append(given)
        return torch.tensor(3.0), {"of": "verl"}

    calls: list[Any] = []
    values, data = log_probs(), batch()
    loss, metrics = loss_of_trained(counted, as_output(values), data)
    assert loss == 3 and metrics == {"of": "verl"}, "some tokens are masked"
    data["response_mask"].values().zero_()
    loss, metrics = loss_of_trained(counted, as_output(values), data)
    assert loss == 0 and not metrics and len(calls) == 1
    assert not torch.autograd.grad(loss, values)[0].any()


def rows_of(data: TensorDict, log_prob: Tensor, squared_norm: Tensor | None = None) -> MiniBatch:
    """The rows of the only data-parallel rank."""
    return Sequences(data, dist.group.WORLD).measured(log_prob, squared_norm)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("uids", [["a", "b", "a", "b"], ["a", "pad-1", "a", "b"]])
def test_rows_of_a_mini_batch(uids: list[str]) -> None:
    is_padding = [uid.startswith("pad") for uid in uids]
    data = batch(uid=uids)
    policy, _ = response_rows(as_output(log_probs())["log_probs"], data, "rollout_log_probs")
    rows = rows_of(data, policy.detach(), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    log_w = [-0.1 + 1.0 - 0.3 + 2.0, -0.4 + 0.5, 0.0, 4.0 - 2.6]
    wanted = torch.tensor([math.nan if pad else w for w, pad in zip(log_w, is_padding, strict=True)]).double()
    torch.testing.assert_close(rows.log_weight, wanted, equal_nan=True, rtol=1e-6, atol=1e-6)
    assert rows.reward.tolist() == [1.5, 0.25, 0.0, 1.0] and rows.tokens.tolist() == [2, 1, 0, 4]
    assert rows.padding.tolist() == is_padding and not rows.dropped.any(), "an empty response is not excluded"
    assert rows.group.tolist() == ([0, 1, 0, 2] if any(is_padding) else [0, 1, 0, 1])
    assert rows.squared_norm is not None and rows.squared_norm.tolist() == [1, 2, 3, 4]
    moved = [math.exp(d) - 1 - d for d in (0.9, 1.7)]
    assert rows.kl[0].item() == pytest.approx(sum(moved), rel=1e-6)
    torch.testing.assert_close(rows.squares, torch.tensor([0.18**2, 0.01, 0, 0.54]).double(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(rows.jump, torch.tensor([0.72 + 1.7, 0, 0, 0]).double(), rtol=1e-6, atol=1e-6)
    assert not rows.truncated.any(), "without extra_fields no response is truncated"


@pytest.mark.usefixtures("process_group")
def test_sequences_without_a_token_or_a_finite_log_prob_are_known_before_the_forward() -> None:
    data = batch()
    before = Sequences(data, dist.group.WORLD)
    assert before.facts.usable.tolist() == [True] * 4 and before.facts.length.tolist() == [5, 2, 3, 5]
    assert before.facts.rank.tolist() == [0] * 4 and before.mine == slice(0, 4)
    data["response_mask"].values()[3] = 0  # the second sequence is taken out
    data["rollout_log_probs"].values()[1] = math.nan  # in the hole of the first
    data["rollout_log_probs"].values()[5] = -math.inf
    rows = rows_of(data, torch.zeros(4, 4))
    assert rows.usable.tolist() == [True, False, True, False]
    assert rows.dropped.tolist() == [False, True, False, False] and rows.log_weight[1].isnan()


@pytest.mark.usefixtures("process_group")
def test_log_probs_of_fewer_or_more_tokens_than_the_longest_response() -> None:
    """Other micro-batches' longest responses make rows longer; this one's last tokens may be tool output."""
    policy, _ = response_rows(as_output(log_probs())["log_probs"], batch(), "rollout_log_probs")
    wanted = rows_of(batch(), policy).log_weight
    wide = torch.nn.functional.pad(policy, (0, 3), value=9.0)
    assert rows_of(batch(), wide).log_weight.equal(wanted)
    two = tu.index_select_tensor_dict(batch(), [0, 3])  # fewer responses than tokens
    assert rows_of(two, wide[[0, 3]]).log_weight.equal(wanted[[0, 3]])
    assert rows_of(two, policy[[0, 3], :3]).tokens.equal(torch.tensor([2.0, 4]).double())
    data = batch()
    data["response_mask"].values()[-1] = 0
    rows = [rows_of(data, policy[:, :width]).log_weight for width in (3, 4)]
    assert rows[0].equal(rows[1])


@pytest.mark.usefixtures("process_group")
def test_rewards_of_tokens_are_added_up_in_float64() -> None:
    data = batch(rm_scores=nested([torch.tensor([2.0**24, 0, 1]), *map(torch.tensor, REWARD[1:])]))
    assert Sequences(data, dist.group.WORLD).facts.reward[0] == 2**24 + 1


@pytest.mark.usefixtures("process_group")
def test_only_truncated_responses_are_masked_and_only_where_asked() -> None:
    flags: dict[str, Any] = {"extra_fields": [{TRUNCATED: i == 1} for i in range(4)]}
    for treatment in (Truncated.MASK, Truncated.TRAIN):
        data = batch(**flags)
        tu.assign_non_tensor(data, **{TRUNCATED: treatment})
        facts = Sequences(data, dist.group.WORLD).facts
        assert facts.truncated.tolist() == [False, True, False, False]
        assert facts.masked.tolist() == [False, treatment == Truncated.MASK, False, False]


@pytest.mark.usefixtures("process_group")
def test_fresh_tokens_and_their_squares_are_known_apart() -> None:
    # Two tokens of the first response are jumps, with log-ratios of 0.9 and 1.7: of the first one 0.18 is none.
    runs = [[[3, 1], [5, 1]], [[5, 1]], [], [[2, 1], [5, 2], [None, 1]]]
    data = batch()
    tu.assign_non_tensor(data, policy_version=5)
    policy, _ = response_rows(as_output(log_probs())["log_probs"], data, "rollout_log_probs")
    rows = rows_of(data, policy.detach())
    assert not rows.fresh.any() and rows.lag.isnan().all(), "no agent loop has told the versions"
    data = batch(extra_fields=[{FIELD: each, "min_global_steps": 3} for each in runs])
    tu.assign_non_tensor(data, policy_version=5)
    rows = rows_of(data, policy.detach())
    wanted = torch.tensor([[1, 0.0], [1, 0.01], [0, 0], [2, 0.4**2 + 0.3**2]]).double()
    torch.testing.assert_close(rows.fresh, wanted, rtol=1e-4, atol=1e-9)
    assert rows.lag.tolist() == [2.0] * 4


@pytest.mark.usefixtures("process_group")
def test_log_probs_that_were_computed_again_are_compared_with_the_policys() -> None:
    """Only sampled tokens count, and only those that a sampler was asked for: the first two and the first three."""
    data = batch(session_id=[0, 0, 1, 1])
    policy, _ = response_rows(as_output(log_probs())["log_probs"], data, "rollout_log_probs")
    policy = policy.detach()
    known = {"a_0": (policy[0, :2] - 0.25).tolist(), "b_1": (policy[3, :3] + 0.5).tolist(), "c_0": [1.0]}
    tu.assign_non_tensor(data, **{COMPUTED_AGAIN: json.dumps(known)})
    again = rows_of(data, policy).again
    assert not again[:, 0].any() and not again[1:3].any(), "of no version"
    torch.testing.assert_close(again[[0, 3], 1, ::2], torch.tensor([[1, 0.25**2], [3, 3 * 0.5**2]]).double())
    versions = [{FIELD: each} for each in ([[3, 1], [5, 1]], [[5, 1]], [], [[2, 2], [5, 1], [2, 1]])]
    data = batch(session_id=[0, 0, 1, 1], extra_fields=versions)
    tu.assign_non_tensor(data, policy_version=5, **{COMPUTED_AGAIN: json.dumps(known)})
    again = rows_of(data, policy).again
    assert again[:, :, 0].tolist() == [[0, 1], [0, 0], [0, 0], [1, 2]], "fresh tokens apart from the others"
    torch.testing.assert_close(again[0, 1, 1:], torch.tensor([0.18**2, 0.25**2]).double(), rtol=1e-4, atol=0)


def test_sequences_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three data-parallel ranks with the rows of `batch()`, and another model-parallel rank with the same norms."""

    def gather(into: list[Tensor], own: Tensor, group: None) -> None:
        into[:] = [own] * 3

    def add(columns: Tensor) -> None:
        columns[:, -1] *= 2

    sizes = {"get_world_size": lambda group: 3, "get_rank": lambda group: 1}
    monkeypatch.setattr(sequences, "dist", SimpleNamespace(**sizes, all_gather=gather, all_reduce=add))
    seen = Sequences(batch(), None)
    assert seen.facts.rank.tolist() == [0] * 4 + [1] * 4 + [2] * 4 and seen.mine == slice(4, 8)
    assert seen.facts.group.tolist() == [0, 1, 0, 1] * 3, "a prompt's group may lie on several ranks"
    norms = torch.tensor([1.0, 2, 3, 4])
    rows = seen.measured(torch.tensor([[-1.0] * 4, [-2.0] * 4]), norms, [[0], [3, 1], [2]])
    assert rows.squared_norm is not None and rows.squared_norm.tolist() == [2, 4, 6, 8]
    assert rows.rank.tolist() == [0, 1, 1, 2] and rows.tokens.tolist() == [2, 4, 1, 0]
    assert rows.log_weight.tolist() == [0, 0, -1.5, 0], "of this rank alone: the others' are theirs to add"
    data = batch()
    tu.assign_non_tensor(data, global_token_num=NonTensorData([5] * 11))
    with pytest.raises(RuntimeError, match="11 sequences on 3 data-parallel ranks, and 4 on rank 1: not the same"):
        Sequences(data, None)


@pytest.mark.parametrize("name", ["rollout_log_probs", "response_mask"])
def test_a_value_for_each_token(name: str) -> None:
    check_lengths(batch())
    short = batch(**{name: nested([torch.zeros(n) for n in (3, 1, 0, 2)])})
    with pytest.raises(
        ValueError, match=f"{name}: 2 values for the 4 response tokens of a sample of prompt b, and 1 samp"
    ):
        check_lengths(short)


def test_the_first_epochs_weights_stand_and_several_trajectories_have_none() -> None:
    weights = SequenceWeights()
    weights.note(batch(), torch.zeros(4), torch.zeros(4))
    assert not weights.of_sessions(), "no agent loop made these"
    data = batch(session_id=torch.tensor([0, 0, 1, 0]))
    for epoch in range(2):
        weights.note(data, torch.arange(4.0) + epoch, torch.arange(4.0) + 10)
    assert weights.of_sessions() == {("a", 0): (0.0, 10.0), ("a", 1): (2.0, 12.0)}
    weights.clear()
    assert not weights.of_sessions()
