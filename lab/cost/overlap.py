"""Runs of the real stack on work that is bound by latency, timed."""

import statistics
from dataclasses import dataclass
from pathlib import Path

from tests.kit.small_run import TrainerRun

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
