"""Packed updates against one backward per sequence, in one process; and what is done where they are not possible."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers
from torch.utils._python_dispatch import TorchDispatchMode
from verl.utils import tensordict_utils as tu

from tests.actor.conftest import ONE_PROCESS, sgd
from tests.actor.test_vcpo_engine import train
from tests.kit.actor import build_engine
from tests.kit.layout_run import CAPPED, GROUP_SIZE, GROUPS, PER_TRAJECTORY, Method, ParallelLayout, run_layout
from tests.kit.layout_worker import make_batch
from vcpo.gradnorm import sums
from verl_vcpo.actor.norms_settings import NOT_PACKED_EXPERTS
from verl_vcpo.actor.taps import experts, layout, routing, tapping
from verl_vcpo.actor.taps.collector import Collector
from verl_vcpo.actor.update import packed as packed_update
from verl_vcpo.actor.vcpo_settings import VCPOSettings

# Of the largest entry of each tensor: sums in another order, and a difference of two sums (5.1e-6 on one processor).
TOLERANCE = 1e-5


def gradients(engine: Any, batch: Any, **settings: Any) -> dict[str, torch.Tensor]:
    """What the optimizer is given by one update."""
    seen: dict[str, torch.Tensor] = {}
    step = engine.optimizer_step

    def look() -> Any:
        seen.update({name: p.main_grad.clone() for name, p in engine.module[0].named_parameters()})
        return step()

    engine.optimizer_step = look
    train(engine, batch.clone(), VCPOSettings(**settings))
    return seen


def assert_same_update(make_engine: Callable[..., Any], batch: Any, tolerance: float, **settings: Any) -> None:
    """Norms to 1e-5, and gradients to `tolerance` of each tensor's largest entry."""
    packed, oracle = make_engine(), make_engine()
    got = gradients(packed, batch, **settings)
    of_config = {name: value for name, value in settings.items() if name != "norms"}
    wanted = gradients(oracle, batch, **of_config, norms={"how": "per_trajectory"})
    norms, expected = (engine.last_update[0].squared_norm for engine in (packed, oracle))
    torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0)
    for name, gradient in wanted.items():
        assert 0 < gradient.abs().max() < 1e3, name
        error = ((got[name] - gradient).abs().max() / gradient.abs().max()).item()
        assert error <= tolerance, name


@pytest.mark.parametrize(
    "settings",
    [
        dict(opob_scope="minibatch"),
        dict(opob_weights="published", norm_by_std=False),
        dict(truncation=None, norms=dict(how="two_backwards")),
        dict(opob_scope="minibatch", norms=dict(how="two_backwards")),
        dict(baseline="opob_capped", opob_scope="minibatch"),
        dict(),
    ],
    ids=str,
)
def test_settings(make_engine: Callable[..., Any], settings: dict[str, Any]) -> None:
    assert_same_update(make_engine, make_batch(ONE_PROCESS), TOLERANCE, **settings)


@pytest.mark.parametrize("how", ["packed", "two_backwards"])
@pytest.mark.parametrize("model", ["untied", "tied", "moe"])
def test_the_forms_of_a_gpu(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, model: str, how: str
) -> None:
    """Catches products shared by sequences of different coefficients, and padding that counts."""
    as_on_a_gpu(monkeypatch)
    batch = make_batch(ONE_PROCESS)
    rewards = batch["rm_scores"].values()
    rewards.copy_((rewards > 1.0).float())  # two values, as most rewards have
    tolerance = TOLERANCE if model == "untied" else 4 * TOLERANCE  # a tied table's sums cancel more
    assert_same_update(lambda: make_engine(model), batch, tolerance, norms=dict(how=how))


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layout, sums):
        monkeypatch.setattr(module, "batches", lambda x: True)


def test_micro_batches_that_do_not_divide_a_group(make_engine: Callable[..., Any]) -> None:
    batch = make_batch(ONE_PROCESS)
    tu.assign_non_tensor(batch, micro_batch_size_per_gpu=16)
    assert_same_update(make_engine, batch, TOLERANCE)


