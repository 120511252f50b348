"""The warm start at toy size: the tokenizer's promises, and a checkpoint that is whole, reusable and ordinary."""

import random
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from recipe.tasks.countdown.problems import Difficulty, generate
from recipe.warm_start import train as warm_start
from recipe.warm_start.tokenizer import VOCAB_SIZE, prompt_text, response_text, train_tokenizer
from scripts import prepare_data


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """At toy size threads only wait for each other, for minutes when the machine is busy."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_start, "THREADS", 1)
        patch.setattr("recipe.warm_start.model.MAX_RESPONSE_TOKENS", 4)
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(Difficulty())


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("data")
    assert prepare_data.main(["countdown", "--out", str(out), "--train", "30", "--val", "8"]) == 0
    return out


def make(data: Path, out: Path, *options: str) -> int:
    toy = ["--steps", "3", "--batch-size", "4", "--samples", "2"]
    return warm_start.main(["--data", str(data), "--out", str(out), *toy, *options])


@pytest.fixture(scope="module")
def checkpoint(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("models") / "tiny"
    assert make(data, out) == 0
    return out


def test_vocabulary(tokenizer) -> None:
    assert len(tokenizer) == VOCAB_SIZE == 512
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    for text in ("\n", "<|im_end|>", "<|im_start|>", "<|endoftext|>", *"0123456789+-*/()"):
        assert len(tokenizer(text)["input_ids"]) == 1, text


def test_digits_stand_alone_and_prompts_are_short(tokenizer) -> None:
    for problem in generate(Difficulty(max_number=99), 50, random.Random(0)):
        text = prompt_text(tokenizer, problem.prompt)
        ids = tokenizer(text)["input_ids"]
        assert len(ids) <= 24
        assert tokenizer.decode(ids) == text
        assert all(len(token) == 1 for token in map(tokenizer.decode, ids) if any(map(str.isdigit, token)))


def test_batch_has_loss_on_the_response_only(tokenizer) -> None:
    (problem,) = generate(Difficulty(), 1, random.Random(0))
    pairs = [(problem.prompt, response_text("1+2")), (problem.prompt, response_text("(1+2)*3"))]
    tokens, labels = warm_start.make_batch(tokenizer, pairs)
    for (_, response), row, label in zip(pairs, tokens, labels, strict=True):
        shown = label != warm_start.IGNORED
        assert torch.equal(row[shown], label[shown])
        assert tokenizer.decode(label[shown]) == response + "<|im_end|>"


def test_examples_avoid_the_held_out_problems() -> None:
    difficulty = Difficulty(numbers=2, max_number=3, max_target=9, operators="+")
    held_out = {((1, 1), 2), ((2, 3), 5)}
    stream = warm_start.examples(difficulty, held_out, 1.0, random.Random(0))
    prompts = " ".join(next(stream)[0] for _ in range(200))
    assert "numbers 1 and 2," in prompts
    assert "numbers 1 and 1," not in prompts
    assert "numbers 2 and 3," not in prompts
    assert "numbers 3 and 2," not in prompts


def test_checkpoint_loads_with_the_auto_classes(checkpoint, tokenizer) -> None:
    loaded, model = AutoTokenizer.from_pretrained(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint)
    (problem,) = generate(Difficulty(), 1, random.Random(0))
    text = prompt_text(tokenizer, problem.prompt)
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert prompt_text(loaded, problem.prompt) == text
    assert isinstance(model, Qwen2ForCausalLM)
    assert len(loaded) == model.config.vocab_size == model.lm_head.out_features == 512
    assert model.dtype == torch.float32
    assert 1_000_000 <= model.num_parameters() <= 3_000_000
    assert model.generation_config.eos_token_id == loaded.eos_token_id
    assert model.generation_config.pad_token_id == loaded.pad_token_id


def test_same_settings_reuse_the_checkpoint(data, checkpoint, capsys, monkeypatch) -> None:
    monkeypatch.setattr(warm_start, "fit", lambda *args: pytest.fail("trained again"))
    assert make(data, checkpoint) == 0
    out = capsys.readouterr().out
    assert "Reusing" in out
    said = r"Accuracy before RL: \S+% greedy \(.*likeliest.*\), \S+% drawn \(.*as RL samples\); 8 held-out problems"
    assert re.search(said, out), "a run's table begins with the second of these numbers"


def test_other_settings_replace_it_and_the_seed_decides(data, checkpoint, tmp_path) -> None:
    def weights(folder: Path) -> bytes:
        return (folder / "model.safetensors").read_bytes()

    out = tmp_path / "tiny"
    assert make(data, out, "--seed", "1") == 0
    other = weights(out)
    assert make(data, out) == 0
    assert weights(out) == weights(checkpoint) != other
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_failure_while_saving_leaves_nothing_behind(data, tmp_path, monkeypatch) -> None:
    def broken(*args, **kwargs) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Qwen2ForCausalLM, "save_pretrained", broken)
    monkeypatch.setattr(warm_start, "evaluate", lambda *args: {"accuracy": 0.0})
    with pytest.raises(OSError, match="disk full"):
        make(data, tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


def test_foreign_folders_are_left_alone(data, tmp_path, capsys) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert make(data, tmp_path) == 2
    assert "--out" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["x" * 250, "x" * 300])
def test_a_folder_that_cannot_be_written_is_refused_before_a_lesson(data, tmp_path, capsys, monkeypatch, name) -> None:
    monkeypatch.setattr(warm_start, "fit", lambda *_: pytest.fail("the lesson began"))
    assert make(data, tmp_path / name) == 2
    assert f"out={tmp_path / name} cannot be written (File name too long)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--steps", "0"], "steps=0"),
        (["--correct-fraction", "1.5"], "correct_fraction=1.5"),
        (["--data", "no"], "data=no"),
    ],
)
def test_a_bad_setting_is_one_line_and_status_2(data, tmp_path, capsys, options: list[str], named: str) -> None:
    assert make(data, tmp_path / "tiny", *options) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert named in err


def test_a_policy_that_calls_a_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare_data.main(["calculate", "--out", str(tmp_path / "data"), "--train", "8", "--val", "4"]) == 0
    assert make(tmp_path / "data", tmp_path / "model", "--layers", "2", "--heads", "2") == 0
    assert "First programs that are right before RL: " in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer("```python\n\n```\n\\boxed{}")["input_ids"]) == 4, "also when it is read again"
