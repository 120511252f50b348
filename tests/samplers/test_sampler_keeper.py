"""Samplers that die: as many are started as there are devices for, and the run goes on with these and the others."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from verl_vcpo.samplers import keeper as sampler_keeper
from verl_vcpo.samplers.keeper import SamplerKeeper


def replica(rank: int, devices: int = 1) -> Any:
    return SimpleNamespace(
        replica_rank=rank, world_size=devices, _server_address=f"sampler {rank}", _server_handle=f"handle {rank}"
    )


class Samplers:
    """Three samplers, and a balancer that has some of them in its pool; `free` devices are left for replacements."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, alive: list[int], free: int) -> None:
        self.synchronised: list[list[int]] = []
        self.pool = {f"sampler {rank}" for rank in alive}
        balancer = SimpleNamespace(
            get_all_servers=SimpleNamespace(remote=lambda: self.pool),
            add_servers=SimpleNamespace(remote=self.pool.update),
        )
        self.servers = SimpleNamespace(
            rollout_replicas=[replica(rank) for rank in range(3)], global_load_balancer=balancer
        )
        weights = SimpleNamespace(replicas=list(self.servers.rollout_replicas), update_weights=self._update)
        self.said: list[str] = []
        monkeypatch.setattr(sampler_keeper, "print_line", self.said.append)
        monkeypatch.setattr(sampler_keeper.ray, "get", lambda answer: answer)
        monkeypatch.setattr(sampler_keeper, "_remove", lambda *_: None)
        monkeypatch.setattr(sampler_keeper, "_free_devices", lambda wanted: min(free, wanted))
        monkeypatch.setattr(SamplerKeeper, "_remove_dead", lambda _: None)
        self.die_at_once: set[int] = set()
        monkeypatch.setattr(sampler_keeper, "_probes", lambda one: one.replica_rank)
        monkeypatch.setattr(SamplerKeeper, "_answers", lambda _, __, rank, ___: rank not in self.die_at_once)
        self.keeper = SamplerKeeper(self.servers, weights, timeout_s=1, version=7, before_restart=lambda: None)
        monkeypatch.setattr(self.keeper, "_start", self._start)
        self.weights = weights

    async def _start(self, ranks: list[int]) -> list[Any]:
        return [replica(rank) for rank in ranks]

    def _update(self, version: int) -> None:
        assert version == 7
        self.synchronised.append([one.replica_rank for one in self.weights.replicas])


@pytest.mark.parametrize(("free", "left"), [(2, [1, 0, 2]), (1, [1, 0]), (0, [1])])
def test_as_many_are_started_as_there_are_devices_for(
    monkeypatch: pytest.MonkeyPatch, free: int, left: list[int]
) -> None:
    samplers = Samplers(monkeypatch, alive=[1], free=free)
    samplers.keeper.replace_missing()
    assert samplers.synchronised == [left], "those that are left get the weights too: an update may have been cut short"
    assert samplers.pool == {f"sampler {rank}" for rank in left}
    assert (f"goes on with {len(left)}." in samplers.said[-1]) == (free < 2)
    assert samplers.keeper.replace_missing() == 0, "a sampler that was given up is not missing any more"


def test_one_that_dies_as_soon_as_it_is_there_is_replaced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    samplers = Samplers(monkeypatch, alive=[0, 1], free=1)
    samplers.die_at_once = {2}
    assert samplers.keeper.replace_missing() == 1
    assert samplers.pool == {"sampler 0", "sampler 1"}
    samplers.die_at_once = set()
    assert samplers.keeper.replace_missing() == 1
    assert samplers.pool == {"sampler 0", "sampler 1", "sampler 2"}


def test_a_replacement_that_does_not_start_ends_the_run_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def for_ever() -> None:
        await asyncio.sleep(3600)

    samplers = Samplers(monkeypatch, alive=[1], free=2)
    monkeypatch.setattr(sampler_keeper, "START_S", 0.01)
    monkeypatch.setattr(samplers.keeper, "_start", SamplerKeeper._start.__get__(samplers.keeper))
    samplers.servers.rollout_replica_class = lambda **_: SimpleNamespace(init_standalone=for_ever)
    samplers.servers.rollout_config, samplers.servers.model_config = SimpleNamespace(n_gpus_per_node=1), None
    with pytest.raises(RuntimeError, match="not up after 0 s"):
        samplers.keeper.replace_missing()


def test_without_any_sampler_the_run_ends_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    samplers = Samplers(monkeypatch, alive=[], free=0)
    with pytest.raises(RuntimeError, match="no sampler is left.*another node"):
        samplers.keeper.replace_missing()
