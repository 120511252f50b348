"""The gradient of a VCPO update from one packed backward, although baselines need norms that a backward computes.

A pass is a forward and backward over some groups of every data-parallel rank; all sequences of a baseline are in one
pass. h_i = a_i g_i are the gradients of a loss that contains the weights a_i. They are added into two buffers as they
are formed: sum (R_i - m) / s h_i and sum h_i / s. When all ranks know the norms of the pass, main -= (b - m) second is
the gradient. m is the commonest reward, so that most sequences are in the second sum only. At scope `group` each group
of a rank has a second buffer; at scope `minibatch` the pass is the mini-batch.

A second forward and backward, with the coefficients in its loss, follows where rounding would spoil the difference of
the two sums (rounding.py), and where settings, groups or ranks do not allow sums (passes.py): then one pass over the
mini-batch measures norms alone.

A pass is one call of Megatron's pipeline schedule: with P stages and n micro-batches the stages are idle for a share of
(P - 1) / (n + P - 1) of each pass.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.utils import get_model_config
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from vcpo import OpobScope
from vcpo.estimator import log_packed_weights, log_reward_scale
from verl_vcpo.actor.taps.collector import Collector
from verl_vcpo.actor.taps.modules import Tap
from verl_vcpo.actor.taps.sums import SecondBuffers, Sums, make_room
from verl_vcpo.actor.update import rounding
from verl_vcpo.actor.update.losses import weighted_score_loss
from verl_vcpo.actor.update.mini_batch import Measured, MiniBatch, joined
from verl_vcpo.actor.update.one_pass import log_probs, outputs_of
from verl_vcpo.actor.update.passes import Passes, passes_of_sums
from verl_vcpo.actor.update.sequences import Sequences, numbered, rows_in_mini_batch
from verl_vcpo.actor.vcpo_settings import VCPOSettings


class Unmeasured(ArithmeticError):
    """The norms of a mini-batch cannot be used, and neither can the gradient that was formed with them."""


class Pass:
    """Some sequences of all data-parallel ranks.

    The pass counts N = D * largest sequences, `largest` the most sequences of a rank: sequence i of rank d has the
    number d * largest + i.

    Args:
        rows: for each of the D data-parallel ranks the numbers of its sequences in the mini-batch.
        rank: this data-parallel rank.
        size: the sequences of a rank in the mini-batch.
    """

    def __init__(self, rows: list[list[int]], rank: int, size: int) -> None:
        self.rows, self.rank = rows, rank
        self.at = rows_in_mini_batch(rows, size)
        """[n] rows in the global mini-batch, rank after rank."""
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
        engine: the Megatron engine, in train mode.
        tap: that of the engine's modules.
        data: this data-parallel rank's b sequences.
        sequences: those of `data`.
        aggregation: `loss_agg_mode` and `loss_scale_factor`.
        second: the second buffers, zero between updates; they become as many as the sums need.
        sums: form two sums where that is possible; False: measure norms alone.
    """

    def __init__(
        self,
        engine: Any,
        tap: Tap,
        data: TensorDict,
        sequences: Sequences,
        config: VCPOSettings,
        aggregation: dict[str, Any],
        second: SecondBuffers,
        sums: bool,
    ) -> None:
        self.engine, self.tap, self.data, self.sequences = engine, tap, data, sequences
        self.config, self.aggregation, self.second = config, aggregation, second
        self.facts = sequences.facts
        passes = self._passes_of_sums() if sums else None
        self.has_sums = passes is not None
        whole = [[list(range(sequences.size))] * sequences.ranks]
        self.passes = [Pass(rows, sequences.rank, sequences.size) for rows in passes or whole]
        self.losses: list[float] = []

    def _passes_of_sums(self) -> Passes | None:
        if self.engine.tf_config.num_moe_experts:  # each sum would read and write every expert for every sequence
            return None
        if next(p for p in self.engine.module[0].parameters() if p.requires_grad).main_grad.dtype != torch.float32:
            return None
        dynamic = tu.get_non_tensor_data(self.data, key="use_dynamic_bsz", default=True)
        return passes_of_sums(
            self.config,
            self.facts,
            int(self.data["max_token_len_per_gpu"]) * mpu.get_context_parallel_world_size() if dynamic else None,
            self.second.most,
            staged=mpu.get_pipeline_model_parallel_world_size() > 1,
            interleaved=mpu.get_virtual_pipeline_model_parallel_world_size() is not None,
        )

    def run(self) -> Measured:
        """Run all passes. Collective over the whole trainer.

        Raises:
            Unmeasured: on all ranks: a norm is NaN or infinite, or float32 cannot hold the squares of a gradient; the
                contents of the buffers are not usable.
        """
        if self.has_sums:
            make_room(self.second, self.engine.module, self._slots)
        self.engine.optimizer_zero_grad()
        with _finalized_once(self.engine.module):
            parts = [self._one_pass(one) for one in self.passes]
        batch = joined(parts, torch.cat([one.at for one in self.passes]))
        _check_finite(batch)
        formed = self.has_sums and self._two_sums_suffice(batch)
        return Measured(batch, outputs_of(self.engine, self.losses) if formed else None)

    def _one_pass(self, one: Pass) -> MiniBatch:
        """Run a pass, and return its rows with the norms of g_i."""
        engine = self.engine
        data = self._select(one)
        sums = self._sums(one) if self.has_sums else None
        tied = engine.model_config.share_embeddings_and_output_weights
        collector = self.tap.collector = Collector(one.size, tied=tied, device=get_device_id(), sums=sums)
        try:
            loss = partial(weighted_score_loss, importance=self.config if sums else None, **self.aggregation)
            out = engine.forward_backward_batch(data, loss)
        finally:
            self.tap.collector = None
        if engine.is_mp_src_rank_with_outputs():
            self.losses += out["loss"]
        # The loss contains the data-parallel size as a factor, and Megatron multiplies by the context-parallel size.
        factor = self.sequences.ranks * mpu.get_context_parallel_world_size()
        norms = (collector.squared_norms() / factor**2)[one.numbers.to(get_device_id())]
        batch = self.sequences.measured(log_probs(engine, data, out), norms, one.rows)
        if sums is None:
            return batch
        assert batch.squared_norm is not None
        log_used = log_packed_weights(self.config, batch.log_weight)
        used = torch.where(log_used.isfinite(), log_used, 0.0)
        batch = replace(batch, squared_norm=batch.squared_norm * (-2 * used).exp())
        self._combine(one, batch, sums)
        return batch

    def _select(self, one: Pass) -> TensorDict:
        rows = one.own_rows
        data = self.data.copy() if rows == list(range(len(self.data))) else self._of_rows(rows)
        size = tu.get_non_tensor_data(data, key="micro_batch_size_per_gpu", default=None)
        if size:  # verl demands a size that divides the pass: the largest such size
            tu.assign_non_tensor(
                data, micro_batch_size_per_gpu=max(n for n in range(1, size + 1) if len(rows) % n == 0)
            )
        data["vcpo_row"] = one.my_numbers
        data["vcpo_coefficient"] = self.facts.usable[self.sequences.mine][rows].float()
        return data

    def _of_rows(self, rows: list[int]) -> TensorDict:
        ragged = self._ragged
        data = tu.index_select_tensor_dict(self.data.exclude(*ragged), rows)
        for name, values in ragged.items():
            dimension = self.data[name]._ragged_idx
            data[name] = tu.nested_tensor_from_tensor_list([values[row] for row in rows], ragged_idx=dimension)
        return data

    @cached_property
    def _ragged(self) -> dict[str, tuple[Tensor, ...]]:
        """The rows of each nested column, unbound once: to unbind a column takes time for all of its rows."""
        return {name: value.unbind() for name, value in self.data.items() if getattr(value, "is_nested", False)}

    def _sums(self, one: Pass) -> Sums:
        """Return the pass's two sums of a_i g_i, with the factors (R_i - m) / (s B) and 1 / (s B)."""
        reward, common, scale = self._rewards
        both = torch.stack([(reward - common) * scale, scale])
        return Sums(one.spread(both[:, one.at]).float(), self._slot(one), self.second)

    def _slot(self, one: Pass) -> Tensor:
        """Return [N] a sequence's baseline, counted among those of its rank in the pass."""
        groups = self.facts.group[one.at]
        if self.config.opob_scope is OpobScope.MINIBATCH:
            groups = torch.zeros_like(groups)
        of_ranks = groups.split([len(rows) for rows in one.rows])
        return one.spread(torch.cat([numbered(of_rank.tolist()) for of_rank in of_ranks]))

    @cached_property
    def _slots(self) -> int:
        """The most second buffers that a pass needs."""
        return max(int(self._slot(one).max()) for one in self.passes) + 1

    @cached_property
    def _rewards(self) -> tuple[Tensor, Tensor, Tensor]:
        """[B] rewards, the commonest in the baseline's scope, and 1 / (s B); 0 where a sequence is not usable, and the
        last also where a sequence is masked."""
        facts, usable = self.facts, self.facts.usable
        reward, common, scale = (torch.zeros_like(facts.reward) for _ in range(3))
        if usable.any():
            reward[usable] = facts.reward[usable]
            group = facts.group[usable]
            scale[usable] = log_reward_scale(self.config, reward[usable], group).exp() / usable.sum()
            whole = self.config.opob_scope is OpobScope.MINIBATCH
            common[usable] = _commonest(reward[usable], torch.zeros_like(group) if whole else group)
        return reward, common, scale.masked_fill(facts.masked, 0.0)

    def _combine(self, one: Pass, batch: MiniBatch, sums: Sums) -> None:
        """Subtract the second buffers of a pass from the main buffer."""
        # All usable sequences whose gradients are in one of this rank's second buffers have one baseline.
        summed = batch.usable
        if self.config.opob_scope is not OpobScope.MINIBATCH:
            summed = summed & (batch.rank == self.sequences.rank)
        shift = batch.estimate(self.config).baseline - self._rewards[1][one.at]
        slot = sums.slot[one.numbers]
        of_slots = [shift[summed & (slot == s)].tolist() for s in range(sums.slots)]
        sums.subtract([values[0] if values else 0.0 for values in of_slots])

    def _two_sums_suffice(self, batch: MiniBatch) -> bool:
        """Return True where the gradient in Megatron's buffers is as exact as the buffers' numbers allow."""
        _, common, scale = self._rewards
        step = batch.estimate(self.config)
        cancellation, underflow = rounding.predicted(self.config, batch, step, common, scale, self._slots)
        if underflow > rounding.LIMIT:
            raise Unmeasured
        return cancellation <= rounding.LIMIT


def _check_finite(batch: MiniBatch) -> None:
    """Raise Unmeasured for a usable sequence without a weight, or any sequence without a norm.

    A norm of a sequence that is not usable says, too, whether the gradient of all sequences is finite.
    """
    assert batch.squared_norm is not None
    if (batch.usable & ~batch.log_weight.isfinite() | ~batch.squared_norm.isfinite()).any():
        raise Unmeasured


def _commonest(reward: Tensor, group: Tensor) -> Tensor:
    """Return [B] the commonest reward of the group; if several are, the one nearest to the group's mean."""
    out = torch.empty_like(reward)
    for one in group.unique():
        of_group = reward[group == one]
        values, counts = of_group.unique(return_counts=True)
        most = values[counts == counts.max()]
        out[group == one] = most[(most - of_group.mean()).abs().argmin()]
    return out


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
