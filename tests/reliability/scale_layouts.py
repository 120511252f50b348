"""The control loop at the scale of the launch scripts: their layouts, each in a process of its own (scale_run.py)."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.kit import ROOT
from tests.reliability.published_scripts import SHELL

_TIMEOUT_S = 1800
_LONG_AGENT = Path(__file__).with_name("long_responses.yaml")
_MOST_WORKERS = 8  # what a machine of 24 GiB has the memory for


@dataclass(frozen=True)
class ScaleLayout:
    """What of a launch script's layout the control loop sees. slots: of a sampler, `max_num_seqs`."""

    script: str
    batch_size: int
    samples: int
    lag: float
    samplers: int
    slots: int
    agent_workers: int

    @property
    def in_flight(self) -> int:
        return int((self.lag + 1) * self.batch_size * self.samples)


@dataclass(frozen=True)
class Responses:
    """Lengths in tokens, drawn without memory with this mean and cut at `most`, and seconds a token.

    at_once: each response has `most` tokens, and no engine is asked for them (long_responses.py).
    """

    mean: float = 24.0
    most: int = 96
    token_s: float = 0.02
    at_once: bool = False


LONG = ScaleLayout("1,024 x 16, 8,192 tokens", 1024, 16, lag=8, samplers=1, slots=256, agent_workers=2)
"""More trajectories a step than any launch script has, each of the length of a reasoning model's."""
LONG_RESPONSES = Responses(most=8192, at_once=True)


@dataclass
class ScaleResult:
    """Times in seconds: means over the run's steps; of a poll, the longest.

    driver_s_per_step: processor time of the driver's process, without the submission of the first k batches and
    without what it spends while it waits for samples. The driver's own wall time would count what the other processes
    of the run take of the same two cores.
    """

    script: str
    in_flight: int
    trajectories_per_step: int
    submit_s: float = 0.0
    step_s: float = 0.0
    driver_s_per_step: float = 0.0
    poll_s: float = 0.0
    update_s: float = 0.0
    reissue_s: float = 0.0
    """Of submitting `reissued` late prompts again while the samplers are stopped, so that the workers are idle."""
    reissue_busy_s: float = 0.0
    """Of the same while the workers have responses to finish."""
    begun_again_s: float = 0.0
    """As `reissue_s`, and until the workers have removed the trajectories of the stopped attempts, and begun anew."""
    reissued: int = 0
    trajectories_per_s: float = 0.0
    declared_dead: int = 0
    hung: int = 0
    lost: int = 0
    """Prompts that were submitted, not trained on, and are not in TransferQueue."""
    duplicated: int = 0
    lag_violations: int = 0


def settings(layout: ScaleLayout, assets: Path, run_dir: Path, steps: int, responses: Responses) -> list[str]:
    """The overrides of a CPU run with this layout."""
    agent = "actor_rollout_ref.rollout.agent"
    at_once = [f"{agent}.agent_loop_config_path={_LONG_AGENT}", f"{agent}.default_agent_loop=long_responses"]
    return [
        *(at_once if responses.at_once else []),
        "+task=countdown",
        "hardware=cpu",
        f"data.train_files={assets}/data/train.parquet",
        f"data.val_files={assets}/data/val.parquet",
        f"actor_rollout_ref.model.path={assets}/model",
        f"run_dir={run_dir}",
        "reward.custom_reward_function.path=pkg://tests.kit.digits_reward",
        f"data.train_batch_size={layout.batch_size}",
        f"data.max_response_length={responses.most}",
        f"actor_rollout_ref.rollout.max_model_len={responses.most + 128}",
        f"+actor_rollout_ref.model.override_config.max_position_embeddings={responses.most + 128}",
        f"actor_rollout_ref.rollout.n={layout.samples}",
        f"actor_rollout_ref.rollout.n_gpus_per_node={layout.samplers}",
        f"actor_rollout_ref.rollout.max_num_seqs={layout.slots}",
        f"actor_rollout_ref.rollout.agent.num_workers={layout.agent_workers}",
        f"async.lag={layout.lag}",
        "async.kv_cache=recompute",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "samples_every=0",
        "save_model=false",
        "trainer.resume_mode=disable",
        f"trainer.total_training_steps={steps}",
    ]


def launch_scripts() -> list[Path]:
    """All of them."""
    return sorted(path for path in SHELL.glob("*/*.sh"))


def read_layout(script: Path) -> ScaleLayout:
    """The layout of a launch script, from the configuration that the script prints."""
    printed = subprocess.run(
        ["bash", str(script), "--print-config"],
        cwd=ROOT,
        env={**os.environ, "CPU": ""},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    config = yaml.safe_load(printed)
    rollout = config["actor_rollout_ref"]["rollout"]
    split = rollout["tensor_model_parallel_size"] * rollout["pipeline_model_parallel_size"]
    return ScaleLayout(
        script=str(script.relative_to(SHELL)),
        batch_size=config["data"]["train_batch_size"],
        samples=rollout["n"],
        lag=config["async"]["lag"],
        samplers=max(1, rollout["n_gpus_per_node"] * rollout["nnodes"] // split),
        slots=rollout["max_num_seqs"],
        agent_workers=min(_MOST_WORKERS, rollout["agent"]["num_workers"]),
    )


def run(
    layout: ScaleLayout,
    overrides: list[str],
    output: Path,
    responses: Responses,
    kill_in_step: int = 0,
) -> ScaleResult:
    """One layout to its end; a run that has not ended after half an hour hangs.

    kill_in_step: the first sampler is killed while the trainer makes the update of this step; 0: none is.

    Raises:
        RuntimeError: the run failed.
    """
    given = [json.dumps(vars(layout)), json.dumps(vars(responses)), str(output), str(kill_in_step)]
    with open(output.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.reliability.scale_run", *given, *overrides],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(60)
            return ScaleResult(layout.script, layout.in_flight, layout.batch_size * layout.samples, hung=1)
    if process.returncode:
        raise RuntimeError(f"{layout.script}: {output.with_suffix('.log').read_text()[-2000:]}")
    return ScaleResult(**json.loads(output.read_text()))
