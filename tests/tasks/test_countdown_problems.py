"""Countdown problems: solvable, distinct, reproducible, and readable by verl."""

import random

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.tasks.countdown.problems import (
    Difficulty,
    generate,
    make_split,
    problem_key,
    random_expression,
    to_row,
)
from recipe.tasks.countdown.reward import compute_score, evaluate

difficulties = st.builds(
    Difficulty,
    numbers=st.integers(2, 5),
    max_number=st.integers(5, 100),
    max_target=st.integers(50, 999),
    operators=st.sampled_from(["+-*/", "+-*", "+", "*/+"]),
)


@given(difficulties, st.integers())
@settings(max_examples=50, deadline=None)
def test_solutions_reach_the_target_with_every_number_once(difficulty: Difficulty, seed: int) -> None:
    for problem in generate(difficulty, 3, random.Random(seed)):
        value, used = evaluate(problem.solution)
        assert value == problem.target
        assert sorted(used) == sorted(problem.numbers)
        assert 1 <= problem.target <= difficulty.max_target
        assert all(1 <= number <= difficulty.max_number for number in problem.numbers)
        assert set(problem.solution) & set("+-*/") <= set(difficulty.operators)


@given(st.lists(st.integers(1, 99), min_size=2, max_size=6), st.integers())
@settings(max_examples=100, deadline=None)
def test_random_expressions_are_well_formed(numbers: list[int], seed: int) -> None:
    # Division is left out: x/(y-y) has no value.
    expression = random_expression(tuple(numbers), "+-*", random.Random(seed))
    _, used = evaluate(expression)
    assert sorted(used) == sorted(numbers)


def test_split_is_disjoint_distinct_and_of_the_size_asked_for() -> None:
    train, val = make_split(Difficulty(), 500, 100, seed=0)
    train_keys, val_keys = {p.key for p in train}, {p.key for p in val}
    assert (len(train_keys), len(val_keys)) == (len(train), len(val)) == (500, 100)
    assert not train_keys & val_keys


def test_split_depends_on_the_seed_alone_and_val_not_on_the_size_of_train() -> None:
    assert make_split(Difficulty(), 50, 20, seed=3) == make_split(Difficulty(), 50, 20, seed=3)
    assert make_split(Difficulty(), 50, 20, seed=3)[1] == make_split(Difficulty(), 90, 20, seed=3)[1]
    assert make_split(Difficulty(), 50, 20, seed=3) != make_split(Difficulty(), 50, 20, seed=4)


def test_the_order_of_the_numbers_makes_no_new_problem() -> None:
    assert problem_key((3, 1, 2), 6) == problem_key([1, 2, 3], 6) != problem_key((1, 2, 3), 7)


def test_too_many_problems_is_an_error_that_names_the_settings() -> None:
    with pytest.raises(ValueError, match="max_number=2.*raise max_number"):
        make_split(Difficulty(numbers=2, max_number=2), 100, 10, seed=0)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("numbers", 1), ("numbers", 7), ("max_number", 0), ("max_target", 0)),
        *(("operators", ""), ("operators", "+%"), ("operators", "++")),
    ],
)
def test_a_bad_setting_is_named(setting: str, value: int | str) -> None:
    with pytest.raises(ValueError, match=f"^{setting}="):
        Difficulty(**{setting: value})


@pytest.mark.parametrize(("train", "val", "name"), [(0, 1, "train"), (1, 0, "val")])
def test_a_bad_size_is_named(train: int, val: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}=0"):
        make_split(Difficulty(), train, val, seed=0)


def test_rows_survive_parquet_and_keep_the_solution_to_themselves(tmp_path) -> None:
    train, _ = make_split(Difficulty(), 20, 5, seed=0)
    pd.DataFrame([to_row(p, "train", i) for i, p in enumerate(train)]).to_parquet(tmp_path / "train.parquet")
    loaded = pd.read_parquet(tmp_path / "train.parquet")
    for index, (problem, row) in enumerate(zip(train, loaded.to_dict("records"), strict=True)):
        assert row["prompt"][0] == {"role": "user", "content": problem.prompt}
        assert row["extra_info"]["index"] == index
        # pandas gives numpy arrays here; the reward must take them.
        truth = row["reward_model"]["ground_truth"]
        response = f"<answer>{problem.solution}</answer>"
        assert compute_score(row["data_source"], response, truth, row["extra_info"])["score"] == 1.0
        assert "solution" not in str(row)
