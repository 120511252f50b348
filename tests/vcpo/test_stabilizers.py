"""Each stabilizer: its value and gradient by hand, and REINFORCE's gradient on policy where its formula says so."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vcpo.stabilizers import TOKEN_LOSSES, bapo, m2po, oapl, off_policy_mask, p3o, r2vpo, sat, topr, vespo
from vcpo.stabilizers.bapo import _positive_share
from vcpo.stabilizers.group_replay import GroupReplay
from vcpo.stabilizers.oapl import optimal_advantages
from vcpo.stabilizers.ratios import sequence_ratios, token_log_ratios
from vcpo.stabilizers.sat import contraction
from vcpo.stabilizers.tba import tba, tba_tokens

MASK = torch.tensor([[True, True], [True, False]])
ADVANTAGE = torch.tensor([[2.0, 2.0], [-1.0, -1.0]])
# What a run without settings of its own trains with: the sources' values, where a source has one.
DEFAULTS: dict[str, dict[str, Any]] = {
    "bapo": dict(positive_share=0.5, lower=(0.6, 0.9), upper=(1.2, 3.0), lower_step=0.02, upper_step=0.05),
    "m2po": dict(tau=0.04),
    "oapl": dict(beta=1e-3),
    "off_policy_mask": dict(delta=0.5, clip=0.2),
    "p3o": {},
    "r2vpo": dict(multiplier=0.5),
    "sat": dict(quantile=0.9, lower=0.2, upper=0.2),
    "tba": dict(beta=0.05),
    "topr": {},
    "vespo": dict(positive=(2.0, 3.0), negative=(3.0, 2.0)),
}


def off_policy(ratios: list[list[float]]) -> tuple[Tensor, Tensor]:
    """([2, 2] log pi with its graph, log mu) with these token ratios."""
    log_mu = torch.full((2, 2), -1.0)
    return (log_mu + torch.tensor(ratios).log()).requires_grad_(), log_mu


def check(losses: Tensor, log_pi: Tensor, value: list[list[float]], gradient: list[list[float]]) -> None:
    """Of the sum over the masked tokens."""
    torch.testing.assert_close(losses.detach() * MASK, torch.tensor(value))
    (got,) = torch.autograd.grad((losses * MASK).sum(), log_pi)
    torch.testing.assert_close(got, torch.tensor(gradient))


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_settings_that_are_not_given_have_the_values_of_the_sources(name: str) -> None:
    for loss in (tba, tba_tokens) if name == "tba" else (TOKEN_LOSSES[name],):
        parameters = inspect.signature(loss).parameters.values()
        assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == DEFAULTS[name]
    replay = GroupReplay[str](seed=0)
    assert (replay.capacity, replay.recent, replay.temperature) == (512, 0.5, 0.25)


def test_ratios_are_bounded_where_their_squares_still_fit_float32() -> None:
    log_pi, log_mu = torch.tensor([[-1.0, -1.0], [-300.0, -1.0]]), torch.tensor([[-200.0, -1.0], [-1.0, -1.0]])
    assert token_log_ratios(log_pi, log_mu, MASK).tolist() == [[20.0, 0.0], [-20.0, 0.0]]
    torch.testing.assert_close(sequence_ratios(log_pi, log_mu, MASK), torch.tensor([20.0, -20.0]).exp())


@pytest.mark.parametrize("name", sorted(TOKEN_LOSSES))
def test_on_policy_the_gradient_is_reinforces(name: str) -> None:
    log_pi, log_mu = off_policy([[1.0, 1.0], [1.0, 1.0]])
    (gradient,) = torch.autograd.grad((TOKEN_LOSSES[name](log_pi, log_mu, ADVANTAGE, MASK) * MASK).sum(), log_pi)
    torch.testing.assert_close(gradient, -ADVANTAGE * MASK)


@pytest.mark.parametrize("name", sorted(TOKEN_LOSSES))
def test_what_lies_outside_the_mask_is_ignored(name: str) -> None:
    log_pi, log_mu = off_policy([[1.1, 0.9], [1.2, 1.0]])
    clean = TOKEN_LOSSES[name](log_pi, log_mu, ADVANTAGE, MASK)
    dirty_pi, dirty_mu = log_pi.detach().masked_fill(~MASK, math.nan), log_mu.masked_fill(~MASK, -math.inf)
    dirty = TOKEN_LOSSES[name](dirty_pi, dirty_mu, ADVANTAGE, MASK)
    torch.testing.assert_close(dirty, clean.detach())
    assert not clean[~MASK].any(), "a mean over all tokens would count it"


@pytest.mark.parametrize("name", sorted(TOKEN_LOSSES))
def test_an_overflowing_ratio_stays_finite(name: str) -> None:
    log_pi, log_mu = torch.tensor([[-1.0, -1.0], [-300.0, -1.0]]), torch.tensor([[-200.0, -1.0], [-1.0, -1.0]])
    log_pi.requires_grad_()
    losses = TOKEN_LOSSES[name](log_pi, log_mu, ADVANTAGE, MASK)
    (gradient,) = torch.autograd.grad(losses.sum(), log_pi)
    assert losses.isfinite().all() and gradient.isfinite().all()


def test_topr_tapers_bad_responses_only() -> None:
    log_pi, log_mu = off_policy([[3.0, 0.5], [0.25, 1.0]])
    good = [-2.0 * log_pi[0, 0].item(), -2.0 * log_pi[0, 1].item()]
    bad = 0.25 * log_pi[1, 0].item()
    check(topr(log_pi, log_mu, ADVANTAGE, MASK), log_pi, [good, [bad, 0.0]], [[-2.0, -2.0], [0.25, 0.0]])
    log_pi, log_mu = off_policy([[1.0, 1.0], [4.0, 1.0]])
    check(  # clipped at 1 from above
        topr(log_pi, log_mu, ADVANTAGE, MASK),
        log_pi,
        [[2.0, 2.0], [log_pi[1, 0].item(), 0.0]],
        [[-2.0, -2.0], [1.0, 0.0]],
    )


@pytest.mark.parametrize("loss", [topr, vespo])
def test_a_weight_depends_on_the_sign_of_the_advantage_alone(loss: Callable[..., Tensor]) -> None:
    log_pi, log_mu = off_policy([[0.5, 0.5], [0.25, 1.0]])
    small, large = (loss(log_pi, log_mu, scale * ADVANTAGE, MASK) for scale in (0.25, 1.0))
    torch.testing.assert_close(small, 0.25 * large)


def test_topr_tapers_by_the_whole_response() -> None:
    log_pi, log_mu = off_policy([[0.5, 0.5], [1.0, 1.0]])
    (gradient,) = torch.autograd.grad(topr(log_pi, log_mu, -ADVANTAGE, MASK).sum(), log_pi)
    torch.testing.assert_close(gradient, torch.tensor([[0.5, 0.5], [-1.0, 0.0]]))  # 0.25 * 2 each


def test_vespo_weights_by_sequence_and_sign() -> None:
    log_pi, log_mu = off_policy([[2.0, 1.0], [0.5, 1.0]])
    positive, negative = 2.0**2 * math.exp(3 * (1 - 2.0)), 0.5**3 * math.exp(2 * (1 - 0.5))
    value = [[-positive * 2.0 * p.item() for p in log_pi[0]], [negative * log_pi[1, 0].item(), 0.0]]
    check(vespo(log_pi, log_mu, ADVANTAGE, MASK), log_pi, value, [[-2 * positive] * 2, [negative, 0.0]])


def test_off_policy_mask_drops_bad_sequences_far_away() -> None:
    near, far = math.exp(-0.4), math.exp(-0.6)  # mean log(mu/pi) 0.4 and 0.6
    for ratio, kept in ((near, True), (far, False)):
        log_pi, log_mu = off_policy([[ratio, ratio], [ratio, 1.0]])
        losses = off_policy_mask(log_pi, log_mu, ADVANTAGE, MASK)
        clipped = 0.8 if kept else 0.0  # below 0.8 PPO's loss of a bad token is constant
        check(losses, log_pi, [[-2 * ratio, -2 * ratio], [clipped, 0.0]], [[-2 * ratio, -2 * ratio], [0.0, 0.0]])
        assert (losses[1, 0] == 0) == (not kept)


def test_the_distance_of_a_sequence_is_a_mean_over_its_own_tokens() -> None:
    log_mu, mask = torch.zeros(1, 3), torch.tensor([[True, True, False]])
    log_pi = torch.tensor([[-0.9, 0.0, -9.0]])  # mean log(mu/pi) 0.45
    assert off_policy_mask(log_pi, log_mu, torch.full((1, 3), -1.0), mask)[0, :2].all()
    assert off_policy_mask(2 * log_pi, log_mu, torch.full((1, 3), 0.5), mask)[0, :2].all(), "an advantage above 0"


def test_off_policy_mask_keeps_ppos_clip() -> None:
    log_pi, log_mu = off_policy([[1.5, 0.5], [1.5, 1.0]])
    losses = off_policy_mask(log_pi, log_mu, ADVANTAGE, MASK)
    check(losses, log_pi, [[-2 * 1.2, -2 * 0.5], [1.5, 0.0]], [[0.0, -1.0], [1.5, 0.0]])


@pytest.mark.parametrize("name", sorted(TOKEN_LOSSES.keys() - {"oapl", "p3o", "r2vpo"}))  # these have a penalty as well
def test_a_group_without_a_signal_has_no_loss(name: str) -> None:
    log_pi, log_mu = off_policy([[1.5, 0.5], [1.5, 1.0]])
    assert not TOKEN_LOSSES[name](log_pi, log_mu, 0 * ADVANTAGE, MASK).any()


def test_m2po_masks_the_largest_until_the_mean_is_at_most_tau() -> None:
    log_mu = torch.zeros(1, 5)
    moved = torch.tensor([[0.1, 0.2, 0.5, -0.9, 0.3]])
    log_pi, mask = moved.clone().requires_grad_(), torch.ones(1, 5, dtype=torch.bool)
    advantage = torch.tensor([[1.0, 1.0, 1.0, 1.0, -1.0]])
    # harmful: the first three, moments 0.01, 0.04, 0.25; the mean of all is 0.1, that of the first two 0.025.
    # The fourth (A > 0, r < 1) and the fifth (A < 0, r > 1) move the good way.
    losses = m2po(log_pi, log_mu, advantage, mask, tau=0.04)
    expected = -moved.exp() * advantage * torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0]])
    torch.testing.assert_close(losses.detach(), expected)
    (gradient,) = torch.autograd.grad(losses.sum(), log_pi)
    torch.testing.assert_close(gradient, expected)  # d(r)/d(log pi) = r
    assert (m2po(log_pi, log_mu, advantage, mask, tau=0.11) != 0).all()
    assert (m2po(log_pi, log_mu, advantage, mask, tau=0.09) != 0).tolist() == [[True, True, False, True, True]]
    assert (m2po(log_pi, log_mu, advantage, mask, tau=0.005) != 0).tolist() == [[False, False, False, True, True]]


def test_m2po_counts_no_token_that_has_not_moved() -> None:
    losses = m2po(torch.tensor([[0.0, 0.3]]), torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2).bool(), tau=0.05)
    assert losses.tolist() == [[-1.0, 0.0]], "a mean with the first would be 0.045"


def test_bapo_moves_its_bounds_until_good_tokens_have_their_share() -> None:
    log_mu, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    log_pi = torch.tensor([[2.0, 0.7]]).log().requires_grad_()
    advantage = torch.tensor([[1.0, -1.0]])
    # Bounds 0.6 and 1.2: positive 1.2 against negative 0.7, a share of 0.63; 0.5 is reached at once.
    check_bapo(bapo(log_pi, log_mu, advantage, mask), log_pi, [-1.2, 0.7], [0.0, 0.7])
    # A share of 0.65 takes the lower bound all the way to 0.9 (which makes it worse), then the upper to 1.7.
    losses = bapo(log_pi, log_mu, advantage, mask, positive_share=0.65)
    check_bapo(losses, log_pi, [-1.7, 0.9], [0.0, 0.0])
    # Never reached: both bounds end at their ends, and the good token is no longer clipped.
    losses = bapo(log_pi, log_mu, advantage, mask, positive_share=0.9)
    check_bapo(losses, log_pi, [-2.0, 0.9], [-2.0, 0.0])


@pytest.mark.parametrize(
    ("ratios", "advantages", "expected"),
    [([2.0, 1.0], [1.0, -1.2], [-1.2, 1.2]), ([1.0, 0.3], [0.6, -1.0], [-0.6, 0.6])],
)
def test_bapo_leaves_its_bounds_where_good_tokens_have_their_share(
    ratios: list[float], advantages: list[float], expected: list[float]
) -> None:
    """The share is a half. A moved bound would change a loss: first the upper one, then the lower one."""
    losses = bapo(torch.tensor([ratios]).log(), torch.zeros(1, 2), torch.tensor([advantages]), torch.ones(1, 2))
    torch.testing.assert_close(losses, torch.tensor([expected]))


def check_bapo(losses: Tensor, log_pi: Tensor, value: list[float], gradient: list[float]) -> None:
    torch.testing.assert_close(losses.detach(), torch.tensor([value]))
    (got,) = torch.autograd.grad(losses.sum(), log_pi)
    torch.testing.assert_close(got, torch.tensor([gradient]))


def test_tba_is_the_squared_gap_to_the_groups_mean() -> None:
    log_pi = torch.tensor([[-1.0, -2.0], [-1.0, 9.0]], requires_grad=True)
    reference = torch.tensor([[-1.5, -2.0], [-2.0, 9.0]])
    losses = tba(log_pi, reference, torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.int64), MASK, beta=0.5)
    # log(pi/pi_ref) 0.5 and 1; minus R/beta: -1.5 and 1; their mean is -0.25
    torch.testing.assert_close(losses.detach(), torch.tensor([1.25**2, 1.25**2]))
    (gradient,) = torch.autograd.grad(losses.sum(), log_pi)
    torch.testing.assert_close(gradient, torch.tensor([[-2.5, -2.5], [2.5, 0.0]]))


def test_tba_at_the_reference_is_reinforce_with_the_mean_as_baseline() -> None:
    log_pi = torch.full((4, 2), -1.0, requires_grad=True)
    reward, group = torch.tensor([1.0, 0.0, 0.0, 3.0]), torch.tensor([0, 0, 0, 1])
    losses = tba(log_pi, log_pi.detach(), reward, group, torch.ones(4, 2), beta=0.1)
    (gradient,) = torch.autograd.grad(losses.sum(), log_pi)
    baseline = torch.tensor([1 / 3, 1 / 3, 1 / 3, 3.0])
    torch.testing.assert_close(gradient, (-2 / 0.1 * (reward - baseline))[:, None].expand(4, 2))


def test_tba_from_advantages_has_the_same_gradient() -> None:
    torch.manual_seed(0)
    log_pi, reference = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]]).bool()
    reward, group, beta = torch.tensor([1.0, 0.0, 0.3, 2.0]), torch.tensor([0, 0, 1, 1]), 0.2
    (expected,) = torch.autograd.grad(tba(log_pi, reference, reward, group, mask, beta=beta).sum(), log_pi)
    penalised = reward - beta * ((log_pi.detach() - reference) * mask).sum(dim=-1)
    advantage = penalised - torch.stack([penalised[group == g].mean() for g in group])
    losses = tba_tokens(log_pi, log_pi.detach(), advantage[:, None].expand(4, 3), mask, beta=beta)
    assert not losses[~mask.bool()].any(), "a masked token has no loss"
    (gradient,) = torch.autograd.grad(losses.sum(), log_pi)
    torch.testing.assert_close(gradient, expected)


def test_group_replay_draws_good_groups_and_forgets_the_oldest() -> None:
    replay: GroupReplay[str] = GroupReplay(seed=1, capacity=3, recent=0.5, temperature=0.1)
    assert replay.draw(2) == [None, None], "nothing to remember yet"
    assert replay.remember(["a", "b", "c"], [0.0, 1.0, 0.0]) == []
    drawn = replay.draw(1000)
    assert 450 < drawn.count(None) < 550
    assert drawn.count("b") > 450, "e^10 times as often as the others"
    assert replay.remember(["d", "e"], [0.0, 0.0]) == ["a", "b"]
    assert set(replay.draw(1000)) == {None, "c", "d", "e"}
    replay = GroupReplay(seed=1, recent=0.2)
    replay.remember(["a"], [1.0])
    assert 150 < replay.draw(1000).count(None) < 250


def test_oapl_has_the_gradient_of_the_regression() -> None:
    """(beta log w - A*)^2 / (2 beta) of whole responses, by autograd."""
    log_pi, log_mu = off_policy([[2.0, 3.0], [0.5, 1.0]])
    beta = 0.25
    log_weight = ((log_pi - log_mu) * MASK).sum(dim=-1)
    (wanted,) = torch.autograd.grad(((beta * log_weight - ADVANTAGE[:, 0]).square() / (2 * beta)).sum(), log_pi)
    losses = oapl(log_pi, log_mu, ADVANTAGE, MASK, beta=beta)
    (got,) = torch.autograd.grad(losses.sum(), log_pi)
    torch.testing.assert_close(got, wanted)
    # by hand: beta log w - A of each response, on each of its tokens
    first, second = beta * math.log(6) - 2, beta * math.log(0.5) + 1
    torch.testing.assert_close(got, torch.tensor([[first, first], [second, 0.0]]))


def test_oapl_stands_still_at_its_optimum() -> None:
    """pi = mu exp(A* / beta)."""
    log_mu = torch.full((2, 2), -1.0)
    log_pi = (log_mu + (ADVANTAGE / 0.5 / MASK.sum(dim=-1, keepdim=True)) * MASK).requires_grad_()
    (gradient,) = torch.autograd.grad(oapl(log_pi, log_mu, ADVANTAGE, MASK, beta=0.5).sum(), log_pi)
    torch.testing.assert_close(gradient, torch.zeros(2, 2))


def test_optimal_advantages_by_hand_and_at_both_ends() -> None:
    reward, group = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.5]), torch.tensor([0, 0, 0, 0, 1, 1])
    value = math.log((2 * math.e + 2) / 4)
    wanted = torch.tensor([1 - value, -value, -value, 1 - value, 0.0, 0.0])
    torch.testing.assert_close(optimal_advantages(reward, group), wanted)
    largest, mean = (optimal_advantages(reward.double(), group, beta).float() for beta in (1e-4, 1e6))
    torch.testing.assert_close(largest, torch.tensor([0.0, -1.0, -1.0, 0.0, 0.0, 0.0]), atol=1e-3, rtol=0)
    torch.testing.assert_close(mean, torch.tensor([0.5, -0.5, -0.5, 0.5, 0.0, 0.0]), atol=1e-3, rtol=0)
    assert optimal_advantages(torch.tensor([1e4]), torch.tensor([0])).item() == 0, "a group of one, no overflow"


def test_sat_contracts_the_bound_on_the_side_of_the_largest_log_ratios() -> None:
    """|d| of 0.02, 0.04, 0.05 and 0.1: the quantile 0.5 is the second, by the inverse of the distribution function."""
    distance, mask = torch.tensor([[0.02, -0.04, -0.05, 0.1]]), torch.ones(1, 4, dtype=torch.bool)
    above, below = contraction(distance, mask, 0.5)
    torch.testing.assert_close(above, torch.tensor([[1, 1, 1, 1 / (1 + 2.5**2)]]))
    torch.testing.assert_close(below, torch.tensor([[1, 1, 1 / (1 + 1.25**2), 1]]))
    for factor in contraction(distance, mask, 1.0):
        assert (factor == 1).all(), "no |d| is above the largest"


@pytest.mark.parametrize("distance", [torch.zeros(1, 4), torch.full((1, 4), 0.3), torch.tensor([[0.0, 0.0, 0.0, 0.5]])])
def test_sat_without_a_tail_is_ppos_clip(distance: Tensor) -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    for factor in (*contraction(distance, mask, 0.5), *contraction(distance, ~mask, 0.5)):
        assert (factor == 1).all()


def test_sat_cuts_an_outward_gradient_off_earlier_and_keeps_the_way_back() -> None:
    """Ratio 1.1 with |d| twice the quantile: the upper bound is 1 + 0.2 / 5."""
    log_mu = torch.full((1, 4), -1.0)
    small = math.log(1.1) / 2
    log_pi = (log_mu + torch.tensor([[small, small, -small, 2 * small]])).requires_grad_()
    mask = torch.ones(1, 4, dtype=torch.bool)
    for advantage, last in ((1.0, 0.0), (-1.0, 1.1)):
        losses = sat(log_pi, log_mu, torch.full((1, 4), advantage), mask, quantile=0.75)
        (gradient,) = torch.autograd.grad(losses.sum(), log_pi)
        assert gradient[0, 3].item() == pytest.approx(last), "outward: cut off; back to 1: r A"
        assert gradient[0, :3].abs().min() > 0.9
    assert sat(log_pi, log_mu, torch.ones(1, 4), mask, quantile=0.75)[0, 3].item() == pytest.approx(-1.04)


def test_sat_contracts_the_bound_below_one_too() -> None:
    """Ratio 1 / 1.1 with |d| twice the quantile: the lower bound is 1 - 0.2 / 5."""
    small = math.log(1.1) / 2
    log_mu, mask = torch.full((1, 4), -1.0), torch.ones(1, 4, dtype=torch.bool)
    log_pi = log_mu + torch.tensor([[small, small, -small, -2 * small]])
    assert sat(log_pi, log_mu, -torch.ones(1, 4), mask, quantile=0.75)[0, 3].item() == pytest.approx(0.96)
    assert sat(log_pi, log_mu, torch.ones(1, 4), mask, quantile=0.75)[0, 3].item() == pytest.approx(-1 / 1.1)


def test_sat_with_a_quantile_of_zero_takes_the_smallest() -> None:
    above, _ = contraction(torch.tensor([[0.2, 0.1, 0.4]]), torch.ones(1, 3, dtype=torch.bool), 0.0)
    torch.testing.assert_close(above, torch.tensor([[1 / 5, 1.0, 1 / 17]]))


def test_the_positive_share_of_small_advantages() -> None:
    advantage, ones, mask = torch.tensor([[0.1, -0.3, 5.0]]), torch.ones(1, 3), torch.tensor([[1, 1, 0]])
    assert _positive_share(ones, advantage, mask, 0.8, 1.2) == pytest.approx(0.25), "a masked token has no part"


def test_p3o_caps_the_ratios_by_their_ess_and_holds_the_rest_back() -> None:
    """The ratios 2, 0.5 and 1 of the three tokens: rho = 3.5^2 / 5.25 / 3; with a ratio of e^-15, its bound."""
    log_pi, log_mu = off_policy([[2.0, 0.5], [1.0, 9.0]])
    rho = 3.5**2 / 5.25 / 3
    value, slope = [[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]
    for row, column, ratio, advantage in ((0, 0, 2.0, 2.0), (0, 1, 0.5, 2.0), (1, 0, 1.0, -1.0)):
        kl, weight = math.log(ratio) + 1 / ratio - 1, min(ratio, rho)
        value[row][column] = -weight * advantage * log_pi[row, column].item() + (1 - rho) * kl
        slope[row][column] = -weight * advantage + (1 - rho) * (1 - 1 / ratio)
    check(p3o(log_pi, log_mu, ADVANTAGE, MASK), log_pi, value, slope)
    lost = torch.tensor([[-16.0, -1.0], [-1.0, -1.0]], requires_grad=True)
    got = p3o(lost, log_mu, 0 * ADVANTAGE, MASK)[0, 0].item()
    assert got == pytest.approx((1 - 2 / 3) * (-15 + math.exp(10) - 1), rel=1e-5)


def test_r2vpo_lowers_the_advantage_by_the_distance_from_1() -> None:
    log_pi, log_mu = off_policy([[2.0, 0.5], [1.5, 1.0]])
    value = [[-(2 * 2 - 0.25 * 1), -(0.5 * 2 - 0.25 * 0.25)], [-(-1.5 - 0.25 * 0.25), 0.0]]
    slope = [[-2 * (2 - 0.5), -0.5 * (2 + 0.25)], [-1.5 * (-1 - 0.25), 0.0]]  # -r (A - 2 multiplier (r - 1))
    check(r2vpo(log_pi, log_mu, ADVANTAGE, MASK, multiplier=0.25), log_pi, value, slope)
