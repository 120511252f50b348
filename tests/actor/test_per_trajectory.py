"""One backward per sequence, on ranks of every kind: what a rank counts. Megatron's part is played."""

import contextlib
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from verl_vcpo.actor.norms import per_trajectory
from verl_vcpo.actor.norms.per_trajectory import score_gradients

RANKS, RANK, CP = 2, 1, 2
"""Data-parallel ranks, this one, and context-parallel ranks."""
SETTINGS = dict(no_sync_func="theirs", grad_sync_func="theirs", moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.2)
SWITCHED_OFF = dict(no_sync_func=None, grad_sync_func=None, moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None)
EXPERT_BIAS = "moe_router_enable_expert_bias"
WEIGHT = torch.tensor([[3.0, 4.0], [3 * 2.0**-13, 4 * 2.0**-13]])
"""A gradient the squares of whose rows have a sum that float32 cannot hold."""
OF_WEIGHT, OF_BIAS, OF_EXPERT, OF_ANOTHER_RANK = 25 * (1 + 2.0**-26), 4.0, 9.0, 16.0
"""Squared norms of gradients: of this rank's sequences, and of another rank's with which this rank's expert is busy."""


def parameter(gradient: Tensor | None = None, trained: bool = True, **marks: Any) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=trained)
    for name, value in (marks if gradient is None else marks | {"main_grad": gradient}).items():
        setattr(made, name, value)
    return made


class Chunk(torch.nn.Module):
    """A part of a model: three parameters that are another rank's to count, or nobody's, come first."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.tied, self.replica = parameter(trained=False), parameter(shared=True), parameter(replica=True)
        self.weight, self.bias = parameter(torch.zeros(2, 2)), parameter(torch.zeros(1))
        self.expert = parameter(torch.zeros(1), allreduce=False)
        self.config = SimpleNamespace(**SETTINGS, **{EXPERT_BIAS: True})
        self.buffers = [SimpleNamespace(grad_data="dense")]
        self.expert_parallel_buffers = [SimpleNamespace(grad_data="expert")]
        self.in_block = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.in_block = True
        yield
        self.in_block = False


class Engine:
    """An engine whose backward multiplies by what verl's loss and Megatron multiply by. Sequence i counts i + 1 times.

    copies: of a sequence in a backward.
    outputs: whether this rank has the last stage.
    """

    def __init__(self, copies: int, outputs: bool) -> None:
        self.chunk, self.copies, self.outputs, self.backwards = Chunk(), copies, outputs, 0
        self.module, self.tf_config = [self.chunk], SimpleNamespace(microbatch_group_size_per_vp_stage=2)
        self.get_data_parallel_size, self.get_data_parallel_rank = lambda: RANKS, lambda: RANK

    def optimizer_zero_grad(self) -> None:
        for one in (self.chunk.weight, self.chunk.bias, self.chunk.expert):
            one.main_grad.zero_()

    def forward_backward_batch(self, one: TensorDict, loss: partial[Any]) -> dict[str, Any]:
        chunk, self.backwards = self.chunk, self.backwards + 1
        assert "uid" not in one, "no forward pass reads it"
        sizes = [tu.get_non_tensor_data(one, name, None) for name in ("use_dynamic_bsz", "micro_batch_size_per_gpu")]
        assert sizes == [False, 1] and len(one) == self.copies
        assert vars(chunk.config) == {**SWITCHED_OFF, EXPERT_BIAS: False} and chunk.in_block
        coefficient = float(one["vcpo_coefficient"].sum()) * RANKS * CP
        assert coefficient in (0.0, 1.0)
        times = int(one["number"][0]) + 1
        chunk.weight.main_grad += coefficient * times * WEIGHT
        chunk.bias.main_grad += coefficient * times * OF_BIAS**0.5
        chunk.expert.main_grad += times * (OF_EXPERT if coefficient else OF_ANOTHER_RANK) ** 0.5
        chunk.finish_grad_sync()
        return {"model_output": {"log_probs": [torch.arange(times)] * len(one)}} if self.outputs else {}


@pytest.mark.parametrize("outputs", [True, False])
@pytest.mark.parametrize(("copies", "experts"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize(("cp_rank", "copy_of_expert"), [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("split", [1, 2])
def test_each_part_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
    outputs: bool,
    copies: int,
    experts: int,
    cp_rank: int,
    copy_of_expert: int,
    split: int,
) -> None:
    sizes = {
        "get_expert_model_parallel_world_size": experts,
        "get_context_parallel_world_size": CP,
        "get_context_parallel_rank": cp_rank,
        "get_expert_data_parallel_rank": copy_of_expert,
        "get_virtual_pipeline_model_parallel_world_size": None if copies == 1 else 2,
        "get_context_parallel_group": "cp",
        "get_expert_data_parallel_group": "copies",
    }
    summed: list[tuple[str, str]] = []
    reduce = SimpleNamespace(
        get_world_size=lambda group: split, all_reduce=lambda data, group: summed.append((data, group))
    )
    mpu = SimpleNamespace(**{name: lambda value=value: value for name, value in sizes.items()})
    monkeypatch.setattr(per_trajectory, "mpu", mpu)
    monkeypatch.setattr(per_trajectory, "dist", reduce)
    monkeypatch.setattr(per_trajectory, "get_device_id", lambda: "cpu")
    monkeypatch.setattr(per_trajectory, "padded_responses", lambda log_probs, data: log_probs)
    not_replica = lambda one: not hasattr(one, "replica")  # noqa: E731
    monkeypatch.setattr(per_trajectory, "param_is_not_tensor_parallel_duplicate", not_replica)
    engine, data = Engine(copies, outputs), TensorDict({"number": torch.arange(3), "uid": torch.arange(3)}, 3)
    log_probs, squared_norm = score_gradients(engine, data, partial(print))

    dense, expert = OF_WEIGHT + OF_BIAS if cp_rank == 0 else 0.0, float(copy_of_expert == 0)
    of_others = OF_ANOTHER_RANK if experts > 1 else 0.0
    squares = torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64)
    assert squared_norm.tolist() == [
        (of_others * expert * squares).tolist(),
        ((dense + OF_EXPERT * expert) * squares).tolist(),
    ]
    assert engine.backwards == 3 * experts
    assert summed == ([("dense", "cp"), ("expert", "copies")] * engine.backwards if split > 1 else [])
    assert vars(engine.chunk.config) == {**SETTINGS, EXPERT_BIAS: True}, "as before"
    assert "finish_grad_sync" not in vars(engine.chunk)
    assert (log_probs.tolist() if log_probs is not None else None) == (
        [[0, 0, 0], [0, 1, 0], [0, 1, 2]] if outputs else None
    )
