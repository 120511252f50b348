"""The gradient of a VCPO update from one packed backward, although baselines need norms that a backward computes.

A pass is a forward and backward over some of this rank's sequences; all sequences of a baseline are in one pass. The
parts that a backward keeps (`vcpo.norms.keep`) become the update's gradient when all ranks know the norms of the pass:

    activations   inputs and output gradients of every layer: one weighted product each, sum_i c_i g_i. A pass is as
                  many groups as `vcpo.norms.tokens` allows, wherever their sequences lie; at scope `minibatch` all
    gradients     h_i = a_i g_i, of a loss that contains the weights a_i, added into two buffers as they are formed:
                  sum (R_i - m) / s h_i and sum h_i / s; then main -= (b - m) second. m is the commonest reward, so
                  that most sequences are in the second sum only. At scope `group` a pass is some groups of every
                  data-parallel rank, with a second buffer for each of them; at scope `minibatch` it is the mini-batch

Where rounding would spoil the difference of the two sums (norms/rounding.py), a second forward and backward follows,
with the coefficients in its loss.

A pass is one call of Megatron's pipeline schedule: with P stages and n micro-batches the stages are idle for a share of
(P - 1) / (n + P - 1) of each pass.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.utils import get_model_config
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from vcpo import Estimate, OpobScope, estimate
from vcpo.estimator import log_packed_weights, log_reward_scale
from verl_vcpo.actor.losses import importance_weighted_score_loss, padded_responses, weighted_score_loss
from verl_vcpo.actor.mini_batch import (
    MiniBatch,
    SequencesBeforeForward,
    gather_mini_batch,
    gather_sequences,
)
from verl_vcpo.actor.norms.collector import Collector
from verl_vcpo.actor.norms.experts import are_shared
from verl_vcpo.actor.norms.layout import micro_batch
from verl_vcpo.actor.norms.plan import Experts, choose, plan_passes
from verl_vcpo.actor.norms.rounding import TwoSums, predicted_rounding
from verl_vcpo.actor.norms.settings import NormsKeep
from verl_vcpo.actor.norms.sums import SecondBuffers, Sums
from verl_vcpo.actor.vcpo_settings import VCPOSettings


class Unmeasured(ArithmeticError):
    """The norms of a mini-batch cannot be used, and neither can the gradient that was formed with them."""


@dataclass(frozen=True)
class PackedOutcome:
    """The result of the passes over a mini-batch. Unless `rounded`, the gradient is in Megatron's gradient buffers."""

    batch: MiniBatch
    losses: list[float]
    rounded: bool
    """True: only the norms are known, because rounding would have spoiled the gradient of `keep=gradients`."""
    keep: NormsKeep | None
    """The kept part of the passes; None: the norms only."""


class Pass:
    """Some sequences of all data-parallel ranks.

    The pass counts N = D * largest sequences, `largest` the most sequences of a rank: sequence i of rank d has the
    number d * largest + i.

    Args:
        rows: for each of the D data-parallel ranks the numbers of its sequences in the mini-batch.
        rank: this data-parallel rank.
    """

    def __init__(self, rows: list[list[int]], rank: int) -> None:
        self.rows, self.rank = rows, rank
        self.own_rows = rows[rank]
        """This rank's rows."""
        self.largest = max(map(len, rows))
        self.numbers = torch.cat([d * self.largest + torch.arange(len(of_rank)) for d, of_rank in enumerate(rows)])
        """[n] the numbers of all sequences, rank after rank."""

    @property
    def size(self) -> int:
        """N, the count of the pass."""
        return len(self.rows) * self.largest

    @property
    def my_numbers(self) -> Tensor:
        """[b] the numbers of this rank's sequences."""
        return self.rank * self.largest + torch.arange(len(self.own_rows))

    def spread(self, values: Tensor) -> Tensor:
        """Spread [..., n] values, rank after rank, to [..., N] by number, 0 where there is no sequence."""
        out = values.new_zeros(*values.shape[:-1], self.size)
        out[..., self.numbers] = values
        return out


