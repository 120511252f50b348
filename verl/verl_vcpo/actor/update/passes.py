"""The passes in which two sums form a gradient: the sequences of each. All ranks decide the same."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from verl.utils.device import get_device_name

from vcpo import OpobScope
from verl_vcpo.actor.update.mini_batch import Facts
from verl_vcpo.actor.vcpo_settings import VCPOSettings

Passes = list[list[list[int]]]
"""Per pass and data-parallel rank the numbers of the rank's sequences."""

# verl splits a batch into micro-batches in time quadratic in its sequences: beyond so many sequences in a pass, more
# sequences would cost the host more time than another pass does.
_TOGETHER = 64
# Beyond so many tokens in a pass, activations have left a CPU's cache when the sums need them.
_NEAR_TOKENS = 4096


def passes_of_sums(
    config: VCPOSettings,
    facts: Facts,
    micro_batch_tokens: int | None,
    second_buffers: int,
    *,
    staged: bool,
    interleaved: bool,
) -> Passes | None:
    """Return the passes; None where settings, groups or ranks do not allow two sums. No rank has an empty pass.

    All sequences of a baseline are in the same pass, on one rank. A rank's sequences are sorted by group, and within a
    group by reward: sequences of equal rewards share products.

    Args:
        config: VCPO's settings.
        facts: of all ranks' sequences.
        micro_batch_tokens: with `use_dynamic_bsz` the most tokens of a micro-batch; None: micro-batches by sequences.
        second_buffers: the most groups of a rank in a pass.
        staged: the model is a pipeline, whose stages are idle for a part of short passes.
        interleaved: the stages are virtual: Megatron cannot run one group at a time.
    """
    if not config.fits_two_sums:
        return None
    ranks = int(facts.rank.max()) + 1
    groups, rewards, lengths = (x.view(ranks, -1) for x in (facts.group, facts.reward, facts.length))
    if config.opob_scope is OpobScope.MINIBATCH:
        return [[list(range(groups.shape[1]))] * ranks]
    homes = [of_rank.unique() for of_rank in groups]
    if interleaved or len(set(map(len, homes))) != 1 or len(torch.cat(homes).unique()) != sum(map(len, homes)):
        return None
    of_ranks = [_groups_by_reward(*of_rank) for of_rank in zip(homes, groups, rewards, strict=True)]
    passes = [list(rows) for rows in zip(*of_ranks, strict=True)]  # the n-th groups of all ranks
    if not all(_ready(rows, lengths, micro_batch_tokens) for rows in passes):
        return None
    most_tokens = _NEAR_TOKENS if get_device_name() == "cpu" and not staged else math.inf
    # Micro-batches by sequences are as long in a long pass as in a short one.
    most_sequences = math.inf if micro_batch_tokens is None or staged else _TOGETHER

    def fits(rows: list[list[int]]) -> bool:
        small = max(_tokens(rows, lengths)) <= most_tokens and max(map(len, rows)) <= most_sequences
        return small and _ready(rows, lengths, micro_batch_tokens)

    return _joined(passes, second_buffers, fits)


def _groups_by_reward(numbers: Tensor, group: Tensor, reward: Tensor) -> list[list[int]]:
    """Return the rows of each of these groups of one rank, in the order of their rewards."""
    rows = [(group == number).nonzero().flatten() for number in numbers]
    return [mine[reward[mine].sort(stable=True).indices].tolist() for mine in rows]


def _joined(passes: Passes, most: int, fits: Callable[[list[list[int]]], bool]) -> Passes:
    """Join passes of one group on each rank to passes of up to `most` groups that fit."""
    joined, groups = passes[:1], 1
    for rows in passes[1:]:
        both = [[*mine, *more] for mine, more in zip(joined[-1], rows, strict=True)]
        if groups < most and fits(both):
            joined[-1], groups = both, groups + 1
        else:
            joined.append(rows)
            groups = 1
    return joined


def _tokens(rows: list[list[int]], lengths: Tensor) -> list[int]:
    return [int(of_rank[mine].sum()) for mine, of_rank in zip(rows, lengths, strict=True)]


def _ready(rows: list[list[int]], lengths: Tensor, micro_batch_tokens: int | None) -> bool:
    """Return True where every rank has at least as many of these rows as any rank may have micro-batches.

    verl makes the same number of micro-batches on all ranks, none of them empty. A rank whose tokens exceed one
    micro-batch may need one for each sequence.
    """
    if micro_batch_tokens is None:
        return True
    counts = [len(mine) for mine in rows]
    of_ranks = zip(counts, _tokens(rows, lengths), strict=True)
    return min(counts) >= max(n if tokens > micro_batch_tokens else 1 for n, tokens in of_ranks)
