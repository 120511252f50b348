"""A real TransferQueue: who may speak to it, chosen tags, remembered groups, samples for the record."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transfer_queue as tq
import zmq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from transfer_queue.utils import zmq_utils
from verl.utils import tensordict_utils as tu
from zmq.utils.monitor import recv_monitor_message

from recipe.fully_async_policy import main
from recipe.fully_async_policy.launch import ray_access
from verl_vcpo.actor.update.sequence_weights import SequenceWeight
from verl_vcpo.common.stored_tags import PromptTags, prompt_of, tags_of, trajectories_of
from verl_vcpo.loop.prompts.dropped import mask_dropped
from verl_vcpo.loop.prompts.tba_replay import PARTITION, TBAReplay
from verl_vcpo.report.batch_totals import RAW_REWARD
from verl_vcpo.report.sample_log import SAMPLES, samples_of

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


class Touch:
    """Whoever unpickles it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def listeners() -> dict[str, str]:
    """The addresses of all sockets that the queue's processes listen at, by name."""
    client = tq.get_client()
    servers = [client._controller, *client.storage_manager.storage_unit_infos.values()]
    return {f"{server.id}.{port}": server.to_addr(port) for server in servers for port in server.ports}


def send(key: str, address: str, message: list[bytes]) -> bool:
    """Send what TransferQueue would read, with this key; whether the other side has taken the connection."""
    with zmq.Context() as context:
        if key == "the run's":
            socket = zmq_utils.create_zmq_socket(context, zmq.DEALER, "127.0.0.1")
        else:
            socket = context.socket(zmq.DEALER)
        if key == "another":
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey, _ = zmq.curve_keypair()
        socket.identity = zmq_utils.STORAGE_CLIENT_IDENTITY_PREFIXES[0] + b"test"
        with socket, socket.get_monitor_socket() as events:
            socket.connect(address)
            socket.send_multipart(message)
            event = 0
            while event not in {zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED}:
                assert events.poll(30_000), "neither taken nor refused"
                event = recv_monitor_message(events)["event"]
            taken = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            socket.linger = 30_000 if taken else 0
    return taken


@pytest.mark.parametrize("key", ["none", "another", "the run's"])
def test_the_queue_unpickles_what_comes_with_the_runs_key(queue: None, key: str, tmp_path: Path) -> None:
    assert len(addresses := listeners()) >= 3, "the controller's two, and one for each storage unit"
    for name, address in addresses.items():
        file = tmp_path / name
        message = zmq_utils.ZMQMessage.create(zmq_utils.ZMQRequestType.HANDSHAKE, "test", {"field": Touch(file)})
        taken = send(key, address, message.serialize())
        until = time.monotonic() + 60
        while taken and not file.exists():
            assert time.monotonic() < until, "the message was taken, and is not read"
            time.sleep(0.02)
        assert file.exists() == (key == "the run's")
    put_tags(key, {"a": {"status": "running"}})
    assert tags_of(["a"], key) == {"a": {"status": "running"}}, "the queue goes on"


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


def put_tags(partition: str, tags: dict[str, dict[str, Any]]) -> None:
    tq.kv_batch_put(keys=list(tags), partition_id=partition, tags=list(tags.values()))


def test_tags_of_chosen_keys(queue: None) -> None:
    put_tags("chosen", {"a": {"status": "running"}, "b": {"status": "finished"}, "a_0_0": {"seq_len": 3}})
    assert tags_of(["b", "a"], "chosen") == {"b": {"status": "finished"}, "a": {"status": "running"}}
    assert list(tags_of(["missing", "a_0_0", "b"], "chosen")) == ["a_0_0", "b"]
    assert tags_of(["missing"], "chosen") == tags_of([], "chosen") == tags_of(["a"], "no such partition") == {}


def test_all_trajectories_of_chosen_prompts(queue: None) -> None:
    trajectories = ["x_0_0", "x_0_1", "x_0_2", "x_2_0", "y_0_0", "y_1_0", "other_0_0"]  # x's session 1 has none
    put_tags("groups", {key: {"seq_len": number} for number, key in enumerate(trajectories)} | {"x": {"status": "?"}})
    found = trajectories_of({"x": 3, "y": 2}, "groups")
    assert found == {key: {"seq_len": number} for number, key in enumerate(trajectories[:-1])}


