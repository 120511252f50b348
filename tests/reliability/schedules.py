"""The control loop under thousands of random schedules: `python -m tests.reliability.schedules --n 100000 [--json]`.

The real feeding code and the real replay buffer run over a simulated clock, samplers and trainer, without a model.
Random are: lags, batch sizes, samples per prompt, response lengths with stragglers, failures that are retried, sampler
capacities, weight-sync delays, data that ends; and runs that end and go on from a checkpoint, half of them with another
lag and batch size. After every schedule: no trajectory trained on was older than its bound, no prompt was lost or
trained twice, nothing deadlocked.
"""

import json
import sys

from tqdm import tqdm

from recipe.command_line import OneLineParser, run_command, whole_number
from tests.reliability.random_schedules import Schedule, ScheduleOutcome
from tests.reliability.simulated_loop import run


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--n", type=whole_number(1), default=5000, help="schedules (default 5000)")
    parser.add_argument("--first", type=whole_number(0), default=0, help="seed of the first one (default 0)")
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON line, last")
    arguments = parser.parse_args()
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
