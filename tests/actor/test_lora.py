"""Adapters: what is trained and counted, and the policy without adapters, which is the reference policy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from recipe.fully_async_policy.plan.model_shape import shape_of
from tests.kit.layout_run import ParallelLayout
from tests.kit.layout_worker import make_batch
from verl_vcpo.actor.update.losses import padded_responses

LORA = ParallelLayout("LoRA", model="lora", distributed_optimizer=False)
OF_ATTENTION = ParallelLayout("LoRA of attention", model="moe_lora", distributed_optimizer=False)


@pytest.fixture
def adapted(make_engine: Callable[..., Any]) -> Any:
    return make_engine("lora", layout=LORA)


@pytest.mark.parametrize("layout", [LORA, OF_ATTENTION], ids=lambda layout: layout.name)
def test_the_plan_counts_what_is_trained(
    layout: ParallelLayout, make_engine: Callable[..., Any], checkpoints: Callable[[str], Path]
) -> None:
    adapted = make_engine(layout.model, layout=layout)
    trained = {name: p for chunk in adapted.module for name, p in chunk.named_parameters() if p.requires_grad}
    assert trained and all(".adapter." in name for name in trained)
    shape = shape_of(AutoConfig.from_pretrained(checkpoints(layout.model)))
    assert shape is not None
    counted = shape.layers * shape.adapter_parameters(layout.lora_rank)
    assert sum(p.numel() for p in trained.values()) == counted
    assert adapted.packing.unpackable is None, "norms of adapters are packed"


def test_the_policy_without_adapters_is_the_first_policy(adapted: Any, make_engine: Callable[..., Any]) -> None:
    batch, first = make_batch(LORA), make_engine("untied")

    def log_probs(engine: Any) -> torch.Tensor:
        with engine.eval_mode():
            return padded_responses(engine.infer_batch(batch)["model_output"]["log_probs"], batch)

    wanted, with_adapters = log_probs(first), log_probs(adapted)
    with adapted.disable_adapter():
        torch.testing.assert_close(log_probs(adapted), wanted)
    assert (with_adapters - wanted).abs().max() > 1e-3
    torch.testing.assert_close(log_probs(adapted), with_adapters)
