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
from verl_vcpo.actor.model.local_layers import LocalLayers
from verl_vcpo.actor.resume import Resumable
from verl_vcpo.actor.taps.layout import micro_batch
from verl_vcpo.actor.update.checks import check_experts, check_lengths, with_harmless_tokens
from verl_vcpo.actor.update.losses import loss_of_trained, note_longest_response, weighted_score_loss
from verl_vcpo.actor.update.metrics import of_update
from verl_vcpo.actor.update.mini_batch import Measured, MiniBatch
from verl_vcpo.actor.update.one_pass import log_probs, one_pass, outputs_of
from verl_vcpo.actor.update.packing import Packing
from verl_vcpo.actor.update.per_trajectory import per_trajectory
from verl_vcpo.actor.update.sequence_weights import SequenceWeights
from verl_vcpo.actor.update.sequences import Sequences
from verl_vcpo.actor.vcpo_settings import VCPOSettings
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
        aggregation = {name: getattr(actor_config, name) for name in ("loss_agg_mode", "loss_scale_factor")}
        loss = partial(weighted_score_loss, **aggregation)
        if vcpo.enable:
            note_longest_response(data)
            measured = self._measure(data, sequences, vcpo, loss)
        else:
            outputs = super().train_batch(data, partial(loss_of_trained, loss_function))
            measured = Measured(sequences.measured(log_probs(self, data, outputs)), outputs)
        batch = measured.batch
        parts = batch.weight_parts(self.mismatch, batch_begins)
        step = batch.estimate(vcpo if vcpo.enable else _WATCH_ONLY, parts and parts.lag)
        self.last_update = (batch, step)
        mine, weight = sequences.mine, step.weight if vcpo.enable else batch.log_weight.exp()
        self.sequence_weights.note(data, batch.log_weight[mine], weight[mine])
        outputs = self._step(data, measured, step, mine, loss) if vcpo.enable else measured.outputs or {}
        if self.is_mp_src_rank_with_outputs():
            metrics = of_update(measured, step, parts)
            # verl requires lists, and takes the mean over ranks, which all report the same global value.
            outputs["metrics"].update({name: [value] for name, value in metrics.items()})
        return outputs

    def _measure(self, data: TensorDict, sequences: Sequences, vcpo: VCPOSettings, loss: partial[Any]) -> Measured:
        """Run the measuring pass of this method and these settings."""
        if not vcpo.needs_gradient_norms:
            return one_pass(self, data, sequences, vcpo, loss)
        packed = self.packing.measured(data, sequences, vcpo, loss.keywords) if vcpo.packs_gradient_norms else None
        return packed or per_trajectory(self, data, sequences, loss)

    def _step(
        self, data: TensorDict, measured: Measured, step: Estimate, mine: slice, loss: partial[Any]
    ) -> dict[str, Any]:
        """Form the gradient where the measuring pass has not, and step. `mine`: this rank's rows of the mini-batch."""
        batch, outputs = measured
        if batch.moves(step):
            if outputs is None:
                data = with_harmless_tokens(data, batch.spoils[mine])
                data["vcpo_coefficient"] = step.coefficient[mine].float()  # [b]
                self.optimizer_zero_grad()
                outputs = self.forward_backward_batch(data, loss)
            with scaled_learning_rate(self.optimizer, step.step_size_multiplier):
                grad_norm = self.optimizer_step()
        else:
            outputs, grad_norm = outputs_of(self, [0.0]), 0.0
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"]["grad_norm"] = grad_norm
        return outputs

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
