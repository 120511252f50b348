"""What a step costs, on a model small enough for a test: `scripts.bench.step_overhead` measures the same."""

import copy
from typing import Any

import pytest

from scripts.bench.cost.steps import METHODS, PLAIN, Case, exact, gpu_cases, layers_that_fit, measure

GIB = 1 << 30


@pytest.fixture(scope="module")
def row() -> dict[str, Any]:
    case = Case("d512", layers=1, shortest=20, longest=40, groups=2, group_size=2)
    return next(measure([case], rounds=1))


def test_every_method_is_measured_and_exact(row: dict[str, Any]) -> None:
    assert list(row["methods"]) == list(METHODS)
    for method, result in row["methods"].items():
        assert result["seconds"] > 0 and result["peak_bytes"] > 0, method
        assert set(result["errors"]) == {"norms", "gradient"} if method.startswith("packed") else True
    assert row["methods"][PLAIN]["ratio"] == 1
    assert exact(row)


@pytest.mark.parametrize("error", [{"norms": 1.1e-5}, {"gradient": 1.1e-5}, {"gradient": float("nan")}])
def test_a_difference_is_found(row: dict[str, Any], error: dict[str, float]) -> None:
    wrong = copy.deepcopy(row)
    wrong["methods"]["packed, gradients"]["errors"] |= error
    assert not exact(wrong)


def test_as_many_layers_as_fit() -> None:
    assert layers_that_fit("Qwen2.5-1.5B", 28, 139 * GIB, "bfloat16") == 28
    assert 1 < layers_that_fit("Qwen2.5-7B", 28, 139 * GIB, "bfloat16") < 28
    assert layers_that_fit("Qwen2.5-7B", 28, 24 * GIB, "float32") == 1
    assert {case.tp for case in gpu_cases(gpus=1, memory_bytes=139 * GIB)} == {1}
