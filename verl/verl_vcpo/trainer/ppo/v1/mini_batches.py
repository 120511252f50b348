"""Which sequences share a mini-batch, and which a data-parallel rank: baselines compare the samples of a prompt.

No prompt is split between two mini-batches. Where the numbers allow it none is split between two ranks either: the
actor needs no second forward then to know a baseline before its gradient (workers/engine/megatron/packed/plan.py).
"""

from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions


def whole_groups_order(groups: list[str], lengths: list[int], mini_batch_size: int, ranks: int) -> list[int]:
    """The order in which verl's workers find whole prompt groups in every mini-batch, and if possible on every rank.

    verl gives rank r the r-th of `ranks` equal slices, and a mini-batch is the next slice of every rank's rows.

    Args:
        groups: per sequence, its prompt; a prompt's sequences need not be adjacent.
        lengths: per sequence, its tokens: every rank gets about as many of a mini-batch.
        mini_batch_size: sequences of a mini-batch, on all ranks together; divides the number of sequences.
        ranks: data-parallel ranks; divides `mini_batch_size`.

    Returns:
        A permutation of the sequences. Where groups do not fit whole (their sizes differ), the last ones are split.
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
    """Per rank its rows of a mini-batch, about as many tokens each: whole groups, where all ranks get as many."""
    parts = _rows_by_group(groups, batch)
    if len(parts) % ranks or len({len(part) for part in parts}) != 1:
        parts = [[row] for row in batch]
    tokens = [sum(lengths[row] for row in part) for part in parts]
    shares = get_seqlen_balanced_partitions(tokens, k_partitions=ranks, equal_size=True)
    # The ranks' n-th groups are in one pass, whose end they wait for: long ones beside long ones.
    by_length = (sorted(share, key=lambda i: -tokens[i]) for share in shares)
    return [[row for i in share for row in parts[i]] for share in by_length]
