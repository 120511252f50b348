"""Weights through a shared-memory file: whole or absent, one per run, gone afterwards; copied once to another node."""

import asyncio
import os
from pathlib import Path

import pytest
import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from verl_vcpo.cpu import node_file
from verl_vcpo.cpu.weight_file import BACKEND, WeightFileCheckpointEngine, weights_of


def engine(folder: Path, run_id: str = "run", timeout_s: float = 60, **kwargs: object) -> WeightFileCheckpointEngine:
    settings = {"run_id": run_id, "timeout_s": timeout_s, "directory": str(folder), **kwargs}
    return WeightFileCheckpointEngine(bucket_size=1, **settings)  # type: ignore[arg-type]


def weights(scale: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((2, 3), scale), "b": torch.full((4,), -scale, dtype=torch.bfloat16)}


async def receive(receiver: WeightFileCheckpointEngine, version: int) -> dict[str, torch.Tensor]:
    return dict(weights_of([sent async for sent in receiver.receive_weights(global_steps=version)]))


def test_a_receiver_gets_exactly_the_version_it_asked_for(tmp_path: Path) -> None:
    sender, receiver = engine(tmp_path, is_master=True), engine(tmp_path)

    async def exchange() -> dict[str, torch.Tensor]:
        await sender.send_weights(iter(weights(1.0).items()), global_steps=1)
        waiting = asyncio.create_task(receive(receiver, 2))
        await asyncio.sleep(0.05)
        assert not waiting.done(), "version 1 must not be taken for version 2"
        await sender.send_weights(iter(weights(2.0).items()), global_steps=2)
        return await waiting

    received = asyncio.run(exchange())
    for name, weight in weights(2.0).items():
        assert torch.equal(received[name], weight) and received[name].dtype == weight.dtype


def test_staged_weights_are_sent_without_walking_them_again(tmp_path: Path) -> None:
    sender, receiver = engine(tmp_path, is_master=True), engine(tmp_path)

    async def exchange(scale: float, version: int) -> dict[str, torch.Tensor]:
        await sender.send_weights(iter(weights(scale).items()), global_steps=version)
        return await receive(receiver, version)

    sender.stage_weights(iter(weights(1.0).items()), 1)
    assert torch.equal(asyncio.run(exchange(5.0, 1))["a"], weights(1.0)["a"])
    assert torch.equal(asyncio.run(exchange(2.0, 2))["a"], weights(2.0)["a"]), "another version is not what was staged"
    sender.finalize()
    assert torch.equal(asyncio.run(exchange(3.0, 2))["a"], weights(3.0)["a"]), "nothing is staged any more"


