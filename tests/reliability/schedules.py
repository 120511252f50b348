"""The control loop under thousands of random schedules: `python -m tests.reliability.schedules --n 100000 [--json]`.

The real feeding code and the real replay buffer run over a simulated clock, samplers and trainer, without a model.
Random are: lags, batch sizes, samples per prompt, response lengths with stragglers, failures that are retried, rows
that always fail and are skipped, sampler capacities, weight-sync delays, data that ends; and runs that end and go on
from a checkpoint, half of them with another lag and batch size. After every schedule: no trajectory trained on was
older than its bound, no prompt was lost, trained twice, or skipped and trained, nothing deadlocked.
"""

import json
import random
import sys
from dataclasses import dataclass

from tqdm import tqdm

from recipe.command_line import OneLineParser, run_command, whole_number
from verl_vcpo.loop.prompts.deadlines import OnDeadline


@dataclass(frozen=True)
class Resume:
    """A run that ends at some step, and goes on from an earlier step's checkpoint, perhaps with other settings."""

    save_freq: int
    """The number of steps between checkpoints."""
    crash_step: int
    """The step that is not completed, after the first checkpoint."""
    lag: float
    batch_size: int


@dataclass(frozen=True)
class Schedule:
    """The random choices of a run."""

    seed: int
    lag: float
    on_deadline: OnDeadline
    exact: bool
    batch_size: int
    steps: int
    capacity: int
    """The number of prompts that the samplers work on at a time."""
    straggler: float
    """The share of responses that take 30 times as long."""
    failure: float
    """The probability that a response fails."""
    sync_s: float
    samples: int
    """The number of responses to each prompt."""
    rows: int
    """The number of rows of the data, and so of the prompts of an epoch."""
    resume: Resume | None
    bad: int
    """Every so many rows one always fails, by its first response; 0: none."""

    @staticmethod
    def draw(seed: int) -> "Schedule":
        rng = random.Random(seed)
        exact = rng.random() < 0.15
        lag = rng.choice([0, 1, 2, 3, 5, 8, 16]) if exact or rng.random() < 0.7 else round(rng.uniform(0, 5), 1)
        reissue = not exact and lag > 0 and rng.random() < 0.4
        batch_size, steps = rng.randint(1, 4), rng.randint(3, 10)
        resume = None
        if rng.random() < 0.4:
            at = rng.randint(1, steps - 1)
            other = rng.random() < 0.5
            resume = Resume(
                save_freq=at,
                crash_step=rng.randint(at + 1, steps),
                lag=rng.choice([1 if reissue else 0, 1, 2, 4, 8]) if other else lag,
                batch_size=rng.randint(1, 4) if other else batch_size,
            )
        return Schedule(
            seed=seed,
            lag=lag,
            on_deadline=OnDeadline.REISSUE if reissue else OnDeadline.WAIT,
            exact=exact,
            batch_size=batch_size,
            steps=steps,
            capacity=rng.choice([1, 2, 4, 16, 1000]),
            straggler=rng.choice([0.0, 0.05, 0.3]),
            failure=rng.choice([0.0, 0.0, 0.1, 0.4]),
            sync_s=rng.choice([0.0, 0.1, 3.0]),
            samples=rng.choice([1, 1, 3]),
            rows=rng.choice([5, 12, 40, 10000]),
            resume=resume,
            bad=rng.choice([0, 0, 2, 5]),
        )


@dataclass
class ScheduleOutcome:
    """The outcome of one or many schedules."""

    schedules: int = 0
    trained: int = 0
    lag_violations: int = 0
    deadlocks: int = 0
    lost: int = 0
    duplicated: int = 0
    reissued: int = 0
    retried: int = 0
    skipped: int = 0
    resumed: int = 0
    withheld: int = 0
    """The number of prompts of a checkpoint for which the resumed run had no room at once."""

    def add(self, other: "ScheduleOutcome") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def ok(self) -> bool:
        return not (self.lag_violations or self.deadlocks or self.lost or self.duplicated)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--n", type=whole_number(1), default=5000, help="schedules (default 5000)")
    parser.add_argument("--first", type=whole_number(0), default=0, help="seed of the first one (default 0)")
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON line, last")
    arguments = parser.parse_args()
    from tests.reliability.simulated_loop import run

    total = ScheduleOutcome()
    for seed in tqdm(range(arguments.first, arguments.first + arguments.n), desc="schedules", mininterval=1.0):
        outcome = run(Schedule.draw(seed))
        total.add(outcome)
        if not outcome.ok:
            tqdm.write(f"{Schedule.draw(seed)}: {outcome}", file=sys.stderr)
    for name, value in vars(total).items():
        print(f"{name.replace('_', ' '):>16} {value}")
    if arguments.json:
        print(json.dumps(vars(total)))
    return 0 if total.ok else 1


if __name__ == "__main__":
    run_command(main)
