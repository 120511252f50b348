"""verl's metrics of a batch are the same from a few numbers per trajectory as from all its tokens."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu

from verl_vcpo.loop.trainer import LagKTrainer
from verl_vcpo.report.batch_totals import in_place_of_tokens
from verl_vcpo.report.trajectory_metrics import RAW_REWARD, few_fields

LENGTHS = [(5, 3), (4, 7), (6, 1), (3, 1)]  # of prompt and response; the last trajectory is verl's padding
REWARDS = [0.25, -1.0, 1.0, 0.0]
TIMING = {"step": 2.0, "gen": 1.0, "adv": 0.5, "update_actor": 0.25}


def batch_of(lengths: list[tuple[int, int]]) -> KVBatchMeta:
    tags = [
        {"prompt_len": p, "response_len": r, "seq_len": p + r, "min_global_steps": i, "max_global_steps": i + 1}
        for i, (p, r) in enumerate(lengths)
    ]
    tags[-1]["is_padding"] = True
    return KVBatchMeta(keys=[f"u{i}_0_0" for i in range(len(lengths))], tags=tags, partition_id="train")


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class Stored:
    """TransferQueue with this batch, and the names of the fields that were fetched."""

    def __init__(self, with_raw_reward: bool) -> None:
        scores = [torch.zeros(r) for _, r in LENGTHS]
        for score, reward in zip(scores, REWARDS, strict=True):
            score[-1] = reward
        responses = [torch.ones(r, dtype=torch.int64) for _, r in LENGTHS]
        self.fetched: list[str] = []
        self._rows = TensorDict(
            {
                "prompts": nested([torch.ones(p, dtype=torch.int64) for p, _ in LENGTHS]),
                "responses": nested(responses),
                "response_mask": nested(responses),
                "rm_scores": nested(scores),
                "advantages": nested(scores),
                "returns": nested(scores),
            },
            batch_size=len(LENGTHS),
        )
        tu.assign_non_tensor_stack(self._rows, "num_turns", [2, 4, 6, 2])
        extra: list[dict[str, Any]] = [{RAW_REWARD: reward} if with_raw_reward else {} for reward in REWARDS]
        tu.assign_non_tensor_stack(self._rows, "extra_fields", extra)

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        self.fetched += select_fields
        rows = tu.index_select_tensor_dict(self._rows, [int(key[1]) for key in keys])
        return rows.select(*select_fields, strict=False)


def verls_metrics(batch: KVBatchMeta) -> dict[str, Any]:
    """Of a trainer that has what `_compute_metrics` reads of itself."""
    rollout = {"moe_load_balance_metrics_interval": 0}
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout, model=SimpleNamespace(mtp=None)))
    trainer: Any = SimpleNamespace(
        config=config,
        use_critic=False,
        _rollout_moe_lb_metrics_accumulator=None,
        _get_n_gpus_for_throughput=lambda: 1,
    )
    metrics: dict[str, Any] = {"actor/grad_norm": 1.0}
    PPOTrainer._compute_metrics(trainer, batch, metrics, TIMING, 5, 0)
    return metrics


@pytest.mark.parametrize("with_raw_reward", [True, False], ids=["stored rewards", "sums of rm_scores"])
def test_the_same_as_from_all_tokens(with_raw_reward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, batch = Stored(with_raw_reward), batch_of(LENGTHS)
    monkeypatch.setattr(tq, "kv_batch_get", stored.kv_batch_get)
    from_tokens = verls_metrics(batch)
    assert from_tokens["critic/score/mean"] == pytest.approx(sum(REWARDS) / 3), "without the padding"
    assert from_tokens["response_length/clip_ratio"] == pytest.approx(1 / 3)

    stored.fetched.clear()
    from_totals: dict[str, Any] = {}
    with in_place_of_tokens(batch, few_fields(batch), from_totals):
        from_totals |= verls_metrics(batch)
    of_tokens = {"rm_scores"} if not with_raw_reward else set()
    assert set(stored.fetched) == {"num_turns", "extra_fields"} | of_tokens
    left_out = from_tokens.keys() - from_totals.keys()
    assert left_out == {
        f"critic/{what}/{which}" for what in ("advantages", "returns") for which in ("mean", "max", "min")
    }
    assert from_totals == {name: value for name, value in from_tokens.items() if name not in left_out}


def test_a_step_fetches_its_fields_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels, the checkpoint and the metrics of a step read the same few fields."""
    stored, batch = Stored(with_raw_reward=True), batch_of(LENGTHS)
    monkeypatch.setattr(tq, "kv_batch_get", stored.kv_batch_get)
    monkeypatch.setattr(PPOTrainer, "step", lambda *_: batch)
    trainer: Any = object.__new__(LagKTrainer)
    trainer.global_steps, trainer.config = 1, {"async": SimpleNamespace(truncated="train")}
    trainer.sample_log = SimpleNamespace(is_due=lambda step: False)
    trainer.replay_buffer = SimpleNamespace(ages={}, data_rows=[])
    trainer.step({}, {})
    lines = [trainer._with_own_metrics({"perf/total_num_tokens": 8}, TIMING) for _ in range(2)]
    assert stored.fetched == ["num_turns", "extra_fields"] and lines[0] == lines[1]
