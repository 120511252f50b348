"""Packed norms on Transformer Engine's layers, with its kernels, which a GPU alone has."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.gpu_rehearsal.test_engines import update
from tests.kit.fake_cuda.__main__ import STAND_INS
from tests.kit.layout_run import norm_error
from tests.kit.resumption import ONE_PROCESS
from verl_vcpo.actor.norms_settings import NormsHow

pytestmark = pytest.mark.skipif(
    STAND_INS or importlib.util.find_spec("transformer_engine") is None,
    reason="a GPU and Transformer Engine are needed",
)
# Of the norms (`norm_error`): its products of float32 have the 10 bits of TF32.
TOLERANCES = {"float32": 2e-3, "bfloat16": 2e-2}
KINDS = {
    kind: NormsHow.TWO_BACKWARDS if kind == "moe" else NormsHow.PACKED
    for kind in ("untied", "tied", "qk_norms", "llama_tied", "moe", "lora")
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_norms_are_those_of_one_backward_per_sequence(build: Callable[..., Any], kind: str, dtype: str) -> None:
    layout = replace(ONE_PROCESS, model=kind, layers="te")
    engine = build(dtype, layout=layout)
    assert engine.packing.unpackable is None
    assert engine.packing.tap.layers.startswith("the layers of Transformer Engine")
    norms, after = update(engine, how=KINDS[kind])
    wanted, expected = update(build(dtype, layout=layout), how=NormsHow.PER_TRAJECTORY)
    assert wanted.amax() > 2 * wanted.amin() > 0
    assert norm_error(norms, wanted) < TOLERANCES[dtype]
    torch.testing.assert_close(after, expected, atol=1e-3, rtol=2**-7)
