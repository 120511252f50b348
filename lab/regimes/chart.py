"""The regimes as a table and a figure: which methods keep up in which, paired by seed and corrected for all tests."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from lab.simulator.arithmetic import KINDS, Arithmetic
from lab.simulator.grid import LAG_PART
from lab.stability.contrasts import visible
from lab.stability.figures import new_figure, save
from lab.stability.inference import LEVEL, Difference, holm, interval, paired
from lab.stability.tables import Table

METHODS = {"none": "none", "tis_seq": "tis_seq", "vcpo": "vcpo", LAG_PART: "lag part"}
"""Names as they are shown; the last is `method=vcpo vcpo.ess_part=lag`."""
BEHIND = 0.02
"""A method that keeps up is no more behind the best."""


@dataclass(frozen=True)
class Regime:
    """A lag, and what sampler and trainer differ by."""

    lag: int
    rms: float
    tokens: int
    kind: str
    of: dict[str, dict[int, float]]
    """Accuracy after step k, by method and seed."""
    collapsed: dict[str, int]
    """Runs that collapsed, by method."""
    told: float = math.nan
    """The mean factor of the learning rate, by the lag's part."""
    right: float = math.nan
    """What that factor would be if arithmetic were exact."""

    @property
    def fresh_ess_ratio(self) -> str:
        """The ESS ratio of fresh responses in a large batch."""
        ratio = math.exp(-Arithmetic(self.rms, self.tokens).variance)
        return f"{ratio:.2g}" if ratio >= 0.001 else "< 0.001"

    @property
    def best(self) -> str:
        return max(self.of, key=lambda method: statistics.mean(self.of[method].values()))

    def behind(self, method: str) -> list[float]:
        """The best method's accuracy less this one's, at each seed that both have."""
        best = self.of[self.best]
        return [best[seed] - accuracy for seed, accuracy in self.of[method].items() if seed in best]


def regimes(runs: pd.DataFrame) -> list[Regime]:
    """By lag, from exact arithmetic on; the kinds that are not normal last.

    A method without weights has the runs of exact arithmetic everywhere. There, VCPO by the lag's part has VCPO's.
    """
    of_cell = dict(iter(runs.groupby(["lag", "rms", "tokens", "kind", "method"])))
    found = []
    places = {place[:4] for place in of_cell}
    for lag, rms, tokens, kind in sorted(places, key=_order):
        of, collapsed = dict[str, dict[int, float]](), dict[str, int]()
        for method in METHODS:
            exact = method == "none" or rms == 0
            made = "vcpo" if method == LAG_PART and exact else method
            rows = of_cell.get((lag, *((0.0, 0, KINDS[0]) if exact else (rms, tokens, kind)), made))
            if rows is not None:
                of[method] = dict(zip(rows["seed"], rows["accuracy"], strict=True))
                collapsed[method] = int(rows["collapsed"].notna().sum())
        of_lag = of_cell.get((lag, rms, tokens, kind, LAG_PART), runs[:0])
        factors = of_lag["lr_multiplier"].mean(), of_lag["right"].mean()
        found.append(Regime(lag, rms, tokens, kind, of, collapsed, *factors))
    return found


def _order(place: tuple[int, float, int, str]) -> tuple[int, int, float]:
    """By lag; exact arithmetic first, then by the spread of the weights, and the other kinds last."""
    lag, rms, tokens, kind = place
    return lag, KINDS.index(kind), Arithmetic(rms, tokens).variance


@dataclass(frozen=True)
class Judged:
    """A method in a regime, against the best method there."""

    regime: Regime
    method: str
    behind: Difference
    visible: float
    """The difference that the test sees with a power of 80 %; NaN where there is no test."""
    corrected: float = math.nan

    @property
    def keeps_up(self) -> bool:
        """At most `BEHIND` behind, and not significantly different from the best after Holm's correction."""
        return self.behind.mean <= BEHIND and not self.corrected < 1 - LEVEL


