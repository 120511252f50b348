"""The lag simulator and the real Megatron actor: one batch, the same weights, the same numbers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

from lab.simulator.batch import Batch
from lab.simulator.optimizer import Optimizer
from lab.simulator.policy import Policy
from lab.simulator.update import LossMethod, Update, VCPOMethod
from lab.stability.preset import METHODS
from recipe.fully_async_policy import main
from recipe.fully_async_policy.settings.method import decided_by
from tests.actor.conftest import LEARNING_RATE, ONE_PROCESS
from tests.actor.test_vcpo_engine import exported, train, with_response_mask
from tests.kit.actor import adamw, loss_function
from tests.kit.layout_worker import make_batch
from verl_vcpo.actor.vcpo_settings import VCPOSettings
from verl_vcpo.common.truncated import Truncated

# VCPO's updates are compared above; another method gets weights from a pass of log-probs before the update
THE_ACTORS = [name for name in METHODS if not decided_by(name)["vcpo.enable"] and name != "decoupled_ppo"]


def as_simulated(data: TensorDict) -> Batch:
    """The engine's batch in the simulator's form, which knows no tools."""
    mask = data["response_mask"].to_padded_tensor(0).bool()
    treated = tu.get_non_tensor_data(data, key="truncated", default=None) is not None
    marked = [treated and of["truncated"] for of in tu.get(data, "extra_fields")]
    return Batch(
        prompt=torch.stack(data["prompts"].unbind()),
        prompt_mask=torch.ones(len(data), 5, dtype=torch.bool),
        response=data["responses"].to_padded_tensor(0),
        mask=mask,
        rollout_log_prob=data["rollout_log_probs"].to_padded_tensor(0.0),
        reward=torch.stack([reward.sum() for reward in data["rm_scores"].unbind()]).double(),
        group=torch.tensor([int(uid, 16) for uid in data["uid"]]),
        version=torch.zeros(len(data), dtype=torch.int64),
        truncated=torch.tensor(marked),
    )


def check_step(engine: Any, checkpoint: Path, policy: Policy, update: Update) -> None:
    """The engine has made one SGD step; the simulator's gradient makes the same one."""
    first = Policy.load(checkpoint)
    before, gradient = first.parameters, first.by_name(update.gradient)
    rate = LEARNING_RATE * update.lr_multiplier
    for name, weight in exported(engine).items():
        moved, wanted = weight - before[name][0], -rate * gradient[name][0]
        assert (moved - wanted).abs().max() <= 1e-4 * wanted.abs().max() + 1e-9, name


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(baseline="mean"),
    ],
    ids=str,
)
def test_ratios_norms_baselines_and_step(
    make_engine: Callable[..., Any], checkpoints: Callable[..., Path], settings: dict[str, Any]
) -> None:
    vcpo, engine, data = VCPOSettings(**settings), make_engine(), make_batch(ONE_PROCESS, holes=False)
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
    if vcpo.needs_gradient_norms:
        torch.testing.assert_close(update.squared_norm, real.squared_norm, rtol=1e-5, atol=0)
    assert update.kl == pytest.approx((real.kl.sum() / real.tokens.sum()).item(), rel=1e-5)
    check_step(engine, checkpoints(), policy, update)


@pytest.mark.parametrize("treatment", ["mask", "drop"])
def test_truncated_responses_are_left_out_alike(
    make_engine: Callable[..., Any], checkpoints: Callable[..., Path], treatment: str
) -> None:
    vcpo, engine, data = VCPOSettings(), make_engine(), make_batch(ONE_PROCESS, holes=False, truncated=treatment)
    batch = as_simulated(data)
    if treatment == "drop":
        for row in batch.truncated.nonzero().flatten().tolist():
            with_response_mask(data, row)
    train(engine, data, vcpo)
    real_step, policy = engine.last_update[1], Policy.load(checkpoints())
    method = VCPOMethod(vcpo, loss_function(vcpo).keywords["config"], Truncated(treatment))
    update = method.update(policy, batch, {}, lag=0)
    assert update.ess_ratio == pytest.approx(real_step.ess_ratio, rel=1e-5)
    torch.testing.assert_close(update.estimate.baseline, real_step.baseline, rtol=2e-5, atol=0)
    assert (update.estimate.coefficient[1::3] == 0).all() and update.of_truncated["vcpo/truncated/gradient_share"] == 0
    check_step(engine, checkpoints(), policy, update)


def configured(name: str) -> DictConfig:
    """All settings of the real stack with `method=NAME`."""
    main.prepare_environment(["hardware=cpu"])
    return main.compose(["+task=countdown_lag", "hardware=cpu", f"method={name}"])


@pytest.mark.parametrize("name", THE_ACTORS)
def test_every_method_makes_the_same_step(
    make_engine: Callable[..., Any], checkpoints: Callable[..., Path], name: str
) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    config = configured(name)
    actor, data = omega_conf_to_dataclass(config.actor_rollout_ref.actor), make_batch(ONE_PROCESS, holes=False)
    tu.assign_non_tensor(data, micro_batch_size_per_gpu=len(data))  # some look at the whole batch
    engine = make_engine()
    torch.manual_seed(0)  # clip_cov leaves tokens out at random
    with engine.train_mode():
        metrics = engine.train_batch(data.clone(), partial(ppo_loss, config=actor))["metrics"]

    method = LossMethod(actor, config.algorithm)
    policy, batch = Policy.load(checkpoints()), as_simulated(data)
    fields = {
        "old_log_probs": batch.rollout_log_prob,
        "advantages": data["advantages"].to_padded_tensor(0.0),
        "response_mask": batch.mask,
        "left_out": batch.truncated,
    }
    torch.manual_seed(0)
    update = method.update(policy, batch, fields, lag=0)
    assert update.ess_ratio == pytest.approx(metrics["vcpo/ess_ratio"][0], rel=1e-5)
    check_step(engine, checkpoints(), policy, update)


def test_the_optimizer_is_megatrons(make_engine: Callable[..., Any], checkpoints: Callable[..., Path]) -> None:
    vcpo, engine = VCPOSettings(), make_engine(optimizer=adamw())
    policy = Policy.load(checkpoints())
    before = {name: p[0].clone() for name, p in policy.parameters.items()}
    method = VCPOMethod(vcpo, loss_function(vcpo).keywords["config"])
    optimizer = Optimizer(policy, adamw(), trainer=None)
    for seed in (0, 1):
        data = make_batch(ONE_PROCESS, seed, holes=False)
        norm = train(engine, data, vcpo)["grad_norm"]
        update = method.update(policy, as_simulated(data), {}, lag=0)
        assert optimizer.step(update.gradient, update.lr_multiplier) == pytest.approx(norm, rel=1e-4)
    for name, weight in exported(engine).items():
        moved = (weight - before[name]).abs().max()
        assert (weight - policy.parameters[name][0]).abs().max() <= 1e-3 * moved, name
