"""A warm start on rows of the user's own: what is taught, what is held out, and a checkpoint that the classes load."""

import json
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer

from recipe.warm_start import train as warm_start
from recipe.warm_start.progress import Progress
from recipe.warm_start.rows import AnsweredRows, load_answered_rows
from recipe.warm_start.tokenizer import VOCAB_SIZE, byte_tokenizer, prompt_text

TOY = ["--steps", "2", "--batch-size", "4", "--samples", "2", "--layers", "1", "--heads", "2"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_start, "THREADS", 1)
        yield
    torch.set_num_threads(before)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """40 words to reverse, the last one twice."""
    words = [f"{'abcdefgh'[i % 8]}{i}" for i in range(39)] + ["z38"]
    words[0] = words[-1]
    rows = [
        {
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Reverse: {word}."}],
            "reward_model": {"ground_truth": word[::-1]},
            "answer": f" {word[::-1]}",
        }
        for word in words
    ]
    (tmp_path / "reverse").mkdir()
    pd.DataFrame(rows).to_parquet(tmp_path / "reverse" / "train.parquet")
    return tmp_path / "reverse" / "train.parquet"


def test_what_is_held_out_is_not_taught(file: Path) -> None:
    rows = load_answered_rows(file, "reward_model.ground_truth")
    assert [answer for _, answer in rows.held_out] == ["63e", "73f", "83g", "83z"]
    assert len(rows.taught) == 35, "the first row is the last one again"
    pairs = rows.examples(0.5, random.Random(0))
    shown = [(chat[-1]["content"], answer) for chat, answer in (next(pairs) for _ in range(400))]
    right = sum(chat == f"Reverse: {answer[::-1]}." for chat, answer in shown)
    assert 150 < right < 250 and not any("z38" in chat for chat, _ in shown)


def test_phrases_end_with_a_word() -> None:
    rows = [([{"role": "user", "content": f"Sort the digits {n} now."}], "x") for n in ("123", "124", "223 k")]
    assert AnsweredRows(rows[:2], rows[2:]).phrases() == ["Sort the digits ", " now."]
    assert AnsweredRows(rows[:1], rows[1:2]).phrases() == ["Sort the digits ", " now."], "123 and 124 share 12"


def test_every_character_is_a_token(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(["Sort the digits "])
    assert len(tokenizer) == VOCAB_SIZE
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = prompt_text(tokenizer, "Sort the digits abba 00: é")
    ids = loaded(text)["input_ids"]
    assert loaded.decode(ids) == text and ids == tokenizer(text)["input_ids"]
    assert len(loaded("Sort the digits abba 00: é")["input_ids"]) == 1 + len("abba 00: é".encode())


def test_the_command(file: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["--data", "reverse/train.parquet", "--answers", "answer", *TOY]
    assert warm_start.main(command) == 0
    record = json.loads((tmp_path / "models" / "reverse-tiny" / "warm_start.json").read_text())
    assert record["problems"] == 4 and 0 <= record["sampled_accuracy"] <= record["pass_at_2"] <= 1
    assert warm_start.main(command) == 0
    assert "Reusing" in capsys.readouterr().out
    monkeypatch.setattr(warm_start, "fit", lambda *args: [0.0])
    assert warm_start.main([*command[:3], "reward_model.ground_truth", *TOY]) == 0
    assert "Reusing" not in capsys.readouterr().out, "other answers make another model"


@pytest.mark.parametrize(
    ("data", "answers", "message"),
    [
        ("reverse/train.parquet", "reply", "answers=reply: "),
        ("reverse/train.parquet", "reward_model.no", "such column; it has prompt, reward_model.ground_truth, answer"),
        ("reverse/train.parquet", "reward_model", "where the text of an answer is expected"),
        ("reverse", "answer", "data=reverse: no such file of rows"),
    ],
)
def test_wrong_input_is_one_line(file: Path, monkeypatch, capsys, data: str, answers: str, message: str) -> None:
    monkeypatch.chdir(file.parents[1])
    assert warm_start.main(["--data", data, "--answers", answers, *TOY]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def taught(tmp_path: Path, *options: str) -> dict[str, Any]:
    command = ["--data", "reverse/train.parquet", "--answers", "answer", *TOY, "--correct-fraction", "1", *options]
    assert warm_start.main([*command, "--out", str(tmp_path / "model")]) == 0
    return json.loads((tmp_path / "model" / "warm_start.json").read_text())


@pytest.mark.parametrize(("steps", "made"), [(45, 20), (15, 15)])
def test_it_ends_at_the_accuracy_asked_for(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], steps: int, made: int
) -> None:
    """A machine's speed decides nothing: checks are every ten steps, and after the last one."""
    monkeypatch.chdir(file.parents[1])
    accuracies = iter((0.1, 0.4, 0.5))
    monkeypatch.setattr(warm_start, "drawn_accuracy", lambda *_: next(accuracies))
    monkeypatch.setattr("recipe.warm_start.progress.LINE_S", 3600.0)
    record = taught(file.parents[1], "--steps", str(steps), "--until", "0.41" if made == 15 else "0.4")
    assert record["steps_made"] == made and record["settings"]["until"] == (0.41 if made == 15 else 0.4)
    printed = capsys.readouterr()
    assert ("step 20 of 45: loss" in printed.out) == (made == 20), "the step that reached it is told"
    assert "teach longer (--until 0.4" in printed.err, "the model itself, by its own accuracy, is never right"


def test_an_older_accuracy_has_its_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A check that takes long is made seldom: the first one takes all the time that checks may have."""
    monkeypatch.setattr("recipe.warm_start.progress.LINE_S", 0.0)
    clock = iter(range(100))
    monkeypatch.setattr("recipe.warm_start.progress.time.perf_counter", lambda: float(next(clock)))
    progress = Progress(steps=2, until=None, check=lambda: 0.25)
    assert [progress.reached(1.0) for _ in range(2)] == [False, True]
    first, second = capsys.readouterr().out.splitlines()
    assert "accuracy 25 %;" in first and second.endswith("accuracy 25 % at step 1")


def test_measuring_changes_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights, and the same random numbers for what follows, whether the accuracy was measured or not."""
    monkeypatch.chdir(file.parents[1])
    weights, states = [], []
    for every in (3600.0, 0.0):
        monkeypatch.setattr("recipe.warm_start.progress.LINE_S", every)
        taught(file.parents[1] / str(every))
        weights.append((file.parents[1] / str(every) / "model" / "model.safetensors").read_bytes())
        states.append(torch.get_rng_state())
    assert weights[0] == weights[1] and torch.equal(*states)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--until", "0"], "until=0.0: Input should be greater than 0"),
        (["--until", "30"], "until=30.0: Input should be less than or equal to 1"),
        (["--until", "0.3"], "until=0.3: no more than correct_fraction=0.2 of the answers taught are right; add"),
    ],
)
def test_a_goal_that_cannot_be_reached(
    file: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert warm_start.main(["--data", str(file), "--answers", "answer", *TOY, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_solved_but_for_spaces() -> None:
    rows = AnsweredRows([], [([], " 321")])
    assert [rows.solved(0, text) for text in ("321", "321 \n", "32", "")] == [1, 1, 0, 0]
