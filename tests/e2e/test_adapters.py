"""A run that trains adapters, and whose samplers get the adapters alone: they sample from the trainer's policy."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.kit.small_run import TrainerRun
from verl_vcpo.report.run_log import MODEL_FOLDER, read_metrics

pytestmark = pytest.mark.e2e

MODEL = "actor_rollout_ref.model"


def test_samplers_with_adapters_alone_have_the_trainers_policy(assets: Path, tmp_path: Path) -> None:
    """At lag 0 all tokens are fresh: another policy than the trainer's, the first one too, has other log-probs."""
    settings = [
        f"{MODEL}.lora.rank=4",
        f"{MODEL}.lora.merge=false",
        "actor_rollout_ref.rollout.load_format=auto",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "async.lag=0",
    ]
    run = TrainerRun(assets, tmp_path / "run", *settings)
    assert run.wait() == 0, run.tail()
    lines = [line for line in read_metrics(tmp_path / "run") if line["step"]]
    assert len(lines) == 3 and all(line["grad_norm"] > 0 for line in lines)
    assert all(line["actor/vcpo/mismatch/rms"] < 1e-5 for line in lines), lines
    first, last = (
        load_file(folder / "model.safetensors") for folder in (assets / "model", tmp_path / "run" / MODEL_FOLDER)
    )
    moved = {name for name, weight in last.items() if (weight - first[name]).abs().max() > 1e-4}
    assert moved == {name for name in last if "_proj.weight" in name}, "adapters are merged into the model that stays"
