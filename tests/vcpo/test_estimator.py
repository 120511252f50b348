"""The estimator against its definition, written out naively."""

import math
from dataclasses import asdict

import pytest
import torch

from vcpo import Baseline, VCPOConfig, estimate
from vcpo.config import StepSizeRule
from vcpo.diagnostics import kl_k3
from vcpo.ess import ess_ratio, step_size_multiplier
from vcpo.estimator import coefficients, reward_factors
from vcpo.importance import log_ratios, sequence_log_weights


def _batch(groups: int = 4, size: int = 8, seed: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    batch = groups * size
    log_weight = torch.randn(batch, generator=g, dtype=torch.float64) * 2
    reward = torch.randint(0, 2, (batch,), generator=g).double()
    group = torch.arange(groups).repeat_interleave(size)
    squared_norm = torch.rand(batch, generator=g, dtype=torch.float64) * 5
    order = torch.randperm(batch, generator=g)
    return log_weight[order], reward[order], group[order], squared_norm[order]


def test_sequence_log_weights_sum_over_response_tokens_only() -> None:
    log_prob = torch.tensor([[-1.0, -2.0, math.nan], [-1.0, -1.0, -1.0]])
    rollout = torch.tensor([[-1.5, -1.0, math.inf], [-2.0, -2.0, -2.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    torch.testing.assert_close(sequence_log_weights(log_prob, rollout, mask), torch.tensor([-0.5, 3.0]).double())


def test_ess_ratio_is_the_textbook_formula() -> None:
    log_weight, *_ = _batch()
    w = log_weight.exp()
    assert ess_ratio(log_weight) == pytest.approx((w.sum() ** 2 / (w**2).sum() / len(w)).item(), rel=1e-12)


@pytest.mark.parametrize(
    ("log_weight", "expected"),
    [
        (torch.full((64,), -12.0), 1.0),  # the published epsilon would read 0.19
        (torch.tensor([1e4, -1e4, 0.0, 0.0]), 0.25),
        (torch.full((8,), -1e4), 1.0),
        (torch.tensor([math.inf, 0.0]), 0.0),
        (torch.tensor([math.nan, 0.0]), 0.0),
        (torch.zeros(0), 0.0),
        (torch.tensor([0.0] + [-1e-9] * 6, dtype=torch.float64), 1.0),  # the rounded quotient is above 1
    ],
)
def test_ess_ratio_at_the_extremes(log_weight: torch.Tensor, expected: float) -> None:
    assert ess_ratio(log_weight) == expected


def test_step_size_rules() -> None:
    assert step_size_multiplier(0.25, StepSizeRule.SQRT, 1.0) == 0.5
    assert step_size_multiplier(0.25, StepSizeRule.LINEAR, 1.0) == 0.25
    assert step_size_multiplier(0.25, StepSizeRule.NONE, 1.0) == 1.0
    assert step_size_multiplier(0.9, StepSizeRule.SQRT, 0.55) == 1.0  # never above the full rate


@pytest.mark.parametrize("opob_weights", ["estimator", "published"])
def test_opob_is_the_definition_per_group(opob_weights: str) -> None:
    log_weight, reward, group, squared_norm = _batch()
    config = VCPOConfig(truncation=2.0, norm_by_std=False, opob_weights=opob_weights)
    length = torch.arange(1, 33)
    result = estimate(config, log_weight, reward, group, squared_norm=squared_norm, length=length)
    w = log_weight.exp()
    used = w.clamp(max=2.0)
    a = used if opob_weights == "estimator" else w * used * length
    for g in range(4):
        i = group == g
        b = (a[i] ** 2 * squared_norm[i] * reward[i]).sum() / (a[i] ** 2 * squared_norm[i]).sum()
        torch.testing.assert_close(result.baseline[i], b.expand(8), rtol=1e-12, atol=0)
        torch.testing.assert_close(result.coefficient[i], used[i] * (reward[i] - b) / 32, rtol=1e-9, atol=0)


@pytest.mark.parametrize("baseline", list(Baseline))
def test_other_baselines_are_their_definitions(baseline: Baseline) -> None:
    log_weight, reward, group, squared_norm = _batch()
    config = VCPOConfig(baseline=baseline, norm_by_std=False)
    result = estimate(config, log_weight, reward, group, squared_norm=squared_norm)
    for g in range(4):
        r = reward[group == g]
        expected = {
            Baseline.NONE: torch.zeros_like(r),
            Baseline.MEAN: r.mean().expand(8),
            Baseline.HALF_MEAN: ((r.min() + r.mean()) / 2).expand(8),
        }.get(baseline)
        if expected is not None:
            torch.testing.assert_close(result.baseline[group == g], expected)
    advantage = reward - result.baseline
    torch.testing.assert_close(result.coefficient, log_weight.exp().clamp(max=8.0) * advantage / 32)


def test_on_policy_without_truncation_mean_and_std_is_grpo() -> None:
    _, reward, group, _ = _batch()
    result = estimate(VCPOConfig(baseline="mean"), torch.zeros(32), reward, group)
    assert result.ess_ratio == 1.0 and result.step_size_multiplier == 1.0
    for g in range(4):
        r = reward[group == g]
        expected = (r - r.mean()) / r.std(unbiased=False) / 32 if r.std() > 0 else torch.zeros_like(r)
        torch.testing.assert_close(result.coefficient[group == g], expected)


def test_a_sequence_with_a_bad_weight_is_left_out_entirely() -> None:
    log_weight, reward, group, squared_norm = _batch()
    log_weight[3], log_weight[5] = math.nan, math.inf
    keep = torch.ones(32, dtype=torch.bool)
    keep[[3, 5]] = False
    whole = estimate(VCPOConfig(), log_weight, reward, group, squared_norm=squared_norm)
    rest = estimate(VCPOConfig(), log_weight[keep], reward[keep], group[keep], squared_norm=squared_norm[keep])
    assert torch.equal(whole.usable, keep)
    assert torch.equal(whole.coefficient[~keep], torch.zeros(2).double())
    torch.testing.assert_close(whole.coefficient[keep], rest.coefficient)
    assert whole.ess_ratio == rest.ess_ratio


def test_nothing_usable_gives_zero_coefficients_and_the_smallest_step() -> None:
    result = estimate(
        VCPOConfig(), torch.full((4,), math.nan), torch.ones(4), torch.zeros(4).long(), squared_norm=torch.ones(4)
    )
    assert not result.usable.any() and not result.coefficient.any()
    assert result.step_size_multiplier == 0.0


@pytest.mark.parametrize("form", [{}, {"opob_scope": "minibatch"}, {"baseline": "mean"}], ids=str)
def test_masked_sequences_count_in_baselines_and_in_b_but_neither_in_the_update_nor_in_rho(form: dict) -> None:
    log_weight, reward, group, squared_norm = _batch()
    masked = torch.arange(len(reward)) % 3 == 1
    config = VCPOConfig(**form)
    every = estimate(config, log_weight, reward, group, squared_norm=squared_norm)
    result = estimate(config, log_weight, reward, group, squared_norm=squared_norm, masked=masked)
    assert result.baseline.equal(every.baseline) and result.weight.equal(every.weight) and result.usable.all()
    assert result.coefficient.equal(torch.where(masked, 0.0, every.coefficient)) and every.coefficient[masked].any()
    w = log_weight[~masked].exp()
    assert result.ess_ratio == pytest.approx((w.sum().square() / w.square().sum() / len(w)).item())
    assert result.step_size_multiplier == pytest.approx(result.ess_ratio**0.5)
    nothing = estimate(config, log_weight, reward, group, squared_norm=squared_norm, masked=masked | True)
    assert not nothing.coefficient.any() and nothing.ess_ratio == nothing.step_size_multiplier == 0


def test_equal_rewards_and_zero_norms_give_finite_zeros() -> None:
    group = torch.tensor([0, 0, 1, 1])
    reward = torch.tensor([1.0, 1.0, 0.0, 1.0])
    result = estimate(VCPOConfig(), torch.zeros(4), reward, group, squared_norm=torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert not result.coefficient[:2].any()
    torch.testing.assert_close(result.baseline[2:], torch.full((2,), 0.5).double())


def test_non_finite_reward_is_an_error() -> None:
    with pytest.raises(ValueError, match="reward"):
        estimate(VCPOConfig(baseline="mean"), torch.zeros(2), torch.tensor([1.0, math.nan]), torch.zeros(2).long())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"baseline": "best"}, "vcpo.baseline='best': choose one of none, mean, half_mean, opob"),
        ({"truncation": 0}, r"vcpo.truncation=0: give a number in \(0, inf\]"),
        ({"base_ess_ratio": 1.5}, r"vcpo.base_ess_ratio=1.5: give a number in \(0, 1\]"),
        ({"base_ess_ratio": "best"}, r"vcpo.base_ess_ratio='best': give a number in \(0, 1\]"),
        ({"norm_by_std": "yes"}, "vcpo.norm_by_std='yes': give true or false"),
        (
            {"baseline": "mean", "opob_scope": "minibatch"},
            "opob_scope=minibatch: has no effect with vcpo.baseline=mean",
        ),
        ({"baseline": "none", "opob_weights": "published"}, "opob_weights=published: has no effect"),
    ],
)
def test_bad_settings_name_the_setting_and_the_fix(setting: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VCPOConfig(**setting)


@pytest.mark.parametrize("opob_weights", ["estimator", "published"])
@pytest.mark.parametrize("norm_by_std", [True, False])
def test_opob_of_the_mini_batch_is_one_constant(norm_by_std: bool, opob_weights: str) -> None:
    log_weight, reward, group, squared_norm = _batch()
    config = VCPOConfig(opob_scope="minibatch", norm_by_std=norm_by_std, opob_weights=opob_weights)
    result = estimate(config, log_weight, reward, group, squared_norm=squared_norm, length=torch.ones(32))
    a = log_weight.exp().clamp(max=8.0)
    if norm_by_std:
        std = torch.stack([reward[group == g].std(unbiased=False) for g in range(4)])[group]
        a = torch.where(std > 0, a / std, 0.0)
    published = log_weight.exp() * log_weight.exp().clamp(max=8.0)
    influence = (published if opob_weights == "published" else a) ** 2 * squared_norm
    b = (influence * reward).sum() / influence.sum()
    torch.testing.assert_close(result.baseline, b.expand(32))
    torch.testing.assert_close(result.coefficient, a * (reward - b) / 32)


def test_a_group_of_one() -> None:
    one = (torch.tensor([0.3]), torch.tensor([1.0]), torch.tensor([0]))
    alone = estimate(VCPOConfig(norm_by_std=False), *one, squared_norm=torch.ones(1))
    assert alone.coefficient.item() == 0.0 and alone.baseline.item() == 1.0


def test_one_sequence_holds_all_weight() -> None:
    log_weight, reward, group, squared_norm = _batch()
    log_weight[0] += 1e4
    result = estimate(VCPOConfig(norm_by_std=False), log_weight, reward, group, squared_norm=squared_norm)
    assert result.ess_ratio == pytest.approx(1 / 32)
    assert result.step_size_multiplier == pytest.approx(32**-0.5)
    assert torch.isfinite(result.coefficient).all()


def test_kl_k3_ignores_masked_tokens_and_is_zero_on_policy() -> None:
    log_prob = torch.tensor([[-1.0, -2.0, math.nan]])
    mask = torch.tensor([[1, 1, 0]])
    assert kl_k3(log_ratios(log_prob, log_prob.clone(), mask)).item() == 0.0
    r = math.exp(0.5)
    torch.testing.assert_close(
        kl_k3(log_ratios(log_prob + 0.5, log_prob, mask)), torch.tensor([2 * (r - 1 - 0.5)]).double()
    )


def test_a_group_of_nearly_equal_rewards_far_from_the_baseline_has_a_bounded_coefficient() -> None:
    config = VCPOConfig(truncation=None, opob_scope="minibatch")
    rows = [(0.0, 0.0, 0, 1.0)] * 6 + [(0.0, 0.0, 1, 1.0), (0.0, 2.0, 0, 1e5), (1e4, 2.0**-7, 1, 0.0)]
    log_weight, reward, group, squared_norm = (torch.tensor(column) for column in zip(*rows, strict=True))
    step = estimate(config, log_weight, reward, group, squared_norm=squared_norm)
    assert step.coefficient.abs().max() == 1e18


def test_a_norm_that_is_not_finite_matters_where_norms_are_used() -> None:
    log_weight, reward, group, squared_norm = _batch()
    squared_norm[[2, 7]] = torch.tensor([math.nan, math.inf]).double()
    with_norms = estimate(VCPOConfig(), log_weight, reward, group, squared_norm=squared_norm)
    assert (~with_norms.usable).nonzero().flatten().tolist() == [2, 7]
    assert estimate(VCPOConfig(baseline="mean"), log_weight, reward, group, squared_norm=squared_norm).usable.all()


def test_rewards_count_as_equal_below_a_deviation_of_a_millionth() -> None:
    config = VCPOConfig(baseline="mean")
    for deviation, normalised in ((0.7e-6, 0.0), (1.5e-6, 0.5)):
        reward = torch.tensor([1 + deviation, 1 - deviation]).double()
        step = estimate(config, torch.zeros(2), reward, torch.zeros(2).long())
        torch.testing.assert_close(step.coefficient, torch.tensor([normalised, -normalised]).double())


@pytest.mark.parametrize("baseline", ["none", "mean", "half_mean"])
def test_without_norms_a_coefficient_is_the_weight_times_a_factor_of_the_rewards(baseline: str) -> None:
    """To the bit; also beyond the largest coefficient, for a masked sequence, and beside a weight that is no number."""
    config, reward = (
        VCPOConfig(baseline=baseline, norm_by_std=False),
        torch.tensor([1e30, 0.0, 1.0, 0.0, 0.3, 5.0]).double(),
    )
    log_weight, group = torch.tensor([3.0, -50.0, 0.1, -0.7, 0.0, math.nan]).double(), torch.tensor([7, 7, 2, 2, 2, 2])
    masked = torch.tensor([False, False, False, True, False, False])
    step = estimate(config, log_weight, reward, group, masked=masked)
    factor = reward_factors(config, reward, group, usable=log_weight.isfinite(), masked=masked)
    assert coefficients(step.weight, factor).equal(step.coefficient)
    assert step.coefficient[0] == 1e18 and step.coefficient[3] == step.coefficient[5] == 0


def test_settings_that_are_not_given_are_the_published_method() -> None:
    """What a user gets who sets nothing; `base_ess_ratio` and truncation are the paper's for single turns."""
    assert asdict(VCPOConfig()) == dict(
        truncation=8.0,
        step_size_rule="sqrt",
        ess_part="whole",
        base_ess_ratio=1.0,
        baseline="opob",
        opob_scope="group",
        opob_weights="estimator",
        norm_by_std=True,
    )


@pytest.mark.parametrize(
    ("settings", "norms", "compares"),
    [
        ({}, True, True),
        ({"baseline": "none", "norm_by_std": False}, False, False),
        ({"baseline": "none", "norm_by_std": True}, False, True),
        ({"baseline": "mean", "norm_by_std": False}, False, True),
        ({"baseline": "half_mean", "norm_by_std": False}, False, True),
        ({"opob_scope": "minibatch", "norm_by_std": False}, True, False),
    ],
)
def test_what_settings_need(settings: dict, norms: bool, compares: bool) -> None:
    config = VCPOConfig(**settings)
    assert (config.needs_gradient_norms, config.compares_samples_of_a_prompt) == (norms, compares)
    assert config.scales_step_size
    assert not VCPOConfig(**settings, step_size_rule="none").scales_step_size


@pytest.mark.parametrize("dominating", [1, 2])
def test_opob_keeps_its_digits_where_equal_rewards_have_all_the_influence(dominating: int) -> None:
    """R - b* is 1e-17 of R there, and the weight makes it count."""
    log_weight = torch.tensor([20.0] * dominating + [0.0, 0.0]).double()
    reward = torch.tensor([1.0] * dominating + [0.0, 0.25]).double()
    config, size = VCPOConfig(truncation=None, norm_by_std=False), len(reward)
    step = estimate(config, log_weight, reward, torch.zeros(size).long(), squared_norm=torch.ones(size))
    wanted = math.exp(20 - 40) * 1.75 / dominating / size
    assert step.coefficient[0].item() == pytest.approx(wanted, rel=1e-9)


def test_large_rewards_of_unequal_weights_keep_their_digits_with_norms_in_float32() -> None:
    """b* rounds to a number next to the first two rewards; R - b* is 1e-18 of them."""
    log_weight = torch.tensor([20.0, 19.1, 0.0, 0.0], dtype=torch.float64)
    reward, squared_norm = torch.tensor([700_001.0, 700_001, 0, 250_000]), torch.tensor([1.0, 1.0, 0.3, 0.3])
    config = VCPOConfig(truncation=None, norm_by_std=False)
    step = estimate(config, log_weight, reward, torch.zeros(4).long(), squared_norm=squared_norm)
    above_others = 700_001 + 450_001
    wanted = math.exp(20) * squared_norm[2].item() * above_others / (math.exp(40) + math.exp(38.2)) / 4
    assert step.coefficient[0].item() == pytest.approx(wanted, rel=1e-9)


def test_rewards_and_norms_in_float32_give_the_numbers_of_float64() -> None:
    log_weight, _, group, squared_norm = _batch()
    reward, squared_norm = torch.rand(32, generator=torch.Generator().manual_seed(1)), squared_norm.float()
    config = VCPOConfig(norm_by_std=True)
    found, wanted = (
        estimate(config, log_weight, r, group, squared_norm=norm)
        for r, norm in ((reward, squared_norm), (reward.double(), squared_norm.double()))
    )
    torch.testing.assert_close(found.coefficient, wanted.coefficient, rtol=1e-12, atol=0)


def test_the_optimal_baseline_needs_norms() -> None:
    log_weight, reward, group, _ = _batch()
    with pytest.raises(ValueError, match="vcpo.baseline=opob needs the gradient norm of every sequence"):
        estimate(VCPOConfig(), log_weight, reward, group)


def test_the_published_weights_need_lengths() -> None:
    log_weight, reward, group, squared_norm = _batch()
    with pytest.raises(ValueError, match="opob_weights=published needs the length of every sequence"):
        estimate(VCPOConfig(opob_weights="published"), log_weight, reward, group, squared_norm=squared_norm)
