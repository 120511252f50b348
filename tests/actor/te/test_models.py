"""Whole models of Transformer Engine's layers, packed, against one backward per sequence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.actor.te.conftest import TENSOR_PARALLEL
from tests.actor.te.model import MOE, QWEN2, QWEN3, SmallModel
from tests.actor.te.oracle import Errors

TOLERANCE = 1e-5
BF16 = 2e-2  # products of numbers of 8 bits, rounded to 8 bits before they are added in float32
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SELECTIVE = dict(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])
OF_EXPERTS = dict(recompute_granularity="selective", recompute_modules=["moe"])


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(dict(QWEN2), id="qwen2"),
        pytest.param(dict(QWEN3, tied=True), id="qwen3-tied"),
        pytest.param(dict(QWEN2, fused=True, **FULL), id="qwen2-fused-full-recompute"),
        pytest.param(dict(QWEN3, **SELECTIVE), id="qwen3-selective-recompute"),
        pytest.param(dict(MOE, moe_grouped_gemm=True), id="grouped-experts"),
        pytest.param(dict(MOE, moe_grouped_gemm=True, fused=True, **FULL), id="grouped-experts-fused-full-recompute"),
        pytest.param(dict(MOE, moe_grouped_gemm=True, **OF_EXPERTS), id="grouped-experts-selective-recompute"),
        pytest.param(dict(MOE), id="experts-one-by-one"),
        pytest.param(dict(MOE, local=True), id="experts-of-megatrons-own-layers"),
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_a_model(settings: dict[str, Any]) -> None:
    """Catches a parameter of a whole model that is not tapped, or is tapped twice where activations are recomputed."""
    assert SmallModel(**settings).errors().within(TOLERANCE)


@pytest.mark.usefixtures("one_rank")
def test_a_model_in_bfloat16() -> None:
    """Catches norms that are summed in bfloat16, and gradients that are not added in the buffer's float32."""
    model = SmallModel(**QWEN3, fused=True, params_dtype=torch.bfloat16, bf16=True)
    assert model.errors().within(BF16)


@pytest.mark.parametrize("case", TENSOR_PARALLEL)
def test_two_tensor_parallel_ranks(case: str, tensor_parallel_processes: Callable[[], dict[str, Errors]]) -> None:
    """Catches a norm's or a head norm's gradient that is squared before it is summed over ranks, a shard that is
    counted twice, and inputs that are not gathered under sequence parallelism."""
    assert tensor_parallel_processes()[case].within(TOLERANCE)
