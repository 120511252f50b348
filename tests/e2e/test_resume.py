"""At lag 0 a run is verl's synchronous one, and one that was stopped and resumed is the same as one that was not."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from testkit import ROOT
from testkit.small_run import small_task
from verl_vcpo.trainer.ppo.v1.run_log import read_metrics

pytestmark = pytest.mark.e2e

STEPS, STOPPED_AFTER = 10, 5


def train(module: str, assets: Path, run_dir: Path, *settings: str) -> None:
    fixed = [
        "async.lag=0",
        "async.deterministic=true",
        # one response at a time: what vLLM computes depends in the last digit on what else is in its batch
        "actor_rollout_ref.rollout.max_num_seqs=1",
        "actor_rollout_ref.rollout.enable_prefix_caching=false",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={STOPPED_AFTER}",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=2",  # not a share of the steps, of which some runs have fewer
        "trainer.val_before_train=false",
        "trainer.test_freq=0",
    ]
    command = [sys.executable, "-m", module, *small_task(assets, run_dir), *fixed, *settings]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-3000:]


def weights(run_dir: Path, step: int) -> dict:
    """What the checkpoint of `step` holds, under Hugging Face names."""
    (file,) = (run_dir / "checkpoints" / f"global_step_{step}").rglob("*.safetensors")
    return load_file(file)


@pytest.fixture(scope="module")
def whole(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("lag0") / "run"
    train("recipe.fully_async_policy.main", assets, run_dir)
    return run_dir


def test_stopped_and_resumed_is_the_same_run(assets: Path, whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "resumed"
    shutil.copytree(whole / "checkpoints", run_dir / "checkpoints")
    shutil.rmtree(run_dir / "checkpoints" / f"global_step_{STEPS}")
    # as if the process had been killed after it had written a later step's line, and the next one half
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[: STOPPED_AFTER + 1]) + lines[-1][:40])
    train("recipe.fully_async_policy.main", assets, run_dir, "trainer.resume_mode=auto")

    resumed = read_metrics(run_dir)
    assert [line["step"] for line in resumed] == list(range(1, STEPS + 1))
    rows = [row for line in resumed for row in line["trained_rows"]]
    assert len(rows) == len(set(rows)) == STEPS * 4
    for a, b in zip(read_metrics(whole), resumed, strict=True):
        for name in ("trained_rows", "reward"):
            assert a[name] == b[name], (name, a["step"])
        for name in ("grad_norm", "baseline", "ess_ratio"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), (name, a["step"])
    same_weights(weights(whole, STEPS), weights(run_dir, STEPS))


def test_lag_0_is_verls_synchronous_trainer(assets: Path, whole: Path, tmp_path: Path) -> None:
    train("tests.e2e.sync_trainer", assets, tmp_path / "sync", f"trainer.total_training_steps={STOPPED_AFTER}")
    synchronous = read_metrics(tmp_path / "sync")
    assert len(synchronous) == STOPPED_AFTER
    for a, b in zip(read_metrics(whole)[:STOPPED_AFTER], synchronous, strict=True):
        assert a["lag_max"] == 0
        for name in ("critic/score/mean", "actor/loss", "actor/grad_norm", "actor/vcpo/baseline"):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), (name, a["step"])
    same_weights(weights(whole, STOPPED_AFTER), weights(tmp_path / "sync", STOPPED_AFTER))


def same_weights(a: dict, b: dict) -> None:
    for name, weight in a.items():
        assert (weight - b[name]).abs().max() <= 1e-4 * weight.abs().max(), name
