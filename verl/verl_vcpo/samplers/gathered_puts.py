"""Puts to TransferQueue of the same time as one request (replaces names of verl/trainer/ppo/v1/agent_loop_tq.py).

verl's agent-loop worker stores each trajectory, and each state of a prompt, by a put of its own. A put costs the
worker, the controller and the storage about as much for eight rows as for one.
"""

import asyncio
import contextlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import transfer_queue
from tensordict import TensorDict
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

GATHER_S = 0.05
"""The time between two requests for a partition, in which puts wait for each other; the first one does not wait."""

_Row = dict[str, Any]


@dataclass(frozen=True)
class _Put:
    keys: list[str]
    rows: list[_Row] | None
    tags: list[dict[str, Any]]
    stored: asyncio.Future[None]


class GatheredPuts:
    """Stands for the package `transfer_queue` in verl's worker. A put returns when its rows are stored."""

    init = staticmethod(transfer_queue.init)

    def __init__(self) -> None:
        self._waiting: dict[str, list[_Put]] = defaultdict(list)
        self._begun: dict[str, float] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    async def async_kv_put(self, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        """Store a tag. Raises what TransferQueue raises."""
        await self._stored([key], partition_id, None, [tag])

    async def async_kv_batch_put(
        self, keys: list[str], partition_id: str, tags: list[dict[str, Any]], fields: list[_Row] | None = None
    ) -> None:
        """Store tags, and a row of fields for each key. Raises what TransferQueue raises."""
        await self._stored(keys, partition_id, fields, tags)

    async def _stored(
        self, keys: list[str], partition_id: str, rows: list[_Row] | None, tags: list[dict[str, Any]]
    ) -> None:
        """Return when the rows and tags are stored. A caller that is cancelled while they are sent waits for the end.

        So nothing is written later for a prompt that was stopped.
        """
        loop = asyncio.get_running_loop()
        waiting, put = self._waiting[partition_id], _Put(keys, rows, tags, loop.create_future())
        waiting.append(put)
        if len(waiting) == 1:
            loop.call_at(self._begun.get(partition_id, 0.0) + GATHER_S, self._begin, partition_id)
        try:
            await asyncio.shield(put.stored)
        except asyncio.CancelledError:
            if put in self._waiting.get(partition_id, ()):
                self._waiting[partition_id].remove(put)
                raise
            while not put.stored.done():
                with contextlib.suppress(asyncio.CancelledError):  # the caller is cancelled once more
                    await asyncio.wait({put.stored})
            raise

    def _begin(self, partition_id: str) -> None:
        """Send the partition's puts that wait: one request for all whose rows can be one TensorDict."""
        self._begun[partition_id] = asyncio.get_running_loop().time()
        alike: dict[object, list[_Put]] = defaultdict(list)
        for put in self._waiting.pop(partition_id, []):
            alike[None if put.rows is None else _columns(put.rows[0])].append(put)
        for puts in alike.values():
            task = asyncio.ensure_future(_send(puts, partition_id))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)


def _columns(row: _Row) -> object:
    """Return what is equal for rows whose fields can be stacked: names and, of tensors, all but the first dimension."""
    return frozenset(
        (name, value.dtype, value.ndim, value.shape[1:]) if isinstance(value, torch.Tensor) else (name,)
        for name, value in row.items()
    )


async def _send(puts: list[_Put], partition_id: str) -> None:
    """Store puts in one request; one by one if that fails, so that what cannot be stored fails alone."""
    try:
        await (_send_tags if puts[0].rows is None else _send_rows)(puts, partition_id)
    except Exception as error:
        if len(puts) == 1:
            puts[0].stored.set_exception(error)
        else:
            for put in puts:
                await _send([put], partition_id)
    else:
        for put in puts:
            put.stored.set_result(None)


async def _send_tags(puts: list[_Put], partition_id: str) -> None:
    tags: dict[str, dict[str, Any]] = defaultdict(dict)
    for put in puts:
        for key, tag in zip(put.keys, put.tags, strict=True):
            tags[key] |= tag
    await transfer_queue.async_kv_batch_put([*tags], partition_id, tags=[*tags.values()])


async def _send_rows(puts: list[_Put], partition_id: str) -> None:
    keys, tags = [key for put in puts for key in put.keys], [tag for put in puts for tag in put.tags]
    fields: TensorDict = list_of_dict_to_tensordict([row for put in puts for row in put.rows or ()])
    await transfer_queue.async_kv_batch_put(keys, partition_id, fields=fields, tags=tags)


def gather_puts() -> None:
    """Have verl's agent-loop worker of this process store by `GatheredPuts`, which makes the tensors of the rows."""
    agent_loop_tq.tq = GatheredPuts()
    agent_loop_tq.list_of_dict_to_tensordict = lambda rows: rows
