"""The NCCL group of weight updates follows its members (extends verl/checkpoint_engine/nccl_checkpoint_engine.py).

verl forms the group at the first update and keeps that group: a sampler that replaces a dead one is never in it. Here
a group's name is a digest of its members. A process that is told another name leaves its group and joins the new one,
at the first update after a sampler was replaced and at no other. A new name also keeps Ray from handing out the
communicator id of the old group, which stays in a named actor.

A process leaves by an abort: NCCL's orderly end of a communicator waits for all processes of the node, and one of them
is dead. For the same reason a broadcast to a dead process never ends, and NCCL raises no error. So each process looks
for the driver's word that the update failed (`give_up`) while it sends or receives, and aborts what it is waiting for.
"""

import contextlib
import hashlib
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from functools import cached_property
from typing import Any

import torch
from ray.experimental import internal_kv
from ray.util import collective
from ray.util.collective.collective import get_group_handle
from verl import checkpoint_engine
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

# Where cupy is not installed verl has no NCCL engine, and the one below is not registered.
_UPSTREAM: Any = checkpoint_engine.NCCLCheckpointEngine
BACKEND = "nccl"
_POLL_S = 0.5
_GIVEN_UP = "vcpo_weight_update_given_up_"


class RegroupingNCCLCheckpointEngine(_UPSTREAM or CheckpointEngine):  # type: ignore[misc]
    """verl's NCCL engine, with a group that is formed anew when its members have changed, and only then."""

    group_name: str
    _members = ""
    """The digest of the members of the group that `group_name` names; empty before the first update."""
    _members_of_latest = ""
    """In the driver: the digest of the members of the update that was prepared last."""

    @cached_property
    def _identity(self) -> str:
        return uuid.uuid4().hex

    def prepare(self) -> Any:
        """As verl's, with this process's identity."""
        self.send_buf = self.recv_buf = None  # an update that failed has left its own: room for the new ones
        metadata = super().prepare()
        metadata.identity = self._identity
        return metadata

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """As verl's, with a digest of the members' identities for every process."""
        of_trainer, of_samplers = super().build_topology(actor_wg_world_size, rollout_world_size, metadata)
        identities = ",".join(worker.identity for worker in metadata)
        members = cls._members_of_latest = hashlib.sha256(identities.encode()).hexdigest()[:16]
        for kwargs in (of_trainer, of_samplers):
            kwargs["members"] = [members] * len(kwargs["rank"])
        return of_trainer, of_samplers

    @classmethod
    def give_up(cls) -> None:
        """In the driver: tell all processes of the update that was prepared last to wait for it no longer."""
        internal_kv._internal_kv_put(_GIVEN_UP + cls._members_of_latest, b"1")

    def init_process_group(self, *args: Any, members: str = "", **kwargs: Any) -> None:
        """As verl's, in a group of these members."""
        if members != self._members:
            self._leave_group()
            self.group_name = f"{self.group_name.removesuffix(self._members)}{members}"
            self._members = members
        super().init_process_group(*args, **kwargs)

    def _leave_group(self) -> None:
        if collective.is_group_initialized(self.group_name):
            self._abort()
            collective.destroy_collective_group(self.group_name)

    def _abort(self) -> None:
        """End the communicators of the group without waiting for its other members."""
        if not collective.is_group_initialized(self.group_name):
            return  # a trainer's process that only walks the weights
        for communicators in list(get_group_handle(self.group_name)._dev_comm_map.values()):
            for communicator in communicators:
                communicator.abort()

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> Any:
        """As verl's, until the driver gives the update up."""
        weights = iter(weights)
        with self._abort_when_given_up():
            try:
                return await super().send_weights(weights, global_steps)
            finally:
                # Gathering a weight is collective over the trainer's processes. Those that send none walk to the end,
                # and would wait for a process that stops before.
                for _ in weights:
                    pass

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """As verl's, until the driver gives the update up.

        Raises:
            RuntimeError: the update was given up: what an aborted broadcast has left in the buffer is no weight.
        """
        with self._abort_when_given_up() as given_up:
            async for weight in super().receive_weights(global_steps):
                if given_up.is_set():
                    raise RuntimeError("another process of this weight update died: the update was given up")
                yield weight

    @contextlib.contextmanager
    def _abort_when_given_up(self) -> Iterator[threading.Event]:
        """Inside the block a thread aborts the group's communicators as soon as the driver gives the update up."""
        key, ended, given_up = _GIVEN_UP + self._members, threading.Event(), threading.Event()

        def watch() -> None:
            while not ended.wait(_POLL_S):
                if internal_kv._internal_kv_exists(key):
                    given_up.set()
                    self._abort()
                    return

        watcher = threading.Thread(target=watch, name="weight-update-watch", daemon=True)
        watcher.start()
        try:
            yield given_up
        finally:
            ended.set()


if _UPSTREAM is not None:
    CheckpointEngineRegistry.register(BACKEND)(RegroupingNCCLCheckpointEngine)
