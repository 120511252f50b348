"""Engines of the GPU in this process: on a GPU, or on stand-ins for CUDA and NCCL (tests/kit/fake_cuda)."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.kit.fake_cuda import operations
from tests.kit.fake_cuda.__main__ import STAND_INS
from tests.kit.layout_run import make_checkpoint
from tests.kit.resumption import ONE_PROCESS

# Of the stand-ins themselves, of two devices, and of a run whose sampler is emulated.
collect_ignore = [] if STAND_INS else ["test_layouts.py", "test_run.py", "test_stand_ins.py"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of Hugging Face to begin with, of a kind of `ParallelLayout.model`; each is made once."""
    return functools.cache(lambda kind: make_checkpoint(kind, tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def model(checkpoint: Callable[[str], Path]) -> Path:
    """A checkpoint whose output layer and embedding are two matrices."""
    return checkpoint("untied")


@pytest.fixture(scope="session")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from tests.kit.actor import join_processes

    join_processes(0, 1, tmp_path_factory.mktemp("store"))
    yield
    dist.destroy_process_group()


@pytest.fixture
def build(
    process_group: None, no_operation_without_kernel: None, checkpoint: Callable[[str], Path]
) -> Callable[..., Any]:
    """Builds a freshly loaded engine: `build(dtype, model_type, ...)`, with verl's engine settings by name."""
    from tests.kit.actor import adamw, build_engine

    return lambda *args, layout=ONE_PROCESS, **engine: build_engine(
        layout, checkpoint(layout.model), adamw(), *args, **engine
    )


@pytest.fixture
def no_operation_without_kernel() -> Iterator[None]:
    """What a caught error would hide: an operation that nothing has computed."""
    before = operations.without_kernel() if STAND_INS else {}
    yield
    assert (operations.without_kernel() if STAND_INS else {}) == before
