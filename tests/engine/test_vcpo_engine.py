"""The patched Megatron actor against transformers' own autograd, one process."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from tests.engine.conftest import GROUP_SIZE, LEARNING_RATE, loss_function, make_batch
from vcpo import VCPOConfig, estimate
from verl_vcpo.cpu.megatron_shims import megatron_on_cpu
from verl_vcpo.workers.engine.megatron.transformer_impl import scaled_learning_rate


def exported(engine: Any) -> dict[str, torch.Tensor]:
    """The engine's weights under their Hugging Face names."""
    with megatron_on_cpu(), torch.no_grad():
        return {name: weight.clone() for name, weight in engine.bridge.export_weights(engine.module)}


def reference_scores(model: torch.nn.Module, batch: TensorDict, mean: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """([B] scores with their graph, [B] log importance weights), sequence by sequence."""
    scores, log_weights = [], []
    for ids, prompt, rollout in zip(
        *(batch[k].unbind() for k in ("input_ids", "prompts", "rollout_log_probs")), strict=True
    ):
        log_prob = model(ids[None]).logits[0].log_softmax(-1)
        token = log_prob[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0]
        scores.append(token.mean() if mean else token.sum())
        log_weights.append((token.detach() - rollout).double().sum())
    return torch.stack(scores), torch.stack(log_weights)


def reference_update(
    checkpoint: Path, batch: TensorDict, vcpo: VCPOConfig, mean: bool
) -> tuple[Any, dict, torch.Tensor]:
    """(estimate, weights after one SGD step, squared norms) computed with transformers and torch.autograd."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    parameters = dict(model.named_parameters())
    scores, log_weights = reference_scores(model, batch, mean)
    gradients = [torch.autograd.grad(score, parameters.values(), retain_graph=True) for score in scores]
    norms = torch.stack([sum(g.double().square().sum() for g in gradient) for gradient in gradients])
    reward = torch.stack([r.sum() for r in batch["rm_scores"].unbind()])
    group = torch.tensor([int(uid, 16) for uid in batch["uid"]])
    step = estimate(vcpo, log_weights, reward, group, squared_norm=norms)
    rate = LEARNING_RATE * step.step_size_multiplier
    weights = {
        name: p.detach() + rate * sum(c * g[i] for c, g in zip(step.coefficient.float(), gradients, strict=True))
        for i, (name, p) in enumerate(parameters.items())
    }
    return step, weights, norms


@pytest.mark.parametrize("baseline", ["opob", "mean"])
@pytest.mark.parametrize("loss_agg_mode", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_one_update_is_the_definition(
    make_engine: Callable[[], Any], checkpoint: Path, baseline: str, loss_agg_mode: str
) -> None:
    batch, vcpo = make_batch(), VCPOConfig(baseline=baseline, base_ess_ratio=0.9)
    step, expected, norms = reference_update(checkpoint, batch, vcpo, loss_agg_mode == "seq-mean-token-mean")
    engine = make_engine()
    with engine.train_mode():
        metrics = engine.train_batch(batch, loss_function(vcpo, loss_agg_mode))["metrics"]

    assert 0 < step.ess_ratio < 0.9, "the batch is meant to be off policy"
    assert metrics["vcpo/ess_ratio"] == [pytest.approx(step.ess_ratio, rel=1e-5)]
    assert metrics["vcpo/lr_multiplier"] == [pytest.approx(step.step_size_multiplier, rel=1e-5)]
    assert metrics["vcpo/baseline"] == [pytest.approx(step.baseline.mean().item(), rel=1e-5)]
    if baseline == "opob":
        assert metrics["vcpo/sequence_grad_norm"] == [pytest.approx(norms.sqrt().mean().item(), rel=1e-5)]
    before = dict(AutoModelForCausalLM.from_pretrained(checkpoint).named_parameters())
    for name, weight in exported(engine).items():
        moved, wanted = weight - before[name].detach(), expected[name] - before[name].detach()
        # relative to the largest move of the tensor: its smallest entries are sums that cancel
        assert (moved - wanted).abs().max() <= 1e-4 * wanted.abs().max() + 1e-9, name


def test_a_sequence_with_a_bad_log_prob_is_counted_and_never_trained_on(make_engine: Callable[[], Any]) -> None:
    batch = make_batch()
    batch["rollout_log_probs"].values()[0] = math.nan
    engine = make_engine()
    with engine.train_mode():
        metrics = engine.train_batch(batch, loss_function(VCPOConfig()))["metrics"]
    assert metrics["vcpo/excluded_sequences"] == [1]
    assert all(torch.isfinite(weight).all() for weight in exported(engine).values())


def test_padding_rows_are_left_out_and_not_counted(make_engine: Callable[[], Any]) -> None:
    batch = make_batch()
    uids = [str(uid) for uid in batch["uid"]]
    batch["uid"] = ["pad0" if i == 0 else uid for i, uid in enumerate(uids)]
    engine = make_engine()
    with engine.train_mode():
        metrics = engine.train_batch(batch, loss_function(VCPOConfig()))["metrics"]
    assert metrics["vcpo/excluded_sequences"] == [0]


def test_disabled_is_verls_own_update(make_engine: Callable[[], Any]) -> None:
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    ours, verls = make_engine(), make_engine()
    config = VCPOConfig(enable=False)
    with ours.train_mode():
        metrics = ours.train_batch(make_batch(), loss_function(config))["metrics"]
    with verls.train_mode():
        super_ = MegatronEngineWithLMHead.train_batch(verls, make_batch(), loss_function(config))["metrics"]
    assert metrics["grad_norm"] == super_["grad_norm"]
    assert metrics["vcpo/lr_multiplier"] == [1.0] and metrics["vcpo/ess_ratio"][0] < 1
    theirs = exported(verls)
    assert all(torch.equal(weight, theirs[name]) for name, weight in exported(ours).items())


def test_the_learning_rate_is_scaled_at_the_step_only_and_restored_after_a_crash() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    with pytest.raises(RuntimeError), scaled_learning_rate(optimizer, 0.1):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
        raise RuntimeError("the optimizer fails")
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_groups_have_the_size_the_batch_promises() -> None:
    uids = [str(uid) for uid in make_batch()["uid"]]
    assert {uids.count(uid) for uid in uids} == {GROUP_SIZE}