def test_an_update_that_a_sampler_did_not_survive_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manager then calls no `finalize`; the sender makes its part of the update a second time."""
    sender, survivor = engine(tmp_path, is_master=True), engine(tmp_path)
    monkeypatch.setattr(node_file, "node_id", lambda: "the only node")

    async def update(version: int, *receivers: WeightFileCheckpointEngine) -> None:
        for process in (sender, *receivers):
            process.init_process_group(rank=0, sender=process.prepare())
        await sender.send_weights(iter(weights(version).items()), global_steps=version)
        for receiver in receivers:
            assert torch.equal((await receive(receiver, version))["a"], weights(version)["a"])

    for version in (1, 2):
        sender.stage_weights(iter(weights(version).items()), version)
        asyncio.run(update(version, survivor))
        asyncio.run(update(version, survivor, engine(tmp_path)))
    sender.finalize()
    assert not [*tmp_path.iterdir()], "the file of the update that failed is gone with the next one's"


def test_tensors_that_are_sent_themselves_are_copied_out_of_the_senders_buffer() -> None:
    buffer = torch.zeros(4)
    received = dict(weights_of([("a", buffer[:2]), ("b", buffer[2:])]))
    buffer.fill_(1.0)
    assert received["a"].tolist() == received["b"].tolist() == [0.0, 0.0]


def test_waiting_ends_with_an_error_that_names_what_was_waited_for(tmp_path: Path) -> None:
    (tmp_path / "vcpo-run-weights-v3.partial").write_bytes(b"half, which is never read")
    with pytest.raises(TimeoutError, match=r"waited 0.05 s for the trainer's weights, version 3 .*timeout_s"):
        asyncio.run(receive(engine(tmp_path, timeout_s=0.05), 3))


def test_two_runs_never_meet(tmp_path: Path) -> None:
    asyncio.run(engine(tmp_path, "one", is_master=True).send_weights(iter(weights(1.0).items()), global_steps=1))
    with pytest.raises(TimeoutError):
        asyncio.run(receive(engine(tmp_path, "two", timeout_s=0.05), 1))


def test_a_run_without_a_name_is_refused_and_the_backend_is_registered(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run_id"):
        engine(tmp_path, run_id="")
    assert CheckpointEngineRegistry.get(BACKEND) is WeightFileCheckpointEngine


def test_other_users_can_read_the_file_at_no_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    def save(tensors: object, path: Path) -> None:
        modes.append(path.stat().st_mode & 0o777)
        real_save(tensors, path)

    real_save = torch.save
    monkeypatch.setattr("verl_vcpo.cpu.weight_file.torch.save", save)
    sender = engine(tmp_path, is_master=True)
    (tmp_path / "vcpo-run-weights-v1.partial").write_bytes(b"of a writer that died")
    before = os.umask(0)
    try:
        asyncio.run(sender.send_weights(iter(weights(1.0).items()), global_steps=1))
    finally:
        os.umask(before)
    modes += [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()]
    assert modes == [0o600, 0o600]


class Nodes:
    """A node for the sender and one for the receivers: folders. `fetched` counts what goes from one to the other."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trainers, self.samplers, self.fetched = folder / "trainers", folder / "samplers", 0
        for node in (self.trainers, self.samplers):
            node.mkdir()
        monkeypatch.setattr(node_file, "read", self._read)
        monkeypatch.setattr(node_file, "node_id", lambda: self.here)

    async def _read(self, node: str, path: Path, timeout_s: float) -> bytes:
        assert node == str(self.trainers)
        self.fetched += 1
        await asyncio.sleep(0.05)  # others look for the file meanwhile
        return await asyncio.to_thread(node_file.content_of, str(self.trainers / path.name), timeout_s)

    def engine(self, node: Path, **kwargs: object) -> WeightFileCheckpointEngine:
        """An engine on one of the nodes, which knows where the sender is as verl's manager tells it."""
        made = engine(node, **kwargs)  # type: ignore[arg-type]
        self.here = str(node)
        sender = {"node": str(self.trainers), "host": "the trainer's"}
        actors, rollouts = WeightFileCheckpointEngine.build_topology(1, 1, [sender, {"node": str(self.samplers)}])
        told = actors if node == self.trainers else rollouts
        made.init_process_group(**{name: values[0] for name, values in told.items()})
        return made


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(tmp_path, monkeypatch)


@pytest.mark.parametrize("staged", [True, False])
def test_weights_cross_to_another_node(nodes: Nodes, staged: bool) -> None:
    sender, receivers = nodes.engine(nodes.trainers, is_master=True), [nodes.engine(nodes.samplers) for _ in range(3)]
    beside_the_trainer = nodes.engine(nodes.trainers)
    if staged:
        sender.stage_weights(iter(weights(1.0).items()), 1)

    async def exchange() -> list[dict[str, torch.Tensor]]:
        waiting = [asyncio.create_task(receive(receiver, 1)) for receiver in [*receivers, beside_the_trainer]]
        await asyncio.sleep(0.1)
        await sender.send_weights(iter(weights(1.0).items()), global_steps=1)
        return await asyncio.gather(*waiting)

    for received in asyncio.run(exchange()):
        for name, weight in weights(1.0).items():
            assert torch.equal(received[name], weight)
    assert nodes.fetched == 3
    assert [path.stat().st_mode & 0o777 for path in nodes.samplers.iterdir()] == [0o600] * 3
    for one in (sender, *receivers, beside_the_trainer):
        one.finalize()
    assert not [*nodes.trainers.iterdir(), *nodes.samplers.iterdir()]


def test_waiting_for_another_node_ends_with_an_error_that_names_that_node(nodes: Nodes) -> None:
    with pytest.raises(TimeoutError, match=r"version 3 .*on the trainer's.*its node cannot be reached.*timeout_s"):
        asyncio.run(receive(nodes.engine(nodes.samplers, timeout_s=0.2), 3))


@pytest.mark.slow
def test_a_file_is_read_by_a_ray_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from recipe.fully_async_policy.launch import ray_access

    (tmp_path / "file").write_bytes(b"content")
    with ray_access.started({"num_cpus": 1, "include_dashboard": False, "log_to_driver": False}):
        here = node_file.node_id()
        assert asyncio.run(node_file.read(here, tmp_path / "file", 60)) == b"content"
        with pytest.raises(TimeoutError):
            asyncio.run(node_file.read(here, tmp_path / "none", 0.5))
        with pytest.raises(ray.exceptions.RayError):
            asyncio.run(node_file.read("0" * len(here), tmp_path / "file", 60))
