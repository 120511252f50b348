"""Tests run on CPU: the environment has to be set before anything imports verl, vLLM or Ray.

Those of gpu_rehearsal/ run CUDA builds on stand-ins (tests/kit/fake_cuda), in processes that have them; and some of
them on a GPU, with VCPO_TEST_ON_GPU=1, as scripts/gpu_check.sh does.
"""

import os
import signal
from pathlib import Path

from verl_vcpo.common import start_up
from verl_vcpo.common.run_id import RUN_ID_VARIABLE
from verl_vcpo.cpu import environment

CUDA_BUILD = "VCPO_FAKE_CUDA" in os.environ or "VCPO_TEST_ON_GPU" in os.environ

start_up.set_up_process()
if not CUDA_BUILD:
    environment.apply()
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a test that calls Ray without starting it fails, and starts none

import pytest  # noqa: E402
import torch.distributed as dist  # noqa: E402
from hypothesis import settings  # noqa: E402

from tests.kit import session  # noqa: E402

ONLY_REHEARSED = "gpu_rehearsal"
collect_ignore = [] if CUDA_BUILD else [f"tests/{ONLY_REHEARSED}"]

# Timings are no verdict (a deadline would be one), and a run can be repeated.
settings.register_profile("project", deadline=None, derandomize=True, database=None)
settings.load_profile("project")

# Tier -> markers and folders of the tests that it leaves out.
MANY_SECONDS = {"e2e", "slow", "actor", "simulator", "sandbox", "upstream"}
TIERS = {"quick": {*MANY_SECONDS, "nightly"}, "default": {"nightly"}, "nightly": set()}
# Marker or file -> part of its tests: those of one part may run beside each other, but not beside those of another.
# Tests of the NCCL engine and attacks on the sandbox mostly wait: they fill the time beside starts of the stack.
PARTS = {"e2e": "stack", "test_nccl_checkpoint_engine": "stack", "test_attacks": "stack"}
OTHERS = "together"
# Files of the part "stack" that take longest, in that order: what begins last should be short, or one process idles.
LONGEST = ("test_resume", "test_attacks", "test_survives", "test_whole_stack")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--tier", choices=TIERS, default="default", help="which tests (default: all but nightly)")
    group.addoption("--part", choices=sorted({OTHERS, *PARTS.values()}), help="which of them (default: all)")


def pytest_configure(config: pytest.Config) -> None:
    # A shell without job control lets what it starts in the background ignore Ctrl-C, and so would all processes here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if session.VARIABLE not in os.environ:  # what an outer test run has started, its workers too, ends with that
        reaper = session.begin()
        config.add_cleanup(lambda: reaper.communicate(timeout=60))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of --tier and --part."""
    tier, part = config.getoption("tier"), config.getoption("part")
    kept, left_out = [], []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        folders = set(item.path.relative_to(Path(__file__).parent).parts)
        parts = {PARTS[name] for name in (marks | {item.path.stem}) & PARTS.keys()} or {OTHERS}
        wanted = not (marks | folders) & TIERS[tier] and (part is None or part in parts)
        wanted &= CUDA_BUILD or ONLY_REHEARSED not in folders  # also where the folder is named on the command line
        (kept if wanted else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
    place = {stem: i for i, stem in enumerate(LONGEST)}
    items.sort(key=lambda item: (place.get(item.path.stem, len(LONGEST)), "e2e" not in item.keywords))


@pytest.fixture(autouse=True)
def no_attention_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron writes NVTE_*_ATTN wherever a model is built; the launcher would take them for the user's."""
    for name in [name for name in os.environ if name.startswith("NVTE_") and name.endswith("_ATTN")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_run_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher makes its process one of a run's. Ray's workers of a later test would make that run's folder again."""
    if RUN_ID_VARIABLE not in os.environ:
        monkeypatch.setenv(RUN_ID_VARIABLE, "")
        monkeypatch.delenv(RUN_ID_VARIABLE)


@pytest.fixture(scope="session")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = tmp_path_factory.mktemp("store") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
