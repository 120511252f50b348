"""A model by its name of the hub: downloaded before anything starts, or one line that says how to get it."""

import re
import shutil
from pathlib import Path
from typing import NoReturn

import huggingface_hub
import pytest

from recipe.fully_async_policy.settings.model import check_model
from tests.kit import ROOT
from tests.recipe.refused import MODEL, composed, run

pytestmark = pytest.mark.usefixtures("nothing_starts")
NAME = "Qwen/Qwen2.5-7B"


def test_offline(good: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = run({**good, f"{MODEL}.path": NAME}, capsys)
    assert f"{MODEL}.path={NAME}: no such folder; get it where there is a network: `hf download {NAME} --local" in said
    missing = run({**good, f"{MODEL}.path": "models/no-such"}, capsys)
    assert f"{MODEL}.path=models/no-such: no such folder; give a Hugging Face checkpoint's folder" in missing
    scripts = re.findall(r"`bash (\S+)`", missing)
    assert len(scripts) == 2 and all((ROOT / script).is_file() for script in scripts)


def test_downloaded(good: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str) -> str:
        return str(shutil.copytree(good[f"{MODEL}.path"], tmp_path / name.replace("/", "--")))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config = composed({**good, f"{MODEL}.path": NAME})
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert check_model(config).chat_template
    assert config.actor_rollout_ref.model.path == str(tmp_path / "Qwen--Qwen2.5-7B")


def test_a_download_that_fails(
    good: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def download(_: str) -> NoReturn:
        raise OSError("401 Client Error: gated\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    said = run({**good, f"{MODEL}.path": NAME}, capsys)
    assert f"`hf download {NAME} --local-dir Qwen2.5-7B` (401 Client Error: gated)" in said
