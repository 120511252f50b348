"""Which sequences share a mini-batch: baselines compare the samples of a prompt, so no prompt is split between two.

Between data-parallel ranks it may be: the actor puts the mini-batch together (workers/engine/megatron/mini_batch.py).
"""

from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions


def whole_groups_order(groups: list[str], lengths: list[int], mini_batch_size: int, ranks: int) -> list[int]:
    """The order in which verl's workers find whole prompt groups in every mini-batch.

    verl gives rank r the r-th of `ranks` equal slices, and a mini-batch is the next slice of every rank's rows.

    Args:
        groups: per sequence, its prompt; a prompt's sequences need not be adjacent.
        lengths: per sequence, its tokens: every rank gets about as many of a mini-batch.
        mini_batch_size: sequences of a mini-batch, on all ranks together; divides the number of sequences.
        ranks: data-parallel ranks; divides `mini_batch_size`.

    Returns:
        A permutation of the sequences. Where groups do not fit whole (their sizes differ), the last ones are split.
    """
    by_group: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        by_group.setdefault(group, []).append(row)
    mini_batches: list[list[int]] = [[] for _ in range(len(groups) // mini_batch_size)]
    left_over: list[int] = []
    for rows in sorted(by_group.values(), key=len, reverse=True):  # stable: the oldest prompts are trained on first
        fitting = (batch for batch in mini_batches if len(batch) + len(rows) <= mini_batch_size)
        next(fitting, left_over).extend(rows)
    for batch in mini_batches:
        missing = mini_batch_size - len(batch)
        batch.extend(left_over[:missing])
        del left_over[:missing]

    order: list[list[int]] = [[] for _ in range(ranks)]
    for batch in mini_batches:
        shares = get_seqlen_balanced_partitions([lengths[i] for i in batch], k_partitions=ranks, equal_size=True)
        for rank, share in enumerate(shares):
            order[rank].extend(batch[i] for i in share)
    return [row for rows in order for row in rows]
