"""`python -m scripts.prepare_data`: files, reproducibility, and one line for a bad setting."""

import json
from pathlib import Path

import pandas as pd
import pytest

from recipe.tasks.countdown.problems import problem_key
from scripts import prepare_data


def countdown(out: Path, *options: str) -> int:
    return prepare_data.main(["countdown", "--out", str(out), "--train", "40", "--val", "10", *options])


def keys(file: Path) -> set:
    infos = pd.read_parquet(file)["extra_info"]
    return {problem_key([int(n) for n in info["numbers"]], info["target"]) for info in infos}


def test_writes_rows_and_settings(tmp_path, capsys) -> None:
    assert countdown(tmp_path / "a" / "b", "--operators", "+-*", "--max-number", "15") == 0
    out = tmp_path / "a" / "b"
    assert sorted(path.name for path in out.iterdir()) == ["meta.json", "train.parquet", "val.parquet"]
    train, val = keys(out / "train.parquet"), keys(out / "val.parquet")
    assert (len(train), len(val), train & val) == (40, 10, set())
    assert json.loads((out / "meta.json").read_text()) == {
        "task": "countdown",
        "difficulty": {"numbers": 3, "max_number": 15, "max_target": 99, "operators": "+-*"},
        "seed": 0,
        "rows": {"train": 40, "val": 10},
    }
    captured = capsys.readouterr()
    assert "40 training and 10 held-out" in captured.out
    assert captured.out.count("ground truth: {'target'") == 3


def test_same_seed_same_bytes(tmp_path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert countdown(tmp_path / name, "--seed", seed) == 0
    a, b, c = ((tmp_path / name / "train.parquet").read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--numbers", "1"], "numbers=1"),
        (["--operators", "+^"], "operators='+^'"),
        (["--val", "0"], "val=0"),
        (["--numbers", "2", "--max-number", "2"], "max_number=2"),
        (["--train", "many"], "--train"),
    ],
)
def test_a_bad_setting_is_one_line_and_status_2(tmp_path, capsys, options: list[str], named: str) -> None:
    try:
        status = countdown(tmp_path / "out", *options)
    except SystemExit as stop:  # argparse's own checks
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.err.count("\n") == 1
    assert named in captured.err
    assert not (tmp_path / "out").exists()


def test_a_failed_write_leaves_the_old_files(tmp_path, monkeypatch) -> None:
    assert countdown(tmp_path) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def broken(*args, **kwargs) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare_data.pd.DataFrame, "to_parquet", broken)
    assert countdown(tmp_path, "--seed", "5") == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
