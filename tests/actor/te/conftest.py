"""Tests that run with `-p tests.kit.te_stack`, which `tests/actor/test_transformer_engine.py` gives them."""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from tests.actor.te.model import MOE, QWEN2, QWEN3, SmallModel
from tests.actor.te.oracle import Errors

TENSOR_PARALLEL: dict[str, dict[str, Any]] = {
    "tp2": {"sequence_parallel": False},
    "tp2 sp": {"sequence_parallel": True},
    "tp2 sp grouped experts": {"sequence_parallel": True, "moe_grouped_gemm": True, **MOE},
    "tp2 sp experts one by one": {"sequence_parallel": True, **MOE},
    "tp2 sp experts of megatron's own layers": {"sequence_parallel": True, "local": True, **MOE},
    "ep2 inside tp2 sp": {
        **dict(sequence_parallel=True, moe_grouped_gemm=True, **MOE),
        **dict(expert_model_parallel_size=2, expert_tensor_parallel_size=1),
    },
    "tp2 sp recompute": {
        "sequence_parallel": True,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


@pytest.fixture(scope="session", autouse=True)
def tensor_parallel_processes() -> Iterator[Callable[[], dict[str, Errors]]]:
    """Starts two tensor-parallel processes; called, the fixture waits for what they compute.

    Autouse, because these are forks, which must come before this process joins a group of its own.
    """
    assert not dist.is_initialized()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=_compute, args=(rank, Path(folder))) for rank in range(2)]
        for process in processes:
            process.start()

        def results() -> dict[str, Errors]:
            for process in processes:
                process.join(timeout=400)
            assert [process.exitcode for process in processes] == [0, 0]
            return {name: Errors(*values) for name, values in torch.load(Path(folder) / "result").items()}

        yield results
        for process in processes:
            process.kill()


def _compute(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found = {}
    for name, settings in TENSOR_PARALLEL.items():
        of_experts = ("expert_model_parallel_size", "expert_tensor_parallel_size")
        sizes = {size: settings[size] for size in of_experts if size in settings}
        mpu.initialize_model_parallel(tensor_model_parallel_size=2, **sizes)
        got = SmallModel(**QWEN2, **QWEN3, **settings).errors()
        found[name] = (got.norms, got.sums)
        mpu.destroy_model_parallel()
    both: list[dict[str, tuple[float, float]]] = [{}, {}]
    dist.all_gather_object(both, found)
    if rank == 0:
        worst = {name: tuple(map(max, zip(both[0][name], both[1][name], strict=True))) for name in found}
        torch.save(worst, folder / "result")
    dist.barrier()


@pytest.fixture
def one_rank(process_group: None) -> None:
    """Megatron's parallel state of one process."""
    if not mpu.is_initialized():
        mpu.initialize_model_parallel()
