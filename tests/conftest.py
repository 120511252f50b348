"""Tests run on CPU: the environment has to be set before anything imports verl, vLLM or Ray."""

from verl_vcpo.cpu import environment

environment.apply()

import pytest  # noqa: E402
import torch.distributed as dist  # noqa: E402
from hypothesis import settings  # noqa: E402

# Timings are no verdict (a deadline would be one), and a run can be repeated.
settings.register_profile("project", deadline=None, derandomize=True, database=None)
settings.load_profile("project")


@pytest.fixture(scope="session")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = tmp_path_factory.mktemp("store") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
