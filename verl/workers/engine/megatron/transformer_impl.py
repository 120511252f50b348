"""The patched Megatron actor: one VCPO update per mini-batch. Extends verl/workers/engine/megatron/transformer_impl.py.

An update is two passes over the mini-batch (DESIGN: "Per-sequence gradient norms", `per_trajectory`):

1. measure: every sequence's log importance weight and, if the baseline needs it, the norm of its score gradient;
2. step: one ordinary packed backward of `-sum_i coefficient_i * score_i`, with the learning rate multiplied by
   sqrt(ESS ratio) around the optimizer step and nowhere else.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from vcpo import Estimate, VCPOConfig, estimate
from verl_vcpo.workers.engine.megatron.mini_batch import MiniBatch, gather_mini_batch
from verl_vcpo.workers.utils.losses import padded_responses, score_loss, weighted_score_loss

# The key under which EngineRegistry finds this engine (environment variable VERL_ENGINE_VENDOR).
ENGINE_VENDOR = "vcpo"


@EngineRegistry.register(model_type="language_model", backend="megatron", device="cuda", vendor=ENGINE_VENDOR)
class VCPOMegatronEngine(MegatronEngineWithLMHead):
    """verl's Megatron actor with the VCPO update. With `vcpo.enable=false` it is verl's, plus VCPO's diagnostics."""

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> dict[str, Any]:
        """One optimizer step on one mini-batch.

        Args:
            data: this data-parallel rank's sequences (B of them); besides verl's fields it needs
                `rollout_log_probs` [B, T], `rm_scores` [B, T] (their sum: the raw reward) and `uid` (the prompt group).
            loss_function: verl's, a partial that carries the actor's config.

        Returns:
            verl's dictionary; `metrics` on the rank that holds the outputs.
        """
        actor_config = loss_function.keywords["config"]
        vcpo: VCPOConfig = actor_config.vcpo
        if not vcpo.enable:
            outputs = super().train_batch(data, loss_function)
            batch = self._gather(data, padded_responses(outputs["model_output"]["log_probs"], data), None)
            return self._with_metrics(outputs, batch, _estimate(_WATCH_ONLY, batch))

        mode = actor_config.loss_agg_mode
        if vcpo.needs_gradient_norms:
            batch = self._gather(data, *self._score_gradients(data, mode))
        else:
            batch = self._gather(
                data, padded_responses(self.infer_batch(data)["model_output"]["log_probs"], data), None
            )
        step = _estimate(vcpo, batch)
        data["vcpo_coefficient"] = step.coefficient[batch.mine].float()  # [b]
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, partial(weighted_score_loss, loss_agg_mode=mode))
        with scaled_learning_rate(self.optimizer, step.step_size_multiplier):
            grad_norm = self.optimizer_step()
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"]["grad_norm"] = grad_norm
        return self._with_metrics(outputs, batch, step)

    def _gather(self, data: TensorDict, log_prob: Tensor, squared_norm: Tensor | None) -> MiniBatch:
        return gather_mini_batch(data, log_prob, squared_norm, self.get_data_parallel_group())

    def _score_gradients(self, data: TensorDict, loss_agg_mode: str) -> tuple[Tensor, Tensor]:
        """One backward per sequence: ([B, T] log-probs, [B] float64 squared norms of the score gradients)."""
        log_probs: list[Tensor] = []
        squared_norms: list[Tensor] = []
        data = data.exclude(*_NOT_OF_THE_MODEL)
        tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
        with self._without_gradient_reduction():
            for one in tu.chunk_tensordict(data, len(data)):
                self.optimizer_zero_grad()
                out = self.forward_backward_batch(one, partial(score_loss, loss_agg_mode=loss_agg_mode))
                log_probs.append(padded_responses(out["model_output"]["log_probs"], one)[0])
                squared_norms.append(self._squared_gradient_norm())
        return torch.nn.utils.rnn.pad_sequence(log_probs, batch_first=True), torch.stack(squared_norms)

    def _squared_gradient_norm(self) -> Tensor:
        """Squared norm of the gradient that the buffers hold now: a float64 scalar. One model-parallel rank."""
        buffers = [buffer.grad_data for chunk in self.module for buffer in chunk.buffers]
        return torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in buffers]).square().sum()

    @contextlib.contextmanager
    def _without_gradient_reduction(self) -> Iterator[None]:
        """Backwards inside the block leave each rank its own gradient: a norm is one sequence's, not the ranks' sum."""
        configs = [chunk.config for chunk in self.module]
        reductions = [config.finalize_model_grads_func for config in configs]
        try:
            for config in configs:
                config.finalize_model_grads_func = None
            yield
        finally:
            for config, reduction in zip(configs, reductions, strict=True):
                config.finalize_model_grads_func = reduction

    def _with_metrics(self, outputs: dict[str, Any], batch: MiniBatch, step: Estimate) -> dict[str, Any]:
        if not self.is_mp_src_rank_with_outputs():
            return outputs
        usable = step.usable
        metrics = {
            "vcpo/ess_ratio": step.ess_ratio,
            "vcpo/lr_multiplier": step.step_size_multiplier,
            "vcpo/baseline": _mean(step.baseline[usable]),
            "vcpo/weight/max": step.weight.max().item(),
            "vcpo/kl_rollout_policy": (batch.kl[usable].sum() / batch.tokens[usable].sum().clamp(min=1)).item(),
            "vcpo/excluded_sequences": int((~usable & ~batch.padding).sum()),
        }
        if batch.squared_norm is not None:
            metrics["vcpo/sequence_grad_norm"] = _mean(batch.squared_norm[usable].sqrt())
        # Lists: verl refuses bare numbers. Every rank reports the same global value, whose mean is itself.
        outputs["metrics"].update({name: [value] for name, value in metrics.items()})
        return outputs


# Per-sequence fields that no forward pass reads: slicing them for every sequence would cost more than the pass.
_NOT_OF_THE_MODEL = (
    *("advantages", "returns", "old_log_probs", "rollout_log_probs", "rm_scores", "uid", "raw_prompt", "reward_model"),
    *("extra_info", "extra_fields", "data_source", "session_id", "num_turns", "ability", "index", "tools_kwargs"),
)

# With vcpo.enable=false the update is verl's; the ESS ratio is watched all the same.
_WATCH_ONLY = VCPOConfig(baseline="mean", step_size_rule="none")  # type: ignore[arg-type]


def _estimate(config: VCPOConfig, batch: MiniBatch) -> Estimate:
    return estimate(config, batch.log_weight, batch.reward, batch.group, batch.squared_norm)


def _mean(values: Tensor) -> float:
    return values.mean().item() if values.numel() else math.nan


@contextlib.contextmanager
def scaled_learning_rate(optimizer: Any, multiplier: float) -> Iterator[None]:
    """The step inside the block uses `multiplier` times the scheduler's rate, which is restored whatever happens."""
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    try:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * multiplier
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
