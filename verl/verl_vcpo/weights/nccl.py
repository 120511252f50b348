"""An NCCL group for weight updates that follows its members (verl/checkpoint_engine/nccl_checkpoint_engine.py).

verl forms the group at the first update and keeps that group: a sampler that replaces a dead one never joins. Here a
group's name is a digest of its members. A process that is told another name leaves its group and joins the new group,
at the first update after a sampler was replaced and at no other update. A new name also keeps Ray from handing out the
communicator id of the old group, which stays in a named actor.

A process leaves by an abort: NCCL's orderly end of a communicator waits for all processes of the node, and one process
is dead. For the same reason a broadcast to a dead process never ends, and NCCL raises no error. So each process looks
for the driver's word that the update failed (`give_up`) while it sends or receives, and aborts the transfer.

A transfer that failed may end after the next update has begun. So each transfer works on a copy of the engine, made
when the transfer began, and each update has its own publisher: nothing of the old transfer reaches the new group or the
new subscribers. Sockets belong to the process's one ZeroMQ context. A context of an update that failed would be
collected together with its socket, and would wait for ever for the socket to be closed.
"""

import asyncio
import contextlib
import copy
import hashlib
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from functools import cached_property
from typing import Any

import ray
import torch
import zmq
from ray.experimental import internal_kv
from ray.util import collective
from ray.util.collective.collective import get_group_handle
from verl import checkpoint_engine
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.net_utils import is_valid_ipv6_address

# Without cupy verl has no NCCL engine, and the engine below is not registered.
_UPSTREAM: Any = checkpoint_engine.NCCLCheckpointEngine
BACKEND = "nccl"
_POLL_S = 0.5
_SUBSCRIBED_S = 60.0
_GIVEN_UP = "vcpo_weight_update_given_up_"


class _Messages:
    """The messages that a sampler has subscribed to; the wait for a message ends when the update is given up."""

    def __init__(self, socket: zmq.Socket[bytes], given_up: threading.Event) -> None:
        self._socket, self._given_up = socket, given_up

    def recv_string(self) -> str:
        while not self._socket.poll(round(1000 * _POLL_S)):
            if self._given_up.is_set():
                raise _given_up()
        return self._socket.recv_string()

    def recv_pyobj(self) -> Any:
        return self._socket.recv_pyobj()


def _given_up() -> RuntimeError:
    return RuntimeError("another process of this weight update died: the update was given up")


