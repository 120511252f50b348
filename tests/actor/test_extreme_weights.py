"""The gradient is right for every weight, in every way to form it: drawn by hypothesis."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.exactness.extreme_weights import EACH_GROUP, LIMIT, ONE, WAYS, Actor, log_weights
from tests.kit.layout_run import GROUP_SIZE, GROUPS, Method, ParallelLayout, run_layout
from verl_vcpo.actor.vcpo_settings import VCPOSettings

B = GROUPS * GROUP_SIZE
LOG_WEIGHT = st.one_of(st.floats(-40, 40), st.sampled_from([-40.0, -25.0, -12.0, 0.0, 12.0, 25.0, 40.0]))
SOME = {
    "truncation": st.sampled_from([8.0, None]),
    "norm_by_std": st.booleans(),
    "log_weight": st.lists(LOG_WEIGHT, min_size=B, max_size=B),
    "reward": st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0]), min_size=B, max_size=B),
}


@pytest.fixture(scope="module")
def actor(process_group: None, tmp_path_factory: pytest.TempPathFactory) -> Actor:
    return Actor(tmp_path_factory.mktemp("actor"))


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=12)
@given(**SOME)
def test_every_way_is_one_backward_per_sequence(
    actor: Actor, way: str, log_weight: list[float], reward: list[float], **estimator: Any
) -> None:
    batch = actor.with_log_weights(torch.tensor(log_weight).double(), torch.tensor(reward))
    error, _ = actor.error(batch, VCPOSettings(**estimator, **WAYS[way]))
    assert error <= LIMIT


@pytest.mark.parametrize(("weights", "truncation"), [(ONE, None), (EACH_GROUP, 8.0)])
def test_a_second_backward_follows_only_where_the_two_sums_would_cancel(
    actor: Actor, weights: str, truncation: float | None
) -> None:
    took = []
    for spread in (0, 4, 14, 25):
        error, second = actor.error(
            actor.with_log_weights(log_weights(weights, spread, B)),
            VCPOSettings(truncation=truncation, **WAYS["packed"]),
        )
        assert error <= LIMIT
        took.append(second)
    assert took == [False, False, True, True]


def test_weights_too_small_to_be_squared_are_measured_without_them(actor: Actor) -> None:
    batch = actor.with_log_weights(torch.full((B,), -40.0).double())
    tiny = dict(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=1e6)
    wanted, _ = actor.update(batch, VCPOSettings(**WAYS["per trajectory"]), **tiny)
    got, metrics = actor.update(batch, VCPOSettings(**WAYS["packed"]), **tiny)
    assert metrics["vcpo/second_backwards"] == [1]
    assert (got - wanted).norm() <= LIMIT * wanted.norm()


@pytest.mark.parametrize("layout", [ParallelLayout("DP2", dp=2), ParallelLayout("PP2", pp=2)], ids=lambda x: x.name)
def test_all_ranks_take_the_second_backward(layout: ParallelLayout, checkpoints: Callable[[], Path]) -> None:
    dominated: dict[str, Any] = dict(whole_groups=True, dominance=20.0)
    packed = Method("packed", {"truncation": None}, **dominated)
    reference = Method("per trajectory", {"truncation": None, "norms": {"how": "per_trajectory"}}, **dominated)
    got = run_layout(layout, checkpoints(), [packed])["packed"]
    wanted = run_layout(ParallelLayout("one process"), checkpoints(), [reference])["per trajectory"]
    before = load_file(checkpoints() / "model.safetensors")
    for name, parameter in wanted.parameters.items():
        moved = (parameter - before[name]).abs().max()
        assert (got.parameters[name] - parameter).abs().max() <= 1e-3 * moved, name
