"""Several mini-batches and epochs through verl's own worker: every update is made, and none of its metrics is lost."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.trainer.ppo.v1.trainer_base import reduce_metrics
from verl.utils import tensordict_utils as tu
from verl.workers.config.engine import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

from tests.actor.conftest import ONE_PROCESS, sgd
from tests.actor.test_vcpo_engine import exported, reference_scores, train
from tests.kit.actor import engine_settings, loss_function
from tests.kit.layout_run import GROUP_SIZE, GROUPS
from tests.kit.layout_worker import make_batch
from verl_vcpo.actor.vcpo_settings import VCPOSettings

EPOCHS, MINI_BATCHES = 2, 2


@pytest.fixture
def worker(process_group: None, checkpoints: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> TrainingWorker:
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "vcpo")
    settings = engine_settings(ONE_PROCESS, checkpoints(), sgd())
    settings["engine_config"].micro_batch_size_per_gpu = 2
    worker = TrainingWorker(TrainingWorkerConfig(model_type="language_model", **settings))
    worker.reset()
    worker.set_loss_fn(loss_function(VCPOSettings(norm_by_std=False)))
    return worker


def by_group(batch: TensorDict) -> TensorDict:
    """`batch` in the order in which the trainer sends it: whole groups, one after the other."""
    order = sorted(range(len(batch)), key=lambda i: str(batch["uid"][i]))
    return tu.index_select_tensor_dict(batch, order)


def test_every_update_is_made_and_reported(worker: TrainingWorker, make_engine: Callable[..., Any]) -> None:
    batch = by_group(make_batch(ONE_PROCESS))
    size = GROUPS * GROUP_SIZE // MINI_BATCHES
    sent = batch.clone()
    tu.assign_non_tensor(sent, mini_batch_size=size, epochs=EPOCHS, seed=0, dataloader_kwargs={"shuffle": False})
    metrics = tu.get(worker.train_mini_batch(sent), "metrics")

    engine = make_engine()
    expected = [
        train(engine, mini_batch, VCPOSettings(norm_by_std=False))
        for _ in range(EPOCHS)
        for mini_batch in tu.chunk_tensordict(batch.clone(), MINI_BATCHES)
    ]
    for name in ("vcpo/ess_ratio", "vcpo/baseline", "vcpo/lr_multiplier"):
        values = [value for update in expected for value in update[name]]
        assert metrics[name] == pytest.approx(values) and len(set(values)) == EPOCHS * MINI_BATCHES
    lowest = min(update["vcpo/ess_ratio"][0] for update in expected)
    assert reduce_metrics({"vcpo/ess_ratio/min": metrics["vcpo/ess_ratio/min"]}) == {"vcpo/ess_ratio/min": lowest}
    theirs = exported(engine)
    for name, weight in exported(worker.engine).items():
        assert weight.equal(theirs[name]), name


@pytest.mark.parametrize("vcpo", [VCPOSettings(truncation=1.0), VCPOSettings(enable=False)], ids=["vcpo", "none"])
def test_every_sequence_of_the_last_batch_has_its_weight(
    worker: TrainingWorker, monkeypatch: pytest.MonkeyPatch, vcpo: VCPOSettings
) -> None:
    monkeypatch.setattr(worker.engine, "optimizer_step", lambda: 0.0)  # the weights of all mini-batches are comparable
    worker.set_loss_fn(loss_function(vcpo))
    size = GROUPS * GROUP_SIZE // MINI_BATCHES
    for seed in range(2):  # the weights are those of the last batch
        batch = by_group(make_batch(ONE_PROCESS, seed))
        tu.assign_non_tensor_stack(batch, "session_id", [i % GROUP_SIZE for i in range(len(batch))])
        sent = batch.clone()
        kwargs = {"shuffle": True}
        tu.assign_non_tensor(sent, mini_batch_size=size, epochs=EPOCHS, seed=seed, dataloader_kwargs=kwargs)
        worker.train_mini_batch(sent)
    found = worker.engine.sequence_weights.of_sessions()
    assert set(found) == {(str(uid), int(s)) for uid, s in zip(batch["uid"], batch["session_id"], strict=True)}

    model = AutoModelForCausalLM.from_pretrained(worker.engine.model_config.path, dtype=torch.float32)
    with torch.no_grad():
        _, log_weights = reference_scores(model, batch, "seq-mean-token-sum")
    assert 0 < sum(log_weight > 0 for log_weight in log_weights) < len(batch), "some are truncated"
    for uid, session, log_weight in zip(batch["uid"], batch["session_id"], log_weights.tolist(), strict=True):
        weight = math.exp(min(log_weight, 0.0) if vcpo.enable else log_weight)
        assert found[str(uid), int(session)] == pytest.approx((log_weight, weight), rel=1e-4)
