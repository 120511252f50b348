"""The engines that GPUs run, one process: norms, kinds of memory, recomputation, log-probs and exported weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.kit.actor import loss_function
from tests.kit.layout_run import norm_error
from tests.kit.layout_worker import make_batch
from tests.kit.resumption import ONE_PROCESS, largest_difference, parameters, train_actor
from verl_vcpo.actor.megatron_actor import ValueEngine, VCPOMegatronEngine
from verl_vcpo.actor.norms_settings import NormsHow
from verl_vcpo.actor.update.losses import padded_responses
from verl_vcpo.actor.vcpo_settings import VCPOSettings

PACKED = [how for how in NormsHow if how is not NormsHow.PER_TRAJECTORY]
# Rounding: of the norms (`norm_error`), and of the parameters after a step, whose rate is 3e-3: absolute, and of each.
# A bfloat16 parameter may be the next one: those are 2**-7 of each apart, or less.
TOLERANCES = {"float32": (1e-6, 1e-6, 0.0), "bfloat16": (1e-2, 1e-3, 2**-7)}


def update(engine: Any, **norms: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """([B] squared norms, the parameters after the step)."""
    with engine.train_mode():
        engine.train_batch(make_batch(ONE_PROCESS), loss_function(VCPOSettings(base_ess_ratio=0.9, norms=norms)))
        engine.lr_scheduler_step()
    return engine.last_update[0].squared_norm.cpu(), parameters(engine)


def test_the_classes_are_the_gpus(build: Callable[..., Any]) -> None:
    actor, critic = build("bfloat16"), build("bfloat16", "value_model")
    assert type(actor) is VCPOMegatronEngine and type(critic) is ValueEngine
    assert actor.packing.unpackable is None
    for engine in (actor, critic):
        assert all(parameter.is_cuda for parameter in engine.module[0].parameters())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("how", PACKED)
def test_packed_norms_are_those_of_one_backward_per_sequence(build: Callable[..., Any], how: str, dtype: str) -> None:
    norms, after = update(build(dtype), how=how)
    wanted, expected = update(build(dtype), how=NormsHow.PER_TRAJECTORY)
    of_norms, absolute, relative = TOLERANCES[dtype]
    assert wanted.amax() > 2 * wanted.amin() > 0
    assert norm_error(norms, wanted) < of_norms
    torch.testing.assert_close(after, expected, atol=absolute, rtol=relative)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer_offload": True},
        {"param_offload": True},
        {"optimizer_offload": True, "param_offload": True},
        {"layout": replace(ONE_PROCESS, recompute=True)},
    ],
    ids=["optimizer_offload", "param_offload", "both", "recompute"],
)
def test_where_memory_is_changes_nothing(build: Callable[..., Any], dtype: str, settings: dict[str, Any]) -> None:
    there, plain = build(dtype, **settings), build(dtype)
    for step in range(2):
        train_actor(there, step)
        train_actor(plain, step)
    if "param_offload" in settings:
        assert {buffer.param_data.storage().size() for buffer in there.module[0].buffers} == {0}
    if "optimizer_offload" in settings:
        states = [s for o in there.optimizer.chained_optimizers for s in o.optimizer.state.values()]
        assert states and all(state["exp_avg"].device.type == "cpu" for state in states)
    assert largest_difference(parameters(there), parameters(plain)) == 0.0


def responses(engine: Any) -> torch.Tensor:
    """[B, T] log-probs of the responses, on the host."""
    batch = make_batch(ONE_PROCESS)
    with engine.eval_mode():
        outputs = engine.infer_batch(batch)
    return padded_responses(outputs["model_output"]["log_probs"], batch).cpu()


def test_log_probs_are_those_of_transformers(build: Callable[..., Any], model: Path) -> None:
    """Of the actor and of the reference policy."""
    network = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32)
    batch = make_batch(ONE_PROCESS)
    rows = []
    for ids, prompt in zip(batch["input_ids"].unbind(), batch["prompts"].unbind(), strict=True):
        with torch.no_grad():
            of_vocabulary = network(ids[None]).logits[0].log_softmax(-1)
        rows.append(of_vocabulary[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0])
    wanted = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    assert (responses(build()) - wanted).abs().max() < 1e-5
    assert (responses(build(forward_only=True)) - wanted).abs().max() < 1e-5
    assert (responses(build("bfloat16")) - wanted).abs().max() < 0.2


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_exported_weights_are_those_that_were_loaded(build: Callable[..., Any], model: Path, dtype: str) -> None:
    weights, _ = build(dtype, param_offload=True).get_per_tensor_param()
    exported = dict(weights)
    loaded = load_file(model / "model.safetensors")
    assert exported.keys() == loaded.keys()
    for name, weight in exported.items():
        assert weight.is_cuda and weight.dtype == getattr(torch, dtype)
        assert torch.equal(weight.cpu(), loaded[name].to(weight.dtype)), name
