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
from verl_vcpo.actor.norms.choice import Choice, Layers, choose
from verl_vcpo.actor.norms.plan import Experts
from verl_vcpo.actor.norms.settings import ACTIVATIONS_OF_AUTO_BYTES
from verl_vcpo.actor.vcpo_settings import VCPOSettings

D128 = Layers((((128, 256), (128, 128), (128, 1024), (512, 128)) * 4 + ((128, 512),),))
D512 = Layers((((512, 768), (512, 512), (512, 2816), (1408, 512)) * 2 + ((512, 4096),),))
D512_TP2 = Layers((((512, 384), (256, 512), (512, 1408), (704, 512)) * 2 + ((512, 2048),),))
OF_7B = ((3584, 1152), (896, 3584), (3584, 9472), (4736, 3584))  # over 4 tensor-parallel ranks
GPU = Layers((OF_7B,), number_bytes=2, device="cuda")


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
        rank=torch.arange(n) // (n // ranks),
        mine=slice(0, n // ranks),
    )


def chosen(
    seen: SequencesBeforeForward, layers: Layers, tokens: int | None = 8192, staged: bool = False, **settings: Any
) -> Choice:
    return choose(VCPOSettings(**settings), seen, False, tokens, Experts.NONE, layers, staged)


@pytest.mark.parametrize(
    ("seen", "layers", "expected"),
    [
        (groups(16, 8, 40, 80), D128, "gradients"),
        (groups(16, 4, 64, 256), D512, "gradients"),
        (groups(32, 4, 64, 256), D512_TP2, "gradients"),
        (groups(16, 2, 256, 1024), D512, "gradients"),
        (groups(32, 2, 256, 1024), D512, "gradients"),
        (groups(32, 2, 256, 1024), D512_TP2, "gradients"),
        (groups(2, 2, 2048, 2048), D512, "gradients"),
        (groups(32, 16, 64, 256), GPU, "activations"),
        (groups(32, 8, 600, 800), GPU, "activations"),
        (groups(8, 4, 4096, 4096), GPU, "gradients"),
    ],
    ids=[
        "a laptop's",
        "16 groups, short",
        "32 groups, short, TP 2",
        "16 groups, long",
        "32 groups, long",
        "32 groups, long, TP 2",
        "2 groups, longest",
        "GPU, short",
        "GPU, long",
        "GPU, longest",
    ],
)
def test_the_faster_is_kept(seen: SequencesBeforeForward, layers: Layers, expected: str) -> None:
    """Those on a CPU are the ones that `lab.cost.steps` finds the faster."""
    choice = chosen(seen, layers)
    assert choice.keep == expected
    assert all(f"{keep} " in choice.why for keep in ("gradients", "activations")), "it says what was compared"


def test_what_is_set_is_kept() -> None:
    for keep in ("gradients", "activations"):
        choice = chosen(groups(16, 8, 40, 80), D128, norms=dict(keep=keep))
        assert (choice.keep, choice.why) == (keep, f"vcpo.norms.keep={keep}")
    whole = chosen(groups(16, 8, 40, 80), D128, norms=dict(keep="activations"))
    assert len(whole.passes) == 1, "norms.tokens is the only limit"


def test_where_ranks_share_groups_there_is_no_choice() -> None:
    choice = chosen(groups(16, 2, 256, 1024, across=True), D512)
    assert choice.keep == "activations"
    assert "lie on several data-parallel ranks" in choice.why


def test_auto_takes_no_more_memory_than_a_second_buffer() -> None:
    """Catches activations of many tokens on a GPU whose memory was planned for one more buffer."""
    whole = Layers((OF_7B * 28,), number_bytes=2, device="cuda")
    fit = whole.tokens_that_fit
    numbers = 28 * sum(i * o for i, o in OF_7B), 28 * sum(i + o for i, o in OF_7B)
    assert 4 * numbers[0] > ACTIVATIONS_OF_AUTO_BYTES
    assert fit == 4 * numbers[0] // (2 * numbers[1])
    assert chosen(groups(32, 16, fit // 16 - 2, fit // 16), whole).keep == "activations"
    too_long = chosen(groups(32, 16, fit // 16 + 1, fit // 16 + 2), whole)
    assert (too_long.keep, too_long.why) == ("gradients", "the activations of a pass are larger than a second buffer")
    for keep, tokens in (("activations", fit // 2), ("activations", 2 * fit)):
        limited = chosen(groups(32, 4, 200, 200), whole, None, norms=dict(tokens=tokens))
        assert limited.keep == keep
        assert max(len(rows) * 200 for (rows,) in limited.passes) <= min(tokens, fit)


@pytest.mark.parametrize("settings", [dict(), dict(opob_leave_one_out=True)], ids=["gradients", "activations"])
def test_a_pass_has_no_more_sequences_than_the_host_handles_fast(settings: dict[str, Any]) -> None:
    seen = groups(16, 8, 20, 40)

    def sizes(tokens: int | None = 8192, staged: bool = False) -> list[int]:
        return [len(rows) for (rows,) in chosen(seen, D128, tokens, staged, **settings).passes]

    assert sizes() == [64, 64]
    assert sizes(tokens=None) == [128], "micro-batches by sequences"
    assert sizes(staged=True) == [128], "a pipeline"


def test_passes_of_several_groups() -> None:
    """Catches passes of many tokens on a CPU, whose activations leave the cache, and buffers that memory has no room
    for."""
    seen = groups(16, 4, 64, 256)
    lengths = [sum(seen.length[rows].tolist()) for (rows,) in chosen(seen, D512).passes]
    assert 2048 < max(lengths) <= 4096
    numbers = ACTIVATIONS_OF_AUTO_BYTES // 4 // 3
    large = replace(D512, trained=numbers)
    assert large.second_buffers_that_fit == 3
    assert replace(D512, trained=4 * numbers).second_buffers_that_fit == 1
    assert max(len(rows) for (rows,) in chosen(seen, large).passes) <= 3 * 4


@pytest.mark.parametrize("model", ["untied", "tied"])
def test_the_layers_of_an_engine(make_engine: Callable[..., Any], model: str) -> None:
    """Catches a layer that the choice does not count: hidden size 64, MLP 96, 64 words, 4 heads that share 2."""
    (stage,) = make_engine(model).linear_layers.stages
    assert sorted(stage) == sorted([(64, 128), (64, 64), (64, 192), (96, 64)] * 4 + [(64, 64)])


def test_an_update_says_what_it_kept(make_engine: Callable[..., Any]) -> None:
    kept = {
        keep: train(make_engine(), make_batch(ONE_PROCESS), VCPOSettings(norms={"keep": keep}))["vcpo/activations_kept"]  # type: ignore[arg-type]  # it takes a mapping
        for keep in ("auto", "activations", "gradients")
    }
    assert kept == {"auto": [1], "activations": [1], "gradients": [0]}
