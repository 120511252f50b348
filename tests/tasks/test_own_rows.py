"""`python -m scripts.prepare_data rows`: files as people have them, right ones and wrong ones."""

import json
from pathlib import Path

import pandas as pd
import pytest

from recipe.warm_start.rows import load_answered_rows
from scripts import prepare_data

CSV = "id,question,answer\n" + "".join(f"{i},What is {i} + {i}?,{2 * i}\n" for i in range(20))


def prepare(file: Path, *options: str, question: str = "question", answer: str = "answer") -> int:
    columns = ["--question", question, "--answer", answer]
    return prepare_data.main(["rows", "--from", str(file), *columns, "--out", str(file.parent / "out"), *options])


def written(tmp_path: Path) -> dict[str, list[tuple[str, str]]]:
    """(question, ground truth) of each part."""
    parts = {part: pd.read_parquet(tmp_path / "out" / f"{part}.parquet") for part in ("train", "val")}
    return {
        part: [(row.prompt[0]["content"], row.reward_model["ground_truth"]) for row in rows.itertuples()]
        for part, rows in parts.items()
    }


def test_the_rows_are_split_and_have_verls_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sums.csv").write_text(CSV)
    assert prepare(tmp_path / "sums.csv", "--val-fraction", "0.25") == 0
    assert "rows: 15 training and 5 held-out rows" in capsys.readouterr().out
    pairs = written(tmp_path)
    assert sorted(pairs["train"] + pairs["val"]) == sorted((f"What is {i} + {i}?", str(2 * i)) for i in range(20))
    row = pd.read_parquet(tmp_path / "out/val.parquet").iloc[1]
    assert (row["data_source"], dict(row["extra_info"])) == ("sums", {"index": "sums/val/1", "split": "val"})
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    assert meta["question"] == "question" and meta["rows"] == {"train": 15, "val": 5}
    assert len(load_answered_rows(tmp_path / "out/train.parquet", "reward_model.ground_truth").taught) == 14
    more = ["--seed", "1", "--name", "math", "--instruction", "In \\boxed{}."]
    assert prepare(tmp_path / "sums.csv", "--val-fraction", "0.25", *more) == 0
    asked = written(tmp_path)["val"]
    assert all(question.endswith("?\nIn \\boxed{}.") for question, _ in asked)
    others = [(question.removesuffix("\nIn \\boxed{}."), answer) for question, answer in asked]
    assert others != pairs["val"] and set(others) < set(pairs["train"] + pairs["val"])
    assert set(pd.read_parquet(tmp_path / "out/train.parquet")["data_source"]) == {"math"}


RIGHT = [
    ("quotes.csv", 'question,answer\n"Say ""hi"", twice","hi, hi"\nb,c\n', ('Say "hi", twice', "hi, hi")),
    ("windows.csv", "\ufeffquestion,answer\r\nWie groß ist 7²?,049\r\nb,c\r\n", ("Wie groß ist 7²?", "049")),
    ("numbers.jsonl", '{"question": "7 * 6?", "answer": 42}\n\n{"question": "b", "answer": 0.5}\n', ("7 * 6?", "42")),
    ("small.jsonl", '{"question": "a", "answer": 0.00001}\n{"question": "b", "answer": 1e22}\n', ("a", "0.00001")),
    ("large.jsonl", '{"question": "a", "answer": 0.00001}\n{"question": "b", "answer": 1e22}\n', ("b", "1" + "0" * 22)),
    (
        "utf8.jsonl",
        '{"question": "数字は?", "answer": "四 🙂"}\n{"question": 1, "answer": 0}\n',
        ("数字は?", "四 🙂"),
    ),
    ("spaces.json", '{"question": " a ", "answer": " b\\n"}\n{"question": "b", "answer": 0}\n', ("a", "b")),
]


@pytest.mark.parametrize(("name", "text", "expected"), RIGHT, ids=[name for name, *_ in RIGHT])
def test_a_right_file(tmp_path: Path, name: str, text: str, expected: tuple[str, str]) -> None:
    (tmp_path / name).write_bytes(text.encode())
    assert prepare(tmp_path / name) == 0
    pairs = written(tmp_path)
    assert expected in pairs["train"] + pairs["val"] and len(pairs["train"]) == len(pairs["val"]) == 1


def test_single_precision_is_written_with_its_own_digits(tmp_path: Path) -> None:
    pd.DataFrame({"q": ["x", "y"], "a": [0.1, None]}).astype({"a": "float32"}).fillna(0.3).to_parquet(
        tmp_path / "t.parquet"
    )
    assert prepare(tmp_path / "t.parquet", "--question", "q", "--answer", "a") == 0
    assert sorted(truth for pairs in written(tmp_path).values() for _, truth in pairs) == ["0.1", "0.3"]


