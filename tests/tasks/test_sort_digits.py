"""Sorting digits: the rows, and what is right."""

import pandas as pd
import pytest

from recipe.tasks import reward, sort_digits
from scripts import prepare_data


def test_rows_are_distinct_and_their_truth_is_right(tmp_path) -> None:
    options = ["--train", "40", "--val", "10", "--digits", "3"]
    for name in "ab":
        assert prepare_data.main(["sort_digits", "--out", str(tmp_path / name), *options]) == 0
    assert (tmp_path / "a/train.parquet").read_bytes() == (tmp_path / "b/train.parquet").read_bytes()
    rows = pd.concat([pd.read_parquet(tmp_path / "a" / f"{split}.parquet") for split in ("train", "val")])
    digits = [chat[0]["content"].removeprefix("Sort the digits ").removesuffix(".") for chat in rows["prompt"]]
    assert len(set(digits)) == 50 and all(len(text) == 3 for text in digits)
    assert [model["ground_truth"] for model in rows["reward_model"]] == ["".join(sorted(text)) for text in digits]


@pytest.mark.parametrize(("response", "right"), [("0123", 1.0), (" 0123\n", 1.0), ("123", 0.0), ("0123 0123", 0.0)])
def test_right_or_wrong(response: str, right: float) -> None:
    scored = reward.compute_score(sort_digits.DATA_SOURCE, response, "0123")
    assert (scored["score"], scored["acc"]) == (right, right)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--digits", "2"], "digits=2"),
        (["--val", "0"], "val=0"),
    ],
)
def test_a_bad_setting_is_one_line(tmp_path, capsys, options: list[str], named: str) -> None:
    assert prepare_data.main(["sort_digits", "--out", str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1
