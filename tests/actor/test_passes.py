"""What `vcpo.norms.keep=auto` keeps of a mini-batch, and in which passes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.actor.conftest import ONE_PROCESS
from tests.actor.test_vcpo_engine import train
from tests.kit.layout_worker import make_batch
from verl_vcpo.actor.mini_batch import SequencesBeforeForward
from verl_vcpo.actor.norms.plan import Experts, Parts, choose, plan_passes
from verl_vcpo.actor.norms.settings import SECOND_BUFFERS_BYTES, NormsConfig, NormsKeep
from verl_vcpo.actor.vcpo_settings import VCPOSettings

SMALL = Parts(trained=10_000_000)


def groups(number: int, size: int, shortest: int, longest: int, across: bool = False) -> SequencesBeforeForward:
    """`number` prompts of `size` samples, on one rank or, one sample each, across two."""
    n, ranks = number * size, 2 if across else 1
    ones = torch.ones(n)
    return SequencesBeforeForward(
        reward=ones.double(),
        group=torch.arange(n) % number if across else torch.arange(n) // size,
        tokens=ones.double(),
        length=torch.randint(shortest, longest + 1, (n,), generator=torch.Generator().manual_seed(0)),
        usable=ones.bool(),
        masked=~ones.bool(),
        rank=torch.arange(n) // (n // ranks),
        mine=slice(0, n // ranks),
    )


def chosen(
    seen: SequencesBeforeForward, parts: Parts = SMALL, tokens: int | None = 8192, **settings: Any
) -> tuple[NormsKeep, list[list[list[int]]]]:
    return choose(VCPOSettings(**settings), seen, False, tokens, Experts.NONE, parts)


def test_what_is_set_is_kept() -> None:
    for keep in NormsKeep.GRADIENTS, NormsKeep.ACTIVATIONS:
        assert chosen(groups(16, 8, 40, 80), norms=dict(keep=keep))[0] is keep
    _, passes = chosen(groups(16, 8, 40, 80), norms=dict(keep="activations"))
    assert len(passes) == 1, "norms.tokens is the only limit"


def test_auto_keeps_activations_where_ranks_share_groups_only() -> None:
    assert chosen(groups(16, 2, 256, 1024))[0] is NormsKeep.GRADIENTS
    assert chosen(groups(16, 2, 256, 1024, across=True))[0] is NormsKeep.ACTIVATIONS


@pytest.mark.parametrize("settings", [dict(), dict(opob_leave_one_out=True)], ids=["gradients", "activations"])
def test_a_pass_has_no_more_sequences_than_the_host_handles_fast(settings: dict[str, Any]) -> None:
    seen = groups(16, 8, 20, 40)

    def sizes(tokens: int | None = 8192, staged: bool = False) -> list[int]:
        parts = replace(SMALL, staged=staged)
        return [len(rows) for (rows,) in chosen(seen, parts, tokens, **settings)[1]]

    assert sizes() == [64, 64]
    assert sizes(tokens=None) == [128], "micro-batches by sequences"
    assert sizes(staged=True) == [128], "a pipeline"


def test_passes_of_several_groups() -> None:
    """Catches passes of many tokens on a CPU, whose activations leave the cache, and buffers that memory has no room
    for."""
    seen = groups(16, 4, 64, 256)
    lengths = [sum(seen.length[rows].tolist()) for (rows,) in chosen(seen)[1]]
    assert 2048 < max(lengths) <= 4096
    assert max(sum(seen.length[rows].tolist()) for (rows,) in chosen(seen, norms=dict(tokens=2000))[1]) <= 2000
    numbers = SECOND_BUFFERS_BYTES // 4 // 3
    large = Parts(trained=numbers)
    assert (large.second_buffers, Parts(trained=4 * numbers).second_buffers) == (3, 1)
    assert max(len(rows) for (rows,) in chosen(seen, large)[1]) <= 3 * 4
    of_experts = VCPOSettings(norms=NormsConfig(keep=NormsKeep.GRADIENTS))
    _, passes = choose(of_experts, seen, False, 8192, Experts.OWN, SMALL)
    assert {len(rows) for (rows,) in passes} == {4}


def test_the_parts_of_an_engine(make_engine: Callable[..., Any]) -> None:
    engine = make_engine()
    trained = sum(p.numel() for chunk in engine.module for p in chunk.parameters())
    assert engine.parts == Parts(trained, "cpu", staged=False)


def test_an_update_says_what_it_kept(make_engine: Callable[..., Any]) -> None:
    kept = {
        keep: train(make_engine(), make_batch(ONE_PROCESS), VCPOSettings(norms={"keep": keep}))["vcpo/activations_kept"]  # type: ignore[arg-type]  # it takes a mapping
        for keep in ("auto", "activations", "gradients")
    }
    assert kept == {"auto": [0], "activations": [1], "gradients": [0]}


def test_passes_take_as_many_groups_as_their_tokens_allow() -> None:
    seen = groups(4, 2, 10, 10)
    sizes = {
        most: len(plan_passes(VCPOSettings(norms=NormsConfig(tokens=most)), "activations", seen, False))
        for most in (1, 40, 80)
    }
    assert sizes == {1: 4, 40: 2, 80: 1}
    assert len(plan_passes(VCPOSettings(norms=NormsConfig(tokens=1)), "activations", seen, interleaved=True)) == 1
