"""Where vLLM's CPU worker runs: in the engine's process, or in processes of its own."""

from types import SimpleNamespace

import pytest
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from verl_vcpo.cpu.vllm_server import CPUvLLMHttpServer

BACKEND = "distributed_executor_backend"


def engine_kwargs(world_size: int, **given: str) -> dict[str, str]:
    """What a server of a model that is split over `world_size` processes gives vLLM beside verl's own arguments."""
    server = object.__new__(CPUvLLMHttpServer)
    server.replica_world_size, server.config = world_size, SimpleNamespace()
    kwargs = dict(given)
    server._preprocess_engine_kwargs(kwargs)
    return kwargs


def test_a_model_in_one_piece_has_its_worker_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    backend = engine_kwargs(1)[BACKEND]
    config = SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend=backend))
    assert Executor.get_class(config) is UniProcExecutor
    assert engine_kwargs(1, **{BACKEND: "mp"})[BACKEND] == "mp", "what is given is obeyed"
    assert BACKEND not in engine_kwargs(2)


def test_threads_that_are_bound_to_cores_need_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    assert BACKEND not in engine_kwargs(1)
