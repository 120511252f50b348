"""Prompt groups stay whole within mini-batches, however verl slices the batch over ranks."""

from hypothesis import given
from hypothesis import strategies as st

from verl_vcpo.loop.prompts.prompt_groups import whole_groups_order


def mini_batches(order: list[int], mini_batch_size: int, ranks: int) -> list[list[int]]:
    """What verl's workers train on: rank r has the r-th slice, a mini-batch the next slice of every rank."""
    share, step = len(order) // ranks, mini_batch_size // ranks
    return [
        [row for rank in range(ranks) for row in order[rank * share + start :][:step]]
        for start in range(0, share, step)
    ]


@given(
    n=st.sampled_from([2, 4, 8]),
    prompts=st.integers(1, 4),
    batches=st.integers(1, 4),
    ranks=st.sampled_from([1, 2, 4]),
    shuffle=st.randoms(use_true_random=False),
)
def test_a_prompt_is_in_one_mini_batch(n: int, prompts: int, batches: int, ranks: int, shuffle: object) -> None:
    mini_batch_size = n * prompts * ranks
    groups = [f"prompt{i // n}" for i in range(mini_batch_size * batches)]
    shuffle.shuffle(groups)  # type: ignore[attr-defined]
    lengths = [1 + i % 7 for i in range(len(groups))]
    order = whole_groups_order(groups, lengths, mini_batch_size, ranks)
    assert sorted(order) == list(range(len(groups)))
    homes: dict[str, set[int]] = {}
    for number, rows in enumerate(mini_batches(order, mini_batch_size, ranks)):
        for row in rows:
            homes.setdefault(groups[row], set()).add(number)
    assert all(len(home) == 1 for home in homes.values())
    share = len(order) // ranks
    ranks_of: dict[str, set[int]] = {}
    for place, row in enumerate(order):
        ranks_of.setdefault(groups[row], set()).add(place // share)
    assert all(len(home) == 1 for home in ranks_of.values()), "and on one rank"


def test_ranks_get_about_as_many_tokens() -> None:
    groups, lengths = [f"prompt{i // 4}" for i in range(32)], [10 * (1 + i // 4) for i in range(32)]
    order = whole_groups_order(groups, lengths, mini_batch_size=32, ranks=2)
    assert sum(lengths[row] for row in order[:16]) == sum(lengths[row] for row in order[16:])
    assert [lengths[row] for row in order[:16]] == sorted((lengths[row] for row in order[:16]), reverse=True)


def test_groups_of_different_sizes_lose_no_sequence() -> None:
    groups = ["a"] * 5 + ["b"] * 4 + ["c"] * 3
    order = whole_groups_order(groups, [1] * 12, mini_batch_size=6, ranks=2)
    assert sorted(order) == list(range(12))
