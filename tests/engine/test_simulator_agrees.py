"""The lag simulator and the real Megatron actor: one batch, the same weights, the same numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from recipe.lag_simulator.batch import Batch
from recipe.lag_simulator.optimizer import Optimizer
from recipe.lag_simulator.policy import Policy
from recipe.lag_simulator.update import LossMethod, Update, VCPOMethod
from scripts.bench.layout_worker import adamw, loss_function, make_batch
from tests.engine.conftest import LEARNING_RATE, ONE_PROCESS
from tests.engine.test_vcpo_engine import exported, train
from vcpo import VCPOConfig


def as_simulated(data: TensorDict) -> Batch:
    """The engine's batch in the simulator's form."""
    mask = data["response_mask"].to_padded_tensor(0).bool()
    return Batch(
        prompt=torch.stack(data["prompts"].unbind()),
        prompt_mask=torch.ones(len(data), 5, dtype=torch.bool),
        response=data["responses"].to_padded_tensor(0),
        mask=mask,
        rollout_log_prob=data["rollout_log_probs"].to_padded_tensor(0.0),
        reward=torch.stack([reward.sum() for reward in data["rm_scores"].unbind()]).double(),
        group=torch.tensor([int(uid, 16) for uid in data["uid"]]),
        version=torch.zeros(len(data), dtype=torch.int64),
    )


def check_step(engine: Any, checkpoint: Path, policy: Policy, update: Update) -> None:
    """The engine has made one SGD step; the simulator's gradient makes the same one."""
    before = Policy.load(checkpoint).parameters
    rate = LEARNING_RATE * update.lr_multiplier
    for name, weight in exported(engine).items():
        moved, wanted = weight - before[name].detach(), -rate * update.gradients[name]
        assert (moved - wanted).abs().max() <= 1e-4 * wanted.abs().max() + 1e-9, name


@pytest.mark.parametrize("baseline", ["opob", "mean"])
def test_ratios_norms_baselines_and_step(
    make_engine: Callable[..., Any], checkpoints: Callable[..., Path], baseline: str
) -> None:
    vcpo, engine, data = VCPOConfig(baseline=baseline), make_engine(), make_batch(ONE_PROCESS)
    train(engine, data, vcpo)
    real, real_step = engine.last_update

    policy = Policy.load(checkpoints())
    method = VCPOMethod(vcpo, loss_function(vcpo).keywords["config"])
    update = method.update(policy, as_simulated(data), {}, lag=0)
    step = update.estimate
    assert step.ess_ratio == pytest.approx(real_step.ess_ratio, rel=1e-5)
    assert step.step_size_multiplier == pytest.approx(real_step.step_size_multiplier, rel=1e-5)
    for ours, theirs in ((step.weight, real_step.weight), (step.baseline, real_step.baseline)):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=0)
    torch.testing.assert_close(step.coefficient, real_step.coefficient, rtol=1e-4, atol=1e-7)
    if baseline == "opob":
        torch.testing.assert_close(update.squared_norm, real.squared_norm, rtol=1e-5, atol=0)
    assert update.kl == pytest.approx((real.kl.sum() / real.tokens.sum()).item(), rel=1e-5)
    check_step(engine, checkpoints(), policy, update)


@pytest.mark.parametrize(
    "policy_loss",
    [
        {"loss_mode": "vespo"},
        {"loss_mode": "vanilla"},
        {
            "loss_mode": "bypass_mode",
            "rollout_correction": {
                "loss_type": "reinforce",
                "rollout_is": "sequence",
                "rollout_is_threshold": 8.0,
            },
        },
    ],
    ids=["vespo", "ppo", "tis_seq"],
)
def test_other_methods_make_the_same_step(
    make_engine: Callable[..., Any], checkpoints: Callable[..., Path], policy_loss: dict[str, Any]
) -> None:
    from verl.trainer.config import RolloutCorrectionConfig
    from verl.workers.config import PolicyLossConfig

    settings = dict(policy_loss)
    if correction := settings.pop("rollout_correction", None):
        settings["rollout_correction"] = RolloutCorrectionConfig(**correction)
    vcpo, engine, data = VCPOConfig(enable=False), make_engine(), make_batch(ONE_PROCESS)
    options = {"policy_loss": PolicyLossConfig(**settings)}
    metrics = train(engine, data.clone(), vcpo, **options)

    from omegaconf import OmegaConf

    algorithm = OmegaConf.create({"adv_estimator": "grpo", "rollout_correction": {"bypass_mode": True}})
    method = LossMethod(loss_function(vcpo, **options).keywords["config"], algorithm)
    policy, batch = Policy.load(checkpoints()), as_simulated(data)
    fields = {
        "old_log_probs": batch.rollout_log_prob,
        "advantages": data["advantages"].to_padded_tensor(0.0),
        "response_mask": batch.mask,
    }
    update = method.update(policy, batch, fields, lag=0)
    assert update.ess_ratio == pytest.approx(metrics["vcpo/ess_ratio"][0], rel=1e-5)
    check_step(engine, checkpoints(), policy, update)


def test_the_optimizer_is_megatrons(make_engine: Callable[..., Any], checkpoints: Callable[..., Path]) -> None:
    vcpo, engine = VCPOConfig(), make_engine(optimizer=adamw())
    policy = Policy.load(checkpoints())
    before = {name: p.detach().clone() for name, p in policy.parameters.items()}
    method = VCPOMethod(vcpo, loss_function(vcpo).keywords["config"])
    optimizer = Optimizer(policy, adamw(), trainer=None)
    for seed in (0, 1):
        data = make_batch(ONE_PROCESS, seed)
        norm = train(engine, data, vcpo)["grad_norm"]
        update = method.update(policy, as_simulated(data), {}, lag=0)
        assert optimizer.step(update.gradients, update.lr_multiplier) == pytest.approx(norm, rel=1e-4)
    for name, weight in exported(engine).items():
        moved = (weight - before[name]).abs().max()
        assert (weight - policy.parameters[name]).abs().max() <= 1e-3 * moved, name
