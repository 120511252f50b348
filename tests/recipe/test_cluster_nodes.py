"""A run on a cluster begins once the cluster's nodes are there; what no node has room for is said, and has a limit."""

import itertools
from typing import Any

import pytest
import ray
from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy.launch import cluster_nodes
from recipe.fully_async_policy.launch.cluster_nodes import wait_for_nodes

HEAD, NODE = {"CPU": 4.0}, {"CPU": 96.0, "GPU": 8.0}


def config(address: str | None = "10.0.0.1:6379") -> DictConfig:
    """One node trains, one samples."""
    sizes = {"nnodes": 1, "n_gpus_per_node": 8}
    split = {"tensor_model_parallel_size": 2, "data_parallel_size": 1, "pipeline_model_parallel_size": 1}
    rollout = {"rollout": {**sizes, **split}}
    return OmegaConf.create(
        {"trainer": sizes, "actor_rollout_ref": rollout, "ray_kwargs": {"ray_init": {"address": address}}}
    )


def have(monkeypatch: pytest.MonkeyPatch, *nodes: list[dict[str, float]]) -> list[float]:
    """Ray's nodes at each question, the last ones from then on. Returns the waits."""
    waits: list[float] = []
    clock, answers = itertools.count(), itertools.chain(nodes, itertools.repeat(nodes[-1]))
    monkeypatch.setattr(cluster_nodes.time, "sleep", waits.append)
    monkeypatch.setattr(cluster_nodes.time, "monotonic", lambda: 40.0 * next(clock))
    of_state: Any = ray._private.state
    monkeypatch.setattr(of_state, "available_resources_per_node", lambda: dict(enumerate(next(answers))))
    return waits


def test_nodes_that_come_later(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    waits = have(monkeypatch, [HEAD], [HEAD, NODE], [HEAD, NODE, NODE])
    wait_for_nodes(config())
    assert len(waits) == 2
    said = "Ray's 2 nodes have 8 free GPUs, and the run takes 16: 8 of the trainer (trainer.nnodes, n_gpus_per_node)"
    assert f"Waiting for nodes: {said}" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([HEAD, NODE], "Ray's 2 nodes have 8 free GPUs, and the run takes 16"),
        (
            [{"CPU": 96, "GPU": 4}] * 4,
            "the trainer .* 1 times 8 GPUs and 24 of Ray.s CPUs on one node, .* 4 and 96",
        ),
    ],
)
def test_nodes_that_do_not_come(nodes: list[dict[str, float]], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, nodes)
    with pytest.raises(RuntimeError, match=expected):
        wait_for_nodes(config(), wait_s=100.0)


def test_a_ray_of_ones_own_gets_no_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    waits = have(monkeypatch, [{"CPU": 4, "GPU": 16}])
    with pytest.raises(RuntimeError, match="24 of Ray's CPUs on one node, and Ray's nodes have free 16 and 4"):
        wait_for_nodes(config(address=None))
    assert len(waits) <= 1
