"""Which rate a method gets at a lag, and what it is compared with: on curves made by hand."""

from collections.abc import Iterable

import pandas as pd
import pytest

from lab.stability.cells import Cell, summarise
from lab.stability.contrasts import (
    BEST,
    COLLAPSED,
    RATES,
    SAME,
    collapses,
    contrasts,
    corrected,
    standings,
)
from lab.stability.inference import holm, paired
from lab.stability.tuning import choose, chosen_cells
from lab.tests.stability.curves import curve

Flat = tuple[str, int, float, int, float]
"""Method, lag, learning rate, seed, and the accuracy of every evaluation but the first."""


def cells(runs: Iterable[Flat]) -> list[Cell]:
    made = [curve([0.2, *[a] * 15], method=m, lag=k, lr=lr, seed=s) for m, k, lr, s, a in runs]
    return summarise(pd.concat(made, ignore_index=True), 150)


def at(method: str, lag: int, lr: float, *accuracies: float) -> list[Flat]:
    return [(method, lag, lr, seed, accuracy) for seed, accuracy in enumerate(accuracies, 1)]


def test_the_chosen_rate_is_the_smallest_as_good_as_the_best_but_for_chance() -> None:
    noisy = {1e-4: [0.50, 0.52], 3e-4: [0.47, 0.57], 1e-3: [0.0, 0.1]}  # 3e-4: 0.01 better, by chance
    clear = {1e-4: [0.30, 0.32], 3e-4: [0.48, 0.52], 1e-3: [0.0, 0.1]}
    assert choose({"noisy": noisy, "clear": clear}) == {"noisy": 1e-4, "clear": 3e-4}
    assert choose({"one seed": {1e-4: [0.5], 3e-4: [0.51]}}) == {"one seed": 3e-4}
    assert choose({"equal": {1e-4: [0.5], 3e-4: [0.5]}}) == {"equal": 1e-4}
    assert choose({"two rates": clear, "one rate": {1e-3: [0.4, 0.5]}})["one rate"] == 1e-3


def test_a_contrast_is_of_the_mean_over_a_group_of_lags() -> None:
    runs = [
        *at("vcpo_ess", 8, 1e-4, 0.9, 0.9, 0.9),  # of another group
        *at("vcpo_ess", 64, 1e-4, 0.40, 0.42, 0.44),
        *at("vcpo_ess", 128, 1e-4, 0.44, 0.42, 0.43),
        *at("none", 64, 1e-4, 0.10, 0.12, 0.05, 0.7),
        *at("none", 128, 1e-4, 0.05, 0.04, 0.03),
        *at("tis_seq", 64, 1e-4, 0.41, 0.42, 0.45),
        *at("tis_seq", 128, 1e-4, 0.44, 0.41, 0.43),
        *at("ppo", 64, 1e-4, 0.3, 0.3, 0.3),  # not run at lag 128
    ]
    made = cells(runs)
    rows = {row.method: row for row in standings(made, [64, 128])}
    assert list(rows) == ["tis_seq", "vcpo_ess", "none"], "the best first"
    reference, none = [0.42, 0.42, 0.435], [0.075, 0.08, 0.04]
    assert list(rows["vcpo_ess"].by_seed.values()) == pytest.approx(reference)
    assert list(rows["none"].by_seed.values()) == pytest.approx(none), "seed 4 was not run at lag 128"
    found = {one.method: one for one in corrected(contrasts(made, made)) if list(one.lags) == [64, 128]}
    assert set(found) == {"tis_seq", "none"} and {one.seeds for one in found.values()} == {3}
    assert vars(found["none"].difference) == pytest.approx(vars(paired(none, reference)))
    p = [found[method].difference.p for method in ("none", "tis_seq")]
    assert [found[method].corrected for method in ("none", "tis_seq")] == pytest.approx(holm(p))
    assert {method: one.verdict for method, one in found.items()} == {"none": "worse", "tis_seq": SAME}
    assert 0 < found["none"].visible < 0.1 and found["none"].compared == BEST


def test_rates_with_more_seeds_are_compared_by_themselves() -> None:
    """Methods that have all those seeds, over all those rates."""
    more = {"vcpo_ess": (0.4, 0.42, 0.44, 0.46), "topr": (0.41, 0.44, 0.46, 0.47)}
    runs = [run for name, of in more.items() for lr in (1e-4, 3e-4) for run in at(name, 64, lr, *of)]
    runs += [run for name in (*more, "vcpo") for run in at(name, 64, 3e-5, 0.4, 0.41)]
    runs += [run for lr in (1e-4, 3e-4) for run in at("vcpo", 64, lr, 0.4, 0.41)]
    made = cells(runs)
    (found,) = (one for one in contrasts(made, chosen_cells(made)) if one.compared == RATES)
    assert (found.method, found.against, found.seeds) == ("topr", "vcpo_ess", 4)
    assert found.difference.mean == pytest.approx(0.015)


def test_collapses_are_compared_over_all_tasks() -> None:
    one = cells([*at("vcpo_ess", 8, 1e-4, *[0.4] * 6), *at("none", 8, 1e-4, *[0.0] * 6), *at("oapl", 8, 1e-4, 0.0)])
    other = cells([*at("vcpo_ess", 8, 1e-4, 0.4), *at("none", 8, 1e-4, 0.4)])
    (found,) = collapses([one, other])
    assert (found.method, found.compared) == ("none", COLLAPSED), "oapl was run on one task only"
    assert found.difference.mean == pytest.approx(6 / 7)
    assert corrected([found])[0].verdict == "worse", "more of them is worse"
