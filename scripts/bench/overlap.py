"""Does asynchrony pay? `python -m scripts.bench.overlap [--json]`.

The real stack on CPU with a workload that is bound by latency: before each response a tool takes its time, a few calls
much longer than the rest. The same run at lag 0 and at lag 4: seconds per step, what each side needs for itself, and
the ideal, the longer of the two. About four minutes on 2 cores.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.bench.small_run import ROOT, Run, make_assets

STEPS, WARM_UP = 14, 5


@dataclass(frozen=True)
class Timing:
    """Medians over the steps after the warm-up, in seconds."""

    lag: int
    step_s: float
    trainer_s: float
    """What the trainer works: the step without waiting for rollouts."""
    wait_s: float
    """What it waits for rollouts."""
    sync_s: float


def measure(assets: Path, folder: Path, lag: int) -> Timing:
    """One run."""
    run = Run(
        assets,
        folder / f"lag{lag}",
        f"async.lag={lag}",
        f"trainer.total_training_steps={STEPS}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={ROOT}/scripts/bench/slow_tool.yaml",
        "actor_rollout_ref.rollout.agent.default_agent_loop=slow_tool",
    )
    if run.wait():
        raise RuntimeError(f"the run at lag {lag} failed:\n{run.tail()}")
    lines = [line for line in run.lines() if line["step"] > WARM_UP]

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 3)

    waits = [line["trainer_idle_share"] * line["step_s"] for line in lines]
    return Timing(
        lag=lag,
        step_s=median([line["step_s"] for line in lines]),
        trainer_s=median([line["step_s"] - wait for line, wait in zip(lines, waits, strict=True)]),
        wait_s=median(waits),
        sync_s=median([line["weight_sync_s"] for line in lines]),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line, last")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="vcpo-overlap-"))
    assets = make_assets(folder)
    synchronous, asynchronous = (measure(assets, folder, lag) for lag in (0, 4))
    shutil.rmtree(folder)
    # At lag 0 the sides take turns, so each one's own time can be read off: samplers work while the trainer waits.
    ideal = max(synchronous.wait_s, synchronous.trainer_s)
    for timing in (synchronous, asynchronous):
        print(
            f"lag {timing.lag}: {timing.step_s:6.2f} s per step; the trainer works {timing.trainer_s:.2f} s of it, "
            f"waits {timing.wait_s:.2f} s; weight sync {timing.sync_s:.2f} s"
        )
    speed_up, of_ideal = synchronous.step_s / asynchronous.step_s, ideal / asynchronous.step_s
    print(f"ideal:  {ideal:6.2f} s per step, the longer side alone")
    print(f"lag 4 is {speed_up:.2f}x as fast as lag 0, and {of_ideal:.0%} of ideal")
    if arguments.json:
        runs = [asdict(timing) for timing in (synchronous, asynchronous)]
        print(json.dumps({"ideal_s": ideal, "speed_up": speed_up, "of_ideal": of_ideal, "runs": runs}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
