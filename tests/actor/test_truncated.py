"""Masked responses have no gradient in the update, and their part in baselines; on two ranks as in one process."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

from recipe.fully_async_policy import main
from tests.actor.conftest import ONE_PROCESS
from tests.actor.test_vcpo_engine import exported, reference_update, train, with_response_mask
from tests.kit.layout_run import PACKED, PER_TRAJECTORY, TWO_BACKWARDS, ParallelLayout, run_layout
from tests.kit.layout_worker import make_batch
from verl_vcpo.actor.vcpo_settings import VCPOSettings

WAYS: dict[str, dict[str, Any]] = {
    "packed": {"opob_scope": "minibatch"},
    "two backwards": {"norms": {"how": "two_backwards"}},
    "per trajectory": {"norms": {"how": "per_trajectory"}},
    "no norms": {"baseline": "mean"},
}


@pytest.mark.parametrize("way", WAYS)
def test_an_update_with_masked_responses_is_the_definition(
    make_engine: Callable[..., Any], checkpoints: Callable[..., Path], way: str
) -> None:
    batch, vcpo, engine = make_batch(ONE_PROCESS, truncated="mask"), VCPOSettings(**WAYS[way]), make_engine()
    masked = torch.tensor([i % 3 == 1 for i in range(len(batch))])
    step, expected, _ = reference_update(checkpoints(), batch, vcpo, masked=masked)
    metrics = train(engine, batch, vcpo)
    for name, value in (
        ("ess_ratio", step.ess_ratio),
        ("baseline", step.baseline.mean()),
        ("truncated/weight", step.weight[masked].mean()),
        ("finished/weight", step.weight[~masked].mean()),
        *([("truncated/gradient_share", 0.0)] if way != "no norms" else []),
    ):
        assert metrics[f"vcpo/{name}"] == [pytest.approx(float(value), rel=1e-5)], name
    assert metrics["vcpo/dropped_sequences"] == metrics["vcpo/excluded_sequences"] == [0]
    before = dict(AutoModelForCausalLM.from_pretrained(checkpoints()).named_parameters())
    for name, weight in exported(engine).items():
        moved, wanted = weight - before[name].detach(), expected[name] - before[name].detach()
        assert (moved - wanted).abs().max() <= 1e-4 * wanted.abs().max() + 1e-9, name


def test_the_share_of_the_gradient(make_engine: Callable[..., Any]) -> None:
    engine = make_engine()
    metrics = train(engine, make_batch(ONE_PROCESS, truncated="train"), VCPOSettings())
    batch, step = engine.last_update
    size = step.coefficient.abs() * batch.squared_norm.sqrt()
    assert metrics["vcpo/truncated/gradient_share"] == [pytest.approx((size[1::3].sum() / size.sum()).item())]


def test_nothing_but_masked_responses_makes_no_step(make_engine: Callable[..., Any]) -> None:
    engine, batch = make_engine(), make_batch(ONE_PROCESS, truncated="mask")
    before = exported(engine)
    tu.assign_non_tensor_stack(batch, "extra_fields", [{"truncated": True}] * len(batch))
    metrics = train(engine, batch, VCPOSettings())
    assert metrics["vcpo/skipped_updates"] == [1] and metrics["grad_norm"] == 0
    assert all(weight.equal(before[name]) for name, weight in exported(engine).items())


def test_a_micro_batch_without_a_token_is_no_error_of_verls_losses(make_engine: Callable[..., Any]) -> None:
    """A long response is a micro-batch of its own; verl's corrections refuse one in which everything is masked."""
    from verl.utils.config import omega_conf_to_dataclass

    main.prepare_environment(["hardware=cpu"])
    config = main.compose(["+task=countdown_lag", "hardware=cpu", "method=tis_seq"]).actor_rollout_ref.actor
    weights = []
    for size in (2, 16):
        engine, batch = make_engine(), make_batch(ONE_PROCESS)
        for row in (2, 3):
            with_response_mask(batch, row)
        tu.assign_non_tensor(batch, micro_batch_size_per_gpu=size)
        with engine.train_mode():
            engine.train_batch(batch, partial(ppo_loss, config=omega_conf_to_dataclass(config)))
        weights.append(exported(engine))
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-5, atol=1e-6, msg=name)


def test_on_two_data_parallel_ranks_as_in_one_process(checkpoints: Callable[..., Path]) -> None:
    ways = [replace(way, truncated="mask") for way in (PER_TRAJECTORY, TWO_BACKWARDS, PACKED)]
    one = run_layout(ParallelLayout("one process"), checkpoints(), ways[:1])[PER_TRAJECTORY.name]
    for name, two in run_layout(ParallelLayout("DP2", dp=2), checkpoints(), ways).items():
        torch.testing.assert_close(two.ess_ratio, one.ess_ratio, rtol=1e-5, atol=0, msg=name)
        torch.testing.assert_close(two.baseline, one.baseline, rtol=1e-5, atol=1e-6, msg=name)
        for parameter, value in two.parameters.items():
            wanted = one.parameters[parameter]
            torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-6, msg=f"{name}: {parameter}")