def test_buffers_are_zero_between_updates(make_engine: Callable[..., Any]) -> None:
    engine = make_engine()
    train(engine, make_batch(ONE_PROCESS), VCPOSettings(baseline="mean"))
    assert engine._packing is None
    train(engine, make_batch(ONE_PROCESS), VCPOSettings())
    trained = [p for chunk in engine.module for p in chunk.parameters() if p.requires_grad]
    assert set(engine.packing.second_buffers) == set(trained)
    assert not any(buffer.any() for buffer in engine.packing.second_buffers.values())


@pytest.mark.parametrize("settings", [dict(), dict(opob_scope="minibatch")], ids=str)
def test_a_mixture_of_experts(make_engine: Callable[..., Any], settings: dict[str, Any]) -> None:
    """Catches a router, or rows of experts, whose gradients are left out or counted for another sequence."""
    assert make_engine("moe").packing.unpackable is None
    batch = make_batch(ONE_PROCESS)
    assert_same_update(lambda: make_engine("moe"), batch, 4 * TOLERANCE, **settings)  # of an expert's few tokens


def test_padded_sequences_of_a_mixture_of_experts(make_engine: Callable[..., Any]) -> None:
    """Catches rows of [S, n, d], in which neighbouring rows are of different sequences, that are read as runs."""
    padded = ParallelLayout("padded", model="moe", packed=False, distributed_optimizer=False)
    batch = make_batch(padded)
    assert_same_update(lambda: make_engine("moe", layout=padded), batch, 4 * TOLERANCE)


OF_EXPERTS: dict[str, Any] = {
    **dict.fromkeys(NOT_PACKED_EXPERTS, True),
    "moe_z_loss_coeff": 1e-3,
    "moe_expert_capacity_factor": 1.5,
    "moe_latent_size": 16,
    "moe_token_dispatcher_type": "flex",
    "moe_router_load_balancing_type": "seq_aux_loss",
}


