"""Tests run on CPU: the environment has to be set before anything imports verl, vLLM or Ray."""

from verl_vcpo.cpu import environment

environment.apply()

import pytest  # noqa: E402
import torch.distributed as dist  # noqa: E402


@pytest.fixture(scope="session")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = tmp_path_factory.mktemp("store") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
