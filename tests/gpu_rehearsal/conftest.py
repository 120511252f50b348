"""Engines of the GPU in this process, on stand-ins for CUDA and NCCL (tests/kit/fake_cuda)."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.kit.fake_cuda import operations
from tests.kit.layout_run import make_checkpoint
from tests.kit.resumption import ONE_PROCESS


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Hugging Face to begin with: output layer and embedding are two matrices."""
    return make_checkpoint("untied", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from tests.kit.actor import join_processes

    join_processes(0, 1, tmp_path_factory.mktemp("store"))
    yield
    dist.destroy_process_group()


@pytest.fixture
def build(process_group: None, no_operation_without_kernel: None, model: Path) -> Callable[..., Any]:
    """Builds a freshly loaded engine: `build(dtype, model_type, ...)`, with verl's engine settings by name."""
    from tests.kit.actor import adamw, build_engine

    return lambda *args, layout=ONE_PROCESS, **engine: build_engine(layout, model, adamw(), *args, **engine)


@pytest.fixture
def no_operation_without_kernel() -> Iterator[None]:
    """What a caught error would hide: an operation that nothing has computed."""
    before = operations.without_kernel()
    yield
    assert operations.without_kernel() == before
