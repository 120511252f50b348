"""`python -m scripts.prepare_data` on small files in the schemas of the hubs."""

import json
from pathlib import Path

import pandas as pd
import pytest

from recipe.tasks import reward
from scripts import prepare_data
from tests.kit import raw_data

TASKS = tuple(raw_data.TASKS)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Raw files of every task, each in a folder of its name."""
    for task in TASKS:
        raw_data.write(task, tmp_path / "raw" / task)
    return tmp_path / "raw"


def prepare(task: str, raw: Path, *options: str) -> int:
    return prepare_data.main([task, "--source", str(raw / task), "--out", str(raw.parent / task), *options])


def rewrite(file: Path, change) -> None:
    """Apply `change` to each row of a JSON lines file."""
    rows = [change(json.loads(line)) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("task", TASKS)
def test_rows_that_verl_and_the_reward_accept(raw: Path, capsys, task: str) -> None:
    assert prepare(task, raw) == 0
    out = raw.parent / task
    assert sorted(path.name for path in out.iterdir()) == ["meta.json", "train.parquet", "val.parquet"]
    printed = capsys.readouterr().out
    assert f"{task}: 64 training and 16 held-out rows" in printed
    assert printed.count("ground truth:") == 3
    for name, count in (("train", 64), ("val", 16)):
        rows = pd.read_parquet(out / f"{name}.parquet")
        assert len(rows) == count
        assert {"prompt", "data_source", "reward_model", "extra_info"} <= set(rows)
        for row in rows.iloc[:3].to_dict("records"):
            truth = row["reward_model"]["ground_truth"]
            right = f"#### {truth}" if task == "gsm8k" else f"\\boxed{{{truth}}}"
            assert reward.compute_score(row["data_source"], right, truth)["score"] == 1.0
            assert [message["role"] for message in row["prompt"]] == ["user"]


def test_gsm8k_as_the_hub_publishes_it(raw: Path) -> None:
    """Parquet, two configurations; the thousands of an answer have commas."""
    source = raw / "gsm8k"
    for name in ("train", "test"):
        row = {"question": "How many?", "answer": "Many.\n#### 1,080"}
        for configuration in ("main", "socratic"):
            (source / configuration).mkdir(exist_ok=True)
            pd.DataFrame([row]).to_parquet(source / configuration / f"{name}-00000-of-00001.parquet")
        (source / f"{name}.jsonl").unlink()
    assert prepare("gsm8k", raw) == 0
    (row,) = pd.read_parquet(raw.parent / "gsm8k/train.parquet").to_dict("records")
    assert row["reward_model"]["ground_truth"] == "1080"


def test_math_leaves_out_what_is_evaluated_on(raw: Path, capsys) -> None:
    held_out = json.loads((raw / "math/math-500/test.jsonl").read_text().splitlines()[0])
    extra = raw / "math/hendrycks/geometry/train-00000-of-00001.parquet"
    boxless = {"problem": "Prove it.", "solution": "Trivial.", "level": "Level 5", "type": "Geometry"}
    raw_data.write_parquet(extra, [{**boxless, **{k: held_out[k] for k in ("problem", "solution")}}, boxless])
    # the whole test split of MATH, beside MATH-500
    raw_data.write_parquet(extra.with_name("test-00000-of-00001.parquet"), [boxless])
    assert prepare("math", raw) == 0
    assert "removed: 1 in MATH-500, 1 without a \\boxed answer" in capsys.readouterr().out
    assert json.loads((raw.parent / "math/meta.json").read_text())["rows"] == {"train": 64, "val": 16}


def test_tool_use_drops_repetitions_and_dapos_own_instructions(raw: Path, capsys) -> None:
    assert prepare("tool_use", raw) == 0
    assert "removed: 64 repeated" in capsys.readouterr().out
    rows = pd.read_parquet(raw.parent / "tool_use/train.parquet")
    for prompt in rows["prompt"]:
        text = prompt[0]["content"]
        assert "Answer:" not in text and "```python" in text and text.endswith("?")


@pytest.mark.parametrize(
    ("task", "spoil", "expected"),
    [
        ("gsm8k", lambda raw: (raw / "gsm8k/test.jsonl").unlink(), "no parquet or JSON lines file of the val split"),
        ("gsm8k", lambda raw: (raw / "gsm8k/test.jsonl").write_text("{"), "test.jsonl: line 1: not JSON"),
        ("gsm8k", lambda raw: (raw / "gsm8k/test.jsonl").write_text(""), "no validation rows are left"),
        (
            "gsm8k",
            lambda raw: rewrite(raw / "gsm8k/train.jsonl", lambda r: {"question": r["question"]}),
            "train.jsonl: column 'answer' is missing; the row has 'question'",
        ),
        (
            "gsm8k",
            lambda raw: rewrite(raw / "gsm8k/train.jsonl", lambda r: {**r, "answer": "18"}),
            "an answer without its '#### number': '18'",
        ),
        (
            "gsm8k",
            lambda raw: rewrite(raw / "gsm8k/train.jsonl", lambda r: {**r, "question": None}),
            "column 'question' holds None where text is expected",
        ),
        (
            "math",
            lambda raw: rewrite(raw / "math/math-500/test.jsonl", lambda r: {"problem": r["problem"]}),
            "no file of MATH-500",
        ),
        (
            "tool_use",
            lambda raw: raw_data.write_parquet(raw / "tool_use/dapo/more.parquet", [{"prompt": "2+2?"}]),
            "column 'prompt' must hold one chat message: '2+2?'",
        ),
        (
            "tool_use",
            lambda raw: (raw / "tool_use/aime25/test.jsonl").unlink(),
            "file of AIME 2025 ('aime' in its path)",
        ),
    ],
)
def test_a_bad_source_is_one_line_and_status_2(raw: Path, capsys, task: str, spoil, expected: str) -> None:
    spoil(raw)
    assert prepare(task, raw) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert expected in errors
    assert not (raw.parent / task).exists()


def test_a_source_that_is_not_there(capsys) -> None:
    assert prepare_data.main(["gsm8k", "--source", "nowhere", "--out", "x"]) == 2
    assert "--source nowhere: no such folder; get them with `hf download openai/gsm8k" in capsys.readouterr().err
