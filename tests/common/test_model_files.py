"""The files beside the weights: what a trained model takes over from the first model, and what it does not."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_vcpo.common import model_files

FORMS: list[dict[str, Any]] = [  # the second half is what transformers reads and does not write
    {},
    {"eos_token_id": [151645, 151643], "pad_token_id": 151643},
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05},
    {"max_length": 4096, "unknown": {"a": [1]}},
    {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0},
    {"num_beam_groups": 2, "transformers_version": "4.37.0"},
    {"temperature": 0.9, "top_p": 0.6, "eos_token_id": 2},  # Vicuna's
    {"do_sample": False, "temperature": 0.6},
    {"do_sample": False, "top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.1},
    {"length_penalty": 2.0},
    {"early_stopping": True},
]
OF_MODEL = ["LICENSE.txt", "config.json", "generation_config.json", "modeling_own.py"]
OF_TOKENIZER = ["additional_chat_templates/tool_use.jinja", "added_tokens.json", "chat_template.jinja", "merges.txt"]
OF_TOKENIZER += ["own.tiktoken", "special_tokens_map.json", "tokenization_own.py", "tokenizer.json", "tokenizer.model"]
OF_TOKENIZER += ["tokenizer_config.json", "vocab.json", "words.bpe"]
OTHERS = ["README.md", "adapter_config.json", "model.safetensors", "model.safetensors.index.json", "optimizer.pt"]
OTHERS += ["pytorch_model.bin", "train.parquet", "warm_start.json", "tokenizer/notes.txt"]


def model(folder: Path, *names: str, **settings: Any) -> SimpleNamespace:
    """The settings of a model in `folder`, which gets files that contain their names."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"model_type": "qwen2", "name": name}))
    given = {"path": str(folder), "hf_config_path": None, "tokenizer_path": None, "custom_chat_template": None}
    mtp = SimpleNamespace(enable=False)
    return SimpleNamespace(**{**given, "override_config": {"attn_implementation": "eager"}, "mtp": mtp, **settings})


def taken_over(first: SimpleNamespace, out: Path) -> dict[str, str]:
    model_files.write(model_files.read(first, ["./words.bpe"]), out)
    return {str(file.relative_to(out)): file.read_text() for file in out.rglob("*") if file.is_file()}


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_any_settings_of_generation(tmp_path: Path, form: dict[str, Any]) -> None:
    first = model(tmp_path / "first", "config.json")
    text = json.dumps(form, indent=3)
    (tmp_path / "first/generation_config.json").write_text(text)
    assert taken_over(first, tmp_path / "trained")["generation_config.json"] == text


def test_which_files(tmp_path: Path) -> None:
    first = model(tmp_path / "first", *OF_MODEL, *OF_TOKENIZER, *OTHERS)
    trained = taken_over(first, tmp_path / "trained")
    assert sorted(trained) == sorted([*OF_MODEL, *OF_TOKENIZER])
    assert all(json.loads(content)["name"] == name for name, content in trained.items())


def test_a_tokenizer_and_a_template_of_ones_own(tmp_path: Path) -> None:
    given = {"tokenizer_path": str(tmp_path / "tokenizer"), "custom_chat_template": "{{ messages }}"}
    first = model(tmp_path / "first", *OF_MODEL, *OF_TOKENIZER, **given)
    model(
        tmp_path / "tokenizer",
        "tokenizer.json",
        "config.json",
        "chat_template.json",
        "additional_chat_templates/a.jinja",
    )
    trained = taken_over(first, tmp_path / "trained")
    expected = ["chat_template.jinja", "tokenization_own.py", "tokenizer.json"]
    assert sorted(trained) == sorted([*OF_MODEL, *expected]), "none of the model's own tokenizer but the code"
    assert trained["chat_template.jinja"] == "{{ messages }}"


@pytest.mark.parametrize("plain", [True, False], ids=["dict", "OmegaConf"])
def test_config_json_follows_the_settings(tmp_path: Path, plain: bool) -> None:
    changes = {"rope_scaling": {"factor": 4.0}, "max_position_embeddings": 64, "attn_implementation": "eager"}
    first = model(tmp_path, override_config=changes if plain else OmegaConf.create(changes))
    settings = {"model_type": "deepseek_v3", "eos_token_id": [1, 2], "rope_scaling": {"type": "yarn", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps({**settings, "num_nextn_predict_layers": 1}))
    assert json.loads(taken_over(first, tmp_path / "trained")["config.json"]) == {
        **settings,
        "rope_scaling": {"type": "yarn", "factor": 4.0},
        "max_position_embeddings": 64,
        "num_nextn_predict_layers": 0,
    }


def test_a_file_that_is_lost_is_no_file_less(tmp_path: Path) -> None:
    first = model(tmp_path, "config.json")
    (tmp_path / "generation_config.json").symlink_to(tmp_path / "blobs/0123")  # as of a cache that was cleaned
    with pytest.raises(OSError, match="generation_config.json"):
        model_files.read(first)
