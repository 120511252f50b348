"""The tests of tests/engine/te, in a process of their own: its Megatron has Transformer Engine, and no other has."""

import importlib.util
import os
import subprocess
import sys

from testkit import ROOT


def test_packed_norms_on_transformer_engines_layers() -> None:
    """Fails with the output of the tests."""
    command = [sys.executable, "-m", "pytest", "-p", "testkit.te_stack", "-q", "--color=no", "tests/engine/te"]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_other_processes_do_not_see_transformer_engine() -> None:
    """Catches an installation into the environment's own packages, where Megatron would find it and fail."""
    assert importlib.util.find_spec("transformer_engine") is None
