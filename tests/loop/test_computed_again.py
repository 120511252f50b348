"""What samplers are asked between two weight updates, and what becomes of their answers."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta

from verl_vcpo.actor.update.sequences import COMPUTED_AGAIN
from verl_vcpo.loop import computed_again
from verl_vcpo.loop.computed_again import ComputedAgain

VERSION, PROMPT = 6, 3
STEP = VERSION + 1


class Call:
    """A call to a sampler that has been sent."""

    def __init__(self, server: "Server", tokens: list[int]) -> None:
        self.server, self.tokens = server, tokens


class Server:
    """A sampler whose log-prob of token t is -t / 10; it remembers what it was asked."""

    def __init__(self, version: int = VERSION, fate: str = "answers") -> None:
        self.version, self.fate, self.asked, self.dropped = version, fate, [], []  # type: ignore[var-annotated]
        self.generate = SimpleNamespace(remote=self._generate)
        self.drop_request = SimpleNamespace(remote=self.dropped.append)

    def _generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Any:
        self.asked.append((prompt_ids, sampling_params))
        return Call(self, prompt_ids)


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray and TransferQueue without a process: prompts of 3 tokens, responses of 0 to 5 by the sample's number."""

    def wait(calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert timeout in (10, 60) and num_returns == len(calls)
        return [c for c in calls if c.server.fate != "late"], [c for c in calls if c.server.fate == "late"]

    def get(call: Any) -> Any:
        if call.server.fate == "dies":
            raise ray.exceptions.ActorDiedError
        if call.server.fate == "raises":
            raise ray.exceptions.RayTaskError("generate", "Traceback", ValueError("no such token"))
        fields: dict[str, Any] = {"global_steps": call.server.version}
        if call.server.fate != "aborts":
            fields["prompt_logprobs"] = [[-token / 10] for token in call.tokens[1:]] + [[0.0]]
        return SimpleNamespace(extra_fields=fields)

    def fetch(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        assert set(select_fields) == {"prompts", "responses", "extra_fields"}
        lengths = [int(key.split("_")[1]) for key in keys]
        return {
            "extra_fields": [{"sampler": int(key[2:].split("_")[0])} if key[0] == "s" else {} for key in keys],
            "prompts": torch.nested.as_nested_tensor([torch.arange(PROMPT) for _ in keys], layout=torch.jagged),
            "responses": torch.nested.as_nested_tensor([torch.arange(n) + 7 for n in lengths], layout=torch.jagged),
        }

    monkeypatch.setattr(computed_again, "ray", SimpleNamespace(wait=wait, get=get, exceptions=ray.exceptions))
    monkeypatch.setattr(tq, "kv_batch_get", fetch)


def config(**more: Any) -> Any:
    given = {"lag": 4, "trainer": "bfloat16", "dtype": "bfloat16", "max_model_len": 7, "rank": 0, "merge": True, **more}
    lag, trainer, rank, merge = (given.pop(name) for name in ("lag", "trainer", "rank", "merge"))
    rollout = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "enable_rollout_routing_replay": False, **given}
    of_model = {"actor": {"megatron": {"dtype": trainer}}, "model": {"lora": {"rank": rank, "merge": merge}}}
    return OmegaConf.create({"async": {"lag": lag}, "actor_rollout_ref": {**of_model, "rollout": rollout}})


def asked(*servers: Server, arithmetic: float | None = None, **more: Any) -> dict[str, list[float]] | None:
    """Return what is in the batch after a question about six samples of a prompt, and a session of two trajectories."""
    replicas = [SimpleNamespace(_server_handle=server, replica_rank=i) for i, server in enumerate(servers)]
    batch = KVBatchMeta(keys=[*(f"a_{i}_0" for i in range(6)), "b_2_0", "b_2_1", "pad"], tags=[{}] * 8 + [PADDING])
    again = ComputedAgain(SimpleNamespace(rollout_replicas=replicas), config(**more))
    again.ask(batch, range(9), STEP, arithmetic)
    return json.loads(batch.extra_info[COMPUTED_AGAIN]) if COMPUTED_AGAIN in batch.extra_info else None


PADDING = {"is_padding": True}


def test_the_response_tokens_of_some_sequences() -> None:
    """A sequence has at most six tokens here: vLLM has to make a seventh. Two servers are asked in turn."""
    first, second = Server(), Server()
    found = asked(first, second)
    assert found == {f"a_{n}": [-0.7, -0.8, -0.9][:n] for n in (1, 2, 3, 4, 5)}
    assert [len(tokens) for tokens, _ in first.asked] == [5, 6] and [len(t) for t, _ in second.asked] == [4, 6, 6]
    assert first.asked[0][1] == {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}


def test_a_response_goes_to_the_sampler_it_comes_from() -> None:
    """Keys s_N have the sample N of sampler N; rank 7 is gone, so any other sampler is asked."""
    servers = [Server(), Server()]
    ranks = zip(servers, (1, 3), strict=True)
    replicas = [SimpleNamespace(_server_handle=server, replica_rank=rank) for server, rank in ranks]
    batch = KVBatchMeta(keys=["s_3_0", "s_1_0", "s_7_0"], tags=[{}] * 3)
    ComputedAgain(SimpleNamespace(rollout_replicas=replicas), config()).ask(batch, range(3), STEP, None)
    asked = [[len(tokens) - PROMPT for tokens, _ in server.asked] for server in servers]
    assert asked == [[1, 3], [3]]


@pytest.mark.parametrize("fate", ["dies", "aborts", "late"])
def test_a_sampler_that_does_not_answer_is_left_out(fate: str) -> None:
    silent = Server(fate=fate)
    assert asked(Server(), silent) == {"a_2": [-0.7, -0.8], "a_4": [-0.7, -0.8, -0.9]}
    assert len(silent.dropped) == (3 if fate == "late" else 0)


def test_log_probs_of_another_version_are_left_out() -> None:
    assert asked(Server(version=VERSION - 1)) == {}


@pytest.mark.parametrize(
    ("settings", "asks"),
    [
        ({}, True),
        ({"arithmetic": 0.98}, True),
        ({"arithmetic": 0.99}, False),
        ({"lag": 0}, False),
        ({"dtype": "float32"}, True),
        ({"dtype": "float32", "trainer": "float32"}, False),
        ({"temperature": 0.9}, False),
        ({"top_p": 0.9}, False),
        ({"top_k": 20}, False),
        ({"enable_rollout_routing_replay": True}, False),
        ({"rank": 4}, True),
        ({"rank": 4, "merge": False}, False),
    ],
    ids=str,
)
def test_it_asks_only_where_the_answer_can_matter(settings: dict[str, Any], asks: bool) -> None:
    server = Server()
    assert (asked(server, **settings) is not None) == asks == bool(server.asked)


def questions(server: Server, steps: range, arithmetic: float | None = 0.5, key: str = "a_2_0") -> ComputedAgain:
    """Ask in each of these steps."""
    replica = SimpleNamespace(_server_handle=server, replica_rank=0)
    again = ComputedAgain(SimpleNamespace(rollout_replicas=[replica]), config())
    for step in steps:
        again.ask(KVBatchMeta(keys=[key], tags=[{}]), [0], step, arithmetic)
    return again


def test_samplers_that_are_too_slow_are_asked_less_often(capfd: pytest.CaptureFixture[str]) -> None:
    server = Server(fate="late")
    questions(server, range(STEP, STEP + 41))
    assert len(server.asked) == len(server.dropped) == 3
    (line,) = capfd.readouterr().out.splitlines()
    assert "1 of 1 log-probs were not computed again in 10 s" in line


def test_where_arithmetic_hardly_counts_they_are_asked_seldom() -> None:
    server = Server()
    questions(server, range(1, 61), arithmetic=0.995)
    assert len(server.asked) == 3


def test_an_error_of_the_question_ends_the_questions_and_not_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    server = Server(fate="raises")
    questions(server, range(1, 10))
    assert len(server.asked) == 1 and "any more: one of them raised" in capfd.readouterr().out
    assert asked(Server(fate="raises")) == {}
    assert capfd.readouterr().out.count("any more: one of them raised") == 1, "once for five answers"


def test_a_prompt_that_fills_the_limit_is_told_once(capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("verl_vcpo.loop.questions._TOKENS", PROMPT)
    server = Server()
    questions(server, range(1, 10))
    assert not server.asked and capfd.readouterr().out.count("no prompt has less than 3 tokens") == 1


def test_the_sequences_are_spread_over_the_rows() -> None:
    server = Server()
    replica = SimpleNamespace(_server_handle=server, replica_rank=0)
    keys = [f"{uid}_{1 + row % 5}_0" for row, uid in enumerate("abcdefghijklmnopqrstuvwxyz")]
    batch = KVBatchMeta(keys=keys, tags=[{}] * 26)
    ComputedAgain(SimpleNamespace(rollout_replicas=[replica]), config()).ask(batch, range(26), STEP, 0.5)
    chosen = [keys.index(f"{session}_0") for session in json.loads(batch.extra_info[COMPUTED_AGAIN])]
    assert len(chosen) == 16 and chosen[0] == 0 and chosen[-1] == 24
