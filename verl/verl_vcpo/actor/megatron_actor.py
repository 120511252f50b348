"""The patched Megatron actor: one VCPO update per mini-batch. Extends verl/workers/engine/megatron/transformer_impl.py.

An update has up to two passes over the mini-batch:

1. measure: every sequence's log importance weight and, if the baseline needs norms, the norm of its score gradient;
2. step: one ordinary packed backward of `-sum_i coefficient_i * score_i`, then an optimizer step with the learning rate
   multiplied by the step-size multiplier.

The first pass usually forms the gradient too: without norms (update/one_pass.py), and packed with them
(update/packed.py). The rows of all sequences are gathered on all ranks (update/sequences.py), so weights, baselines and
the step are those of the global mini-batch on every parallel layout, whichever ranks have the sequences of a prompt.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.megatron_utils import load_megatron_optimizer, offload_megatron_optimizer
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead, MegatronEngineWithValueHead

from vcpo import Estimate, Mismatch, VCPOConfig
from vcpo.mismatch import WeightParts
from verl_vcpo.actor.model.local_layers import LocalLayers
from verl_vcpo.actor.resume import Resumable
from verl_vcpo.actor.taps.layout import micro_batch
from verl_vcpo.actor.update.checks import check_experts, check_lengths, with_harmless_tokens
from verl_vcpo.actor.update.lag_bins import of_lags
from verl_vcpo.actor.update.losses import loss_of_trained, note_longest_response, weighted_score_loss
from verl_vcpo.actor.update.mini_batch import Measured, MiniBatch
from verl_vcpo.actor.update.one_pass import log_probs, one_pass, outputs_of
from verl_vcpo.actor.update.packing import Packing
from verl_vcpo.actor.update.per_trajectory import per_trajectory
from verl_vcpo.actor.update.sequence_weights import SequenceWeights
from verl_vcpo.actor.update.sequences import Sequences
from verl_vcpo.actor.vcpo_settings import VCPOSettings
from verl_vcpo.common.truncated import parts_of_update
from verl_vcpo.common.whole_file import write_whole

# The key under which EngineRegistry finds this engine (environment variable VERL_ENGINE_VENDOR).
ENGINE_VENDOR = "vcpo"

# In a checkpoint's folder, beside Megatron's files.
STATE_FILE = "vcpo.json"

# The settings of the estimate from which metrics are computed with methods other than VCPO.
_WATCH_ONLY = VCPOConfig(baseline="mean", step_size_rule="none")  # type: ignore[arg-type]  # it takes strings as well


@EngineRegistry.register(model_type="language_model", backend="megatron", device="cuda", vendor=ENGINE_VENDOR)
class VCPOMegatronEngine(LocalLayers, Resumable, MegatronEngineWithLMHead):
    """verl's Megatron actor with the VCPO update; with another method verl's update, plus VCPO's diagnostics."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mismatch = Mismatch()
        self.sequence_weights = SequenceWeights()
        self.last_update: tuple[MiniBatch, Estimate] | None = None  # for tests; the same on every rank
        self._packing: Packing | None = None
        self._batch_begins = True

    def initialize(self) -> None:
        """Build the model."""
        super().initialize()
        for group in self.optimizer.param_groups if self.optimizer else ():
            if "foreach" in group:  # torch's AdamW on a GPU would make a float32 copy of all parameters in each step
                group["foreach"] = False

    @property
    def packing(self) -> Packing:
        """Packed norms of this model. The first call taps its modules; it is collective over the whole trainer."""
        if self._packing is None:
            self._packing = Packing(self)
        return self._packing

    def train_batch(self, data: TensorDict, loss_function: partial[Any]) -> dict[str, Any]:
        """Make one optimizer step on one mini-batch; no step if no sequence of the mini-batch is usable.

        Args:
            data: this data-parallel rank's B sequences, with verl's fields and `rollout_log_probs` [B, T], `rm_scores`
                [B, T] (their sum: the raw reward) and `uid` (the prompt group).
            loss_function: verl's, a partial that carries the actor's config.

        Returns:
            verl's dictionary; `metrics` on the rank that holds the outputs.

        Raises:
            ValueError: a sequence without one log-prob, or one value of the mask, for each response token; or without
                experts for a token, where these are replayed.
        """
        actor_config = loss_function.keywords["config"]
        vcpo: VCPOSettings = actor_config.vcpo
        check_lengths(data)
        check_experts(data)
        batch_begins, self._batch_begins = self._batch_begins, _ends_batch(data)
        if batch_begins:
            self.sequence_weights.clear()
        sequences = Sequences(data, self.get_data_parallel_group())
        if not vcpo.enable:
            outputs = super().train_batch(data, partial(loss_of_trained, loss_function))
            batch = sequences.measured(log_probs(self, data, outputs))
            log_weight = batch.log_weight[sequences.mine]
            self.sequence_weights.note(data, log_weight, log_weight.exp())
            parts = self._parts(batch, batch_begins)
            return self._with_metrics(outputs, batch, batch.estimate(_WATCH_ONLY, parts and parts.lag), parts)

        note_longest_response(data)
        aggregation = {name: getattr(actor_config, name) for name in ("loss_agg_mode", "loss_scale_factor")}
        loss = partial(weighted_score_loss, **aggregation)
        batch, outputs = self._measure(data, sequences, vcpo, loss)
        parts = self._parts(batch, batch_begins)
        step = batch.estimate(vcpo, parts and parts.lag)
        self.last_update = (batch, step)
        mine = sequences.mine
        self.sequence_weights.note(data, batch.log_weight[mine], step.weight[mine])
        if not (step.usable & ~batch.masked).any():  # a gradient of zero still moves weights: momentum, weight decay
            return self._with_metrics(outputs_of(self, [0.0]), batch, step, parts, grad_norm=0.0)
        second = outputs is None
        if outputs is None:
            data = with_harmless_tokens(data, batch.spoils[mine])
            data["vcpo_coefficient"] = step.coefficient[mine].float()  # [b]
            self.optimizer_zero_grad()
            outputs = self.forward_backward_batch(data, loss)
        with scaled_learning_rate(self.optimizer, step.step_size_multiplier):
            grad_norm = self.optimizer_step()
        return self._with_metrics(outputs, batch, step, parts, grad_norm=grad_norm, second_backward=second)

    def _measure(self, data: TensorDict, sequences: Sequences, vcpo: VCPOSettings, loss: partial[Any]) -> Measured:
        """Run the measuring pass of this method and these settings."""
        if not vcpo.needs_gradient_norms:
            return one_pass(self, data, sequences, vcpo, loss)
        packed = self.packing.measured(data, sequences, vcpo, loss.keywords) if vcpo.packs_gradient_norms else None
        return packed or per_trajectory(self, data, sequences, loss)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move the engine as verl does, but with `optimizer_offload` leave the optimizer's state on the host.

        verl has the state on the GPU for the whole update, where activations need the memory.
        """
        stays = self.is_optimizer_offload_enabled and device == get_device_name()
        super().to(device=device, model=model, optimizer=optimizer and not stays, grad=grad)

    def optimizer_step(self) -> Any:
        """Step the optimizer, and return the norm of the gradient.

        Raises:
            RuntimeError: the step has spoilt the weights, which no sampler and no checkpoint gets. Not so where only
                the norm overflows: clipping by an infinite norm leaves a gradient of zero.
        """
        with self._optimizer_on_device():
            norm = super().optimizer_step()
        if norm is not None and not math.isfinite(norm) and not self._has_finite_weights():
            raise RuntimeError(
                f"the norm of the gradient is {float(norm)}, and the step has spoilt the weights; go on from the last "
                "checkpoint, with a lower actor_rollout_ref.actor.optim.lr or another method"
            )
        return norm

    def _has_finite_weights(self) -> bool:
        """Return the same on all ranks: the norm, by which all ranks get here, is of all of them."""
        finite = torch.ones((), device=get_device_id())
        for parameter in (p for chunk in self.module for p in chunk.parameters() if p.requires_grad):
            finite *= parameter.isfinite().all()
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        return bool(finite)

    @contextlib.contextmanager
    def _optimizer_on_device(self) -> Iterator[None]:
        """With `optimizer_offload`: the optimizer's state is on the GPU in the block only, without the second buffers
        of packed norms."""
        if not self.is_optimizer_offload_enabled:
            yield
            return
        if self._packing is not None:
            self._packing.second_buffers.clear()
        load_megatron_optimizer(self.optimizer)
        try:
            yield
        finally:
            offload_megatron_optimizer(self.optimizer)

    def forward_step(self, batch_iter: Iterator[TensorDict], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Run verl's `forward_step`; in a packed update set the collector's micro-batch for forward and backward."""
        collector = self._packing.tap.collector if self._packing else None
        if collector is None:
            return super().forward_step(batch_iter, *args, **kwargs)
        batch = next(batch_iter)
        layout = micro_batch(batch, self.engine_config.use_remove_padding, get_device_id())
        collector.micro_batch = layout

        def backward_begins(_: Tensor) -> None:
            collector.micro_batch = layout

        output, loss_function = super().forward_step(iter([batch]), *args, **kwargs)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(backward_begins)

        def loss(*loss_args: Any, **loss_kwargs: Any) -> Any:
            value, *rest = loss_function(*loss_args, **loss_kwargs)
            value.register_hook(backward_begins)
            return (value, *rest)

        return output, loss

    def _parts(self, batch: MiniBatch, batch_begins: bool) -> WeightParts | None:
        """Return what lag and arithmetic make of the weights that rho is of: masked sequences count in neither.

        Mini-batches after the first one have a policy that no sampler has.
        """
        log_weight = batch.log_weight.masked_fill(batch.masked, math.nan)
        fresh, again = (batch.fresh, batch.again) if batch_begins else (None, None)
        return self.mismatch.update(log_weight, batch.jump, batch.tokens, batch.squares, fresh, again)

    def _with_metrics(
        self,
        outputs: dict[str, Any],
        batch: MiniBatch,
        step: Estimate,
        parts: WeightParts | None,
        *,
        grad_norm: float | None = None,
        second_backward: bool = False,
    ) -> dict[str, Any]:
        if not self.is_mp_src_rank_with_outputs():
            return outputs
        if grad_norm is not None:  # else verl's update has put it there
            outputs["metrics"]["grad_norm"] = grad_norm
        usable = step.usable
        metrics = {
            "vcpo/ess_ratio": step.ess_ratio,
            "vcpo/ess_ratio/min": step.ess_ratio,  # verl takes the minimum over mini-batches, by the name
            "vcpo/lr_multiplier": step.step_size_multiplier,
            "vcpo/baseline": _mean(step.baseline[usable]),
            "vcpo/weight/max": step.weight.max().item(),
            "vcpo/kl_rollout_policy": (batch.kl[usable].sum() / batch.tokens[usable].sum().clamp(min=1)).item(),
            "vcpo/excluded_sequences": int((~usable & ~batch.padding & ~batch.dropped).sum()),
            "vcpo/dropped_sequences": int(batch.dropped.sum()),
            "vcpo/skipped_updates": int(not (usable & ~batch.masked).any()),
            "vcpo/second_backwards": int(second_backward),
            **parts_of_update(step, batch.truncated, batch.squared_norm),
            **of_lags(batch.lag, step, batch.reward, batch.squared_norm),
        }
        if batch.squared_norm is not None:
            metrics["vcpo/sequence_grad_norm"] = _mean(batch.squared_norm[usable].sqrt())
        if parts:
            metrics |= {
                "vcpo/ess/lag": max(step.ess_ratio, parts.lag),
                "vcpo/ess/arithmetic": parts.arithmetic,
                "vcpo/mismatch/rms": parts.rms,
                "vcpo/mismatch/rms_error": parts.rms_error,
                "vcpo/mismatch/tokens_again": int(batch.again[:, :, 0].sum()),
            }
        # verl requires lists, and takes the mean over ranks, which all report the same global value.
        outputs["metrics"].update({name: [value] for name, value in metrics.items()})
        return outputs

    def get_per_tensor_param(self, base_sync_done: bool = True, **kwargs: Any) -> Any:
        """Return what samplers get: all weights; the adapters alone, where samplers do not get them merged.

        `base_sync_done`: samplers have the first policy, from its folder (`rollout.load_format`).
        """
        return super().get_per_tensor_param(base_sync_done=base_sync_done, **kwargs)

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Save verl's checkpoint, and what has been measured of the weights of fresh data."""
        super().save_checkpoint(local_path, *args, **kwargs)
        if dist.get_rank() == 0:
            write_whole(Path(local_path) / STATE_FILE, json.dumps({"mismatch": self.mismatch.state_dict()}))

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint of this engine, or of verl's."""
        state_file = Path(local_path or "") / STATE_FILE
        state = json.loads(state_file.read_text()) if local_path and state_file.is_file() else None
        super().load_checkpoint(local_path, *args, **kwargs)
        if state is not None:
            self.mismatch.load_state_dict(state["mismatch"])


@EngineRegistry.register(model_type="value_model", backend="megatron", device="cuda", vendor=ENGINE_VENDOR)
class ValueEngine(LocalLayers, Resumable, MegatronEngineWithValueHead):
    """verl's critic, which goes on from a checkpoint as the actor does."""


def _ends_batch(data: TensorDict) -> bool:
    """Return True for a batch's last mini-batch in the last epoch, as verl's worker marks it."""
    return bool(tu.get_non_tensor_data(data, key="update_lr_scheduler", default=True))


def _mean(values: Tensor) -> float:
    return values.mean().item() if values.numel() else math.nan


@contextlib.contextmanager
def scaled_learning_rate(optimizer: Any, multiplier: float) -> Iterator[None]:
    """Multiply the scheduler's learning rate by `multiplier` in the block, and restore it afterwards."""
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    try:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * multiplier
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