def test_a_prompt_is_asked_for_until_it_is_finished(queue: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    retrieve = tq.get_client().kv_retrieve_meta
    monkeypatch.setattr(tq.get_client(), "kv_retrieve_meta", lambda **kw: asked.append(kw["keys"]) or retrieve(**kw))
    prompts = PromptTags()
    prompts.add(["p", "q", "r"])
    assert prompts.current("prompts") == {}, "not stored yet"
    put_tags("prompts", {"p": {"status": "pending"}, "q": {"status": "finished"}, "r": {"status": "failure"}})
    assert {uid: tag["status"] for uid, tag in prompts.current("prompts").items()} == {
        "p": "pending",
        "q": "finished",
        "r": "failure",
    }
    put_tags("prompts", {"p": {"status": "finished"}, "r": {"status": "pending"}})  # r is sampled again
    assert {uid: tag["status"] for uid, tag in prompts.current("prompts").items()} == {
        "p": "finished",
        "q": "finished",
        "r": "pending",
    }
    prompts.remove(["p", "q"])
    assert list(prompts.current("prompts")) == ["r"]
    assert asked == [["p", "q", "r"], ["p", "q", "r"], ["p", "r"], ["r"]]


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


class Letters:
    """A tokenizer of one letter per token."""

    def decode(self, tokens: torch.Tensor, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(ord("a") + token) for token in tokens.tolist())


def test_samples_for_the_record(queue: None) -> None:
    """Of a batch of 3 prompts with 4 samples each and a row of padding; a sample's response has as many tokens as its
    place in the batch, plus 1."""
    sessions = [(f"p{prompt}", session) for prompt in range(3) for session in range(4)]
    keys = [*(f"{uid}_{session}_0" for uid, session in sessions), "pad_0_0"]
    lengths = range(1, len(keys) + 1)
    nested = {
        "prompts": [torch.tensor([prompt]) for prompt in (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3)],
        "responses": [torch.arange(length) for length in lengths],
        "rm_scores": [torch.tensor([0.0] * (length - 1) + [0.5]) for length in lengths],
        "session_id": [torch.tensor(session) for _, session in [*sessions, ("pad", 0)]],
    }
    nested["session_id"] = torch.stack(nested["session_id"])  # type: ignore[assignment]
    data = TensorDict(
        {
            name: rows if isinstance(rows, torch.Tensor) else torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            for name, rows in nested.items()
        },
        batch_size=len(keys),
    )
    tu.assign_non_tensor_stack(data, "uid", [prompt_of(key) for key in keys])
    tu.assign_non_tensor_stack(data, "data_source", ["letters"] * len(keys))
    extra = [{RAW_REWARD: float(i)} if i % 2 else {RAW_REWARD: None} for i in range(len(keys))]
    tu.assign_non_tensor_stack(data, "extra_fields", extra)
    tags: list[dict[str, Any]] = [{"min_global_steps": i % 3} for i in range(len(keys))]
    tags[-1]["is_padding"] = True
    tq.kv_batch_put(keys=keys, partition_id="samples", fields=data, tags=tags)
    weights = {session: SequenceWeight(i / 8, float(i)) for i, session in enumerate(sessions)}
    weights[sessions[0]] = SequenceWeight(math.nan, math.inf)
    del weights[sessions[1]]

    seen = set()
    for step in range(10, 30):
        samples = samples_of(KVBatchMeta(keys, tags, "samples"), step, weights, Letters())
        assert len(samples) == SAMPLES
        for sample in samples:
            row = sample["tokens"] - 1
            seen.add(row)
            assert sample == {
                "step": step,
                "uid": sessions[row][0],
                "prompt": "abc"[row // 4],
                "response": "abcdefghijkl"[: row + 1],
                "tokens": row + 1,
                "reward": float(row) if row % 2 else 0.5,
                "lag": step - 1 - row % 3,
                "weight": float(row) if row > 1 else None,
                "log_weight": row / 8 if row > 1 else None,
                "data_source": "letters",
            }
    assert seen == set(range(12)), "any of them, and never padding"


@pytest.mark.usefixtures("queue")
@pytest.mark.parametrize("treatment", ["mask", "drop"])
def test_truncated_trajectories_are_left_out_where_they_are_stored(treatment: str) -> None:
    keys, lengths = [f"{treatment}_{i}_0" for i in range(3)], [2, 3, 1]
    ones = [torch.ones(length, dtype=torch.int64) for length in lengths]
    data = TensorDict(
        {name: tu.nested_tensor_from_tensor_list(ones) for name in ("response_mask", "loss_mask", "responses")},
        batch_size=3,
    )
    tu.assign_non_tensor_stack(data, "uid", [treatment] * 3)
    tags: list[dict[str, Any]] = [{"status": "success", "response_len": length} for length in lengths]
    tq.kv_batch_put(keys=keys, partition_id="train", fields=data, tags=tags)
    tq.kv_batch_put(keys=keys[:1], partition_id="train", tags=[{"truncated": treatment}])  # as the agent-loop worker
    stored = tags_of(keys, "train")
    assert stored[keys[0]] == tags[0] | {"truncated": treatment} and stored[keys[1]] == tags[1]
    mask_dropped(KVBatchMeta(keys=keys, tags=list(stored.values()), partition_id="train"), by_verl=True)
    left = tq.kv_batch_get(keys=keys, partition_id="train")
    for name in ("response_mask", "loss_mask"):
        assert [row.tolist() for row in left[name].unbind()] == [[0, 0], [1, 1, 1], [1]]
    assert all(row.all() for row in left["responses"].unbind())
    assert list(map(str, tu.get(left, "uid"))) == [keys[0] if treatment == "drop" else treatment, treatment, treatment]
    tq.kv_clear(keys=keys, partition_id="train")
