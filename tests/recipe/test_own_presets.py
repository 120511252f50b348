"""Presets outside the package: found by --config-dir, and their sizes win over those of a laptop."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.evaluate import __main__ as evaluate
from recipe.fully_async_policy import main
from recipe.fully_async_policy.settings.validate import SettingError
from scripts import check_data

PRESET = """
# @package _global_
defaults:
  - /scale: ${oc.env:VCPO_HARDWARE}
  - _self_
data:
  max_response_length: 7
actor_rollout_ref:
  model:
    path: models/mine
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One whose name Hydra's grammar has to quote."""
    folder = tmp_path / "it's, my [presets]"
    (folder / "task").mkdir(parents=True)
    (folder / "task" / "mine.yaml").write_text(PRESET)
    return folder


def composed(folder: Path):
    arguments = ["+task=mine", "hardware=cpu", "data.train_batch_size=3"]
    main.prepare_environment(arguments)
    return main.compose(arguments, folder)


def test_what_the_preset_sets_wins_over_a_laptops_sizes(folder: Path) -> None:
    config = composed(folder)
    assert (config.data.max_response_length, config.actor_rollout_ref.model.path) == (7, "models/mine")
    assert config.data.max_prompt_length == 64, "what it leaves out is a laptop's"
    assert config.data.train_batch_size == 3, "the command line wins over both"


def test_a_file_of_ones_own_is_found_from_any_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mine.py").touch()
    monkeypatch.chdir(folder)
    files = ("function_tool_path", "tool_config_path")
    settings = [
        "reward.custom_reward_function.path",
        *(f"actor_rollout_ref.rollout.multi_turn.{name}" for name in files),
    ]
    arguments = ["hardware=cpu", *(f"{setting}=mine.py" for setting in settings)]
    main.prepare_environment(arguments)
    config = main.compose(arguments)
    assert [OmegaConf.select(config, setting) for setting in settings] == [str(folder / "mine.py")] * 3


def test_the_commands_take_the_folder_anywhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["+task=mine", "--config-dir", str(folder), "hardware=cpu"]
    assert main.main([*arguments, "--print-config"]) == 0
    assert "max_response_length: 7\n" in capsys.readouterr().out
    (folder / "config.json").write_text("{}")
    of_task = ["--task", "mine", *arguments[1:]]
    assert evaluate.main([str(folder), *of_task, "data.val_files=no.parquet"]) == 2
    assert "data.val_files=no.parquet: no such file" in capsys.readouterr().err
    assert check_data.main(["no.parquet", *of_task]) == 2
    assert "FILE=no.parquet: no such file" in capsys.readouterr().err


def test_every_command_says_where_a_wrong_value_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preset = folder / "task" / "mine.yaml"
    preset.write_text(PRESET.replace("max_response_length: 7", "max_response_length: 0"))
    (folder / "config.json").write_text("{}")
    of_task = ["--config-dir", str(folder), "hardware=cpu", *(f"data.{part}_files=no" for part in ("train", "val"))]
    assert main.main(["+task=mine", *of_task]) == 2
    assert evaluate.main([str(folder), "--task", "mine", *of_task]) == 2
    assert check_data.main(["no.parquet", "--task", "mine", *of_task]) == 2
    words = f"{preset}:7: data.max_response_length=0: give a whole number"
    assert capsys.readouterr().err.count(words) == 3


def test_a_folder_that_cannot_be_meant(folder: Path) -> None:
    with pytest.raises(SettingError, match=r"^--config-dir .*nowhere: no such folder$"):
        composed(folder / "nowhere")
    (folder / "task" / "math.yaml").write_text(PRESET)
    with pytest.raises(SettingError, match=r"task/math.yaml has the name of a preset of ours; rename it"):
        composed(folder)