class PackedUpdate:
    """The passes of one mini-batch, on one rank.

    Args:
        engine: the Megatron engine, in train mode, its modules tapped (`engine.tap`).
        data: this data-parallel rank's b sequences.
        config: VCPO's settings, which need gradient norms.
        aggregation: `loss_agg_mode` and `loss_scale_factor`.
        second: with `keep=gradients` `slots` second buffers for each parameter when `run` begins, zero between updates.
        only_norms: keep nothing else, because `keep=gradients` could not measure this mini-batch.
    """

    def __init__(
        self,
        engine: Any,
        data: TensorDict,
        config: VCPOSettings,
        aggregation: dict[str, Any],
        second: SecondBuffers,
        only_norms: bool = False,
    ) -> None:
        self.engine, self.data, self.config, self.aggregation, self.second = engine, data, config, aggregation, second
        self.rank, self.ranks = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
        self.sequences: SequencesBeforeForward = gather_sequences(data, self.rank)
        interleaved = mpu.get_virtual_pipeline_model_parallel_world_size() is not None
        limits = interleaved, _micro_batch_tokens(data), _experts(engine)
        self.keep: NormsKeep | None = None
        if only_norms:
            passes = plan_passes(config, None, self.sequences, *limits)
        else:
            self.keep, passes = choose(config, self.sequences, *limits, engine.parts)
        self.passes = [Pass(rows, self.rank) for rows in passes]
        self.slots = max(max(self._slots(one)) for one in self.passes) + 1
        """The most second buffers that a pass needs with `keep=gradients`."""
        self.squared_norm = torch.zeros(self.ranks, len(data), dtype=torch.float64, device=get_device_id())
        self.log_probs: list[Tensor | None] = [None] * len(data)
        self.losses: list[float] = []

    def run(self) -> PackedOutcome:
        """Run all passes. Afterwards the update's gradient is in Megatron's buffers, if the outcome has one.

        Raises:
            Unmeasured: on all ranks: a norm is NaN or infinite, or float32 cannot hold the squares of a gradient; the
                contents of the buffers are not usable.
        """
        self.engine.optimizer_zero_grad()
        with _finalized_once(self.engine.module):
            for one in self.passes:
                self._one_pass(one)
        batch = self._whole_batch()
        rounded = self.keep is None or (self.keep is NormsKeep.GRADIENTS and not self._two_sums_suffice(batch))
        return PackedOutcome(batch, self.losses, rounded, self.keep)

    def _one_pass(self, one: Pass) -> None:
        engine = self.engine
        data = self._select(one)
        sums = self._sums(one) if self.keep is NormsKeep.GRADIENTS else None
        tied = engine.model_config.share_embeddings_and_output_weights
        collector = Collector(self.keep, one.size, tied=tied, device=get_device_id(), sums=sums)
        engine.tap.collector = collector
        try:
            out = engine.forward_backward_batch(data, self._loss())
        finally:
            engine.tap.collector = None
        log_prob = None
        if engine.is_mp_src_rank_with_outputs():
            log_prob = padded_responses(out["model_output"]["log_probs"], data)
            for row, values in zip(one.own_rows, log_prob, strict=True):
                self.log_probs[row] = values
            self.losses += out["loss"]
        # The loss contains the data-parallel size as a factor, and Megatron multiplies by the context-parallel size.
        factor = self.ranks * mpu.get_context_parallel_world_size()
        norms = collector.squared_norms().view(self.ranks, one.largest) / factor**2
        for rank, rows in enumerate(one.rows):
            self.squared_norm[rank, rows] = norms[rank, : len(rows)]
        if self.keep is not None:
            batch = self._unweighted(gather_mini_batch(data, self.rank, log_prob, norms, equal=False))
            self._combine(collector, one, batch, sums)

    def _select(self, one: Pass) -> TensorDict:
        rows = one.own_rows
        data = self.data.copy() if rows == list(range(len(self.data))) else self._of_rows(rows)
        size = tu.get_non_tensor_data(data, key="micro_batch_size_per_gpu", default=None)
        if size:  # verl demands a size that divides the pass: the largest such size
            tu.assign_non_tensor(
                data, micro_batch_size_per_gpu=max(n for n in range(1, size + 1) if len(rows) % n == 0)
            )
        data["vcpo_row"] = one.my_numbers
        data["vcpo_coefficient"] = self.sequences.usable[self.sequences.mine][rows].float()
        return data

    def _of_rows(self, rows: list[int]) -> TensorDict:
        ragged = self._ragged
        data = tu.index_select_tensor_dict(self.data.exclude(*ragged), rows)
        for name, values in ragged.items():
            dimension = getattr(self.data[name], "_ragged_idx", self.data[name].dim() - 1)
            data[name] = tu.nested_tensor_from_tensor_list([values[row] for row in rows], ragged_idx=dimension)
        return data

    @cached_property
    def _ragged(self) -> dict[str, tuple[Tensor, ...]]:
        """The rows of each nested column, unbound once: to unbind a column takes time for all of its rows."""
        return {name: value.unbind() for name, value in self.data.items() if getattr(value, "is_nested", False)}

    def _loss(self) -> Callable[..., Any]:
        if self.keep is NormsKeep.GRADIENTS:
            return partial(importance_weighted_score_loss, config=self.config, **self.aggregation)
        return partial(weighted_score_loss, **self.aggregation)

    def _of_pass(self, one: Pass, values: Tensor) -> Tensor:
        """Select from [..., B] of the mini-batch the [..., n] of the pass, rank after rank."""
        size = len(self.data)
        return values[..., [rank * size + row for rank, rows in enumerate(one.rows) for row in rows]]

    def _sums(self, one: Pass) -> Sums:
        """Return the pass's two sums of a_i g_i, with the factors (R_i - m) / (s B) and 1 / (s B)."""
        reward, common, scale = self._rewards
        both = torch.stack([(reward - common) * scale, scale])
        return Sums(one.spread(self._of_pass(one, both)).float(), self._slots(one), self.second)

    def _slots(self, one: Pass) -> tuple[int, ...]:
        """Return N numbers: a sequence's baseline, counted among those of its rank in the pass."""
        if self.config.opob_scope is OpobScope.MINIBATCH:
            return (0,) * one.size
        slot = [0] * one.size
        groups = self._of_pass(one, self.sequences.group).split([len(rows) for rows in one.rows])
        for rank, of_rank in enumerate(groups):
            number = {group: i for i, group in enumerate(dict.fromkeys(of_rank.tolist()))}
            first = rank * one.largest
            slot[first : first + len(of_rank)] = [number[group] for group in of_rank.tolist()]
        return tuple(slot)

    @cached_property
    def _rewards(self) -> tuple[Tensor, Tensor, Tensor]:
        """[B] rewards, the commonest in the baseline's scope, and 1 / (s B); 0 where a sequence is not usable, and the
        last also where a sequence is masked."""
        sequences, usable = self.sequences, self.sequences.usable
        reward, common, scale = (torch.zeros_like(sequences.reward) for _ in range(3))
        if usable.any():
            reward[usable] = sequences.reward[usable]
            group = sequences.group[usable]
            scale[usable] = log_reward_scale(self.config, reward[usable], group).exp() / usable.sum()
            whole = self.config.opob_scope is OpobScope.MINIBATCH
            common[usable] = _commonest(reward[usable], torch.zeros_like(group) if whole else group)
        return reward, common, scale.masked_fill(sequences.masked, 0.0)

    def _unweighted(self, batch: MiniBatch) -> MiniBatch:
        """Replace norms of a_i g_i, which `keep=gradients` measures, by norms of g_i."""
        if self.keep is not NormsKeep.GRADIENTS:
            return batch
        assert batch.squared_norm is not None
        log_used = log_packed_weights(self.config, batch.log_weight)
        used = torch.where(log_used.isfinite(), log_used, 0.0)
        return MiniBatch(**{**vars(batch), "squared_norm": batch.squared_norm * (-2 * used).exp()})

    def _combine(self, collector: Collector, one: Pass, batch: MiniBatch, sums: Sums | None) -> None:
        """Form the update's gradient from what the collector has kept of a pass."""
        step = self._estimate(batch)
        if self.keep is NormsKeep.ACTIVATIONS:
            # The step's coefficients contain 1 / B with the B of this pass, not of the mini-batch.
            share = step.usable.sum() / self.sequences.usable.sum().clamp(min=1)
            collector.add_weighted(one.spread(step.coefficient * share).float().to(get_device_id()))
            return
        assert sums is not None
        # All usable sequences whose gradients are in one of this rank's second buffers have one baseline.
        summed = self._of_pass(one, self.sequences.usable)
        if self.config.opob_scope is not OpobScope.MINIBATCH:
            summed &= self._of_pass(one, self.sequences.rank == self.rank)
        shift = step.baseline - self._of_pass(one, self._rewards[1])
        slot = torch.tensor(sums.slot)[one.numbers]
        of_slots = [shift[summed & (slot == s)].tolist() for s in range(sums.slots)]
        sums.subtract([values[0] if values else 0.0 for values in of_slots])

    def _two_sums_suffice(self, batch: MiniBatch) -> bool:
        """Return True where the gradient in Megatron's buffers is as exact as the buffers' numbers allow."""
        sums = TwoSums.of_buffers(self.second, self.slots)
        _, common, scale = self._rewards
        rounding = predicted_rounding(self.config, batch, self._estimate(batch), common, scale, sums)
        if rounding.underflow > sums.limit:
            raise Unmeasured
        return rounding.cancellation <= sums.limit

    def _estimate(self, batch: MiniBatch) -> Estimate:
        return estimate(
            self.config,
            batch.log_weight,
            batch.reward,
            batch.group,
            squared_norm=batch.squared_norm,
            length=batch.tokens,
            masked=batch.masked,
        )

    def _whole_batch(self) -> MiniBatch:
        log_prob = None
        if self.engine.is_mp_src_rank_with_outputs():
            log_prob = torch.nn.utils.rnn.pad_sequence([x for x in self.log_probs if x is not None], batch_first=True)
        batch = self._unweighted(gather_mini_batch(self.data, self.rank, log_prob, self.squared_norm))
        assert batch.squared_norm is not None
        if (self.sequences.usable & ~(batch.log_weight.isfinite() & batch.squared_norm.isfinite())).any():
            raise Unmeasured
        return batch


