"""Tests run on CPU: the environment has to be set before anything imports verl, vLLM or Ray."""

from verl_vcpo.cpu import environment

environment.apply()

import pytest  # noqa: E402
import torch.distributed as dist  # noqa: E402
from hypothesis import settings  # noqa: E402

from testkit import session  # noqa: E402

# Timings are no verdict (a deadline would be one), and a run can be repeated.
settings.register_profile("project", deadline=None, derandomize=True, database=None)
settings.load_profile("project")

# Tier -> markers of the tests that it leaves out.
TIERS = {"quick": {"e2e", "alone", "slow", "nightly"}, "default": {"nightly"}, "nightly": set()}
# The processes of the whole stack use every core: these tests have the machine to themselves.
ALONE = {"e2e", "alone"}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--tier", choices=TIERS, default="default", help="which tests (default: all but nightly)")
    group.addoption(
        "--part",
        choices=["together", "alone"],
        help="together: tests that may run beside others (pytest -n); alone: those that may not",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # pytest-xdist's workers are such processes themselves
        reaper = session.begin()
        config.add_cleanup(lambda: reaper.communicate(timeout=60))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of --tier and --part."""
    part = config.getoption("part")
    kept, left_out = [], []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        wanted = not marks & TIERS[config.getoption("tier")]
        if part:
            wanted &= bool(marks & ALONE) == (part == "alone")
        (kept if wanted else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(scope="session")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = tmp_path_factory.mktemp("store") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
