"""A policy loss of the user's own in the Megatron actor: the function is called, and its gradient is the update."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import PolicyLossConfig

from tests.actor.conftest import ONE_PROCESS
from tests.actor.test_vcpo_engine import exported, train
from tests.kit.layout_worker import make_batch
from verl_vcpo.actor.vcpo_settings import VCPOSettings

# verl's gpg, times a setting
LOSS = """
from verl.trainer.ppo.core_algos import agg_loss


def scaled(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, *, scale=1.0):
    loss = agg_loss(-log_prob * advantages, response_mask, loss_agg_mode, **config.global_batch_info)
    return scale * loss, {"mine/scale": scale}


def without_loss(log_prob, **more):
    return log_prob.mean() * float("nan"), {}


def without_gradient(log_prob, **more):
    return (log_prob * 0).sqrt().sum(), {}


def with_a_large_gradient(log_prob, **more):
    return log_prob.mean() * 1e30, {}


def with_a_vector(log_prob, **more):
    return log_prob.mean(), {"mine/log_prob": log_prob}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """The actor's settings of a function."""
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", dict(core_algos.POLICY_LOSS_REGISTRY))
    (tmp_path / "loss.py").write_text(LOSS)
    return lambda name: {"policy_loss": PolicyLossConfig(loss_mode=f"{tmp_path}/loss.py:{name}")}


def test_its_gradient_is_the_update(make_engine: Callable[..., Any], own: Callable[..., Any]) -> None:
    first, vcpo = exported(make_engine()), VCPOSettings(enable=False)

    def trained(loss: dict[str, Any], **settings: float) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        engine = make_engine()
        loss = {**loss, "stabilizer": settings}
        metrics = train(engine, make_batch(ONE_PROCESS), vcpo, "seq-mean-token-mean", **loss)
        return exported(engine), metrics

    verls, _ = trained({"policy_loss": PolicyLossConfig(loss_mode="gpg")})
    once, metrics = trained(own("scaled"))
    assert metrics["mine/scale"].aggregate() == 1.0
    assert all(torch.equal(weight, verls[name]) for name, weight in once.items())
    twice, metrics = trained(own("scaled"), scale=2.0)
    assert metrics["mine/scale"].aggregate() == 2.0
    for name, weight in twice.items():
        torch.testing.assert_close(weight - first[name], 2 * (once[name] - first[name]), rtol=1e-4, atol=1e-6)
    assert any((once[name] - weight).abs().max() > 1e-3 for name, weight in first.items()), "the step moves the policy"


def test_a_norm_that_overflows_leaves_the_weights(make_engine: Callable[..., Any], own: Callable[..., Any]) -> None:
    engine = make_engine()
    metrics = train(
        engine,
        make_batch(ONE_PROCESS),
        VCPOSettings(enable=False),
        "seq-mean-token-mean",
        **own("with_a_large_gradient"),
    )
    assert metrics["grad_norm"] == torch.inf
    assert all(weight.isfinite().all() for weight in exported(engine).values())


@pytest.mark.parametrize(
    ("loss", "error", "steps"),
    [
        ("without_loss", "loss.py:without_loss: its loss is nan; make it finite for all log-probs and masks", False),
        ("with_a_vector", r"loss.py:with_a_vector: its metric 'mine/log_prob' is tensor\(.*make it a number", False),
        ("without_gradient", "the norm of the gradient is nan, and the step has spoilt the weights; go on from", True),
    ],
)
def test_what_is_not_finite_ends_the_run(
    make_engine: Callable[..., Any], own: Callable[..., Any], loss: str, error: str, steps: bool
) -> None:
    """A loss may be so for a batch of training, and not for the numbers of the check before the start."""
    engine = make_engine()
    with pytest.raises(RuntimeError, match=error):
        train(engine, make_batch(ONE_PROCESS), VCPOSettings(enable=False), "seq-mean-token-mean", **own(loss))
    assert any(weight.isnan().any() for weight in exported(engine).values()) is steps
