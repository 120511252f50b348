"""The input that verl's optimal token baseline needs and verl's V1 trainer does not pass to it: sum_v pi(v)^2.

Extends verl/trainer/ppo/v1/trainer_base.py. verl's actor can compute sum_v pi(v)^2 beside the old log-probs
(`actor.calculate_sum_pi_squared`) and leave the result in TransferQueue. The V1 trainer of verl 0.9.1 neither requests
the computation nor reads the result.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo.v1 import trainer_base
from verl.workers.utils.padding import response_from_nested

FIELD = "sum_pi_squared"


@contextlib.contextmanager
def requested(batch: KVBatchMeta) -> Iterator[None]:
    """Have the actor's log-prob pass over `batch` in the block also store `sum_pi_squared` in TransferQueue."""
    batch.extra_info["calculate_sum_pi_squared"] = True
    try:
        yield
    finally:
        del batch.extra_info["calculate_sum_pi_squared"]


@contextlib.contextmanager
def passed_to_estimator(batch: KVBatchMeta) -> Iterator[None]:
    """Give verl's advantage estimators in the block `sum_pi_squared` [B, T] of `batch`."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[FIELD, "response_mask"])
    data[FIELD] = response_from_nested(data[FIELD], data["response_mask"])
    padded = data.to_padded_tensor()[FIELD]
    upstream = trainer_base.compute_advantage_for_multi_trajectories

    def compute_advantage(batch_data: DataProto, *args: Any, **kwargs: Any) -> DataProto:
        batch_data.batch[FIELD] = padded
        return upstream(batch_data, *args, **kwargs)

    trainer_base.compute_advantage_for_multi_trajectories = compute_advantage
    try:
        yield
    finally:
        trainer_base.compute_advantage_for_multi_trajectories = upstream