def test_a_parquet_file_and_a_pandas_csv(tmp_path: Path) -> None:
    table = pd.DataFrame({"q": [f"a, {i}\n" for i in range(9)], "a": range(9)})
    table.to_parquet(tmp_path / "table.parquet")
    table.to_csv(tmp_path / "table.csv")
    for name in ("table.parquet", "table.csv"):
        assert prepare(tmp_path / name, "--name", "table", question="q", answer="a") == 0
        pairs = written(tmp_path)
        assert sorted(pairs["train"] + pairs["val"]) == [(f"a, {i}", str(i)) for i in range(9)]


def test_no_question_is_both_taught_and_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = "".join(f"{i}, What  is {i} + {i}? ,{2 * i + (i == 3)}\n" for i in range(20))
    (tmp_path / "sums.csv").write_text(CSV + again)
    assert prepare(tmp_path / "sums.csv", "--val-fraction", "0.5") == 0
    assert "removed: 19 repeated, 1 with a question that an earlier row answers otherwise" in capsys.readouterr().out
    pairs = written(tmp_path)
    assert len(set(pairs["train"]) | set(pairs["val"])) == 20 == len(pairs["train"]) + len(pairs["val"])
    assert ("What is 3 + 3?", "6") in pairs["train"] + pairs["val"], "the first is kept"


WRONG: dict[str, tuple[str, str | bytes | None, list[str], str]] = {
    "missing": ("a.csv", None, [], "--from {file}: no such file"),
    "a name of another kind": ("a.xlsx", "x", [], "give a file with one of the names .csv, .tsv, .parquet, .jsonl"),
    "a header alone": ("a.csv", "question,answer\n", [], "has no rows"),
    "no such column": ("a.csv", "id,Question,answer\n1,a,b\n", [], "{file}:2: no column 'question'; it has 'id', 'Que"),
    "a column twice": ("a.csv", "question,answer,answer\na,b,c\n", [], "{file}:1: column 'answer' is there twice"),
    "empty answers": (
        "a.csv",
        CSV + "7,x,\n" + "8,y, \n" * 10,
        [],
        "column 'answer' is empty in line 22, 23, 24, 25, 26, 27, 28, 29, 30, 31 and 1 more; fill it, or remove",
    ),
    "a null": ("a.jsonl", '\n{"question": "q", "answer": null}', [], "column 'answer' is empty in line 2;"),
    "after a quoted line": ("a.csv", 'question,answer\n"a\nb",c\nd,\n', [], "'answer' is empty in line 4;"),
    "too many fields": ("a.csv", CSV + "7,1,000?,b\n", [], "{file}:22: 4 fields, and the first line has 3; fields are"),
    "an open quote": ("a.csv", CSV + '7,"x,y\n8,c,d\n', [], "{file}:22: not readable as CSV from this line on"),
    "not UTF-8": (
        "a.csv",
        "question,answer\ngroß,1\n".encode("latin-1"),
        [],
        "{file}:2: not text in UTF-8 (byte 0xdf)",
    ),
    "Excel's text": ("a.csv", "question,answer\na,1\n".encode("utf-16"), [], "{file}:1: not text in UTF-8 (byte 0xff)"),
    "an array": ("a.json", '[{"question": 1, "answer": 2}, 3]', [], "{file}: row 2: 3 is no JSON object"),
    "half a character": (
        "a.jsonl",
        '{"question": "\\ud800", "answer": 1}',
        [],
        "{file}: line 1: \\ud800 is half a char",
    ),
    "a broken line": ("a.jsonl", '{"question": "a", "answer": 1}\n{"q', [], "{file}: line 2: not JSON (Unterminated"),
    "a list as answer": (
        "a.jsonl",
        '{"question": "a", "answer": [1]}',
        [],
        "{file}:1: column 'answer' holds [1]",
    ),
    "no parquet": ("a.parquet", "question,answer\n", [], "{file}: not a readable parquet file"),
    "one question": ("a.csv", "question,answer\na,b\na,b\n", [], "1 different questions; give two or more"),
    "a fraction": ("a.csv", CSV, ["--val-fraction", "10"], "--val-fraction 10.0: give a number between 0 and 1"),
    "one column": ("a.csv", CSV, ["--answer", "question"], "--answer question: is the column of the questions, too"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_one_line_and_status_2(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, content, options, expected = WRONG[case]
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert prepare(file, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("prepare_data rows: ") and error.count("\n") == 1
    assert expected.format(file=file) in error
    assert not (tmp_path / "out").exists()
