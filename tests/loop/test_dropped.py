"""Truncated responses that are left out have no token in the loss, and dropped ones no part in a baseline of verl's."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu

from tests.loop.test_replay_buffer import failed_prompts
from verl_vcpo.loop.prompts.dropped import groups_without_signal, mask_dropped
from verl_vcpo.loop.prompts.replay_buffer import LagKReplayBuffer
from verl_vcpo.loop.trainer import LagKTrainer

GROUPS = {
    # the rewards of a prompt's samples, and which are truncated
    "a": ([1.0, 0.0, 1.0, 0.0], [3]),
    "b": ([1.0, 1.0, 0.0, 0.0], [1, 2, 3]),
    "c": ([0.0, 1.0, 0.0, 0.0], []),
    "d": ([0.0, 1.0, 0.0, 0.0], [0, 1, 2, 3]),
}
LENGTH = 3


def tags_of(treatment: str) -> dict[str, dict[str, Any]]:
    return {
        f"{prompt}_{i}_0": {"response_len": LENGTH} | ({"truncated": treatment} if i in truncated else {})
        for prompt, (rewards, truncated) in GROUPS.items()
        for i in range(len(rewards))
    }


Rows = dict[str, dict[str, Any]]


def stored(treatment: str) -> tuple[KVBatchMeta, Rows]:
    """A batch, and the fields of its trajectories in TransferQueue."""
    tags = tags_of(treatment)
    tags["pad0_0_0"] = {"response_len": 1, "truncated": treatment, "is_padding": True}  # verl copies a real one's tag
    rows: Rows = {}
    for key, tag in tags.items():
        ones = torch.ones(tag["response_len"], dtype=torch.int64)
        rows[key] = {"uid": key.split("_")[0], "response_mask": ones, "loss_mask": ones}
    return KVBatchMeta(keys=list(tags), tags=list(tags.values()), partition_id="train"), rows


def put_over(rows: Rows, keys: list[str], partition_id: str, fields: TensorDict) -> None:
    """As TransferQueue, which keeps the fields that are not given."""
    columns = {name: tu.get(fields, name) for name in fields.keys()}  # noqa: SIM118  # of a TensorDict
    for i, key in enumerate(keys):
        for name, column in columns.items():
            rows[key][name] = str(column[i]) if name == "uid" else column.unbind()[i]


def grpo(rewards: list[float]) -> list[float]:
    reward = np.array(rewards)
    return ((reward - reward.mean()) / (reward.std(ddof=1) + 1e-6)).tolist()


@pytest.mark.parametrize("treatment", ["mask", "drop"])
def test_grpos_advantages_are_those_of_the_samples_that_count(monkeypatch: pytest.MonkeyPatch, treatment: str) -> None:
    batch, stored_rows = stored(treatment)
    monkeypatch.setattr(tq, "kv_batch_put", partial(put_over, stored_rows))
    mask_dropped(batch, by_verl=True)
    *rows, padding = stored_rows.values()
    mask = torch.stack([row["response_mask"] for row in rows])
    assert mask.equal(torch.stack([row["loss_mask"] for row in rows])) and padding["response_mask"].all()
    rewards = [reward for of_prompt, _ in GROUPS.values() for reward in of_prompt]
    scores = torch.zeros(len(rewards), LENGTH)
    scores[:, -1] = torch.tensor(rewards)
    uids = np.array([row["uid"] for row in rows])
    advantage = compute_grpo_outcome_advantage(scores, mask.float(), uids)[0][:, 0]

    expected: list[float] = []
    for of_prompt, truncated in GROUPS.values():
        left = [i for i in range(4) if i not in truncated]
        compared = range(4) if treatment == "mask" else left if len(left) > 1 else []
        values = dict(zip(compared, grpo([of_prompt[i] for i in compared]) if compared else [], strict=True))
        expected += [values.get(i, 0.0) if i in left else 0.0 for i in range(4)]
    assert advantage.tolist() == pytest.approx(expected, abs=1e-6)
    masked = [i for i, row in enumerate(mask) if not row.any()]
    alone = [4] if treatment == "drop" else []  # with verl's estimator its advantage would be its reward
    assert masked == sorted([3, 5, 6, 7, 12, 13, 14, 15, *alone])


def test_vcpos_engine_finds_the_group_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole groups stay on their rank: with other uids each update would need a second backward."""
    batch, put = stored("drop")[0], list[tuple[list[str], TensorDict]]()
    monkeypatch.setattr(tq, "kv_batch_put", lambda keys, partition_id, fields: put.append((keys, fields)))
    mask_dropped(batch, by_verl=False)
    ((keys, fields),) = put
    assert keys == [key for key, tag in zip(batch.keys, batch.tags, strict=True) if "truncated" in tag][:-1]
    assert "uid" not in fields and not fields["response_mask"].values().any()
    mask_dropped(KVBatchMeta(keys=["a_0_0"], tags=[{"response_len": 1}], partition_id="train"), by_verl=True)
    assert len(put) == 1, "nothing is put where nothing is left out"


