"""Packed updates against one backward per sequence, in one process; and what is done where they are not possible."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from verl.utils import tensordict_utils as tu

from tests.actor.conftest import ONE_PROCESS, sgd
from tests.actor.test_vcpo_engine import train
from tests.kit.actor import build_engine
from tests.kit.layout_run import ACTIVATIONS, GROUP_SIZE, GROUPS, PER_TRAJECTORY, ParallelLayout, run_layout
from tests.kit.layout_worker import make_batch
from vcpo.gradnorm import linear, sums
from verl_vcpo.actor.mini_batch import SequencesBeforeForward
from verl_vcpo.actor.norms import experts, plan, update
from verl_vcpo.actor.norms.collector import Collector
from verl_vcpo.actor.norms.plan import Experts, plan_passes, what_to_keep
from verl_vcpo.actor.norms.settings import NOT_PACKED_EXPERTS, NormsConfig, NormsKeep
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
        dict(opob_scope="minibatch", norms=dict(keep="gradients")),
        dict(opob_weights="published", norm_by_std=False, norms=dict(keep="gradients")),
        dict(opob_leave_one_out=True),
        dict(truncation=None, norms=dict(keep="activations", tokens=1)),
        dict(opob_scope="minibatch", norms=dict(keep="activations")),
        dict(norms=dict(keep="gradients")),
        dict(),
    ],
    ids=str,
)
def test_settings(make_engine: Callable[..., Any], settings: dict[str, Any]) -> None:
    assert_same_update(make_engine, make_batch(ONE_PROCESS), TOLERANCE, **settings)


@pytest.mark.parametrize("keep", ["gradients", "activations"])
@pytest.mark.parametrize("model", ["untied", "tied", "moe"])
def test_the_forms_of_a_gpu(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, model: str, keep: str
) -> None:
    """Catches products shared by sequences of different coefficients, and padding that counts."""
    as_on_a_gpu(monkeypatch)
    batch = make_batch(ONE_PROCESS)
    rewards = batch["rm_scores"].values()
    rewards.copy_((rewards > 1.0).float())  # two values, as most rewards have
    tolerance = TOLERANCE if model == "untied" else 4 * TOLERANCE  # a tied table's sums cancel more
    assert_same_update(lambda: make_engine(model), batch, tolerance, norms=dict(keep=keep))


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear, sums):
        monkeypatch.setattr(module, "batches", lambda x: True)


def test_micro_batches_that_do_not_divide_a_group(make_engine: Callable[..., Any]) -> None:
    batch = make_batch(ONE_PROCESS)
    tu.assign_non_tensor(batch, micro_batch_size_per_gpu=16)
    assert_same_update(make_engine, batch, TOLERANCE)


def test_what_is_not_needed_is_not_allocated(make_engine: Callable[..., Any]) -> None:
    engine = make_engine()
    for settings in (dict(baseline="mean"), dict(norms=dict(keep="activations"))):
        train(engine, make_batch(ONE_PROCESS), VCPOSettings(**settings))
        assert not engine._second_buffers
    train(engine, make_batch(ONE_PROCESS), VCPOSettings(norms=NormsConfig(keep="gradients")))
    trained = [p for chunk in engine.module for p in chunk.parameters() if p.requires_grad]
    assert set(engine._second_buffers) == set(trained)
    assert not any(buffer.any() for buffer in engine._second_buffers.values()), "zero between updates"


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(norms=dict(keep="gradients")),
        dict(opob_scope="minibatch", norms=dict(keep="gradients")),
    ],
    ids=str,
)
def test_a_mixture_of_experts(make_engine: Callable[..., Any], settings: dict[str, Any]) -> None:
    """Catches a router, or rows of experts, whose gradients are left out or counted for another sequence."""
    made: list[Any] = []

    def make() -> Any:
        made.append(engine := make_engine("moe"))
        assert engine.unpackable is None
        return engine

    assert_same_update(make, make_batch(ONE_PROCESS), 4 * TOLERANCE, **settings)  # of an expert's few tokens
    assert bool(made[0]._second_buffers) == (settings.get("norms") == dict(keep="gradients"))


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
    assert engine._why_not_packed() is None and engine.tf_config.moe_aux_loss_coeff > 0, "with no loss that uses it"
    monkeypatch.setattr(engine.tf_config, setting, OF_EXPERTS[setting])
    reason = engine._why_not_packed()
    assert reason is not None and str(OF_EXPERTS[setting]) in reason
    assert (setting if setting != "moe_router_load_balancing_type" else "moe_aux_loss_coeff") in reason


def test_copies_of_experts_with_parts_of_a_sequence_fall_back_and_say_so(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches squares of parts of a gradient, where context-parallel ranks have copies of the same experts."""
    engine = make_engine("moe")
    monkeypatch.setattr(experts.dist, "get_process_group_ranks", lambda group: [0, 1])
    reason = engine._why_not_packed()
    assert reason is not None and "copies of an expert" in reason and "expert_model_parallel_size" in reason


