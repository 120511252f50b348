"""The order of a batch: all samples of a prompt in one mini-batch, and if possible on one data-parallel rank.

A baseline compares the samples of a prompt. Where no prompt is split between two ranks, the actor knows the baseline
before the gradient without a second forward (actor/update/passes.py).
"""

import contextlib
from collections.abc import Iterator

from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from verl_vcpo.common.stored_tags import prompt_of


def keep_groups_whole(batch: KVBatchMeta, mini_batch_size: int, ranks: int) -> None:
    """Reorder a batch by `whole_groups_order`; one mini-batch on one rank has all groups whole in any order."""
    if ranks > 1 or len(batch) > mini_batch_size:
        prompts, lengths = [prompt_of(key) for key in batch.keys], [tag["seq_len"] for tag in batch.tags]
        batch.reorder(whole_groups_order(prompts, lengths, mini_batch_size, ranks))


def mini_batch_size(config: DictConfig) -> int:
    """Return the number of sequences of a mini-batch, on all ranks together."""
    return int(config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n)


@contextlib.contextmanager
def one_mini_batch(config: DictConfig) -> Iterator[None]:
    """Give verl's constructor one mini-batch per batch: it asserts a weight update after every mini-batch."""
    actor = config.actor_rollout_ref.actor
    mini_batch_size = actor.ppo_mini_batch_size
    actor.ppo_mini_batch_size = config.data.train_batch_size
    try:
        yield
    finally:
        actor.ppo_mini_batch_size = mini_batch_size


def first_mini_batch(rows: int, mini_batch_size: int, ranks: int) -> list[int]:
    """Return the first rows of every rank's slice of a batch of `rows`; arguments: see `whole_groups_order`."""
    each, of_rank = rows // ranks, mini_batch_size // ranks
    return [rank * each + row for rank in range(ranks) for row in range(min(each, of_rank))]


def whole_groups_order(groups: list[str], lengths: list[int], mini_batch_size: int, ranks: int) -> list[int]:
    """Return the order that gives every mini-batch whole prompt groups, and if possible every rank.

    verl gives rank r the r-th of `ranks` equal slices, and a mini-batch is the next slice of every rank's rows.

    Args:
        groups: the prompt of each sequence; a prompt's sequences need not be adjacent.
        lengths: the tokens of each sequence; all ranks get about the same number of tokens of a mini-batch.
        mini_batch_size: sequences of a mini-batch, on all ranks together; divides the number of sequences.
        ranks: data-parallel ranks; divides `mini_batch_size`.

    Returns:
        A permutation of the sequences. Where groups of different sizes do not fit whole, the last groups are split.
    """
    by_group = _rows_by_group(groups, range(len(groups)))
    mini_batches: list[list[int]] = [[] for _ in range(len(groups) // mini_batch_size)]
    left_over: list[int] = []
    for rows in sorted(by_group, key=len, reverse=True):  # stable: the oldest prompts are trained on first
        fitting = (batch for batch in mini_batches if len(batch) + len(rows) <= mini_batch_size)
        next(fitting, left_over).extend(rows)
    for batch in mini_batches:
        missing = mini_batch_size - len(batch)
        batch.extend(left_over[:missing])
        del left_over[:missing]

    order: list[list[int]] = [[] for _ in range(ranks)]
    for batch in mini_batches:
        for rank, share in enumerate(_shares(batch, groups, lengths, ranks)):
            order[rank].extend(share)
    return [row for rows in order for row in rows]


def _rows_by_group(groups: list[str], rows: range | list[int]) -> list[list[int]]:
    by_group: dict[str, list[int]] = {}
    for row in rows:
        by_group.setdefault(groups[row], []).append(row)
    return list(by_group.values())


def _shares(batch: list[int], groups: list[str], lengths: list[int], ranks: int) -> list[list[int]]:
    """Return the rows of a mini-batch for each rank, with about the same number of tokens.

    A rank gets whole groups where all groups have one size and their number is a multiple of the number of ranks.
    """
    parts = _rows_by_group(groups, batch)
    if len(parts) % ranks or len({len(part) for part in parts}) != 1:
        parts = [[row] for row in batch]
    tokens = [sum(lengths[row] for row in part) for part in parts]
    shares = get_seqlen_balanced_partitions(tokens, k_partitions=ranks, equal_size=True)
    # The n-th groups of all ranks are trained on in one pass, and the longest group decides how long the pass lasts.
    # Sorted by length, groups of similar length meet.
    by_length = (sorted(share, key=lambda i: -tokens[i]) for share in shares)
    return [[row for i in share for row in parts[i]] for share in by_length]
