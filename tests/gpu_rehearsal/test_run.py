"""A lag-1 run with hardware=gpu on two devices, stopped by SIGTERM; and the same command, which goes on."""

import math
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.kit.fake_cuda.__main__ import VARIABLE
from tests.kit.small_run import TrainerRun, make_assets

STEPS, SAVED_EVERY, STOPPED_AFTER = 6, 2, 3
SETTINGS = [
    "hardware=gpu",
    "async.lag=1",
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={SAVED_EVERY}",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "data.max_prompt_length=64",
    "data.max_response_length=64",
    "data.dataloader_num_workers=0",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
    "reward.custom_reward_function.name=of_length",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    # the devices are no devices for Ray, which asks the driver's tools
    "+ray_kwargs.ray_init.num_gpus=2",
    "ray_kwargs.ray_init.num_cpus=32",
    "+ray_kwargs.ray_init.include_dashboard=false",
    "+ray_kwargs.ray_init.object_store_memory=1000000000",
]


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made without the stand-ins, in a tenth of the time."""
    environment = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", VARIABLE)}
    return make_assets(tmp_path_factory.mktemp("assets"), environment=environment)


@pytest.mark.parametrize("method", ["vcpo", "a2c"])
def test_a_run_goes_on(method: str, assets: Path, tmp_path: Path) -> None:
    """With a2c a critic is trained, and goes on, beside the actor."""
    settings = [*SETTINGS, f"method={method}"]
    run = TrainerRun(assets, tmp_path / "run", *settings, module="tests.kit.counting_run")
    run.wait_for_step(STOPPED_AFTER)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() != 0
    before = {line["step"] for line in run.lines()}
    assert STOPPED_AFTER in before and STEPS not in before
    resumed = TrainerRun(
        assets, tmp_path / "run", *settings, "trainer.resume_mode=auto", module="tests.kit.counting_run"
    )
    assert resumed.wait() == 0, resumed.tail()
    lines = resumed.lines()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert line["lag_max"] <= 1
        assert math.isfinite(line["actor/grad_norm"]) and line["actor/grad_norm"] > 0
        assert ("critic/vf_loss" in line) == (method == "a2c")
    trained = load_file(next((tmp_path / "run" / "model").glob("*.safetensors")))
    first = load_file(assets / "model" / "model.safetensors")
    assert any((weight.float() - first[name].float()).abs().max() > 0 for name, weight in trained.items())
