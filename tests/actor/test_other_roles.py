"""What else the trainer runs on CPU beside the actor: the reference policy (KL penalties) and verl's critic (A2C)."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu
from verl.workers.config import McoreCriticConfig
from verl.workers.utils.losses import value_loss
from verl.workers.utils.padding import no_padding_2_padding

from tests.actor.conftest import ONE_PROCESS
from tests.kit.actor import adamw, build_engine
from tests.kit.layout_worker import make_batch
from verl_vcpo.cpu.engine import CPUValueEngine


def test_a_reference_policy_has_the_actors_log_probs(
    checkpoints: Callable[..., Path], make_engine: Callable[..., Any]
) -> None:
    actor, batch = make_engine(), make_batch(ONE_PROCESS)
    reference = build_engine(ONE_PROCESS, checkpoints(), adamw(), forward_only=True)
    found = []
    for engine in (actor, reference):
        with engine.eval_mode():
            found.append(engine.infer_batch(batch.clone())["model_output"]["log_probs"].values())
    torch.testing.assert_close(found[0], found[1])


def test_a_model_of_a_test_leaves_the_environment_as_it_was(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches Megatron's choice of attention, which a run that a test starts afterwards would inherit, and refuse."""
    for kernel in ("FLASH", "FUSED", "UNFUSED"):
        monkeypatch.delenv(f"NVTE_{kernel}_ATTN", raising=False)
    before = dict(os.environ)
    make_engine()
    assert dict(os.environ) == before


def critic_values(critic: CPUValueEngine, batch: TensorDict) -> torch.Tensor:
    """[B, T] before each response token."""
    with critic.eval_mode():
        values = critic.infer_batch(batch.clone())["model_output"]["values"]
    return no_padding_2_padding(values, batch)


@pytest.mark.usefixtures("process_group")
def test_a_critic_is_the_policy_with_another_head_and_learns_returns(checkpoints: Callable[..., Path]) -> None:
    critic = build_engine(ONE_PROCESS, checkpoints(), adamw(1e-2), model_type="value_model")
    batch = make_batch(ONE_PROCESS)
    model = AutoModelForCausalLM.from_pretrained(checkpoints(), attn_implementation="eager", dtype=torch.float32)
    head = critic.module[0].module.output_layer
    mask = batch["response_mask"].to_padded_tensor(0).bool()
    values = critic_values(critic, batch)
    for ids, prompt, found in zip(batch["input_ids"].unbind(), batch["prompts"].unbind(), values, strict=True):
        with torch.no_grad():
            hidden = model.model(ids[None]).last_hidden_state[0, len(prompt) - 1 : -1]
            expected = (hidden @ head.weight.T)[:, 0]
        torch.testing.assert_close(found[: len(expected)], expected, rtol=1e-4, atol=1e-5)

    returns = torch.where(mask, 0.7, 0.0)
    nested = [row[: len(response)] for row, response in zip(returns, batch["responses"].unbind(), strict=True)]
    batch["returns"] = torch.nested.as_nested_tensor(nested, layout=torch.jagged)
    batch["values"] = torch.nested.as_nested_tensor([row.clone() for row in nested], layout=torch.jagged)
    config = McoreCriticConfig(ppo_micro_batch_size_per_gpu=2, cliprange_value=100.0)
    tu.assign_non_tensor(batch, global_batch_size=len(batch))
    for _ in range(12):
        with critic.train_mode():
            critic.train_batch(batch.clone(), partial(value_loss, config))
    before, after = ((v - returns)[mask].square().mean() for v in (values, critic_values(critic, batch)))
    assert after < 0.5 * before
