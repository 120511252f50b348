"""Log-weights against their formula written out."""

import math

import pytest
import torch
from torch import Tensor

from vcpo import VCPOConfig
from vcpo.baseline import optimal_off_policy, weighted_mean, without_optimal
from vcpo.diagnostics import kl_k3
from vcpo.ess import ess_ratio
from vcpo.estimator import log_packed_weights, log_used_weights
from vcpo.importance import log_ratios, sequence_log_weights


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """(log w, reward, group): 8 prompts of 8 sequences."""
    generator = torch.Generator().manual_seed(0)
    log_weight = 2 * torch.randn(64, generator=generator, dtype=torch.float64)
    reward = torch.randint(0, 2, (64,), generator=generator).double()
    return log_weight, reward, torch.arange(8).repeat_interleave(8)


def test_log_weights_of_a_long_response_are_sums_in_float64() -> None:
    """In float32 the differences, and their sum, are off by 1e-7 and more each."""
    generator = torch.Generator().manual_seed(0)
    log_prob, rollout = (-3 * torch.rand(1, 2**15, generator=generator) for _ in range(2))
    found = sequence_log_weights(log_prob, rollout, torch.ones(1, 2**15))
    exact = math.fsum(p - q for p, q in zip(log_prob[0].tolist(), rollout[0].tolist(), strict=True))
    assert found.item() == pytest.approx(exact, abs=1e-9)


def test_numbers_that_come_in_float32_are_used_in_float64() -> None:
    """Weights, rewards and norms of a real run are float32: rounding more than once would lose digits of a sum."""
    log_weight, reward, group = batch()
    norm = torch.rand(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    single, mask = [x.float() for x in (reward + log_weight.sin(), log_weight, norm)], torch.ones(4, 16)

    def results(r: Tensor, w: Tensor, n: Tensor) -> list[Tensor]:
        baseline = optimal_off_policy(r, w, n, group)
        of_groups = [without_optimal(r, baseline, w, n, group), baseline]
        tokens = [x.view(4, 16) for x in (w, n)]
        sums = [sequence_log_weights(*tokens, mask), kl_k3(log_ratios(*tokens, mask))]
        return [*of_groups, *sums, torch.tensor([ess_ratio(w)]).double()]

    for narrow, exact in zip(results(*single), results(*(x.double() for x in single)), strict=True):
        assert narrow.dtype == torch.float64
        torch.testing.assert_close(narrow, exact, rtol=1e-12, atol=1e-12)


def test_means_have_the_digits_of_float64() -> None:
    group, third = torch.zeros(2, dtype=torch.int64), numbers(1 / 3, 1 / 3)
    weights = numbers(math.log(3), math.log(5))
    assert weighted_mean(numbers(0, 1), weights, group).tolist() == pytest.approx([5 / 8] * 2, rel=1e-14)
    assert weighted_mean(third, numbers(0, -1), group).tolist() == pytest.approx([1 / 3] * 2, rel=1e-14)


def test_log_weights_carry_no_gradient() -> None:
    log_prob = torch.zeros(2, 3, requires_grad=True)
    for of_tokens in (sequence_log_weights, log_ratios):
        assert not of_tokens(log_prob, torch.ones(2, 3), torch.ones(2, 3)).requires_grad


@pytest.mark.parametrize("top", [0.0, 5.0, 20.0, 300.0])
def test_a_reward_less_its_optimal_baseline_keeps_its_digits(top: float) -> None:
    """In a second group norms are 0, and in a third rewards are equal."""
    reward = numbers(1.0, 0.0, 0.25, 4.0, 2.0, 7.0, 7.0)
    group = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    log_a, norm = numbers(top, 0.0, math.log(3) / 2, 1.0, 0.0, 2.0, 0.0), numbers(2.0, 1.0, 1.0, 0.0, 0.0, 1.0, 5.0)
    baseline = optimal_off_policy(reward, log_a, norm, group)
    found = without_optimal(reward, baseline, log_a, norm, group)
    first = (1.0 + 3.0 * 0.75) * math.exp(-2 * top) / (2.0 + 4.0 * math.exp(-2 * top))
    wanted = numbers(first, first - 1.0, first - 0.75, 1.0, -1.0, 0.0, 0.0)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)


def test_weights_are_bounded_where_float32_can_square_their_gradients() -> None:
    log_weight = numbers(1e4, 39.0, -39.0, -1e4)
    untruncated = VCPOConfig(truncation=None)
    assert log_used_weights(untruncated, log_weight).tolist() == [40.0, 39.0, -39.0, -1e4]
    assert log_packed_weights(untruncated, log_weight).tolist() == [40.0, 39.0, -39.0, -40.0]