@pytest.mark.parametrize("setting", OF_EXPERTS)
def test_settings_of_a_mixture_of_experts_that_fall_back_and_say_so(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """Catches norms without a gradient that an auxiliary loss adds, or that another way of dispatching hides."""
    engine = make_engine("moe")
    assert engine.packing.why_not() is None and engine.tf_config.moe_aux_loss_coeff > 0, "with no loss that uses it"
    monkeypatch.setattr(engine.tf_config, setting, OF_EXPERTS[setting])
    reason = engine.packing.why_not()
    assert reason is not None and str(OF_EXPERTS[setting]) in reason
    assert (setting if setting != "moe_router_load_balancing_type" else "moe_aux_loss_coeff") in reason


def test_copies_of_experts_with_parts_of_a_sequence_fall_back_and_say_so(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches squares of parts of a gradient, where context-parallel ranks have copies of the same experts."""
    engine = make_engine("moe")
    monkeypatch.setattr(experts.dist, "get_process_group_ranks", lambda group: [0, 1])
    for name, size in (("model", 2), ("tensor", 3)):
        monkeypatch.setattr(experts.mpu, f"get_expert_{name}_parallel_world_size", lambda size=size: size)
    reason = engine.packing.why_not()
    assert reason is not None and reason.endswith("so that copies of an expert have parts of the same sequence")
    assert "expert_model_parallel_size x expert_tensor_parallel_size=6: less than" in reason
    assert "tensor_model_parallel_size=2," in reason
    of_group = {"copies": [0, 2], "sequence": [0, 1]}
    monkeypatch.setattr(experts.mpu, "get_expert_data_parallel_group", lambda: "copies")
    monkeypatch.setattr(experts.mpu, "get_tensor_and_context_parallel_group", lambda: "sequence")
    monkeypatch.setattr(experts.dist, "get_process_group_ranks", of_group.__getitem__)
    assert engine.packing.why_not() is None, "copies have other sequences"


def test_settings_under_which_layers_form_or_hide_gradients(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    assert engine.packing.unpackable is None and engine.packing.why_not() is None
    for setting, value in (
        ("fp8", "e4m3"),
        ("fp4", "e2m1"),
        ("tp_comm_overlap", True),
        ("cuda_graph_impl", "local"),
        ("softmax_type", "learnable"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(engine.tf_config, setting, value)
            reason = engine.packing.why_not()
        assert reason is not None and (setting in reason or "CUDA graph" in reason)


def test_overlapped_reductions_fall_back_and_say_so(
    make_engine: Callable[..., Any], checkpoints: Callable[[], Path], caplog: pytest.LogCaptureFixture
) -> None:
    overlap = {"overlap_grad_reduce": True, "bucket_size": 10_000}
    overlapped = build_engine(ONE_PROCESS, checkpoints(), sgd(), override_ddp_config=overlap)
    plain = make_engine()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            got = gradients(overlapped, make_batch(ONE_PROCESS))
    for _ in range(2):
        wanted = gradients(plain, make_batch(ONE_PROCESS), norms={"how": "per_trajectory"})
    assert "packed -> per_trajectory: overlap_grad_reduce=true" in caplog.text
    assert all(gradient.equal(wanted[name]) for name, gradient in got.items())


@pytest.mark.parametrize(("recorded", "settings"), [(1.0, {}), (torch.nan, {}), (1.0, {"baseline": "mean"})], ids=str)
def test_a_gradient_that_is_not_finite_is_found_and_left_out(
    make_engine: Callable[..., Any], caplog: pytest.LogCaptureFixture, recorded: float, settings: dict[str, Any]
) -> None:
    """Catches NaN in the weights from activations of a sequence that the update excludes."""
    engine, batch = make_engine(), make_batch(ONE_PROCESS)
    ids = batch["input_ids"].values()
    ids[ids == 0] = 1
    ids[0] = 0  # in the first sequence only
    with torch.no_grad():
        engine.module[0].module.embedding.word_embeddings.weight[0] = torch.inf
    batch["rollout_log_probs"].values()[0] *= recorded
    metrics = train(engine, batch, VCPOSettings(**settings))
    assert "not finite" in caplog.text or settings
    assert all(p.isfinite().all() for name, p in engine.module[0].named_parameters() if "embedding" not in name)
    assert metrics["vcpo/excluded_sequences"] == [1] and metrics["vcpo/skipped_updates"] == [0]
    assert not engine.last_update[1].usable[0] and engine.last_update[1].usable[1:].all()


class NoWaiting(TorchDispatchMode):
    """Refuses operations whose result the host needs before it can go on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "bincount")
        assert not any(name in str(func) for name in waits), func
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    called: list[str] = []

    def guard(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            with NoWaiting():
                return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, guarded)

    for name in ("linear", "router", "experts", "vector", "embedding", "squared_norms"):
        guard(Collector, name)
    guard(packed_update, "weighted_score_loss")
    return called


@pytest.mark.parametrize("how", ["packed", "two_backwards"])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("model", ["tied", "moe"])
def test_nothing_in_loss_and_backward_waits_for_a_device(
    make_engine: Callable[..., Any],
    no_waiting: list[str],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    batched: bool,
    model: str,
) -> None:
    if batched:
        as_on_a_gpu(monkeypatch)
    train(make_engine(model), make_batch(ONE_PROCESS), VCPOSettings(norms={"how": how}))  # type: ignore[arg-type]  # it takes a mapping
    expected = {"linear", "vector", "embedding", "squared_norms"} | ({"router", "experts"} if model == "moe" else set())
    assert set(no_waiting) == expected | {"weighted_score_loss"}


def test_several_groups_in_a_pass_give_the_update_of_one_at_a_time(make_engine: Callable[..., Any]) -> None:
    """Catches gradients in another baseline's second buffer."""
    together, apart = make_engine(), make_engine()
    got = gradients(together, make_batch(ONE_PROCESS))
    apart.packing.second_buffers.most = 1
    wanted = gradients(apart, make_batch(ONE_PROCESS))
    assert [len(next(iter(engine.packing.second_buffers.values()))) for engine in (together, apart)] == [GROUPS, 1]
    norms, expected = (engine.last_update[0].squared_norm for engine in (together, apart))
    torch.testing.assert_close(norms, expected, rtol=1e-6, atol=0)
    for name, gradient in wanted.items():
        assert (got[name] - gradient).abs().max() <= TOLERANCE * gradient.abs().max(), name


def test_dynamic_micro_batches_of_prompts_that_straddle_ranks(checkpoints: Callable[[], Path]) -> None:
    layout = ParallelLayout("DP2, dynamic batch", dp=2, dynamic_batch=True)
    straddling = Method("straddling", CAPPED, whole_groups=True, straddling=True)
    got = run_layout(layout, checkpoints(), [straddling])[straddling.name]
    wanted = run_layout(ParallelLayout("one process"), checkpoints(), [PER_TRAJECTORY])[PER_TRAJECTORY.name]
    torch.testing.assert_close(got.squared_norm, wanted.squared_norm, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.baseline, wanted.baseline, rtol=1e-5, atol=0)


def test_recompute(make_engine: Callable[..., Any]) -> None:
    recompute = ParallelLayout("recompute", recompute=True, distributed_optimizer=False)
    plain, again = make_engine(), make_engine(layout=recompute)
    for engine in (plain, again):
        train(engine, make_batch(ONE_PROCESS), VCPOSettings())
        assert engine.packing.second_buffers
    assert plain.last_update[0].squared_norm.equal(again.last_update[0].squared_norm)
    assert len(plain.last_update[0].squared_norm) == GROUPS * GROUP_SIZE


def test_rows_of_experts_wait_for_their_copy_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's copy has only begun when the call returns; here it is made when the event is waited for."""
    begun: list[Callable[[], Any]] = []

    class OnCard(torch.Tensor):
        is_cuda = True

    class OnHost(torch.Tensor):
        def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            begun.append(lambda: self.as_subclass(torch.Tensor).copy_(source.as_subclass(torch.Tensor)))
            return self

    class Event:
        def record(self) -> None:
            self.copies = list(begun)

        def synchronize(self) -> None:
            for copy in self.copies:
                copy()

    def empty(size: torch.Size, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory, "a copy to other memory is not asynchronous"
        return torch.zeros(size, dtype=dtype).as_subclass(OnHost)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", empty)
    copy = routing._Copy(torch.tensor([[3, 1]]).as_subclass(OnCard))
    host = copy.wait()
    assert isinstance(host, OnHost) and host.tolist() == [[3, 1]]


def test_a_parameter_that_no_layer_collects_is_named_with_its_layer() -> None:
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 2))
    assert tapping._left_over([model]) == "1.weight belongs to a torch.nn.modules.linear.Linear"
    assert tapping.plug_in([model]).untapped == tapping._left_over([model])
    assert tapping._left_over([model.requires_grad_(False)]) is None, "adapters alone are trained"


@pytest.mark.parametrize(
    ("kind", "bias", "skipped", "tapped"),
    [
        (layers.ColumnParallelLinear, True, False, True),
        (layers.ColumnParallelLinear, True, True, False),
        (layers.ColumnParallelLinear, False, True, True),
        (layers.RowParallelLinear, True, False, False),
        (layers.RowParallelLinear, False, True, True),
    ],
)
def test_a_bias_that_is_not_added_with_the_product_is_not_collected(
    kind: type, bias: bool, skipped: bool, tapped: bool
) -> None:
    """Megatron's layer gives such a bias to its caller, or adds it after the sum over the ranks."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.weight = torch.nn.Parameter(torch.ones(2, 2))
    layer.bias = torch.nn.Parameter(torch.ones(2)) if bias else None
    layer.skip_bias_add = skipped
    untapped = tapping.plug_in([torch.nn.ModuleDict({"layer": layer})]).untapped
    assert (untapped is None) == tapped
    assert tapped or untapped == f"layer.weight belongs to a {kind.__module__}.{kind.__name__}"
