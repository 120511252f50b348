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
import torch

from lab.cost import steps
from lab.cost.steps import (
    METHODS,
    NOISE_LIMIT,
    PACKED,
    PLAIN,
    SMALLEST,
    TWICE,
    Case,
    exact,
    gpu_cases,
    layers_that_fit,
)
from tests.kit import ROOT

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
    assert list(row["methods"]) == list(METHODS)
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


def test_a_case_that_fails_does_not_end_the_others(
    row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(case: Case, *_: Any) -> dict[str, Any]:
        if case.layers == 2:
            raise RuntimeError("out of memory")
        return row

    monkeypatch.setattr(steps, "measure", measure)
    cases, out = [Case("d512", layers, 20, 40, groups=2, group_size=2) for layers in (1, 2, 3)], tmp_path / "rows"
    rows, failed = steps.measure_all(cases, 1, out, minutes=1.0)
    assert (len(rows), failed) == (2, 1)
    assert [json.loads(line)["case"] for line in out.read_text().splitlines()] == [row["case"]] * 2
    assert steps.measure_all(cases, 1, out, minutes=0.0) == ([], 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ([], 1, "PyTorch sees no GPU"),
        (["--minutes", "soon"], 2, "--minutes soon: give a whole number"),
        (["--dtype", "float8"], 2, "--dtype float8: bfloat16 or float32"),
        (["--fast"], 2, "bash scripts/gpu_check.sh [--minutes M]"),
    ],
)
def test_what_cannot_be_measured(arguments: list[str], code: int, expected: str) -> None:
    done = gpu_check(*arguments)
    assert done.returncode == code
    assert expected in done.stderr


def test_as_many_layers_as_fit() -> None:
    assert layers_that_fit("Qwen2.5-1.5B", 28, 139 * GIB) == 28
    assert 1 < layers_that_fit("Qwen2.5-7B", 28, 139 * GIB) < 28
    assert layers_that_fit("Qwen2.5-7B", 28, 24 * GIB) == 1
    cases = gpu_cases(gpus=1, memory_bytes=139 * GIB, transformer_engine=False)
    assert {case.tp for case in cases} == {1} and {case.layers_of for case in cases} == {"local"}
    assert [case.dtype for case in cases] == ["bfloat16"] * 6 + ["float32"] * 6
    assert [case.cost for case in cases[:6]] == sorted(case.cost for case in cases[:6]), "the quickest first"
    both = gpu_cases(gpus=1, memory_bytes=139 * GIB, transformer_engine=True)
    assert [case.layers_of for case in both] == ["te", "local"] * 12 and len({case.name for case in both}) == 24
