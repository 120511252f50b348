"""Several mini-batches and epochs through verl's own worker: every update is made, and none of its metrics is lost."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from transformers import AutoModelForCausalLM
from verl.trainer.ppo.v1.trainer_base import reduce_metrics
from verl.utils import tensordict_utils as tu
from verl.workers.config.engine import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

from recipe.fully_async_policy import main
from tests.actor.conftest import ONE_PROCESS, sgd
from tests.actor.test_vcpo_engine import exported, reference_scores, train
from tests.kit.actor import engine_settings, loss_function
from tests.kit.layout_run import GROUP_SIZE, GROUPS
from tests.kit.layout_worker import make_batch
from verl_vcpo.actor.vcpo_settings import VCPOSettings
from verl_vcpo.loop.trainer import LagKTrainer

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


@pytest.mark.parametrize("lags", [(0, 0), (0, 3, 3), (3, 0)], ids=str)
def test_the_base_ratio_is_that_of_the_first_mini_batches_of_the_freshest_batches(
    worker: TrainingWorker, lags: tuple[int, ...]
) -> None:
    """The other mini-batches are stale: updates of the same batch have moved the policy."""
    worker.set_loss_fn(loss_function(VCPOSettings(base_ess_ratio="auto")))
    sent: list[TensorDict] = []
    ratios, multipliers = list[float](), list[float]()

    def update_actor(meta: KVBatchMeta) -> TensorDict:
        tu.assign_non_tensor(sent[-1], **meta.extra_info)  # as verl's bridge from TransferQueue
        metrics = tu.get(worker.train_mini_batch(sent[-1]), "metrics")
        ratios.append(metrics["vcpo/ess_ratio"][0])
        multipliers.append(metrics["vcpo/lr_multiplier"][0])
        return tu.get_tensordict({}, {"metrics": {**metrics, "mfu": 0.0}})

    main.prepare_environment(["hardware=cpu"])
    sizes = [f"data.train_batch_size={GROUPS}", f"actor_rollout_ref.rollout.n={GROUP_SIZE}"]
    actor = [f"ppo_mini_batch_size={GROUPS // MINI_BATCHES}", f"ppo_epochs={EPOCHS}"]
    trainer = object.__new__(LagKTrainer)
    trainer.config = main.compose(["+task=countdown", *sizes, *(f"actor_rollout_ref.actor.{each}" for each in actor)])
    trainer.actor_rollout_wg = SimpleNamespace(update_actor=update_actor)
    for step, lag in enumerate(lags, start=7):
        sent.append(by_group(make_batch(ONE_PROCESS, step)))
        tu.pop(sent[-1], "lag")
        tags: list[dict[str, Any]] = [{"min_global_steps": step - 1 - max(0, lag - i)} for i in range(len(sent[-1]))]
        tags[3] = {"min_global_steps": 0, "is_padding": True}
        trainer.global_steps = step
        trainer._update_actor(KVBatchMeta(keys=[str(i) for i in range(len(tags))], tags=tags), metrics={})

    freshest = [ratio for ratio, lag in zip(ratios, lags, strict=True) if lag == min(lags)]
    assert worker.engine.freshest_ess_ratio.state_dict() == {"lag": min(lags), "ratios": freshest}
    assert multipliers[0] == 1.0 and multipliers[1] == pytest.approx(min(1.0, ratios[1] / ratios[0]) ** 0.5)


def test_auto_without_the_lag_is_refused(make_engine: Callable[..., Any]) -> None:
    """Catches stale batches that count as fresh ones, which would lower the base ratio and so raise the step."""
    engine, batch = make_engine(), make_batch(ONE_PROCESS)
    tu.pop(batch, "lag")
    train(engine, batch.clone(), VCPOSettings())
    with pytest.raises(KeyError, match="vcpo.base_ess_ratio=auto needs the batch's `lag`"):
        train(engine, batch, VCPOSettings(base_ess_ratio="auto"))


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
