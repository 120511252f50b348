"""A sampler in bfloat16 at a lag: without a fresh token samplers tell what arithmetic makes of the weights."""

from pathlib import Path

import pytest

from tests.kit.small_run import TrainerRun
from verl_vcpo.report.run_log import read_metrics

pytestmark = pytest.mark.e2e


@pytest.mark.nightly
def test_samplers_compute_log_probs_again_and_these_agree(assets: Path, tmp_path: Path) -> None:
    """Long responses, so that arithmetic counts; the learning rate is too small to move the policy."""
    rollout = "actor_rollout_ref.rollout"
    settings = [
        "async.lag=2",
        f"{rollout}.dtype=bfloat16",
        f"{rollout}.ignore_eos=true",
        f"{rollout}.max_model_len=480",
        "data.max_response_length=400",
        "actor_rollout_ref.actor.optim.lr=1e-7",
        "trainer.total_training_steps=6",
    ]
    run = TrainerRun(assets, tmp_path / "run", *settings)
    assert run.wait() == 0, run.tail()
    lines = [line for line in read_metrics(tmp_path / "run") if line["step"]]
    assert [line["lag_min"] for line in lines[2:]] == [2] * 4, "no token is fresh"
    assert all(line["actor/vcpo/ess/arithmetic"] < 0.99 for line in lines)
    assert all(line["actor/vcpo/mismatch/tokens_again"] > 1000 for line in lines), "samplers answer in each step"
    rms, errors = ([line[f"actor/vcpo/mismatch/{name}"] for line in lines] for name in ("rms", "rms_error"))
    assert all(abs(each - rms[0]) < 5 * (error + errors[0]) for each, error in zip(rms, errors, strict=True)), rms
    assert all(line["actor/vcpo/ess/lag"] > 0.85 for line in lines), "nothing but arithmetic makes weights unequal"