class RegroupingNCCLCheckpointEngine(_UPSTREAM or CheckpointEngine):  # type: ignore[misc]
    """verl's NCCL engine with a group that is formed again when its members have changed, and only then."""

    group_name: str
    is_master: bool
    socket: Any
    _members = ""
    """The digest of the members of the group that `group_name` names; empty before the first update."""
    _members_of_latest = ""
    """The digest of the members of the update that was prepared last, in the driver."""

    @cached_property
    def _identity(self) -> str:
        return uuid.uuid4().hex

    @cached_property
    def _sending(self) -> asyncio.Lock:
        return asyncio.Lock()

    def prepare(self) -> Any:
        """Prepare as verl does, with this process's identity, and a publisher for this update alone."""
        self.send_buf = self.recv_buf = None  # buffers of an update that failed: room for the new buffers
        if self.is_master:
            self._start_zmq_server()
        metadata = super().prepare()
        metadata.identity = self._identity
        return metadata

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Build verl's topology, with a digest of the members' identities for every process."""
        of_trainer, of_samplers = super().build_topology(actor_wg_world_size, rollout_world_size, metadata)
        identities = ",".join(worker.identity for worker in metadata)
        members = cls._members_of_latest = hashlib.sha256(identities.encode()).hexdigest()[:16]
        for kwargs in (of_trainer, of_samplers):
            kwargs["members"] = [members] * len(kwargs["rank"])
        return of_trainer, of_samplers

    @classmethod
    def give_up(cls) -> None:
        """Tell all processes of the last prepared update to stop waiting; called in the driver."""
        internal_kv._internal_kv_put(_GIVEN_UP + cls._members_of_latest, b"1")

    def init_process_group(self, *args: Any, members: str = "", **kwargs: Any) -> None:
        """Join a group of these members, as verl does."""
        if members != self._members:
            self._leave_group()
            self.group_name = f"{self.group_name.removesuffix(self._members)}{members}"
            self._members = members
        super().init_process_group(*args, **kwargs)
        if self.is_master:
            self._wait_for_subscribers(self.world_size - self.num_senders)

    def _start_zmq_server(self) -> None:
        """Start verl's server with a publisher that sees who subscribes."""
        self.ip = ray.util.get_node_ip_address().strip("[]")
        ipv6 = is_valid_ipv6_address(self.ip)
        self.socket = zmq.Context.instance().socket(zmq.XPUB)
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # every subscription, not only the first to a topic
        self.socket.setsockopt(zmq.IPV6, ipv6)
        self.listen_port = self.socket.bind_to_random_port(f"tcp://[{self.ip}]" if ipv6 else f"tcp://{self.ip}")

    def _connect_zmq_client(self, metadata: Any) -> None:
        """Connect verl's subscriber, in the process's one ZeroMQ context."""
        ipv6 = is_valid_ipv6_address(metadata.zmq_ip)
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.IPV6, ipv6)
        self.socket.connect(f"tcp://{f'[{metadata.zmq_ip}]' if ipv6 else metadata.zmq_ip}:{metadata.zmq_port}")
        self.socket.setsockopt_string(zmq.SUBSCRIBE, self.topic)

    def _wait_for_subscribers(self, count: int) -> None:
        """Wait until `count` samplers have subscribed: a sampler misses all messages before its subscription.

        Raises:
            RuntimeError: the update was given up, or a subscription is missing after a minute.
        """
        deadline = time.monotonic() + _SUBSCRIBED_S
        while count:
            if self.socket.poll(round(1000 * _POLL_S)):
                count -= self.socket.recv().startswith(b"\1")
            elif internal_kv._internal_kv_exists(_GIVEN_UP + self._members):
                raise _given_up()
            elif time.monotonic() > deadline:
                raise RuntimeError(
                    f"{count} samplers have not subscribed to {self.ip}:{self.listen_port} after {_SUBSCRIBED_S:.0f} s"
                )

    def _leave_group(self) -> None:
        if collective.is_group_initialized(self.group_name):
            self._abort()
            collective.destroy_collective_group(self.group_name)

    def _abort(self) -> None:
        """End the communicators of the group without waiting for other members."""
        if not collective.is_group_initialized(self.group_name):
            return  # a trainer's process that gathers weights and sends none
        for communicators in list(get_group_handle(self.group_name)._dev_comm_map.values()):
            for communicator in communicators:
                communicator.abort()

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> Any:
        """Send as verl does until the driver gives the update up; first wait for the end of the transfer before."""
        weights, transfer = iter(weights), copy.copy(self)
        async with self._sending:
            with transfer._abort_when_given_up():
                try:
                    return await super(RegroupingNCCLCheckpointEngine, transfer).send_weights(weights, global_steps)
                finally:
                    # Gathering a weight is collective over the trainer's processes. Those that send none gather to the
                    # end, and would wait for a process that stops before.
                    for _ in weights:
                        pass

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the weights as verl does, until the driver gives the update up.

        Raises:
            RuntimeError: the update was given up: an aborted broadcast leaves no weight in the buffer.
        """
        transfer = copy.copy(self)
        with transfer._abort_when_given_up() as given_up:
            transfer.socket = _Messages(self.socket, given_up)
            async for weight in super(RegroupingNCCLCheckpointEngine, transfer).receive_weights(global_steps):
                if given_up.is_set():
                    raise _given_up()
                yield weight

    @contextlib.contextmanager
    def _abort_when_given_up(self) -> Iterator[threading.Event]:
        """Abort the group's communicators, by a thread, if the driver gives the update up during the block."""
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
