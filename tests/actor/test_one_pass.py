"""Without norms one forward and backward measures weights and forms the gradient, with the bits of two passes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.actor.conftest import ONE_PROCESS
from tests.actor.test_vcpo_engine import exported, train
from tests.kit.actor import two_passes
from tests.kit.layout_run import VOCABULARY, Method, ParallelLayout, run_layout
from tests.kit.layout_worker import make_batch
from verl_vcpo.actor.vcpo_settings import VCPOSettings

MICRO_BATCHES = 8


def updated(
    engine: Any, batch: TensorDict, baseline: str
) -> tuple[list[bool], dict[str, Any], dict[str, torch.Tensor]]:
    """Whether a backward follows each forward of an update; its metrics; the weights after it."""
    forwards: list[bool] = []
    of_verl = engine.forward_step

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        forwards.append(torch.is_grad_enabled())
        return of_verl(*args, **kwargs)

    engine.forward_step = forward_step
    metrics = train(engine, batch, VCPOSettings(baseline=baseline, truncation=3.0, base_ess_ratio=0.9))
    return forwards, metrics, exported(engine)


@pytest.mark.parametrize("baseline", ["half_mean", "mean", "none"])
def test_an_update_is_one_forward_and_backward(make_engine: Callable[..., Any], baseline: str) -> None:
    forwards, metrics, weights = updated(make_engine(), make_batch(ONE_PROCESS, truncated="mask"), baseline)
    with two_passes():
        of_two, expected, theirs = updated(make_engine(), make_batch(ONE_PROCESS, truncated="mask"), baseline)
    assert forwards == [True] * MICRO_BATCHES
    assert of_two == [False] * MICRO_BATCHES + [True] * MICRO_BATCHES, "what the bits are compared with"
    assert metrics == expected | {"vcpo/second_backwards": [0]}
    assert all(weight.equal(theirs[name]) for name, weight in weights.items())


LAYOUTS = [
    ParallelLayout("DP2, dynamic batch", dp=2, dynamic_batch=True),
    ParallelLayout("CP2 x PP2, padded", cp=2, pp=2, packed=False),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)
def test_on_every_layout_it_has_the_bits_of_two_passes(layout: ParallelLayout, checkpoints: Callable[[], Path]) -> None:
    """A prompt's samples lie on all data-parallel ranks, and one sequence has almost all the weight."""
    once = Method("one pass", {"baseline": "half_mean", "truncation": None}, dominance=5.0)
    twice = Method("two passes", once.vcpo, dominance=once.dominance, two_passes=True)
    results = run_layout(layout, checkpoints(), [once, twice])
    one, two = (results[method.name] for method in (once, twice))
    assert one.ess_ratio.equal(two.ess_ratio) and one.baseline.equal(two.baseline)
    assert all(weight.equal(two.parameters[name]) for name, weight in one.parameters.items())


@pytest.mark.parametrize("bad", ["recorded nan", "recorded -inf", "activations"])
def test_where_a_weight_is_not_finite_a_second_pass_forms_the_gradient(
    make_engine: Callable[..., Any], bad: str
) -> None:
    def update() -> tuple[list[bool], dict[str, Any], dict[str, torch.Tensor], int]:
        engine, batch = make_engine(), make_batch(ONE_PROCESS)
        if bad == "activations":
            engine.module[0].module.embedding.word_embeddings.weight.data[VOCABULARY - 1] = math.nan
            batch["input_ids"].values()[0] = VOCABULARY - 1  # no other sequence has the token
        else:
            batch["rollout_log_probs"].values()[0] = float(bad.removeprefix("recorded "))
        model = engine.module[0].module
        model.register_buffer("passes", torch.zeros(()), persistent=False)

        def count(*_: Any) -> None:  # as a router counts the tokens of its experts
            model.passes.add_(int(torch.is_grad_enabled()))

        model.register_forward_hook(count)
        return *updated(engine, batch, "half_mean"), int(model.passes)

    forwards, metrics, weights, counted = update()
    with two_passes():
        _, expected, theirs, _ = update()
    assert forwards == [True] * 2 * MICRO_BATCHES and counted == MICRO_BATCHES
    assert metrics == expected and metrics["vcpo/second_backwards"] == metrics["vcpo/excluded_sequences"] == [1]
    for name, weight in weights.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=0, equal_nan=True, msg=name)