def _commonest(reward: Tensor, group: Tensor) -> Tensor:
    """Return [B] the commonest reward of the group; if several are, the one nearest to the group's mean."""
    out = torch.empty_like(reward)
    for one in group.unique():
        of_group = reward[group == one]
        values, counts = of_group.unique(return_counts=True)
        most = values[counts == counts.max()]
        out[group == one] = most[(most - of_group.mean()).abs().argmin()]
    return out


def _micro_batch_tokens(data: TensorDict) -> int | None:
    """Return the most tokens of a micro-batch on all context-parallel ranks; None: micro-batches by sequences."""
    if not tu.get_non_tensor_data(data, key="use_dynamic_bsz", default=True):
        return None
    return int(data["max_token_len_per_gpu"]) * mpu.get_context_parallel_world_size()


def _experts(engine: Any) -> Experts:
    if not engine.tf_config.num_moe_experts:
        return Experts.NONE
    return Experts.SHARED if are_shared() else Experts.OWN


@contextlib.contextmanager
def _finalized_once(modules: list[torch.nn.Module]) -> Iterator[None]:
    """Have Megatron reduce gradients over ranks and stages once, at the end of the block, instead of in every pass."""
    configs = [get_model_config(chunk) for chunk in modules]
    finalize = configs[0].finalize_model_grads_func
    calls: list[tuple[Any, Any]] = []
    try:
        for config in configs:
            config.finalize_model_grads_func = lambda *args, **kwargs: calls.append((args, kwargs))
        yield
    finally:
        for config in configs:
            config.finalize_model_grads_func = finalize
    args, kwargs = calls[-1]
    finalize(*args, **kwargs)


def forward_step(
    collector: Collector,
    packed: bool,
    step: Callable[..., Any],
    batch_iter: Iterator[TensorDict],
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Run verl's `forward_step`, and set the collector's micro-batch for the forward and for its backward."""
    batch = next(batch_iter)
    layout = micro_batch(batch, packed, get_device_id())
    collector.micro_batch = layout

    def backward_begins(_: Tensor) -> None:
        collector.micro_batch = layout

    output, loss_function = step(iter([batch]), *args, **kwargs)
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(backward_begins)

    def loss(*loss_args: Any, **loss_kwargs: Any) -> Any:
        value, *rest = loss_function(*loss_args, **loss_kwargs)
        value.register_hook(backward_begins)
        return (value, *rest)

    return output, loss
