"""Every split of the GPUs and every lag, simulated: what each costs, what limits it, what one GPU more would gain."""

import math
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from lab.planner.rates import DRIVER_S, Layout, PlanError, Rates
from lab.planner.simulation import SimulatedStep, Simulation

_ALL_SPLITS, _SOME_SPLITS, _FINER = 32, 10, 4
"""Up to so many splits all are simulated; otherwise some, evenly spaced, and a few more around the cheapest."""
_RESPONSES, _RESPONSES_OF_ONE = 1_500_000, 120_000
"""Responses that a plan, and one forecast of it, simulate at most. Above, a fraction of the samplers stands for all."""
_MEASURED, _FEWEST_PROMPTS = 16, 16
NEARLY = 1.1
"""So many times the cheapest row's GPU hours are hardly more: forecasts are not more exact (docs/guide/sizing.md)."""
_IDLE, _HARDLY, _MOSTLY = 0.1, 0.01, 0.5


@dataclass(frozen=True)
class Forecast:
    """Of one split and lag."""

    trainer_gpus: int
    sampler_gpus: int
    lag: float
    step_s: float
    gpu_hours: float
    """Until the last step, all GPUs, with the start."""
    trainer_idle: float
    """Share of the time that the trainer waits for rollouts."""
    sampler_idle: float
    """Share of the time that a sampler has no request."""
    lag_mean: float
    lag_p95: float
    lag_max: int
    deadline_wait_s: float
    """Of a step, in which enough prompts were finished, but others were due."""
    running: float
    """Requests that run at a time, of one sampler."""
    cores_full: float
    """Share of the time that more was asked of shared cores than there is."""
    binds: str
    """What limits the speed."""
    pareto: bool = False
    """No other row has fewer GPU hours and less lag."""
    trainer_gain: float | None = None
    """Share by which a step is shorter with one GPU more for the trainer; None: not computed."""
    sampler_gain: float | None = None


@dataclass(frozen=True)
class Plan:
    """The answer."""

    source: str
    assumptions: list[str]
    fits: dict[str, float]
    gpus: int
    steps: int
    responses: int
    """Of a step."""
    rows: list[Forecast] = field(default_factory=list)

    @property
    def advised(self) -> Forecast:
        """The least lag among the rows that cost hardly more than the cheapest. It is of the Pareto front."""
        enough = NEARLY * min(row.gpu_hours for row in self.rows)
        return min((row for row in self.rows if row.gpu_hours <= enough), key=lambda row: (row.lag_mean, row.gpu_hours))

    def as_json(self) -> dict[str, object]:
        """For one JSON line."""
        return asdict(self) | {"advised": asdict(self.advised)}


