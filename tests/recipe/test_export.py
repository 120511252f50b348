"""What `recipe.export` makes of folders without a whole model. tests/actor/test_export.py has the others."""

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from recipe import export
from verl_vcpo.loop import checkpoint


def run_with_checkpoints(root: Path, *steps: int) -> list[Path]:
    """The checkpoints of a run, with a model of two files."""
    folders = []
    for step in steps:
        with checkpoint.written_whole(OmegaConf.create({"default_local_dir": f"{root}/checkpoints"}), step) as folder:
            model = folder / "actor" / "model" / "huggingface"
            model.mkdir(parents=True)
            (model / "config.json").write_text("{}")
            place = {}
            for file in "ab":
                save_file({f"{file}.weight": torch.zeros(3)}, model / f"{file}.safetensors")
                place[f"{file}.weight"] = f"{file}.safetensors"
            (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
        folders.append(root / "checkpoints" / folder.name)
    return folders


def complaint(capsys: pytest.CaptureFixture[str], *arguments: Path) -> str:
    assert export.main([str(argument) for argument in arguments]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1
    return line


@pytest.mark.parametrize("below", ["", "actor"])
def test_the_model_of_a_checkpoint(tmp_path: Path, below: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder,) = run_with_checkpoints(tmp_path, 5)
    assert export.main([str(folder / below), str(tmp_path / "out")]) == 0
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "a.safetensors",
        "b.safetensors",
        "config.json",
        "model.safetensors.index.json",
    ]
    assert "recipe.vllm serve" in capsys.readouterr().out
    assert "is there already" in complaint(capsys, folder, tmp_path / "out")


def test_a_model_that_cannot_be_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder,) = run_with_checkpoints(tmp_path, 5)
    weights = folder / "actor" / "model" / "huggingface"
    assert f"{weights}/out is in the checkpoint: give a folder else" in complaint(capsys, folder, weights / "out")
    (weights / "lost").symlink_to("nowhere")  # copytree lists such errors, as it does those of a full disk
    assert "out: cannot be written ([Errno 2] No such file or dir" in complaint(capsys, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_of_checkpoints_names_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = run_with_checkpoints(tmp_path, 5, 10)[1]
    for folder in (tmp_path, tmp_path / "checkpoints"):
        assert f"give one of them, e.g. {newest}\n" in complaint(capsys, folder, tmp_path / "out")


def test_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such folder" in complaint(capsys, tmp_path / "nowhere", tmp_path / "out")
    assert "is no checkpoint with a model" in complaint(capsys, tmp_path, tmp_path / "out")


def test_megatrons_own_shards_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = tmp_path / "global_step_1" / "actor" / "model" / "dist_ckpt"
    shards.mkdir(parents=True)
    (shards / "metadata.json").write_text("{}")
    assert "add hf_model to" in complaint(capsys, tmp_path / "global_step_1", tmp_path / "out")


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder,) = run_with_checkpoints(tmp_path, 5)
    weights = folder / "actor" / "model" / "huggingface" / "a.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "a.safetensors has changed since it was written" in complaint(capsys, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_only_the_index_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint as it is left when the index of the first model names a weight that Megatron does not have."""
    (folder,) = run_with_checkpoints(tmp_path, 5)
    (folder / checkpoint.MANIFEST).unlink()  # whatever verl has written is whole by our manifest
    weights = folder / "actor" / "model" / "huggingface"
    index = json.loads((weights / "model.safetensors.index.json").read_text())
    index["weight_map"]["lost"] = "b.safetensors"
    (weights / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "b.safetensors lacks 1 of its weights, the first is lost" in complaint(capsys, folder, tmp_path / "out")
    (weights / "b.safetensors").unlink()
    assert "files of weights are missing, the first is b.safetensors" in complaint(capsys, folder, tmp_path / "out")
