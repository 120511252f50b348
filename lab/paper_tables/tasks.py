"""The paper's results, and what stands beside each of them here: tasks, methods, lags and lengths of the runs."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lab.stability import preset

SYNCHRONOUS, VCPO, NONE = "synchronous", "vcpo_capped", "none"
"""The methods that are run: the paper's reference, the default, and stale rollouts without a correction."""
BEFORE = "before RL"
LEARNING_RATE = 2e-4
"""Of all methods, lags and tasks: the quickstart's, and that of the presets sums and calculate. No method is tuned."""


class Published(NamedTuple):
    """A row of the paper's tables (arXiv 2602.17616): accuracy in %, optimizer steps, GPU hours."""

    name: str
    accuracy: float
    steps: int = 0
    hours: float = 0.0


def _rows(before: float, *of_methods: Published) -> dict[str, Published]:
    return {BEFORE: Published(BEFORE, before)} | dict(zip((SYNCHRONOUS, VCPO), of_methods, strict=True))


PAPER = {
    "Countdown": _rows(1.6, Published(SYNCHRONOUS, 38.4, 400, 143.2), Published("VCPO, lag 10", 41.9, 400, 89.6)),
    "MATH-500": _rows(40.2, Published(SYNCHRONOUS, 72.0, 400, 134.4), Published("VCPO, lag 10", 71.6, 400, 92.8)),
    "AIME 2025": _rows(5.3, Published(SYNCHRONOUS, 26.7, 300, 420.2), Published("VCPO, lag 2", 27.8, 220, 168.9)),
}
"""The paper's rows by task; speed-ups are quotients of the hours."""


class Case(NamedTuple):
    """A method at a lag."""

    method: str
    lag: int

    @property
    def settings(self) -> list[str]:
        """Settings of the trainer. Synchronous: as the launch scripts', VCPO's estimator without its two controls."""
        if self.method == SYNCHRONOUS:
            return ["method=vcpo", "async.lag=0", "vcpo.step_size_rule=none", "vcpo.baseline=mean"]
        return [f"method={self.method}", f"async.lag={self.lag}"]


@dataclass(frozen=True)
class Task:
    """What the runs of one table are made on."""

    name: str
    paper: str
    """The paper's task, a key of `PAPER`; empty: it stands beside no row of the paper."""
    settings: tuple[str, ...]
    """Settings of the trainer that all runs share."""
    cases: tuple[Case, ...]
    """The first two are those of `--quick`: synchronous, and VCPO at the lag that stands beside the paper's."""
    steps: int
    quick_steps: int
    test_freq: int
    """Above the largest lag: after each evaluation some steps are needed that the evaluation did not help."""
    prepare: Callable[[], None]
    """Makes data and first policy, or raises ValueError that says how to get them."""
    seeds: tuple[int, ...] = (1, 2, 3)
    sandbox: bool = False
    """Whether runs need a server of the code sandbox."""


def _cases(*lags: int) -> tuple[Case, ...]:
    return (Case(SYNCHRONOUS, 0), *(Case(method, lag) for lag in lags for method in (VCPO, NONE)))


def _prepare_sums(model: Path = Path("models/smollm2-135m")) -> None:
    if not model.is_dir() or importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError(f"sums: needs {model} and reasoning-gym; `bash scripts/smollm2.sh` gets both")


_CALCULATE = preset.BenchTask(
    preset="calculate",
    data=Path("data/calculate"),
    model=Path("models/calculate"),
    rows=("calculate",),
    lesson=("--layers", "2", "--heads", "2", "--steps", "600", "--samples", "2"),
)


def _tools(name: str, paper: str, latency_s: float) -> Task:
    return Task(
        name=name,
        paper=paper,
        settings=("+task=calculate", f"tool_use.latency_median_s={latency_s:g}", "data.val_max_samples=256"),
        cases=_cases(2, 8),
        steps=40,
        quick_steps=20,
        test_freq=10,
        prepare=lambda: preset.prepare(_CALCULATE, new_policy=True),
        sandbox=True,
    )


_TWO_TERMS = "min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2"
"""Of SmolLM2's most likely answers 32 % are right, of drawn ones 5 %. With three terms (11 and 3 %) most steps of 32
responses had no right answer, and 18 such steps learned nothing."""
TASKS = {
    task.name: task
    for task in (
        Task(
            name="countdown",
            paper="Countdown",
            settings=("+task=countdown_lag", "async.exact_lag=false", "data.train_batch_size=16"),
            cases=_cases(10),
            steps=120,
            quick_steps=40,
            test_freq=20,
            prepare=lambda: preset.prepare(preset.TASKS["countdown"]),
            seeds=(1, 2, 3, 4, 5),
        ),
        Task(
            name="sums",
            paper="MATH-500",
            settings=(
                "+task=sums",
                "reasoning_gym.val=256",
                f"reasoning_gym.difficulty={{chain_sum: {{{_TWO_TERMS}}}}}",
                # the most likely answers, which sharpening alone does not change
                "actor_rollout_ref.rollout.val_kwargs.temperature=0",
            ),
            cases=_cases(4),
            steps=24,
            quick_steps=12,
            test_freq=6,
            prepare=_prepare_sums,
        ),
        _tools("tools", paper="AIME 2025", latency_s=1.0),
        _tools("tools_at_once", paper="", latency_s=0.0),
    )
}
"""By name, in the order of the paper's tables."""

QUICK = ("countdown", "tools")
"""The tasks of `--quick`: their first policies are made here, in minutes."""


class PlannedRun(NamedTuple):
    """One run of a table."""

    task: Task
    case: Case
    seed: int
    quick: bool

    @property
    def name(self) -> str:
        return f"{self.task.name}/{self.case.method}-lag{self.case.lag}-seed{self.seed}"

    @property
    def steps(self) -> int:
        return self.task.quick_steps if self.quick else self.task.steps

    @property
    def settings(self) -> list[str]:
        """Hydra overrides of `recipe.fully_async_policy.main`, without the run's folder."""
        return [
            *self.task.settings,
            *self.case.settings,
            *(["tool_use.drop_void_turns=false"] if self.task.sandbox and self.case.method == NONE else []),
            f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE:g}",
            f"data.seed={self.seed}",
            f"trainer.total_training_steps={self.steps}",
            f"trainer.test_freq={self.task.test_freq}",
            *("trainer.save_freq=-1", "save_model=false"),
        ]


def planned(names: Sequence[str], quick: bool, seeds: Sequence[int] | None) -> list[PlannedRun]:
    """Return the runs of these tasks in the order in which they are made: all cases with one seed, then the next.

    Args:
        seeds: None: each task's own, with `quick` the first of them.
    """
    tasks = [task for name, task in TASKS.items() if name in names]
    of = {task.name: seeds or task.seeds[: 1 if quick else None] for task in tasks}
    every = sorted({seed for found in of.values() for seed in found})
    return [
        PlannedRun(task, case, seed, quick)
        for seed in every
        for task in tasks
        for case in task.cases[: 2 if quick else None]
        if seed in of[task.name]
    ]
