"""TBA's buffer in a real TransferQueue."""

from collections.abc import Iterator

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

from recipe.fully_async_policy import main, ray_access
from verl_vcpo.trainer.ppo.v1.replay_buffer import prompt_of
from verl_vcpo.trainer.ppo.v1.tba_replay import PARTITION, TBAReplay

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def queue() -> Iterator[None]:
    main.prepare_environment(["hardware=cpu"])
    config = main.compose(["+task=countdown_lag", "hardware=cpu"]).transfer_queue
    config.enable = True
    with ray_access.started({"num_cpus": 8, "include_dashboard": False, "log_to_driver": False}):
        tq.init(config)
        yield
        tq.close()


def put(uids: list[str], step: int) -> KVBatchMeta:
    """Groups of two trajectories; a group's rewards are its number and that plus 1."""
    keys = [f"{uid}_{session}_0" for uid in uids for session in range(2)]
    rewards = [torch.tensor([0.0] * session + [float(uid[1:]) + session]) for uid in uids for session in range(2)]
    data = TensorDict({"rm_scores": torch.nested.as_nested_tensor(rewards, layout=torch.jagged)}, batch_size=len(keys))
    tu.assign_non_tensor_stack(data, "uid", [prompt_of(key) for key in keys])
    tags = [{"seq_len": 2, "min_global_steps": step} for _ in keys]
    tq.kv_batch_put(keys=keys, partition_id="train", fields=data, tags=tags)
    return KVBatchMeta(keys, tags, "train")


def contents(batch: KVBatchMeta) -> list[tuple[str, float, int]]:
    """Per trajectory the uid in its data, its reward and its version."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
    rewards = (float(row.sum()) for row in data["rm_scores"].unbind())
    return [
        (str(uid), reward, tag["min_global_steps"])
        for uid, reward, tag in zip(data["uid"], rewards, batch.tags, strict=True)
    ]


def test_remembered_groups_come_back_whole(queue: None) -> None:
    replayed = TBAReplay(seed=1, capacity=2, recent=0.0, temperature=0.01)  # always the best one
    first = put(["u1", "u3"], step=0)
    assert replayed.mix(first).keys == first.keys, "nothing to replay yet"
    tq.kv_clear(keys=first.keys, partition_id="train")  # trained on

    fresh = put(["u2", "u0"], step=5)
    mixed = replayed.mix(fresh)
    assert mixed.partition_id == "train"
    found = contents(mixed)
    assert [(reward, version) for _, reward, version in found] == [(3.0, 0), (4.0, 0)] * 2
    uids = [uid for uid, _, _ in found]
    assert uids == [prompt_of(key) for key in mixed.keys]
    assert len(set(uids)) == 2, "drawn twice: two groups"
    assert set(tq.kv_list("train")["train"]) == set(mixed.keys), "what was displaced is not left behind"

    kept = {prompt_of(key) for key in tq.kv_list(PARTITION)[PARTITION]}
    assert kept == {"u2", "u0"}, "the older ones were forgotten, among them the one that has come back"

    resumed = TBAReplay(seed=1, recent=0.0, temperature=0.01)
    resumed.resume()
    tq.kv_clear(keys=mixed.keys, partition_id="train")
    again = contents(resumed.mix(put(["u1"], step=6)))
    assert [(reward, version) for _, reward, version in again] == [(2.0, 5), (3.0, 5)]
