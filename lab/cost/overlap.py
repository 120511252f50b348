"""Does asynchrony pay? `python -m lab.cost.overlap [--json]`.

The real stack on CPU with a workload that is bound by latency: before each response a tool takes its time, a few calls
much longer than the rest. The same run at lag 0 and at lag 4: seconds per step of both, and the ideal, the longer of

    trainer    what it works per step while the samplers run beside it: the step without waiting for rollouts
    samplers   what a batch takes them at lag 0, divided by k+1: the bound on lag lets k+1 batches be on their way

Then the same with a model of 20 million parameters at lag 4: how long a weight update stops a sampler. About seven
minutes on 2 cores; run it alone.
"""

import json
import shutil
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from recipe.command_line import OneLineParser, run_command
from tests.kit.small_run import TrainerRun, make_assets

LAG, STEPS, WARM_UP = 4, 17, 5
SLOW_TOOL = Path(__file__).with_name("slow_tool.yaml")
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 7, "num_attention_heads": 16}


@dataclass(frozen=True)
class Timing:
    """Means over the steps after the warm-up, in seconds."""

    lag: int
    step_s: float
    trainer_s: float
    """What the trainer works: the step without waiting for rollouts."""
    wait_s: float
    """What it waits for rollouts."""
    sync_s: float
    """How long a weight update stops the samplers."""


def measure(assets: Path, run_dir: Path, lag: int, *settings: str) -> Timing:
    """One run."""
    run = TrainerRun(
        assets,
        run_dir,
        f"async.lag={lag}",
        f"trainer.total_training_steps={STEPS}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={SLOW_TOOL}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=slow_tool",
        *settings,
    )
    if run.wait():
        raise RuntimeError(f"the run {run_dir.name} failed:\n{run.tail()}")
    lines = [line for line in run.lines() if line["step"] > WARM_UP]

    def mean(values: list[float]) -> float:
        return round(statistics.mean(values), 3)

    waits = [line["trainer_idle_share"] * line["step_s"] for line in lines]
    return Timing(
        lag=lag,
        step_s=mean([line["step_s"] for line in lines]),
        trainer_s=mean([line["step_s"] - wait for line, wait in zip(lines, waits, strict=True)]),
        wait_s=mean(waits),
        sync_s=mean([line["weight_sync_s"] for line in lines]),
    )


def make_large_model(small: Path, folder: Path) -> int:
    """An untrained model of the same kind in `folder`; how many parameters it has."""
    from transformers import AutoConfig, AutoTokenizer, Qwen2ForCausalLM

    config = AutoConfig.from_pretrained(small)
    # layer_types follows from the number of layers
    shape = {name: value for name, value in config.to_dict().items() if name != "layer_types"} | LARGE
    model = Qwen2ForCausalLM(type(config)(**shape))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(small).save_pretrained(folder)
    return model.num_parameters()


def print_result(synchronous: Timing, asynchronous: Timing, samplers_s: float, large: Timing, parameters: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "s per step", "trainer works", "trainer waits", "weight update")
    for name, t in (
        ("lag 0", synchronous),
        (f"lag {LAG}", asynchronous),
        (f"lag {LAG}, {parameters / 1e6:.0f} M parameters", large),
    ):
        table.add_row(name, *(f"{seconds:.2f}" for seconds in (t.step_s, t.trainer_s, t.wait_s, t.sync_s)))
    ideal = max(asynchronous.trainer_s, samplers_s)
    table.add_row(f"lag {LAG}, ideal", f"{ideal:.2f}")
    Console(width=120).print(table)
    print(f"Ideal: the longer of the trainer's {asynchronous.trainer_s:.2f} s and the samplers' {samplers_s:.2f} s.")
    print(
        f"Lag {LAG} is {synchronous.step_s / asynchronous.step_s:.2f}x as fast as lag 0: "
        f"{ideal / asynchronous.step_s:.0%} of the ideal overlap."
    )


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line, last")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="vcpo-overlap-"))
    assets = make_assets(folder)
    synchronous, asynchronous = (measure(assets, folder / f"lag{lag}", lag) for lag in (0, LAG))
    parameters = make_large_model(assets / "model", folder / "large")
    large = measure(assets, folder / "run-large", LAG, f"actor_rollout_ref.model.path={folder}/large")
    shutil.rmtree(folder)

    samplers_s = synchronous.wait_s / (LAG + 1)
    print_result(synchronous, asynchronous, samplers_s, large, parameters)
    if arguments.json:
        ideal = max(asynchronous.trainer_s, samplers_s)
        rows = {"lag_0": asdict(synchronous), "lag_k": asdict(asynchronous), "large": asdict(large)}
        figures = {"ideal_s": ideal, "speed_up": synchronous.step_s / asynchronous.step_s}
        of_ideal = {"of_ideal": ideal / asynchronous.step_s, "large_parameters": parameters}
        print(json.dumps({**figures, **of_ideal, **rows}))
    return 0


if __name__ == "__main__":
    run_command(main)
