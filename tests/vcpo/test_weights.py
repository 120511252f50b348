"""Log-weights, tempered weights, KL penalty, leverage, shrunk baseline: each against its formula written out."""

import math

import pytest
import torch
from torch import Tensor

from vcpo import VCPOConfig, estimate
from vcpo.baseline import shrunk_off_policy
from vcpo.ess import ess_ratio
from vcpo.importance import sequence_log_weights
from vcpo.kl_penalty import centred_log_ratios
from vcpo.leverage import log_unleveraged
from vcpo.tempering import tempering_exponent

ONE_GROUP = torch.zeros(4, dtype=torch.int64)
PLAIN = dict(baseline="mean", norm_by_std=False, truncation=None)


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


@pytest.mark.parametrize("target", [0.3, 0.5, 0.9, 1.0])
def test_alpha_is_the_largest_that_reaches_the_target(target: float) -> None:
    log_weight, _, _ = batch()
    alpha = tempering_exponent(log_weight, target)
    assert 0 <= alpha < 1
    assert ess_ratio(alpha * log_weight) == pytest.approx(target, rel=1e-9)
    assert ess_ratio((alpha + 1e-3) * log_weight) < target


def test_alpha_of_two_weights_by_hand() -> None:
    """(1 + x)^2 / (2 (1 + x^2)) = 0.8 at x = 3^alpha: 3 x^2 - 10 x + 3 = 0, so x = 3."""
    assert tempering_exponent(numbers(0.0, math.log(9)), 0.8) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "log_weight, alpha",
    [
        (numbers(-3.0, -3.0, -3.0), 1.0),  # all equal
        (numbers(5.0), 1.0),  # one sequence
        (numbers(), 1.0),
        (numbers(-math.inf, math.nan), 1.0),
        (numbers(-math.inf, 0.0, math.log(9)), 0.5),  # what is not finite is ignored
        (numbers(0.0, 1e4), pytest.approx(math.log(3) / 1e4)),
    ],
)
def test_alpha_at_the_extremes(log_weight: Tensor, alpha: float) -> None:
    assert tempering_exponent(log_weight, 0.8) == pytest.approx(alpha)


def test_tempered_weights_take_the_place_of_weights_and_the_step_follows_the_weights_themselves() -> None:
    log_weight, reward, group = batch()
    plain, tempered = (
        estimate(VCPOConfig(**PLAIN, **more), log_weight, reward, group) for more in ({}, {"tempered_ess_ratio": 0.5})
    )
    alpha = tempering_exponent(log_weight, 0.5)
    torch.testing.assert_close(tempered.weight, (alpha * log_weight).exp())
    torch.testing.assert_close(tempered.coefficient, plain.coefficient / plain.weight * tempered.weight)
    assert tempered.ess_ratio == plain.ess_ratio and tempered.step_size_multiplier == plain.step_size_multiplier
    used = VCPOConfig(**PLAIN, tempered_ess_ratio=0.5, ess_weights="truncated")
    assert estimate(used, log_weight, reward, group).ess_ratio == pytest.approx(0.5)
    both = PLAIN | dict(truncation=2.0, tempered_ess_ratio=0.5)
    step = estimate(VCPOConfig(**both), log_weight, reward, group)
    wanted = (alpha * log_weight).exp().clamp(max=2.0)  # truncated after tempering
    assert 0 < (wanted == 2.0).sum() < 64
    torch.testing.assert_close(step.weight, wanted)
    step = estimate(VCPOConfig(**both, ess_weights="truncated"), log_weight, reward, group)
    assert step.ess_ratio == pytest.approx(ess_ratio(wanted.log()))
    unusable = log_weight.clone()
    unusable[:3] = numbers(-math.inf, math.inf, math.nan)
    step = estimate(VCPOConfig(**PLAIN, tempered_ess_ratio=0.5), unusable, reward, group)
    assert step.usable.sum() == 61 and not step.coefficient[:3].any() and step.coefficient.isfinite().all()


def test_the_penalty_is_the_gradient_of_the_kl() -> None:
    """Under a policy small enough for sums over all outcomes: grad[J - tau KL(pi || mu)] by autograd."""
    generator = torch.Generator().manual_seed(0)
    logits, log_mu, reward = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(3))
    log_mu, tau = log_mu.log_softmax(0), 0.3
    logits.requires_grad_()
    log_pi = logits.log_softmax(0)
    objective = (log_pi.exp() * (reward - tau * (log_pi - log_mu))).sum()
    (wanted,) = torch.autograd.grad(objective, logits, retain_graph=True)

    log_weight, group = (log_pi - log_mu).detach(), torch.zeros(6, dtype=torch.int64)
    penalty = centred_log_ratios(log_weight, log_weight, group)
    # a weighted mean over draws; here every outcome once, times mu. Centring changes nothing: E_mu[w g] = 0
    coefficient = log_mu.exp() * log_weight.exp() * (reward - tau * penalty)
    (got,) = torch.autograd.grad((coefficient * log_pi).sum(), logits)
    torch.testing.assert_close(got, wanted)


def test_the_penalty_is_in_the_coefficient() -> None:
    log_weight, reward, group = batch()
    config = dict(baseline="mean", truncation=8.0)
    plain, step = (estimate(VCPOConfig(**config, **more), log_weight, reward, group) for more in ({}, {"kl_coef": 0.3}))
    for g in range(8):
        rows = group == g
        used = log_weight[rows].exp().clamp(max=8.0)
        mean = (used * log_weight[rows]).sum() / used.sum()
        wanted = plain.coefficient[rows] - 0.3 * used * (log_weight[rows] - mean) / 64
        torch.testing.assert_close(step.coefficient[rows], wanted)


