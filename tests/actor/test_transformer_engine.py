"""The tests of tests/actor/te, in a process of their own: its Megatron has Transformer Engine, and no other has."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.actor.conftest import ONE_PROCESS
from tests.actor.test_vcpo_engine import train
from tests.kit import ROOT
from tests.kit.layout_worker import make_batch
from verl_vcpo.actor.vcpo_settings import VCPOSettings

_FILES = sorted((ROOT / "tests" / "actor" / "te").glob("test_*.py"), reverse=True)
TESTS = [*map(str, _FILES)]
"""Layers and models before engines, which take minutes: a mistake is seen within seconds."""
NIGHTLY = "tests/actor/test_families.py"


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The tests' process, which has ended, and the file into which test_an_update has written its squared norms."""
    norms = tmp_path_factory.mktemp("te") / "norms"
    command = [sys.executable, "-m", "pytest", "-p", "tests.kit.te_stack", "-x", "-q", "--color=no", *TESTS]
    if pytestconfig.getoption("tier") == "nightly":
        command.append(NIGHTLY)
    environment = {**os.environ, "VCPO_TE_NORMS": str(norms)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    return run, norms


def test_packed_norms_on_transformer_engines_layers(done: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """Fails with the output of the first test that fails."""
    run, _ = done
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


def test_both_kinds_of_layers_have_the_same_norms(
    done: tuple[subprocess.CompletedProcess[str], Path], make_engine: Callable[..., Any]
) -> None:
    """Catches a stand-in for kernels that computes something else, of which all comparisons over there would be."""
    engine = make_engine()
    assert engine.packing.tap.layers == "Megatron's own layers"
    train(engine, make_batch(ONE_PROCESS), VCPOSettings(norms={"how": "per_trajectory"}))
    torch.testing.assert_close(torch.load(done[1]), engine.last_update[0].squared_norm, rtol=1e-5, atol=0)


def test_other_processes_do_not_see_transformer_engine() -> None:
    """Catches an installation into the environment's own packages, where Megatron would find it and fail."""
    assert importlib.util.find_spec("transformer_engine") is None
