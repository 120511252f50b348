"""Per-sequence gradient norms by one backward per sequence: exact on every parallel layout, slow, the reference.

A parallel layout spreads the squared norm of one sequence's gradient over ranks; each part is counted once:

    tensor (TP)      a parameter is a shard, or a replica that only rank 0 counts
    sequence (SP)    norm weights get the gradient of some tokens: Megatron sums over TP before we square
    pipeline (PP)    a stage counts the parameters of its layers; the copy of a tied output layer is not counted
    context (CP)     a rank has the gradient of some tokens: summed over CP before squaring, counted by CP rank 0
    expert (EP)      a token's experts may be on ranks that train on other sequences: data-parallel ranks take
                     turns, and the gradient of an expert is summed over its replicas before squaring
    data (DP)        ranks hold different sequences: gradients are never summed over them
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import get_model_config
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from verl_vcpo.actor.update.losses import padded_responses
from verl_vcpo.actor.update.mini_batch import Measured
from verl_vcpo.actor.update.sequences import Sequences

# Fields of the batch that no forward pass reads: slicing these fields for every sequence would cost more than the pass.
_NOT_OF_THE_MODEL = (
    *("advantages", "returns", "old_log_probs", "rollout_log_probs", "rm_scores", "uid", "raw_prompt", "reward_model"),
    *("extra_info", "extra_fields", "data_source", "session_id", "num_turns", "ability", "index", "tools_kwargs"),
)


def per_trajectory(engine: Any, data: TensorDict, sequences: Sequences, loss: partial[Any]) -> Measured:
    """Run one backward per sequence of `data`. The gradient is still to be formed. Collective over the whole trainer.

    Args:
        engine: the Megatron engine, in train mode.
        data: this data-parallel rank's b sequences.
        sequences: those of `data`.
        loss: `weighted_score_loss` with its aggregation.
    """
    dp_size, dp_rank = sequences.ranks, sequences.rank
    turns = range(dp_size) if mpu.get_expert_model_parallel_world_size() > 1 else [dp_rank]
    copies = _copies(engine)
    # Cancels the factors in the loss: copies, data-parallel size, and (from Megatron) context-parallel size.
    unit = 1.0 / (copies * dp_size * mpu.get_context_parallel_world_size())
    data = data.exclude(*_NOT_OF_THE_MODEL)
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)

    log_probs: list[Tensor] = []
    # [D, b] this rank's part of ||g_i||^2 of sequence i of data-parallel rank d
    squared_norm = torch.zeros(dp_size, len(data), dtype=torch.float64, device=get_device_id())
    with _score_gradients_only(engine.module):
        for i in range(len(data)):
            one = tu.index_select_tensor_dict(data, [i] * copies)
            for turn in turns:
                one["vcpo_coefficient"] = torch.full((copies,), unit if turn == dp_rank else 0.0)
                engine.optimizer_zero_grad()  # marks the next backward as the one that ends in a reduction
                with contextlib.ExitStack() as stack:  # no reduction of its own (`overlap_grad_reduce`)
                    for chunk in engine.module:
                        stack.enter_context(chunk.no_sync())
                    out = engine.forward_backward_batch(one, loss)
                dense, expert = _squared_norms(engine.module)
                squared_norm[turn, i] += expert + (dense if turn == dp_rank else 0.0)
            if engine.is_mp_src_rank_with_outputs():
                log_probs.append(padded_responses(out["model_output"]["log_probs"], one)[0])
    padded = torch.nn.utils.rnn.pad_sequence(log_probs, batch_first=True) if log_probs else None
    return Measured(sequences.measured(padded, squared_norm.flatten()), None)


def _copies(engine: Any) -> int:
    """Return the copies of a sequence in a backward: an interleaved pipeline needs a multiple of its group size."""
    if mpu.get_virtual_pipeline_model_parallel_world_size() is None:
        return 1
    return engine.tf_config.microbatch_group_size_per_vp_stage


def _squared_norms(modules: list[torch.nn.Module]) -> tuple[Tensor | float, Tensor | float]:
    """Return this rank's part of the buffers' squared gradient norm: (of ordinary, of expert parameters)."""
    dense: Tensor | float = 0.0
    expert: Tensor | float = 0.0
    for chunk in modules:
        for parameter in chunk.parameters():
            if not (
                parameter.requires_grad
                and param_is_not_shared(parameter)
                and param_is_not_tensor_parallel_duplicate(parameter)
            ):
                continue
            gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
            # Row by row in float32: a float64 copy of the gradient would take twice its memory.
            of_rows = torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32)
            squared = of_rows.double().square().sum()
            if _is_expert(parameter):
                expert = expert + squared
            else:
                dense = dense + squared
    return (
        dense if mpu.get_context_parallel_rank() == 0 else 0.0,
        expert if mpu.get_expert_data_parallel_rank() == 0 else 0.0,
    )


def _is_expert(parameter: torch.nn.Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)  # Megatron marks experts so


def _sum_over_token_ranks(chunk: Any, force_all_reduce: bool | None = False) -> None:
    """Sum over the ranks that share one sequence's tokens, instead of Megatron's sum over data-parallel ranks."""
    for buffers, group in (
        (chunk.buffers, mpu.get_context_parallel_group()),
        (chunk.expert_parallel_buffers, mpu.get_expert_data_parallel_group()),
    ):
        if buffers and dist.get_world_size(group) > 1:
            for buffer in buffers:
                dist.all_reduce(buffer.grad_data, group=group)


# Regularisers that Megatron adds to gradients in the backward, and reductions that Megatron starts in the backward.
_SWITCHED_OFF = {
    "no_sync_func": None,
    "grad_sync_func": None,
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_router_enable_expert_bias": False,
}


@contextlib.contextmanager
def _score_gradients_only(modules: list[Any]) -> Iterator[None]:
    """Have backwards in the block leave a sequence's score gradient alone: no regularisers, not summed over DP."""
    configs = [get_model_config(chunk) for chunk in modules]
    saved = [{name: getattr(config, name) for name in _SWITCHED_OFF} for config in configs]
    try:
        for config in configs:
            for name, value in _SWITCHED_OFF.items():
                setattr(config, name, value)
        for chunk in modules:
            chunk.finish_grad_sync = partial(_sum_over_token_ranks, chunk)
        yield
    finally:
        for chunk in modules:
            vars(chunk).pop("finish_grad_sync", None)
        for config, settings in zip(configs, saved, strict=True):
            for name, value in settings.items():
                setattr(config, name, value)