def splits(rates: Rates, gpus: int) -> list[tuple[int, int]]:
    """(trainer, samplers), every way in which the GPUs can be split.

    Raises:
        PlanError: the GPUs do not suffice for one replica of the trainer's model and one sampler.
    """
    unit, one = rates.trainer.unit, rates.sampler.gpus
    found = [(t, (gpus - t) // one * one) for t in range(unit, gpus, unit) if gpus - t >= one]
    if not found:
        raise PlanError(
            f"--gpus {gpus}: nothing fits: the trainer's model takes {unit}, a sampler {one}; give {unit + one} or more"
        )
    return found


def spaced(found: list[tuple[int, int]], first: int, last: int, count: int) -> list[tuple[int, int]]:
    """`count` of the splits from the `first` to the `last`, evenly spaced."""
    return [found[i] for i in dict.fromkeys(np.linspace(first, last, count).round().astype(int).tolist())]


def plan(rates: Rates, gpus: int, lags: list[float], steps: int, only: tuple[int, int] | None = None) -> Plan:
    """Forecasts of all splits and lags, and what more GPUs would gain at the best of them.

    Args:
        rates: of a calibration.
        gpus: of trainer and samplers together.
        lags: values of `async.lag`.
        steps: of the run.
        only: one split, in place of all.
    """
    found = [only] if only else splits(rates, gpus)
    chosen = found if len(found) <= _ALL_SPLITS else spaced(found, 0, len(found) - 1, _SOME_SPLITS)
    budget = min(_RESPONSES_OF_ONE, _RESPONSES // (len(chosen) * len(lags)))

    def forecasts(splits: list[tuple[int, int]]) -> list[Forecast]:
        return [forecast(rates, Layout(*split, lag), steps, budget) for split in splits for lag in lags]

    rows = forecasts(chosen)
    if len(chosen) < len(found):
        cheapest = min(rows, key=lambda row: row.gpu_hours).trainer_gpus
        at = [split[0] for split in chosen].index(cheapest)
        first, last = (found.index(chosen[i]) for i in (max(0, at - 1), min(len(chosen) - 1, at + 1)))
        finer = spaced(found, first, last, _FINER + 2)
        rows = sorted(rows + forecasts([split for split in finer if split not in chosen]), key=_order)
    rows = marked(rows)
    rows = [with_gains(rates, row, steps, budget) if row.pareto else row for row in rows]
    work = rates.workload
    return Plan(rates.source, rates.assumptions, rates.fits, gpus, steps, work.responses, rows)


def _order(row: Forecast) -> tuple[int, float]:
    return row.trainer_gpus, row.lag


def forecast(
    rates: Rates, layout: Layout, steps: int, budget: int = _RESPONSES_OF_ONE, fewest: int = _MEASURED
) -> Forecast:
    """One split and lag, of `budget` responses at most, as far as a fraction of the samplers can stand for all.

    Args:
        fewest: steps that are averaged, if the lag is not larger.
    """
    warm_up = 2 * (layout.bound + 1)
    simulated = warm_up + max(fewest, layout.bound)
    work, samplers = rates.workload, layout.sampler_gpus // rates.sampler.gpus
    wanted = budget / (work.responses * simulated)
    share = min(1.0, max(wanted, 1 / max(samplers, 1), min(1.0, _FEWEST_PROMPTS / work.prompts)))
    took = Simulation(rates, layout, share=share).run(simulated)
    return summary(rates, layout, took, warm_up, steps)


def summary(rates: Rates, layout: Layout, took: list[SimulatedStep], warm_up: int, steps: int) -> Forecast:
    """Means over the steps after the warm-up; the cost of all `steps`."""
    kept = took[warm_up:]
    step_s, lags = mean([s.seconds for s in kept]), np.concatenate([s.lags for s in kept])
    first = sum(s.seconds for s in took[:steps])
    seconds = rates.start_s + first + step_s * max(0, steps - len(took))
    found = Forecast(
        layout.trainer_gpus,
        layout.sampler_gpus,
        layout.lag,
        step_s,
        gpu_hours=seconds / 3600 * layout.gpus,
        trainer_idle=sum(s.wait_s for s in kept) / sum(s.seconds for s in kept),
        sampler_idle=sum(s.sampler_idle * s.seconds for s in kept) / sum(s.seconds for s in kept),
        lag_mean=float(np.mean(lags)),
        lag_p95=float(np.percentile(lags, 95)),
        lag_max=int(np.max(lags)),
        deadline_wait_s=mean([s.deadline_wait_s for s in kept]),
        running=mean([s.running for s in kept]),
        cores_full=sum(s.cores_full_s for s in kept) / sum(s.seconds for s in kept),
        binds="",
    )
    return replace(found, binds=limit(rates, found))


def mean(values: list[float]) -> float:
    """The arithmetic mean."""
    return math.fsum(values) / len(values)


def limit(rates: Rates, row: Forecast) -> str:
    """What limits the speed of a row, in a few words."""
    driver_s = DRIVER_S * rates.workload.responses
    if driver_s > 0.5 * row.step_s:
        return f"the driver: {driver_s:.1f} s a step"
    if row.cores_full > _MOSTLY:
        return "the cores, which all parts share"
    if row.trainer_idle < _HARDLY:
        return "the trainer"
    rest = _awaited(rates, row)
    return f"the trainer; besides, {rest}" if row.trainer_idle < _IDLE else rest


def _awaited(rates: Rates, row: Forecast) -> str:
    """What the trainer waits for."""
    if row.lag == 0:
        return "lag 0: one side waits for the other"
    if row.sampler_idle < _IDLE:
        full = row.running > 0.9 * rates.sampler.slots
        return "the samplers, all slots taken" if full else "the samplers, with slots left: long responses, or the lag"
    if row.deadline_wait_s > min(_IDLE, row.trainer_idle / 2) * row.step_s:
        return "stragglers that are due"
    return "the lag: both sides wait"


def marked(rows: list[Forecast]) -> list[Forecast]:
    """With the Pareto front of GPU hours against mean lag marked."""
    front, least = set(), math.inf
    for row in sorted(rows, key=lambda row: (row.gpu_hours, row.lag_mean)):
        if row.lag_mean < least:
            front.add(id(row))
            least = row.lag_mean
    return [replace(row, pareto=id(row) in front) for row in rows]


def with_gains(rates: Rates, row: Forecast, steps: int, budget: int) -> Forecast:
    """With what one GPU more on either side gains: of a whole replica or sampler more, divided by its GPUs."""

    def gain(trainer: int, samplers: int) -> float:
        layout = Layout(row.trainer_gpus + trainer, row.sampler_gpus + samplers, row.lag)
        return max(0.0, 1 - forecast(rates, layout, steps, budget).step_s / row.step_s) / (trainer + samplers)

    return replace(row, trainer_gain=gain(rates.trainer.unit, 0), sampler_gain=gain(0, rates.sampler.gpus))
