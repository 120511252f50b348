"""Three steps at lag 2 through the real Ray, TransferQueue, vLLM and Megatron."""

import asyncio
import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from recipe.fully_async_policy import main
from recipe.fully_async_policy.processes import processes_of
from testkit.small_run import Listener, listening, small_task
from tests.e2e.conftest import prepared
from tests.e2e.updates_in_flight import Sampler, check_log_probs_around_an_update, log_probs, prompt_ids
from verl_vcpo.trainer.ppo.v1.run_log import read_metrics
from verl_vcpo.workers.rollout.kv_cache import KVCache

pytestmark = pytest.mark.e2e

SYNC_VERSION = 1000  # a version that no training step reaches


@dataclass
class Stack:
    """A run that has trained. Its processes are up until `session` is closed."""

    run_id: str
    run_dir: Path
    token: str
    trainer: Any
    listeners: list[Listener]
    processes: int
    session: contextlib.ExitStack
    response: list[int]
    served: list[float]
    weights: dict[str, torch.Tensor]
    """The trainer's, after the last step; `served` are the log-probs of `response` that vLLM reported then."""


@pytest.fixture(scope="module")
def stack(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    run_dir = tmp_path_factory.mktemp("whole_stack")
    run_id, config = prepared([*small_task(assets, run_dir), "async.lag=2", "trainer.test_freq=3"])

    from verl_vcpo.trainer.main_ppo import LagKTaskRunner

    listeners: list[Listener] = []
    with contextlib.ExitStack() as session:
        session.enter_context(main.ray_session(config, run_id))
        runner = LagKTaskRunner()
        runner.run(config, lambda: listeners.extend(listening([psutil.Process(), *processes_of(run_id)])))
        response, served = served_response(runner.trainer, prompt_ids(assets / "model"))
        yield Stack(
            run_id=run_id,
            run_dir=run_dir,
            token=os.environ["RAY_AUTH_TOKEN"],
            trainer=runner.trainer,
            listeners=listeners,
            processes=len(processes_of(run_id)),
            session=session,
            response=response,
            served=served,
            weights=trainer_weights(runner.trainer, run_id),
        )


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


def test_no_other_machine_can_connect(stack: Stack) -> None:
    for name in ("gcs_server", "raylet", "TransferQueueController", "WorkerDict", "CPUvLLMHttpServer"):
        assert any(name in one.process for one in stack.listeners), f"{name} is not found, so it may listen anywhere"
    assert not [one for one in stack.listeners if not one.on_loopback], "other machines can connect"


def test_vllm_serves_the_weights_that_the_trainer_has(stack: Stack, assets: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(assets / "model")
    prompt = prompt_ids(assets / "model")
    before = log_probs(model, prompt, stack.response)
    model.load_state_dict(stack.weights)
    after = log_probs(model, prompt, stack.response)
    assert (after - torch.tensor(stack.served)).abs().max() < 1e-3, "vLLM serves other weights than the trainer's"
    assert (before - after).abs().max() > 1e-3, "three steps changed nothing, so the comparison proves nothing"


def test_log_probs_around_an_update_are_exact(stack: Stack, assets: Path) -> None:
    check_log_probs_around_an_update(Sampler(stack.trainer, stack.run_id, assets / "model"), KVCache.RECOMPUTE)


def test_what_the_run_logs(stack: Stack) -> None:
    zero, *steps = read_metrics(stack.run_dir)
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
    assert list((stack.run_dir / "tensorboard").iterdir())


def test_nothing_is_left_of_it(stack: Stack) -> None:
    assert stack.processes > 5, "the run's processes are not found, so their absence proves nothing"
    stack.session.close()
    assert not processes_of(stack.run_id)
    assert not list(Path("/dev/shm").glob(f"vcpo-{stack.run_id}-*"))
    files = [file for file in stack.run_dir.rglob("*") if file.is_file()]
    assert not [file for file in files if stack.token.encode() in file.read_bytes()], "Ray's token is on disk"
