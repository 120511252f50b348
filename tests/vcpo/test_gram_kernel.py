"""The kernel of the Gram form over Triton's interpreter, in a process that computes on the CPU."""

import os
import subprocess
import sys

import pytest

from tests.kit import ROOT
from tests.kit.fake_cuda.__main__ import VARIABLE

pytest.importorskip("triton")
pytestmark = pytest.mark.slow
LENGTHS = [40, 3, 0, 165, 20]


@pytest.mark.parametrize("lengths", [LENGTHS, [700] * 6], ids=["small tiles", "large tiles"])
def test_over_tritons_interpreter(lengths: list[int]) -> None:
    """Catches rows of another sequence in a tile, a pair of tiles that counts once, and a part of a tile too many."""
    without = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", VARIABLE)}
    script = "import torch; from tests.gpu_rehearsal import test_gram_kernel as t; "
    script += f"print(t.largest_error('cpu', torch.float16, {lengths}))"  # the interpreter has no products of bfloat16
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**without, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert float(run.stdout.split()[-1]) < 1e-5
