"""What must hold for every batch, however extreme: drawn by hypothesis."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from vcpo import Baseline, OpobScope, OpobWeights, StepSizeRule, VCPOConfig, estimate
from vcpo.baseline import group_mean, group_std, half_mean, optimal_off_policy
from vcpo.diagnostics import kl_k3
from vcpo.ess import ess_ratio, step_size_multiplier
from vcpo.importance import log_ratios, sequence_log_weights, truncated_log_weights
from verl_vcpo.common.truncated import soft_length_penalty

FINITE = st.floats(-30, 30)
EXTREME = st.one_of(FINITE, st.sampled_from([1e4, -1e4, 88.8, -745.0, math.inf, -math.inf, math.nan]))
NORM = st.one_of(st.floats(1e-6, 1e6), st.sampled_from([0.0, 1e-300, 1e30]))


def batches(log_weight: st.SearchStrategy = FINITE, norm: st.SearchStrategy = NORM) -> st.SearchStrategy:
    """Rows (log weight, reward, group, squared norm, length)."""
    row = st.tuples(log_weight, st.floats(-2, 2), st.integers(0, 3), norm, st.integers(0, 50))
    return st.lists(row, min_size=1, max_size=24).map(
        lambda rows: {
            name: torch.tensor(column, dtype=torch.int64 if name in ("group", "length") else torch.float64)
            for name, column in zip(
                ("log_weight", "reward", "group", "squared_norm", "length"), zip(*rows, strict=True), strict=True
            )
        }
    )


def select(batch: dict[str, torch.Tensor], rows: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: column[rows] for name, column in batch.items()}


def every_config() -> list[VCPOConfig]:
    """Each baseline (OPOB in each form) with ESS scaling on and off, truncation on and off, normalised and not."""
    settings = []
    for baseline, rule, truncation, norm in itertools.product(
        Baseline, (StepSizeRule.SQRT, StepSizeRule.NONE), (8.0, None), (True, False)
    ):
        forms = [{}]
        if baseline is Baseline.OPOB:
            forms = [
                {"opob_scope": scope, "opob_weights": weights}
                for scope, weights in itertools.product(OpobScope, OpobWeights)
            ]
        elif baseline is Baseline.OPOB_CAPPED:
            forms = [{"opob_scope": scope} for scope in OpobScope]
        for form in forms:
            settings.append(
                VCPOConfig(baseline=baseline, step_size_rule=rule, truncation=truncation, norm_by_std=norm, **form)
            )
    return settings


def short_name(config: VCPOConfig) -> str:
    default = VCPOConfig(baseline="none")
    return " ".join(f"{name}={value}" for name, value in vars(config).items() if value != getattr(default, name))


@given(batch=batches(), shift=st.floats(-500, 500))
def test_ess_ratio_is_bounded_and_ignores_a_common_factor(batch: dict[str, torch.Tensor], shift: float) -> None:
    log_weight = batch["log_weight"]
    ratio = ess_ratio(log_weight)
    assert 1 / len(log_weight) <= ratio <= 1
    assert ess_ratio(log_weight + shift) == pytest.approx(ratio, rel=1e-9)
    assert ess_ratio(log_weight.flip(0)) == pytest.approx(ratio, rel=1e-12)


@given(value=st.floats(-1e4, 1e4), size=st.integers(1, 512))
def test_equal_weights_have_the_ratio_one_exactly(value: float, size: int) -> None:
    assert ess_ratio(torch.full((size,), value)) == 1.0


@given(ratio=st.floats(0, 1), base=st.floats(0.01, 1), rule=st.sampled_from(list(StepSizeRule)))
def test_the_multiplier_is_at_most_one_and_grows(ratio: float, base: float, rule: StepSizeRule) -> None:
    multiplier = step_size_multiplier(ratio, rule, base)
    assert 0 <= multiplier <= 1
    assert step_size_multiplier(min(1.0, ratio * 1.1), rule, base) >= multiplier


@given(batch=batches())
def test_baselines_are_means_of_rewards(batch: dict[str, torch.Tensor]) -> None:
    reward, group = batch["reward"], batch["group"]
    opob = optimal_off_policy(reward, batch["log_weight"], batch["squared_norm"], group)
    for i in range(len(reward)):
        peers = reward[group == group[i]]
        assert peers.min() - 1e-9 <= opob[i] <= peers.max() + 1e-9


@given(batch=batches(), shift=st.floats(-10, 10), factor=st.floats(0.1, 10))
def test_half_of_the_mean_is_below_the_mean_whatever_rewards_are_called(
    batch: dict[str, torch.Tensor], shift: float, factor: float
) -> None:
    """Rewards of -1 and 1 train as those of 0 and 1 do; half of a negative mean would be above it."""
    reward, group = batch["reward"], batch["group"]
    half = half_mean(reward, group)
    assert (half <= group_mean(reward, group) + 1e-9).all()
    torch.testing.assert_close(half_mean(factor * reward + shift, group), factor * half + shift, rtol=1e-9, atol=1e-9)


REWARDS = {
    "two values": st.sampled_from([0.0, 1.0]),
    "async.truncated=penalty": st.builds(
        lambda right, length: right + soft_length_penalty(length, 100, 50, 1.0), st.integers(0, 1), st.integers(1, 100)
    ),
    "outliers": st.sampled_from([0.0, 1.0, -100.0, 100.0]),
    "shaped": st.floats(-2, 2),
}


@pytest.mark.parametrize(
    ("rewards", "baseline", "advantage", "with_mean"),
    [
        ([1, -1, *[0] * 6], 0.0, 0.0, 0.0),
        ([1, -1, -1, *[0] * 5], -0.17, 0.29, 0.21),
        ([1, 1, 0.5, 0.5, *[0] * 4], 0.34, -0.81, -0.90),
        ([-1, *[0] * 7], -0.56, 1.70, 0.38),
    ],
)
def test_the_table_of_the_guide(rewards: list[float], baseline: float, advantage: float, with_mean: float) -> None:
    reward, group = torch.tensor(rewards, dtype=torch.float64), torch.zeros(8, dtype=torch.int64)
    half, deviation = half_mean(reward, group)[0], group_std(reward, group)[0]
    assert half == pytest.approx(baseline, abs=0.005) and -half / deviation == pytest.approx(advantage, abs=0.005)
    assert -reward.mean() / deviation == pytest.approx(with_mean, abs=0.005)


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("scope", OpobScope)
@pytest.mark.parametrize("kind", REWARDS)
@given(batch=batches(), drawn=st.data())
def test_a_low_baseline_lifts_no_wrong_answer(
    drawn: st.DataObject, batch: dict[str, torch.Tensor], kind: str, scope: OpobScope, norm_by_std: bool
) -> None:
    """Groups of two rewards have the plain formulas to the bit; in others nothing below the mean gains by the level."""
    size = len(batch["group"])
    rewards = drawn.draw(st.lists(REWARDS[kind], min_size=size, max_size=size))
    batch["reward"] = torch.tensor(rewards, dtype=torch.float64) + batch["group"]  # each group has its own lowest
    plain, capped = (
        estimate(VCPOConfig(baseline=baseline, opob_scope=scope, norm_by_std=norm_by_std), **batch)
        for baseline in ("opob", "opob_capped")
    )
    group = batch["group"] if scope is OpobScope.GROUP else torch.zeros_like(batch["group"])
    half, mean = half_mean(batch["reward"], group), group_mean(batch["reward"], group)
    assert (capped.coefficient * capped.weight * (batch["reward"] - capped.baseline) >= 0).all()
    for one in group.unique():
        mine = group == one
        reward, middle = batch["reward"][mine], mean[mine][0].item()
        values = reward.unique()
        lowest, highest = values[0].item(), values[-1].item()
        if len(values) <= 2:
            assert torch.equal(half[mine], (reward.min() + mean[mine]) / 2)
            assert torch.equal(capped.baseline[mine], torch.minimum(plain.baseline, mean)[mine])
            kept = mine & (plain.baseline <= mean)
            assert torch.equal(capped.coefficient[kept], plain.coefficient[kept])
            continue
        for baseline, most in ((half[mine], 0.5), (capped.baseline[mine], 1.0)):
            low, high = reward < middle, reward >= middle
            assert (baseline <= middle + 1e-9).all()
            assert (reward - baseline <= (1 - most) * (reward - middle) + 1e-9)[low].all()
            gain = 1 + most * (middle - lowest) / (highest - middle)
            assert (reward - baseline <= gain * (reward - middle) + 1e-9)[high].all()


@given(batch=batches(norm=st.floats(1e-3, 1e3)), factor=st.floats(-100, 100))
def test_opob_ignores_a_common_factor_of_the_weights(batch: dict[str, torch.Tensor], factor: float) -> None:
    arguments = (batch["squared_norm"], batch["group"])
    torch.testing.assert_close(
        optimal_off_policy(batch["reward"], batch["log_weight"] + factor, *arguments),
        optimal_off_policy(batch["reward"], batch["log_weight"], *arguments),
    )


@pytest.mark.parametrize("config", every_config(), ids=short_name)
@given(batch=batches(log_weight=EXTREME, norm=st.one_of(NORM, st.sampled_from([math.inf, math.nan]))))
def test_no_batch_makes_a_coefficient_that_is_not_finite(config: VCPOConfig, batch: dict[str, torch.Tensor]) -> None:
    step = estimate(config, **batch)
    assert torch.isfinite(step.coefficient).all() and step.coefficient.abs().max() < 1e19  # its square fits float32
    assert torch.isfinite(step.baseline).all()
    assert not step.coefficient[~step.usable].any()
    assert not step.usable[~torch.isfinite(batch["log_weight"])].any()
    assert 0 <= step.step_size_multiplier <= 1 and 0 <= step.ess_ratio <= 1
    assert (step.ess_ratio > 0) == bool(step.usable.any())


@pytest.mark.parametrize("config", every_config(), ids=short_name)
@given(batch=batches(), shuffle=st.randoms(use_true_random=False))
def test_the_order_of_the_sequences_does_not_matter(
    config: VCPOConfig, batch: dict[str, torch.Tensor], shuffle: object
) -> None:
    order = list(range(len(batch["group"])))
    shuffle.shuffle(order)  # type: ignore[attr-defined]
    whole, shuffled = estimate(config, **batch), estimate(config, **select(batch, torch.tensor(order)))
    rounding = 1e-12 * (1 + whole.weight.max().item())  # of R - b, times the weight
    torch.testing.assert_close(shuffled.coefficient, whole.coefficient[order], rtol=1e-6, atol=rounding)
    torch.testing.assert_close(shuffled.baseline, whole.baseline[order], rtol=1e-6, atol=1e-9)
    assert shuffled.ess_ratio == pytest.approx(whole.ess_ratio, rel=1e-9)


@given(
    rows=st.lists(st.lists(st.tuples(FINITE, FINITE, st.booleans()), min_size=4, max_size=4), min_size=1, max_size=8),
    cut=st.integers(0, 8),
)
def test_what_is_computed_per_sequence_is_the_same_on_any_shard(rows: list, cut: int) -> None:
    log_prob, rollout, mask = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    for function in (sequence_log_weights, lambda *tokens: kl_k3(log_ratios(*tokens))):
        whole = function(log_prob, rollout, mask)
        shards = [function(log_prob[s], rollout[s], mask[s]) for s in (slice(None, cut), slice(cut, None))]
        assert torch.equal(torch.cat(shards), whole)
    weights = sequence_log_weights(log_prob, rollout, mask)
    assert torch.equal(
        torch.cat([truncated_log_weights(weights[:cut], 8.0), truncated_log_weights(weights[cut:], 8.0)]),
        truncated_log_weights(weights, 8.0),
    )
    assert (kl_k3(log_ratios(log_prob, rollout, mask)) >= -1e-9).all()


@given(batch=batches())
def test_groups_are_independent_at_group_scope(batch: dict[str, torch.Tensor]) -> None:
    first = batch["group"] == batch["group"][0]
    assume(not first.all())
    config = VCPOConfig()
    whole, part = estimate(config, **batch), estimate(config, **select(batch, first))
    torch.testing.assert_close(part.baseline, whole.baseline[first])
    size = len(first) / int(first.sum())  # each divides by its own batch size
    torch.testing.assert_close(part.coefficient, whole.coefficient[first] * size)


REWARD = st.one_of(st.sampled_from([0.0, 0.1, 0.3, 1.0]), st.floats(-2, 2))
WEIGHT = st.one_of(st.sampled_from([-40.0, 0.0, 40.0]), st.floats(-40, 40))


@given(rows=st.lists(st.tuples(WEIGHT, REWARD, st.floats(0.1, 10)), min_size=1, max_size=8))
def test_coefficients_of_opob_do_not_cancel(rows: list[tuple[float, float, float]]) -> None:
    """Against fractions, relative to the norm of the update, the gradients taken as orthogonal."""
    log_weight, reward, norm = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    config = VCPOConfig(truncation=None, norm_by_std=False)
    step = estimate(config, log_weight, reward, torch.zeros(len(rows), dtype=torch.int64), squared_norm=norm.square())
    weights = [Fraction(math.exp(w)) for w, _, _ in rows]
    influence = [(w * Fraction(n)) ** 2 for w, (_, _, n) in zip(weights, rows, strict=True)]
    exact = [
        float(w * sum(h * (Fraction(r) - Fraction(other[1])) for h, other in zip(influence, rows, strict=True)))
        / float(sum(influence) * len(rows))
        for w, (_, r, _) in zip(weights, rows, strict=True)
    ]
    wanted = torch.tensor(exact, dtype=torch.float64)
    assert ((step.coefficient - wanted) * norm).norm() <= 1e-6 * (wanted * norm).norm()
