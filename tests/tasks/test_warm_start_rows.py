"""A warm start on rows of the user's own: what is taught, what is held out, and a checkpoint that the classes load."""

import json
import random
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer

from recipe.warm_start import train as warm_start
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
    monkeypatch.setattr(warm_start, "fit", lambda *args: 0.0)
    assert warm_start.main([*command[:3], "reward_model.ground_truth", *TOY]) == 0
    assert "Reusing" not in capsys.readouterr().out, "other answers make another model"


@pytest.mark.parametrize(
    "data, answers, message",
    [
        ("reverse/train.parquet", "reply", "answers=reply: "),
        ("reverse/train.parquet", "reward_model.no", "answers=reward_model.no: "),
        ("reverse/train.parquet", "reward_model", "where the text of an answer is expected"),
        ("reverse", "answer", "data=reverse: no such file of rows"),
    ],
)
def test_wrong_input_is_one_line(file: Path, monkeypatch, capsys, data: str, answers: str, message: str) -> None:
    monkeypatch.chdir(file.parents[1])
    assert warm_start.main(["--data", data, "--answers", answers, *TOY]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_solved_but_for_spaces() -> None:
    rows = AnsweredRows([], [([], " 321")])
    assert [rows.solved(0, text) for text in ("321", "321 \n", "32", "")] == [1, 1, 0, 0]