def test_settings_under_which_layers_form_or_hide_gradients(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    assert engine.unpackable is None and engine._why_not_packed() is None
    for setting, value in (
        ("fp8", "e4m3"),
        ("fp4", "e2m1"),
        ("tp_comm_overlap", True),
        ("cuda_graph_impl", "local"),
        ("softmax_type", "learnable"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(engine.tf_config, setting, value)
            reason = engine._why_not_packed()
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


def test_a_gradient_that_is_not_finite_is_found_and_left_out(
    make_engine: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine, batch = make_engine(), make_batch(ONE_PROCESS)
    ids = batch["input_ids"].values()
    ids[ids == 0] = 1
    ids[0] = 0  # in the first sequence only
    with torch.no_grad():
        engine.module[0].module.embedding.word_embeddings.weight[0] = torch.inf
    metrics = train(engine, batch, VCPOSettings())
    assert "not finite" in caplog.text
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

    for name in ("linear", "router", "experts", "vector", "embedding", "squared_norms", "add_weighted"):
        guard(Collector, name)
    for name in ("importance_weighted_score_loss", "weighted_score_loss"):
        guard(update, name)
    return called


@pytest.mark.parametrize("keep", ["gradients", "activations"])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("model", ["tied", "moe"])
def test_nothing_in_loss_and_backward_waits_for_a_device(
    make_engine: Callable[..., Any],
    no_waiting: list[str],
    monkeypatch: pytest.MonkeyPatch,
    keep: str,
    batched: bool,
    model: str,
) -> None:
    if batched:
        as_on_a_gpu(monkeypatch)
    train(make_engine(model), make_batch(ONE_PROCESS), VCPOSettings(norms=NormsConfig(keep=keep)))
    expected = {"linear", "vector", "embedding", "squared_norms"} | ({"router", "experts"} if model == "moe" else set())
    expected |= {"weighted_score_loss", "add_weighted"} if keep == "activations" else {"importance_weighted_score_loss"}
    assert set(no_waiting) == expected


def prompts(rank_of_row: list[int], group: list[int], length: int = 10) -> list[SequencesBeforeForward]:
    """The same B sequences, as each of the ranks sees them; sorted by rank."""
    ranks, size = max(rank_of_row) + 1, rank_of_row.count(0)
    ones = torch.ones(len(group))
    return [
        SequencesBeforeForward(
            reward=ones.double(),
            group=torch.tensor(group),
            tokens=ones.double(),
            length=ones.long() * length,
            usable=ones.bool(),
            masked=~ones.bool(),
            rank=torch.tensor(rank_of_row),
            mine=slice(rank * size, (rank + 1) * size),
        )
        for rank in range(ranks)
    ]


def test_what_is_kept_with_experts() -> None:
    """Catches two sums in buffers in which groups of several ranks mix, which have baselines of their own."""
    (seen,) = prompts([0] * 4, [0, 1, 0, 1])

    def kept(of_ranks: Experts, **settings: Any) -> NormsKeep:
        return what_to_keep(VCPOSettings(**settings), seen, False, None, of_ranks)

    two_sums = NormsConfig(keep="gradients")
    for of_ranks in (Experts.OWN, Experts.SHARED):
        assert kept(of_ranks) is NormsKeep.ACTIVATIONS
        assert kept(of_ranks, opob_scope="minibatch") is NormsKeep.GRADIENTS
        assert kept(of_ranks, opob_scope="minibatch", opob_leave_one_out=True) is NormsKeep.ACTIVATIONS
        assert kept(of_ranks, opob_scope="minibatch", norms=two_sums) is NormsKeep.GRADIENTS
    assert kept(Experts.OWN, norms=two_sums) is NormsKeep.GRADIENTS
    with pytest.raises(ValueError, match="norms.keep=gradients: experts get tokens of several data-parallel ranks"):
        kept(Experts.SHARED, norms=two_sums)


def test_one_group_per_pass_where_ranks_have_whole_groups() -> None:
    seen = prompts([0] * 4 + [1] * 4, [0, 1, 0, 1, 2, 2, 3, 3])
    config = VCPOSettings()
    assert {what_to_keep(config, p, interleaved=False) for p in seen} == {"gradients"}
    passes = [plan_passes(config, what_to_keep(config, p, False), p, False) for p in seen]
    assert passes == [[[[0, 2], [0, 1]], [[1, 3], [2, 3]]]] * 2, "both ranks know both ranks' rows"
    of_three = prompts([0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2])
    assert {what_to_keep(config, p, interleaved=False) for p in of_three} == {"gradients"}


def test_groups_that_share_a_pass_of_gradients() -> None:
    """Catches a pass that is too long or has too many second buffers, and rows that are not group after group."""
    seen = prompts([0] * 4 + [1] * 4, [0, 1, 0, 1, 2, 2, 3, 3])

    def passes(tokens: int | None = None, **most: int) -> list[list[list[int]]]:
        planned = [plan_passes(VCPOSettings(), NormsKeep.GRADIENTS, p, False, tokens, **most) for p in seen]  # type: ignore[arg-type]  # of numbers
        assert planned[0] == planned[1], "both ranks know both ranks' rows"
        return planned[0]

    apart, together = [[[0, 2], [0, 1]], [[1, 3], [2, 3]]], [[[0, 2, 1, 3], [0, 1, 2, 3]]]
    assert passes() == passes(most_groups=2, most_tokens=39) == passes(most_groups=2, most_sequences=3) == apart
    assert passes(most_groups=2) == passes(most_groups=3, most_tokens=40, most_sequences=4) == together
    # the first two groups of rank 0 have 50 tokens, so with micro-batches of 40 rank 0 may need one for each sequence
    (uneven, _) = prompts([0] * 6 + [1] * 6, [0, 0, 0, 1, 1, 4, 2, 2, 3, 3, 5, 5])
    for micro_batch_tokens, expected in ((40, [3, 3]), (60, [5, 1])):
        planned = plan_passes(VCPOSettings(), NormsKeep.GRADIENTS, uneven, False, micro_batch_tokens, most_groups=2)
        assert [len(rows) for rows, _ in planned] == expected


def test_several_groups_in_a_pass_give_the_update_of_one_at_a_time(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches gradients in another baseline's second buffer."""
    settings: dict[str, Any] = dict(norms=dict(keep="gradients"))
    together, apart = make_engine(), make_engine()
    got = gradients(together, make_batch(ONE_PROCESS), **settings)
    monkeypatch.setattr(plan, "SECOND_BUFFERS_BYTES", 0)
    wanted = gradients(apart, make_batch(ONE_PROCESS), **settings)
    assert [len(next(iter(engine._second_buffers.values()))) for engine in (together, apart)] == [GROUPS, 1]
    norms, expected = (engine.last_update[0].squared_norm for engine in (together, apart))
    torch.testing.assert_close(norms, expected, rtol=1e-6, atol=0)
    for name, gradient in wanted.items():
        assert (got[name] - gradient).abs().max() <= TOLERANCE * gradient.abs().max(), name


def test_groups_over_several_ranks_share_passes_that_no_rank_is_idle_in() -> None:
    # group 0 is on rank 0 only, 1 on both, 2 on rank 1 only
    seen = prompts([0] * 4 + [1] * 4, [0, 0, 1, 1, 1, 1, 2, 2])
    config = VCPOSettings(norms=NormsConfig(tokens=20))
    assert {what_to_keep(config, p, interleaved=False) for p in seen} == {"activations"}
    passes = [plan_passes(config, what_to_keep(config, p, False), p, False) for p in seen]
    assert passes == [[[[0, 1, 2, 3]] * 2]] * 2
    with pytest.raises(ValueError, match="norms.keep=gradients: a prompt's samples lie on several"):
        what_to_keep(VCPOSettings(norms=NormsConfig(keep="gradients")), seen[0], False)


def test_micro_batches_by_tokens_need_sequences_on_every_rank() -> None:
    # group 0 is on rank 0 but for one sequence, group 2 on rank 1 but for one
    straddling = prompts([0] * 6 + [1] * 6, [0, 0, 0, 1, 1, 2, 0, 1, 1, 2, 2, 2])
    config = VCPOSettings(norms=NormsConfig(tokens=1))

    def passes(most: int | None, of_ranks: Experts = Experts.NONE) -> list[list[list[int]]]:
        planned = [plan_passes(config, NormsKeep.ACTIVATIONS, p, False, most, of_ranks) for p in straddling]
        assert planned[0] == planned[1]
        return planned[0]

    everything = [[[0, 1, 2, 3, 4, 5]] * 2]
    assert passes(None) == passes(30) == [[[0, 1, 2], [0]], [[3, 4], [1, 2]], [[5], [3, 4, 5]]]
    assert passes(20) == everything, "three micro-batches, and one sequence on a rank"
    assert passes(None, Experts.OWN) == passes(None)
    assert passes(None, Experts.SHARED) == everything, "ranks whose experts are shared need as many micro-batches"
    (alike, _) = prompts([0] * 2 + [1] * 2, [0, 1, 0, 1])
    one_by_one = plan_passes(config, NormsKeep.ACTIVATIONS, alike, False, None, Experts.SHARED)
    assert one_by_one == [[[0], [0]], [[1], [1]]]

    # in the middle two groups on one rank each, then the last on one rank
    alone = (
        prompts([0] * 4 + [1] * 4, [0, 1, 1, 3, 0, 2, 2, 3]),
        prompts([0] * 6 + [1] * 6, [0, 0, 1, 1, 2, 2, 0, 1, 2, 3, 3, 3]),
    )
    middle, last = (plan_passes(config, NormsKeep.ACTIVATIONS, of_ranks[0], False) for of_ranks in alone)
    assert middle == [[[0], [0]], [[1, 2], [1, 2]], [[3], [3]]]
    assert last == [[[0, 1], [0]], [[2, 3], [1]], [[4, 5], [2, 3, 4, 5]]]

    uneven = prompts([0] * 4 + [1] * 4, [0, 0, 0, 1, 2, 3, 3, 3])
    kept = {most: {what_to_keep(VCPOSettings(), p, False, most) for p in uneven} for most in (None, 30, 20)}
    assert kept == {None: {"gradients"}, 30: {"gradients"}, 20: {"activations"}}
    with pytest.raises(ValueError, match="norms.keep=gradients: use_dynamic_bsz=true makes as many micro-batches"):
        what_to_keep(VCPOSettings(norms=NormsConfig(keep="gradients")), uneven[0], False, 20)


def test_dynamic_micro_batches_of_prompts_that_straddle_ranks(checkpoints: Callable[[], Path]) -> None:
    layout = ParallelLayout("DP2, dynamic batch", dp=2, dynamic_batch=True)
    straddling = replace(ACTIVATIONS, whole_groups=True, straddling=True)
    got = run_layout(layout, checkpoints(), [straddling])[straddling.name]
    wanted = run_layout(ParallelLayout("one process"), checkpoints(), [PER_TRAJECTORY])[PER_TRAJECTORY.name]
    torch.testing.assert_close(got.squared_norm, wanted.squared_norm, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.baseline, wanted.baseline, rtol=1e-5, atol=0)


def test_recompute(make_engine: Callable[..., Any]) -> None:
    recompute = ParallelLayout("recompute", recompute=True, distributed_optimizer=False)
    plain, again = make_engine(), make_engine(layout=recompute)
    for engine in (plain, again):
        train(engine, make_batch(ONE_PROCESS), VCPOSettings(norms=NormsConfig(keep="gradients")))
        assert engine._second_buffers
    assert plain.last_update[0].squared_norm.equal(again.last_update[0].squared_norm)
    assert len(plain.last_update[0].squared_norm) == GROUPS * GROUP_SIZE
