"""Imports of verl's that are left out."""

import subprocess
import sys

import pytest

from verl_vcpo.common import skipped_imports

LOAD = """
import sys
import verl.checkpoint_engine as engines
print(engines.HCCLCheckpointEngine, "vllm" in sys.modules)
"""


def test_without_an_npu_verls_checkpoint_engines_load_without_vllm() -> None:
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["None", "False"], done.stderr


def test_with_an_npu_its_engine_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, skipped_imports.ENGINE_OF_NPUS, raising=False)
    monkeypatch.setattr(skipped_imports.importlib.util, "find_spec", lambda name: name)
    skipped_imports.skip_engine_of_npus()
    assert skipped_imports.ENGINE_OF_NPUS not in sys.modules
