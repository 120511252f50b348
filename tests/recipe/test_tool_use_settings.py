"""Tool use that cannot work is refused before a process starts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.sandbox_server import served
from tests.recipe.refused import run


@pytest.fixture(scope="module")
def sandbox_url() -> Iterator[str]:
    with served("--warm", "0") as (url, _):
        yield url


@pytest.fixture
def tool_use(good: dict[str, str]) -> dict[str, str]:
    return {**good, "+agent": "simpletir"}


def test_no_sandbox(tool_use: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    error = run({**tool_use, "tool_use.sandbox_url": "http://127.0.0.1:9"}, capsys)
    assert "tool_use.sandbox_url=http://127.0.0.1:9: no sandbox answers" in error
    assert "python -m code_sandbox" in error


def test_a_sandbox_with_a_token(tool_use: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, setting = tmp_path / "token", "tool_use.sandbox_token_file"
    file.write_text("a-token-of-many-characters\n")
    assert f"{setting}={tmp_path}/none: it cannot be read" in run({**tool_use, setting: f"{tmp_path}/none"}, capsys)
    with served("--warm", "0", "--token-file", str(file)) as (url, _):
        asked = {**tool_use, "tool_use.sandbox_url": url, "data.train_files": "no.parquet"}
        assert f"{setting}=null: the sandbox at {url} asks for another token" in run(asked, capsys)
        assert "data.train_files=no.parquet" in run({**asked, setting: str(file)}, capsys)


def test_a_wrong_setting(tool_use: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "tool_use.max_turns=0: give a whole number" in run({**tool_use, "tool_use.max_turns": "0"}, capsys)
    assert "tool_use.turns=2: there is no such setting" in run({**tool_use, "+tool_use.turns": "2"}, capsys)


def test_an_agent_without_its_settings(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    agent = {"actor_rollout_ref.rollout.agent.default_agent_loop": "simpletir"}
    assert "add +agent=simpletir" in run({**good, **agent}, capsys)


def test_verls_update_counts_what_is_dropped(tool_use: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "tool_use.drop_void_turns=true: the update of method=none would" in run(
        {**tool_use, "method": "none"}, capsys
    )


def test_a_wrong_agent_file(tool_use: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    path = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    assert "no package nowhere" in run({**tool_use, path: "pkg://nowhere/loop.yaml"}, capsys)


def test_what_is_right_passes(tool_use: dict[str, str], sandbox_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The first complaint is about something else."""
    error = run({**tool_use, "tool_use.sandbox_url": sandbox_url, "data.train_files": "no.parquet"}, capsys)
    assert "data.train_files=no.parquet" in error