def judged(found: Sequence[Regime]) -> list[Judged]:
    """Every method in every regime; p is corrected for the number of all tests."""
    tests = []
    for regime in found:
        for method in regime.of:
            behind = regime.behind(method)
            none = [0.0] * len(behind)
            tests.append(Judged(regime, method, paired(behind, none), visible(behind, none)))
    return [replace(test, corrected=p) for test, p in zip(tests, holm([test.behind.p for test in tests]), strict=True)]


def chart(runs: pd.DataFrame) -> list[Table]:
    """Accuracy in each regime and who keeps up, the factors of the learning rate, and the power of the tests."""
    found = regimes(runs)
    tests = judged(found)
    lines = []
    for regime in found:
        of = {test.method: test for test in tests if test.regime is regime}
        cells = (_cell(regime, method) for method in METHODS)
        up = ", ".join(METHODS[method] for method in METHODS if method in of and of[method].keeps_up)
        lines.append([str(regime.lag), _place(regime), regime.fresh_ess_ratio, *cells, up])
    columns = ["lag", "RMS at tokens", "ESS ratio, fresh", *METHODS.values(), "keep up"]
    factors = [
        [
            str(regime.lag),
            _place(regime),
            *(f"{x:.2f}" for x in (regime.right, regime.told, regime.told / regime.right)),
        ]
        for regime in found
        if not math.isnan(regime.right)
    ]
    seen = sorted(test.visible for test in tests if not math.isnan(test.visible))
    power = [f"{100 * value:.1f}" for value in (seen[0], statistics.median(seen), seen[-1])] if seen else ["-"] * 3
    return [
        Table("Accuracy after step k, %, and the runs that collapsed", columns, lines),
        Table(
            "Factor of the learning rate by the lag's part, and the right one: means over steps and seeds",
            ["lag", "RMS at tokens", "right", "told", "told / right"],
            factors,
        ),
        Table(
            "Paired tests against the best method of a regime",
            ["tests", "seeds", "points seen with a power of 80 %: least", "in the middle", "most"],
            [[str(len(seen)), str(runs["seed"].nunique()), *power]],
        ),
    ]


def _cell(regime: Regime, method: str) -> str:
    if method not in regime.of:
        return "-"
    mean, lost = 100 * statistics.mean(regime.of[method].values()), regime.collapsed[method]
    return f"{mean:.1f}" + (f", {lost} of {len(regime.of[method])} collapsed" if lost else "")


def draw(runs: pd.DataFrame, file: Path) -> Path:
    """A panel per lag: each method's mean accuracy and its 95 % interval, from exact arithmetic on."""
    found = regimes(runs)
    lags = sorted({regime.lag for regime in found})
    figure, axes = new_figure(1, len(lags), sharey=True, figsize=(5.2 * len(lags), 4.8))
    for axis, lag in zip(axes[0], lags, strict=True):
        at = [regime for regime in found if regime.lag == lag]
        for number, (method, label) in enumerate(METHODS.items()):
            there = [i for i, regime in enumerate(at) if method in regime.of]
            values = [[100 * value for value in at[i].of[method].values()] for i in there]
            means, reach = [statistics.mean(of) for of in values], [interval(of) for of in values]
            places = [i + 0.08 * (number - 1.5) for i in there]
            axis.errorbar(places, means, reach, label=label, marker="o", linewidth=0, elinewidth=1.2)
        names = [f"{_place(regime)}\nESS {regime.fresh_ess_ratio}" for regime in at]
        axis.set_xticks(range(len(at)), [name.replace(" at ", "\nat ").replace(", ", "\n") for name in names])
        axis.set_title(f"lag {lag}", loc="left")
    figure.supxlabel("per-token RMS at tokens of a response; ESS ratio of fresh ones")
    axes[0, 0].set_ylabel("held-out accuracy after step k, %")
    axes[0, 0].legend(frameon=False, fontsize="small", loc="lower left")
    return save(figure, file)


def _place(regime: Regime) -> str:
    kind = f", {regime.kind}" if regime.kind != KINDS[0] else ""
    return f"{regime.rms:g} at {regime.tokens:,}{kind}" if regime.rms else "exact"
