"""What a step costs, on a model small enough for a test: a rehearsal of `scripts/gpu_check.sh` on a CPU."""

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.cost.steps import (
    METHODS,
    NOISE_LIMIT,
    PACKED,
    PER_TRAJECTORY,
    PLAIN,
    SMALLEST,
    TWICE,
    Case,
    exact,
)
from tests.kit import ROOT

pytestmark = pytest.mark.nightly  # measures what the tests of norms and layers compare

GIB = 1 << 30


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, with this environment's Python."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "scripts/gpu_check.sh", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=540, check=False
    )


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The rows that the command wrote, by kind."""
    folder = tmp_path_factory.mktemp("measurements")
    done = gpu_check("--rehearse", "--out", str(folder))
    assert done.returncode == 0, done.stderr
    files = {path.stem.rsplit("-", 1)[1]: path for path in folder.iterdir()}
    assert all(f"written: {path}" in done.stdout for path in files.values())
    return {kind: [json.loads(line) for line in path.read_text().splitlines()] for kind, path in files.items()}


@pytest.fixture
def row(rehearsal: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return copy.deepcopy(rehearsal["steps"][0])


def test_the_rehearsal_has_a_row_for_each_case(rehearsal: dict[str, list[dict[str, Any]]]) -> None:
    assert {(row["dtype"], row["layer"]) for row in rehearsal["layers"]} == {
        (dtype, layer) for dtype in ("bfloat16", "float32") for layer in ("qkv", "o", "fc1", "fc2")
    }
    assert [Case(**row["case"]) for row in rehearsal["steps"]] == [SMALLEST, replace(SMALLEST, layers_of="te")]


@pytest.mark.parametrize("number", [0, 1], ids=["local", "te"])
def test_every_method_is_measured_and_exact(rehearsal: dict[str, list[dict[str, Any]]], number: int) -> None:
    row = rehearsal["steps"][number]
    assert {name: result["units"] for name, result in row["methods"].items()} == {
        name: 6 if name in (TWICE, PER_TRAJECTORY) else 3 for name in METHODS
    }
    for method, result in row["methods"].items():
        assert result["seconds"] > 0 and result["peak_bytes"] > 0, method
        assert set(result["errors"]) == {"norms", "gradient"} if method.startswith("packed") else True
    assert row["methods"][PLAIN]["ratio"] == 1
    noise = row["methods"][TWICE]["noise"]
    assert noise["norms"] < 1e-5
    assert 0 < noise["gradient"] < 1e-5, "other micro-batches round otherwise"
    assert exact(row)


@pytest.mark.parametrize("error", [{"norms": 1.1e-5}, {"gradient": 1.1e-5}, {"gradient": float("nan")}])
def test_a_difference_is_found(row: dict[str, Any], error: dict[str, float]) -> None:
    row["methods"][PACKED]["errors"] |= error
    assert not exact(row)


@pytest.mark.parametrize(
    ("device", "layers", "expected"),
    [
        ("NVIDIA H200", "te", True),
        ("NVIDIA H200", "local", False),
        ("CPU, one thread per process", "te", False),
    ],
)
def test_transformer_engines_products_of_float32_have_fewer_bits_on_a_gpu(
    row: dict[str, Any], device: str, layers: str, expected: bool
) -> None:
    row["device"] = device
    row["case"] |= {"layers_of": layers}
    row["methods"][PACKED]["errors"] = {"norms": 8e-5, "gradient": 5e-4}
    assert exact(row) is expected


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", True), ("float32", False)])
def test_in_bfloat16_as_much_as_the_reference_differs_from_itself_is_rounding(
    row: dict[str, Any], dtype: str, expected: bool
) -> None:
    row["case"]["dtype"] = dtype
    row["methods"][TWICE]["noise"] = {"norms": 0.02, "gradient": 0.1}
    row["methods"][PACKED]["errors"] = {"norms": 0.03, "gradient": 0.15}
    assert exact(row) is expected
    row["methods"][PACKED]["errors"]["gradient"] = 1.1 * NOISE_LIMIT * 0.1
    assert not exact(row)