@pytest.mark.parametrize(("treatment", "nothing"), [("mask", {"d"}), ("drop", {"b", "d"})])
def test_dynamic_filtering_compares_what_is_trained_on(
    monkeypatch: pytest.MonkeyPatch, treatment: str, nothing: set[str]
) -> None:
    tags = tags_of(treatment)
    assert groups_without_signal(tags) == nothing

    def fetch(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, list[torch.Tensor]]:
        prompts = [key.split("_")[:2] for key in keys]
        return {"rm_scores": [torch.tensor([GROUPS[prompt][0][int(i)]]) for prompt, i in prompts]}

    monkeypatch.setattr(tq, "kv_batch_get", fetch)
    buffer = LagKReplayBuffer(
        lag=2, samples=4, reissue_fn=lambda uids, partition: None, failed_prompts=failed_prompts(),
        trainer_mode="lag_k", trainer_config={},
        max_off_policy_threshold=None, max_off_policy_strategy="wait", sampler_kwargs={}, refill_fn=lambda n: None,
        filter_groups_metric="reward",
    )  # fmt: skip
    tags["a_1_0"] |= {"truncated": treatment}  # the others of `a` all have 1
    states = dict.fromkeys(GROUPS, "finished") | {"e": "running"}
    prompts = {uid: {"is_prompt": True, "status": status, "global_steps": 1} for uid, status in states.items()}
    monkeypatch.setattr(tq, "kv_list", lambda partition: {partition: prompts | tags})
    buffer._sync_metadata_from_transfer_queue()
    filtered, _ = buffer._dapo_filtered_keys("train")
    assert filtered == nothing | ({"a"} if treatment == "drop" else set())
    assert buffer.partitions["train"] == tags and buffer.finished_keys["train"] == set(GROUPS)


def test_the_engine_is_told_the_treatment_and_the_version_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version is that which the update begins with: by it the engine knows the lag of each token."""

    def update(self: Any, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        metrics["actor/vcpo/ess/arithmetic"] = 0.5
        return batch

    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(PPOTrainer, "_update_actor", update)
    trainer = object.__new__(LagKTrainer)
    actor = {"actor": {"ppo_mini_batch_size": 2}, "rollout": {"n": 2}}
    trainer.config = OmegaConf.create({"async": {"truncated": "mask"}, "actor_rollout_ref": actor})
    trainer.global_steps, trainer.timing_raw = 7, {}
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 0, 1, 1]})
    trainer.computed_again = SimpleNamespace(ask=lambda batch, *what: asked.append(what))
    keys = [f"{uid}_{sample}_0" for uid in "abcd" for sample in "01"]
    for _ in range(2):
        batch = trainer._update_actor(KVBatchMeta(keys=keys, tags=[{}] * 8), metrics={})
        assert batch.extra_info == {"truncated": "mask", "policy_version": 6}
    assert asked == [([0, 1, 4, 5], 7, None), ([0, 1, 4, 5], 7, 0.5)], "of two ranks, each with half of a mini-batch"
