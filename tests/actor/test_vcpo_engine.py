"""The patched Megatron actor against transformers' own autograd, one process."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu

from tests.actor.conftest import LEARNING_RATE, ONE_PROCESS
from tests.kit.actor import adamw, loss_function
from tests.kit.layout_run import ParallelLayout
from tests.kit.layout_worker import make_batch
from vcpo import estimate
from verl_vcpo.actor.megatron_actor import scaled_learning_rate
from verl_vcpo.actor.vcpo_settings import VCPOSettings
from verl_vcpo.cpu.megatron_shims import megatron_on_cpu


def exported(engine: Any) -> dict[str, torch.Tensor]:
    """The engine's weights under their Hugging Face names."""
    with megatron_on_cpu(), torch.no_grad():
        return {
            name: weight.clone() for name, weight in engine.bridge.export_hf_weights(engine.module, show_progress=False)
        }


def train(engine: Any, batch: TensorDict, vcpo: VCPOSettings, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """One update; its metrics."""
    with engine.train_mode():
        return engine.train_batch(batch, loss_function(vcpo, *args, **kwargs))["metrics"]


def reference_scores(model: torch.nn.Module, batch: TensorDict, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """([B] scores with their graph, [B] log importance weights), sequence by sequence."""
    scores, log_weights = [], []
    fields = ("input_ids", "prompts", "rollout_log_probs", "response_mask")
    for ids, prompt, rollout, mask in zip(*(batch[k].unbind() for k in fields), strict=True):
        log_prob = model(ids[None]).logits[0].log_softmax(-1)
        token = log_prob[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[mask.bool(), 0]
        scale = {"seq-mean-token-mean": len(token), "seq-mean-token-sum-norm": 7}.get(mode, 1)
        scores.append(token.sum() / scale)
        log_weights.append((token.detach() - rollout[mask.bool()]).double().sum())
    return torch.stack(scores), torch.stack(log_weights)


def reference_update(
    checkpoint: Path,
    batch: TensorDict,
    vcpo: VCPOSettings,
    mode: str = "seq-mean-token-mean",
    masked: torch.Tensor | None = None,
) -> tuple[Any, dict, torch.Tensor]:
    """(estimate, weights after one SGD step, squared norms) computed with transformers and torch.autograd."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32)
    parameters = dict(model.named_parameters())
    scores, log_weights = reference_scores(model, batch, mode)
    gradients = [
        torch.autograd.grad(score, parameters.values(), retain_graph=True, materialize_grads=True) for score in scores
    ]
    norms = torch.stack([sum(g.double().square().sum() for g in gradient) for gradient in gradients])
    reward = torch.stack([r.sum() for r in batch["rm_scores"].unbind()])
    group = torch.tensor([int(uid, 16) for uid in batch["uid"]])
    length = torch.stack([mask.sum() for mask in batch["response_mask"].unbind()])
    step = estimate(vcpo, log_weights, reward, group, squared_norm=norms, length=length, masked=masked)
    rate = LEARNING_RATE * step.step_size_multiplier
    weights = {
        name: p.detach() + rate * sum(c * g[i] for c, g in zip(step.coefficient.float(), gradients, strict=True))
        for i, (name, p) in enumerate(parameters.items())
    }
    return step, weights, norms


@pytest.mark.parametrize("baseline", ["opob", "mean", "none"])
@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_one_update_is_the_definition(
    make_engine: Callable[..., Any], checkpoints: Callable[..., Path], baseline: str, mode: str
) -> None:
    batch, vcpo = make_batch(ONE_PROCESS), VCPOSettings(baseline=baseline, base_ess_ratio=0.9)
    step, expected, norms = reference_update(checkpoints(), batch, vcpo, mode)
    engine = make_engine()
    metrics = train(engine, batch, vcpo, mode, loss_scale_factor=7)

    assert 0 < step.ess_ratio < 0.9, "the batch is meant to be off policy"
    assert metrics["vcpo/ess_ratio"] == [pytest.approx(step.ess_ratio, rel=1e-5)]
    assert metrics["vcpo/lr_multiplier"] == [pytest.approx(step.step_size_multiplier, rel=1e-5)]
    assert metrics["vcpo/baseline"] == [pytest.approx(step.baseline.mean().item(), rel=1e-5)]
    if baseline == "opob":
        assert metrics["vcpo/sequence_grad_norm"] == [pytest.approx(norms.sqrt().mean().item(), rel=1e-5)]
    before = dict(AutoModelForCausalLM.from_pretrained(checkpoints()).named_parameters())
    for name, weight in exported(engine).items():
        moved, wanted = weight - before[name].detach(), expected[name] - before[name].detach()
        # relative to the largest move of the tensor: its smallest entries are sums that cancel
        assert (moved - wanted).abs().max() <= 1e-4 * wanted.abs().max() + 1e-9, name


@pytest.mark.parametrize("model", ["untied", "tied", "qk_norms", "moe"])
def test_norms_are_those_of_transformers(
    make_engine: Callable[..., Any], checkpoints: Callable[..., Path], model: str
) -> None:
    *_, norms = reference_update(checkpoints(model), make_batch(ONE_PROCESS), VCPOSettings())
    engine = make_engine(model)
    train(engine, make_batch(ONE_PROCESS), VCPOSettings())
    torch.testing.assert_close(engine.last_update[0].squared_norm, norms, rtol=1e-5, atol=0)


def with_response_mask(batch: TensorDict, row: int) -> TensorDict:
    """`batch` with no token of sequence `row` to train on."""
    offsets = batch["response_mask"].offsets()
    for name in ("response_mask", "loss_mask"):
        batch[name].values()[offsets[row] : offsets[row + 1]] = 0
    return batch


def with_empty_response(batch: TensorDict, row: int) -> TensorDict:
    """`batch` whose sequence `row` ended before its first token."""
    for name in ("responses", "response_mask", "loss_mask", "rollout_log_probs", "rm_scores"):
        rows = [x[:0] if i == row else x for i, x in enumerate(batch[name].unbind())]
        batch[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    for name in ("input_ids", "position_ids"):
        rows = [x[: len(batch["prompts"][i])] if i == row else x for i, x in enumerate(batch[name].unbind())]
        batch[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return batch


@pytest.mark.parametrize("baseline", ["opob", "mean"])
def test_a_sequence_without_tokens_has_weight_one_and_no_gradient(
    make_engine: Callable[..., Any], baseline: str
) -> None:
    engine = make_engine()
    train(engine, with_empty_response(make_batch(ONE_PROCESS), 3), VCPOSettings(baseline=baseline))
    batch, step = engine.last_update
    assert batch.log_weight[3] == 0 and batch.tokens[3] == 0 and step.usable.all()
    if baseline == "opob":
        assert batch.squared_norm[3] == 0
    assert all(torch.isfinite(weight).all() for weight in exported(engine).values())


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("baseline", ["opob", "mean", "none"])
def test_a_masked_or_padding_sequence_is_as_if_it_were_not_there(
    make_engine: Callable[..., Any], baseline: str, padding: bool
) -> None:
    engine, other = make_engine(), make_engine()
    masked = make_batch(ONE_PROCESS)
    without = tu.index_select_tensor_dict(masked, [i for i in range(len(masked)) if i not in (3, 4)])
    if padding:
        masked["uid"] = [f"pad{i}" if i in (3, 4) else str(uid) for i, uid in enumerate(masked["uid"])]
    for row in (3, 4):
        if not padding:
            with_response_mask(masked, row)
        first, end = masked["rm_scores"].offsets()[row : row + 2]
        masked["rm_scores"].values()[first:end] = 1e6  # its reward is nobody's business
        masked["rollout_log_probs"].values()[first:end] = -1e6
    metrics = train(engine, masked, VCPOSettings(baseline=baseline, base_ess_ratio=0.9))
    expected = train(other, without, VCPOSettings(baseline=baseline, base_ess_ratio=0.9))
    assert metrics["vcpo/dropped_sequences"] == [0 if padding else 2] and expected["vcpo/dropped_sequences"] == [0]
    assert metrics["vcpo/excluded_sequences"] == [0]
    for name in ("ess_ratio", "lr_multiplier", "baseline", "weight/max", "kl_rollout_policy"):
        assert metrics[f"vcpo/{name}"] == pytest.approx(expected[f"vcpo/{name}"], rel=1e-6), name
    weights = exported(other)
    for name, weight in exported(engine).items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_sequence_with_a_bad_log_prob_is_counted_and_never_trained_on(
    make_engine: Callable[..., Any], bad: float
) -> None:
    engine, other = make_engine(), make_engine()
    batch = make_batch(ONE_PROCESS)
    batch["rollout_log_probs"].values()[0] = bad
    metrics = train(engine, batch, VCPOSettings())
    assert metrics["vcpo/excluded_sequences"] == [1] and metrics["vcpo/skipped_updates"] == [0]
    assert engine.last_update[1].coefficient[0] == 0
    batch = make_batch(ONE_PROCESS)
    batch["rollout_log_probs"].values()[0] = bad
    batch["rm_scores"].values()[batch["rm_scores"].offsets()[1] - 1] = 99.0  # whatever that sequence earned
    train(other, batch, VCPOSettings())
    theirs = exported(other)
    assert all(torch.equal(weight, theirs[name]) for name, weight in exported(engine).items())


@pytest.mark.parametrize("name", ["rollout_log_probs", "response_mask"])
@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("method", [dict(), dict(norms=dict(how="two_backwards")), dict(enable=False)], ids=str)
def test_log_probs_of_another_length_are_refused(
    make_engine: Callable[..., Any], name: str, change: int, method: dict[str, Any]
) -> None:
    engine, batch = make_engine(), make_batch(ONE_PROCESS)
    rows = list(batch[name].unbind())
    tokens = len(rows[3])
    rows[3] = rows[3][:-1] if change < 0 else torch.cat([rows[3], rows[3][:1]])
    batch[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    before = exported(engine)
    with pytest.raises(ValueError, match=f"{name}: {tokens + change} values for the {tokens} response tokens"):
        train(engine, batch, VCPOSettings(**method))
    assert all(torch.equal(weight, before[key]) for key, weight in exported(engine).items())


@pytest.mark.parametrize("baseline", ["opob", "mean"])
def test_an_update_without_a_usable_sequence_is_skipped(make_engine: Callable[..., Any], baseline: str) -> None:
    engine = make_engine(optimizer=adamw(), layout=ParallelLayout("one process"))
    train(engine, make_batch(ONE_PROCESS), VCPOSettings())  # Adam has momentum now
    before = exported(engine)
    batch = make_batch(ONE_PROCESS)
    batch["rollout_log_probs"].values()[:] = math.nan
    metrics = train(engine, batch, VCPOSettings(baseline=baseline))
    assert metrics["vcpo/skipped_updates"] == [1] and metrics["vcpo/excluded_sequences"] == [16]
    assert all(torch.equal(weight, before[name]) for name, weight in exported(engine).items())


def test_disabled_is_verls_own_update(make_engine: Callable[..., Any]) -> None:
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    ours, verls = make_engine(), make_engine()
    config = VCPOSettings(enable=False)
    metrics = train(ours, make_batch(ONE_PROCESS), config)
    with verls.train_mode():
        super_ = MegatronEngineWithLMHead.train_batch(verls, make_batch(ONE_PROCESS), loss_function(config))["metrics"]
    assert metrics["grad_norm"] == super_["grad_norm"]
    assert metrics["vcpo/lr_multiplier"] == [1.0] and metrics["vcpo/ess_ratio"][0] < 1
    theirs = exported(verls)
    assert all(torch.equal(weight, theirs[name]) for name, weight in exported(ours).items())


def rates(engine: Any) -> list[float]:
    return [group["lr"] for group in engine.optimizer.param_groups]


@pytest.mark.parametrize(
    "settings",
    [{}, {"norms": {"how": "two_backwards"}}, {"norms": {"how": "per_trajectory"}}, {"baseline": "mean"}],
    ids=str,
)
def test_an_update_begins_without_gradients(make_engine: Callable[..., Any], settings: dict[str, Any]) -> None:
    """Those that an earlier backward left in the same train mode are no part of it."""
    weights = []
    for left in (0.0, 1.0):
        engine = make_engine()
        with engine.train_mode():
            for chunk in engine.module:
                for parameter in chunk.parameters():
                    parameter.main_grad.fill_(left)
            engine.train_batch(make_batch(ONE_PROCESS), loss_function(VCPOSettings(**settings)))
        weights.append(exported(engine))
    assert all(weight.equal(weights[1][name]) for name, weight in weights[0].items())


def test_a_crash_inside_the_step_leaves_the_schedulers_rate(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = make_engine(), []

    def crash() -> None:
        seen.extend(rates(engine))
        raise RuntimeError("the optimizer fails")

    monkeypatch.setattr(engine.optimizer, "step", crash)
    with pytest.raises(RuntimeError, match="the optimizer fails"):
        train(engine, make_batch(ONE_PROCESS), VCPOSettings())
    assert seen and all(rate < LEARNING_RATE for rate in seen), "the step is meant to be scaled"
    assert set(rates(engine)) == {LEARNING_RATE}


def test_a_checkpoint_stores_the_schedule(make_engine: Callable[..., Any], tmp_path: Path) -> None:
    layout = ParallelLayout("one process")
    warming_up = replace(adamw(), lr_warmup_steps=4)
    engine = make_engine(optimizer=warming_up, layout=layout)
    train(engine, make_batch(ONE_PROCESS, seed=1), VCPOSettings())
    assert train(engine, make_batch(ONE_PROCESS, seed=0), VCPOSettings())["vcpo/lr_multiplier"][0] < 1
    scheduled = engine.lr_scheduler_step()
    engine.save_checkpoint(str(tmp_path))
    resumed = make_engine(optimizer=warming_up, layout=layout)
    resumed.load_checkpoint(str(tmp_path), del_local_after_load=False)
    assert rates(resumed) == rates(engine) == [scheduled] * len(rates(engine))
    for e in (engine, resumed):
        train(e, make_batch(ONE_PROCESS, seed=2), VCPOSettings())
    assert resumed.lr_scheduler_step() == engine.lr_scheduler_step() > scheduled
    theirs = exported(engine)
    assert all(torch.equal(weight, theirs[name]) for name, weight in exported(resumed).items())


@pytest.mark.parametrize("factor", [0.1, 5.0])
def test_a_resumed_run_has_the_learning_rate_of_its_settings(
    make_engine: Callable[..., Any], tmp_path: Path, factor: float
) -> None:
    """Whoever resumes after a collapse lowers the rate; the checkpoint's would be Megatron's choice."""
    layout = ParallelLayout("one process")
    engine = make_engine(optimizer=replace(adamw(1e-3), lr_warmup_steps=4), layout=layout)
    train(engine, make_batch(ONE_PROCESS), VCPOSettings())
    scheduled = engine.lr_scheduler_step()
    engine.save_checkpoint(str(tmp_path))
    other = replace(adamw(1e-3 * factor), lr_warmup_steps=4)
    resumed = make_engine(optimizer=other, layout=layout)
    resumed.load_checkpoint(str(tmp_path), del_local_after_load=False)
    assert rates(resumed) == pytest.approx([scheduled * factor] * len(rates(resumed)))
    assert resumed.lr_scheduler_step() == pytest.approx(engine.lr_scheduler_step() * factor), "at the same step"


def test_the_learning_rate_is_scaled_inside_the_block_only() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    with scaled_learning_rate(optimizer, 0.1):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert optimizer.param_groups[0]["lr"] == 0.5
