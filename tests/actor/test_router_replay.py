"""The samplers' experts in the update (`router_replay.mode=R3`): the trainer's routers take these and no others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from verl.utils import tensordict_utils as tu
from verl.workers.config import EngineRouterReplayConfig

from tests.actor.conftest import sgd
from tests.actor.test_packed import TOLERANCE, gradients
from tests.kit.actor import build_engine
from tests.kit.layout_run import ParallelLayout
from tests.kit.layout_worker import make_batch
from verl_vcpo.actor.update.checks import check_experts
from verl_vcpo.actor.update.losses import padded_responses

LAYERS, EXPERTS, CHOSEN = 4, 4, 2


def updated(checkpoint: Path, batch: Any, *, recompute: bool, how: str) -> tuple[dict[str, Tensor], Any]:
    """The gradients of one update that replays, and its mini-batch. One engine at a time: verl's list of routers is
    the newest engine's."""
    layout = ParallelLayout("one process", distributed_optimizer=False, recompute=recompute)
    engine = build_engine(layout, checkpoint, sgd(), router_replay=EngineRouterReplayConfig(mode="R3"))
    assert engine.packing.unpackable is None
    found = gradients(engine, batch, norms={"how": how})
    return found, engine.last_update[0]


def with_experts(batch: Any, experts: list[Tensor]) -> Any:
    """The batch with the experts of each sequence, [T - 1, layers, chosen], as samplers return them and verl stores."""
    whole = [torch.cat([rows, torch.zeros_like(rows[:1])]) for rows in experts]
    batch["routed_experts"] = torch.nested.as_nested_tensor(whole, layout=torch.jagged)
    tu.assign_non_tensor_data(batch, "enable_routing_replay", True)  # as verl's worker marks an update
    return batch


def sampled(checkpoint: Path, batch: Any) -> tuple[Tensor, list[Tensor]]:
    """[B, T] log-probs of a sampler in bfloat16, and the experts that it chose, none of a dense model."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    chosen: list[Tensor] = []
    for router in (m for m in model.modules() if isinstance(m, Qwen3MoeTopKRouter)):
        router.register_forward_hook(lambda module, given, output: chosen.append(output[2]))
    rows, experts = [], []
    for ids, prompt in zip(batch["input_ids"].unbind(), batch["prompts"].unbind(), strict=True):
        with torch.no_grad():
            of_tokens = model(ids[None, :-1]).logits[0].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        rows.append(of_tokens[len(prompt) - 1 :])
        if chosen:
            experts.append(torch.stack(chosen, 1).to(torch.int16))
        chosen.clear()
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), experts


def mismatch(engine: Any, batch: Any, sampler: Tensor) -> float:
    """The RMS of a token's log-ratio at lag 0."""
    with engine.eval_mode():
        outputs = engine.infer_batch(batch.clone())
    ratio = padded_responses(outputs["model_output"]["log_probs"], batch) - sampler
    return float(ratio[sampler != 0].square().mean().sqrt())


def test_the_mismatch_of_engines_falls_to_that_of_a_dense_model(
    process_group: None, checkpoints: Callable[[str], Path]
) -> None:
    layout = ParallelLayout("one process", distributed_optimizer=False)
    batch = make_batch(layout)
    dense = mismatch(
        build_engine(layout, checkpoints("qk_norms"), sgd()), batch, sampled(checkpoints("qk_norms"), batch)[0]
    )
    of_sampler, experts = sampled(checkpoints("moe"), batch)
    engine = build_engine(layout, checkpoints("moe"), sgd(), router_replay=EngineRouterReplayConfig(mode="R3"))
    chosen_again = mismatch(engine, batch, of_sampler)
    replayed = mismatch(engine, with_experts(batch, experts), of_sampler)
    print(f"\nRMS of a log-ratio: dense {dense:.4f}, experts {chosen_again:.4f}, replayed {replayed:.4f}")
    assert replayed < dense < chosen_again / 2


def test_a_token_without_experts_is_refused() -> None:
    """Catches a sampler that has returned too few, which verl fills up with expert 0."""
    batch = make_batch(ParallelLayout("one process"))
    lengths = batch["input_ids"].offsets().diff().tolist()
    experts = [torch.tensor([3, 0]).repeat(n - 1, LAYERS, 1) for n in lengths]
    check_experts(with_experts(batch, experts))  # the last token's are not replayed
    for sequence in experts:
        sequence[:, 0] = 0  # as of a dense layer
    check_experts(with_experts(batch, experts))
    check_experts(
        with_experts(batch, [of_sequence[..., :1] * 0 for of_sequence in experts])
    )  # one expert a token: the first
    masks = batch["response_mask"].unbind()
    with_a_hole = next(i for i, mask in enumerate(masks) if mask.any() and not mask.all())
    for i in (2, with_a_hole):
        lacking = [*experts[:i], experts[i].clone(), *experts[i + 1 :]]
        lacking[i][-1:] = 0
        with pytest.raises(ValueError, match=f"no experts for a token of a sample of prompt {batch['uid'][i]}"):
            check_experts(with_experts(batch, lacking))


def log_weights(checkpoint: Path, batch: Any, experts: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """[B] by transformers, whose routers are told the experts."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    routers = [m for m in model.modules() if isinstance(m, Qwen3MoeTopKRouter)]
    told: dict[Any, Tensor] = {}

    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(hidden.reshape(-1, self.hidden_dim), self.weight).softmax(-1)
        scores = logits.gather(1, told[self])
        return logits, scores / scores.sum(-1, keepdim=True), told[self]

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", forward)
    found = []
    fields = (batch[name].unbind() for name in ("input_ids", "prompts", "rollout_log_probs", "response_mask"))
    for rows, ids, prompt, sampled, mask in zip(experts, *fields, strict=True):
        told.update({router: rows[:, i].long() for i, router in enumerate(routers)})
        with torch.no_grad():
            of_tokens = model(ids[None, :-1]).logits[0].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        found.append(((of_tokens[len(prompt) - 1 :] - sampled) * mask).double().sum())
    return torch.stack(found)


def test_the_update_is_that_of_the_samplers_experts(
    process_group: None, checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a pass in which routers choose: forward, recomputation and backward would be of different functions."""
    torch.manual_seed(3)
    batch = make_batch(ParallelLayout("one process"))
    lengths = batch["input_ids"].offsets().diff().tolist()
    experts = [torch.rand(n - 1, LAYERS, EXPERTS).argsort(-1)[..., :CHOSEN].to(torch.int16) for n in lengths]
    with_experts(batch, experts)
    wanted, oracle = updated(checkpoints("moe"), batch, recompute=False, how="per_trajectory")
    told = log_weights(checkpoints("moe"), batch, experts, monkeypatch)
    torch.testing.assert_close(oracle.log_weight, told, rtol=0, atol=1e-4)
    for how, recompute in (("packed", False), ("packed", True), ("per_trajectory", True)):
        got, update = updated(checkpoints("moe"), batch, recompute=recompute, how=how)
        torch.testing.assert_close(update.log_weight, told, rtol=0, atol=1e-4)
        torch.testing.assert_close(update.squared_norm, oracle.squared_norm, rtol=1e-5, atol=0)
        for name, gradient in wanted.items():
            error = (got[name] - gradient).abs().max() / gradient.abs().max()
            assert error <= 4 * TOLERANCE, (how, recompute, name)
