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
_MOST_WORKERS = 8  # a machine of 24 GiB has no memory for more


@dataclass(frozen=True)
class ScaleLayout:
    """The parts of a launch script's layout that the control loop sees. slots: a sampler's `max_num_seqs`."""

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
    """The lengths of responses in tokens, drawn without memory with a mean and cut at `most`; seconds a token.

    at_once: each response has `most` tokens, without a request to an engine (long_responses.py).
    """

    mean: float = 24.0
    most: int = 96
    token_s: float = 0.02
    at_once: bool = False


LONG = ScaleLayout("1,024 x 16, 8,192 tokens", 1024, 16, lag=8, samplers=1, slots=256, agent_workers=2)
"""A layout with more trajectories a step than any launch script, each as long as a reasoning model's."""
LONG_RESPONSES = Responses(most=8192, at_once=True)


@dataclass
class ScaleResult:
    """The counts and times of a run, in seconds: means over the run's steps, and the longest poll.

    driver_s_per_step: processor time of the driver's process, without the submission of the first k batches and
    without waiting for samples. Wall time would count the other processes of the run, which share the two cores.
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
    """The time to submit `reissued` late prompts again while samplers are stopped, and so workers are idle."""
    reissue_busy_s: float = 0.0
    """The time to submit late prompts again while the workers have responses to finish."""
    begun_again_s: float = 0.0
    """`reissue_s`, plus the time until the workers have removed the old trajectories, and begun again."""
    reissued: int = 0
    trajectories_per_s: float = 0.0
    declared_dead: int = 0
    hung: int = 0
    lost: int = 0
    """The number of prompts that were submitted, not trained on, and are not in TransferQueue."""
    duplicated: int = 0
    lag_violations: int = 0


def settings(layout: ScaleLayout, assets: Path, run_dir: Path, steps: int, responses: Responses) -> list[str]:
    """Return the overrides of a CPU run with this layout."""
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
    """Return all launch scripts."""
    return sorted(path for path in SHELL.glob("*/*.sh"))


def read_layout(script: Path) -> ScaleLayout:
    """Read the layout of a launch script from the configuration that the script prints."""
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
    """Run one layout to its end; a run that has not ended after half an hour hangs.

    kill_in_step: the step in whose update the first sampler is killed; 0: none is.

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