def test_the_penalty_acts_where_all_rewards_are_equal_and_not_where_weights_are() -> None:
    log_weight, equal = numbers(0.0, 1.0, -1.0, 0.5), torch.ones(4).double()
    step = estimate(VCPOConfig(baseline="mean", kl_coef=0.3), log_weight, equal, ONE_GROUP)
    assert step.coefficient[1] < 0 < step.coefficient[2], "back towards the samplers' policy"
    on_policy = estimate(VCPOConfig(baseline="mean", kl_coef=0.3), torch.zeros(4), equal, ONE_GROUP)
    assert not on_policy.coefficient.any()


@pytest.mark.parametrize(
    "log_weight", [numbers(-1e4, -1e4, -1e4, -1e4), numbers(1e4, 0.0, 0.0, -1e4), numbers(30.0, -30.0, 0.0, 0.0)]
)
def test_the_penalty_at_the_extremes_is_finite(log_weight: Tensor) -> None:
    step = estimate(VCPOConfig(baseline="mean", kl_coef=0.3), log_weight, numbers(1, 0, 0, 1), ONE_GROUP)
    assert step.coefficient.isfinite().all()
    assert centred_log_ratios(log_weight[:1], log_weight[:1], ONE_GROUP[:1]).item() == 0, "a group of one"


def test_leverage_by_hand() -> None:
    """Influences 1, 1, 2, 4 of 8."""
    log_a, norm = numbers(0.0, 0.0, math.log(2) / 2, 0.0), numbers(1.0, 1.0, 1.0, 4.0)
    torch.testing.assert_close(log_unleveraged(log_a, norm, ONE_GROUP).exp(), numbers(7, 7, 6, 4) / 8)
    torch.testing.assert_close(log_unleveraged(log_a, 0 * norm, ONE_GROUP).exp(), numbers(6, 6, 6, 6) / 8)
    assert log_unleveraged(numbers(900.0, 0.0), numbers(1.0, 1.0), ONE_GROUP[:2])[0] == -1800, "no digit is lost"
    assert log_unleveraged(numbers(0.0), numbers(1.0), ONE_GROUP[:1]).item() == -math.inf, "a group of one"


def test_leverage_weights_with_opob_of_the_others_are_opob_of_the_group() -> None:
    """The identity that `method=vcpo_leverage` is made for, with another baseline."""
    log_weight, reward, group = batch()
    norm = torch.rand(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    of_group, others = (
        estimate(VCPOConfig(norm_by_std=False, opob_leave_one_out=out), log_weight, reward, group, squared_norm=norm)
        for out in (False, True)
    )
    rloo = VCPOConfig(norm_by_std=False, baseline="leave_one_out", leverage_weights=True)
    step = estimate(rloo, log_weight, reward, group, squared_norm=norm)
    torch.testing.assert_close(of_group.coefficient, step.weight * (reward - others.baseline) / 64)
    torch.testing.assert_close(step.coefficient, step.weight * (reward - step.baseline) / 64)
    with pytest.raises(ValueError, match="vcpo.leverage_weights=true needs the gradient norm of every sequence"):
        estimate(rloo, log_weight, reward, group)


def test_shrunk_by_hand() -> None:
    log_a, norm, reward = torch.zeros(4).double(), numbers(1.0, 2.0, 3.0, 6.0), numbers(1.0, 0.0, 0.0, 1.0)
    baseline = shrunk_off_policy(reward, log_a, norm, ONE_GROUP, torch.zeros(4))
    # the others of the first: influences 2, 3, 6 of rewards 0, 0, 1; (sum h)^2 / sum h^2 = 121 / 49
    kept = 1 - 49 / 121
    assert baseline[0].item() == pytest.approx(kept * 6 / 11 + (1 - kept) / 3)
    one_has_all = shrunk_off_policy(reward, numbers(0, 0, 0, 50), norm, ONE_GROUP, torch.zeros(4))
    torch.testing.assert_close(one_has_all[:3], numbers(1, 2, 2) / 3)
    all_equal = shrunk_off_policy(reward, log_a, torch.ones(4), ONE_GROUP, torch.zeros(4))
    torch.testing.assert_close(all_equal, numbers(1, 2, 2, 1) / 3)
    no_gradient = shrunk_off_policy(reward, log_a, torch.zeros(4), ONE_GROUP, torch.zeros(4))
    torch.testing.assert_close(no_gradient, numbers(1, 2, 2, 1) / 3)
    assert shrunk_off_policy(reward[:1], log_a[:1], norm[:1], ONE_GROUP[:1], torch.zeros(1)).item() == 0


def test_shrunk_of_the_mini_batch_leaves_prompts_without_a_difference_out() -> None:
    reward = numbers(1, 0, 1, 1, 1, 1)
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    config = VCPOConfig(baseline="shrunk", opob_scope="minibatch")
    step = estimate(config, torch.zeros(6), reward, group, squared_norm=torch.ones(6))
    torch.testing.assert_close(step.baseline[:3], numbers(0.5, 1.0, 0.5))
    assert not step.coefficient[3:].any()
