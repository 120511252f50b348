"""Three steps at lag 2 through the real Ray, TransferQueue, vLLM and Megatron."""

import asyncio
import math
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.fully_async_policy import main
from recipe.fully_async_policy.processes import processes_of
from testkit.small_run import Listener, listening, small_task
from tests.e2e.conftest import prepared
from verl_vcpo.trainer.ppo.v1.run_log import read_metrics

pytestmark = pytest.mark.e2e

PROMPT = "Using the numbers 3, 5 and 7, write an expression that equals 22."
SYNC_VERSION = 1000  # a version that no training step reaches


def served_response(trainer: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Tokens that vLLM samples now, and the log-probabilities it reports for them."""
    output = asyncio.run(
        trainer.get_llm_client().generate(
            "check", prompt_ids=prompt, sampling_params={"temperature": 1.0, "max_tokens": 16, "logprobs": True}
        )
    )
    return output.token_ids, output.log_probs


def trainer_weights(trainer: Any, run_id: str) -> dict[str, torch.Tensor]:
    """The trainer's weights now, written by its checkpoint engine."""
    import ray

    ray.get(trainer.actor_rollout_wg.update_weights(global_steps=SYNC_VERSION, mode="weight_file"))
    file = Path(f"/dev/shm/vcpo-{run_id}-weights-v{SYNC_VERSION}")
    assert file.stat().st_mode & 0o777 == 0o600
    return torch.load(file, weights_only=True)


def log_probs(model: torch.nn.Module, prompt: list[int], response: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def test_three_steps_at_lag_2(assets: Path, tmp_path: Path) -> None:
    run_id, config = prepared([*small_task(assets, tmp_path), "async.lag=2", "trainer.test_freq=3"])

    from verl_vcpo.trainer.main_ppo import LagKTaskRunner

    tokenizer = AutoTokenizer.from_pretrained(f"{assets}/model")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_dict=False
    )
    listeners: list[Listener] = []
    with main.ray_session(config, run_id):
        runner = LagKTaskRunner()
        runner.run(config, lambda: listeners.extend(listening([psutil.Process(), *processes_of(run_id)])))
        assert len(processes_of(run_id)) > 5, "the run's processes are not found, so their absence proves nothing"
        token = os.environ["RAY_AUTH_TOKEN"]
        response, served = served_response(runner.trainer, prompt)
        weights = trainer_weights(runner.trainer, run_id)

    for name in ("gcs_server", "raylet", "TransferQueueController", "WorkerDict", "CPUvLLMHttpServer"):
        assert any(name in one.process for one in listeners), f"{name} is not found, so it may listen anywhere"
    assert not [one for one in listeners if not one.on_loopback], "other machines can connect"

    model = AutoModelForCausalLM.from_pretrained(f"{assets}/model")
    before = log_probs(model, prompt, response)
    model.load_state_dict(weights)
    after = log_probs(model, prompt, response)
    assert (after - torch.tensor(served)).abs().max() < 1e-3, "vLLM serves other weights than the trainer's"
    assert (before - after).abs().max() > 1e-3, "three steps changed nothing, so the comparison proves nothing"

    zero, *steps = read_metrics(tmp_path)
    assert zero["step"] == 0 and 0 <= zero["val_accuracy"] <= 1
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert [line["lag_max"] for line in steps] == [0, 1, 2], "the samplers run ahead exactly as far as allowed"
    assert steps[-1]["val_accuracy"] is not None
    for line in steps:
        assert 1 / 16 <= line["ess_ratio"] <= 1
        assert line["lr_multiplier"] == pytest.approx(math.sqrt(line["ess_ratio"]), rel=1e-6)
        assert line["kl"] >= 0 and math.isfinite(line["grad_norm"])
        assert 0 <= line["lag_min"] <= line["lag_mean"] <= line["lag_max"]
        assert line["tokens_per_s"] > 0 and line["weight_sync_s"] > 0
        assert 0 <= line["trainer_idle_share"] <= 1 and 0 <= line["sampler_idle_share"] <= 1
    assert steps[0]["ess_ratio"] > 0.99, "the first batch is on policy"
    assert list((tmp_path / "tensorboard").iterdir())
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and token.encode() in file.read_bytes()]

    assert not processes_of(run_id)
    assert not list(Path("/dev/shm").glob(f"vcpo-{run_id}-*"))
