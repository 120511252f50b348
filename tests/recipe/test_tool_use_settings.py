"""Tool use that cannot work is refused before a process starts."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from recipe.fully_async_policy import main
from recipe.fully_async_policy.settings import own_code
from tests.kit.sandbox_server import served
from tests.recipe.conftest import GOOD_ROW
from tests.recipe.refused import ROLLOUT, composed, run
from tests.user_code.test_agent_code import TOOL
from verl_vcpo.user_code import killable

LOOP, LOOPS = f"{ROLLOUT}.agent.default_agent_loop", f"{ROLLOUT}.agent.agent_loop_config_path"
FUNCTIONS, STATEFUL = (f"{ROLLOUT}.multi_turn.{name}" for name in ("function_tool_path", "tool_config_path"))


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
    assert "python -m code_sandbox --port 9" in error


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


def test_what_is_right_passes(
    tool_use: dict[str, str], sandbox_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first complaint is about something else. As the run's client, the check asks no proxy."""
    for scheme in ("http", "https", "all"):
        monkeypatch.setenv(f"{scheme}_proxy", "http://127.0.0.1:9")
    right = {**tool_use, "tool_use.sandbox_url": sandbox_url}
    longer = run({**right, "tool_use.call_timeout_s": "60"}, capsys)
    assert "tool_use.call_timeout_s=60: the sandbox ends every program after 10 s; lower it" in longer
    error = run({**right, "data.train_files": "no.parquet"}, capsys)
    assert "data.train_files=no.parquet" in error and "sandbox" not in error


@pytest.fixture
def tools(good: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """A run with a tool that is right."""
    (tmp_path / "tools.py").write_text(TOOL)
    return {**good, LOOP: "tool_agent", FUNCTIONS: f"{tmp_path}/tools.py"}


@pytest.mark.parametrize(
    ("loop", "setting", "value", "words"),
    [
        ("single_turn_agent", FUNCTIONS, "tools.py", f"has no effect: {LOOP}=single_turn_agent calls no tools of this"),
        (
            "single_turn_agent",
            STATEFUL,
            "tools.yaml",
            "calls no tools of this file; set it to tool_agent, or leave the",
        ),
        ("simpletir", FUNCTIONS, "tools.py", "+agent=simpletir has tools of its own; give tool_use.sandbox_url"),
        (
            "single_turn_agent",
            f"{ROLLOUT}.multi_turn.format",
            "hermes",
            "calls no tools; tool_agent does; leave it out",
        ),
        ("tool_agent", LOOP, "tool_agent", f"has no tools; give {FUNCTIONS}"),
    ],
)
def test_tools_that_no_loop_calls(
    good: dict[str, str], loop: str, setting: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = {"+agent": "simpletir"} if loop == "simpletir" else {LOOP: loop}
    error = run({**good, **agent, setting: value}, capsys)
    assert f"{setting}={value}: " in error and words in error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {name: mine}", "is no list of loops; give each a name and a _target_"),
        (
            "- {name: mine, _target_: a.B}\n- {name: mine, _target_: a.C}",
            "has two loops with the name mine; rename one",
        ),
        ("- {name: mine, _target_: a.B, x: '${y}'}", "cannot be read ("),
    ],
)
def test_a_file_of_agent_loops_that_is_none(
    good: dict[str, str], tmp_path: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loops.yaml").write_text(text)
    error = run({**good, LOOP: "mine", LOOPS: f"{tmp_path}/loops.yaml"}, capsys)
    assert f"{LOOPS}={tmp_path}/loops.yaml: {words}" in error


def test_tools_and_loops_are_loaded_before_the_start(
    tools: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """All of them at the same time, each in a process of its own: what one does there harms nothing."""
    (tmp_path / "tools.py").write_text(TOOL.replace("text: what.", ""))
    (tmp_path / "tools.yaml").write_text("tools: []")
    (tmp_path / "ends.py").write_text("import os; os._exit(3)")
    (tmp_path / "loops.yaml").write_text("- {name: mine, _target_: ends.Loop}")
    main.prepare_environment(["hardware=cpu"])
    given = {**tools, STATEFUL: f"{tmp_path}/tools.yaml", LOOPS: f"{tmp_path}/loops.yaml", LOOP: "mine"}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        functions, stateful, loops = agent_code_errors(given)
    assert functions.startswith(
        f"{FUNCTIONS}={tmp_path}/tools.py: it has a tool sort, for which verl makes no descript"
    )
    assert stateful.startswith(f"{STATEFUL}={tmp_path}/tools.yaml: it has no list of tools; give `tools:`")
    assert loops.startswith(f"{LOOPS}={tmp_path}/loops.yaml: it does not load: its process ended with exit code 3")


def agent_code_errors(given: dict[str, str]) -> list[str]:
    with pytest.raises(own_code.SettingError) as refused:
        own_code.check_agent_code(composed(given), [])
    return refused.value.lines


def test_a_tool_file_that_hangs(tools: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killable, "_START_LIMIT_S", 0.1)
    (line,) = agent_code_errors(tools)
    assert line.startswith(f"{FUNCTIONS}={tools[FUNCTIONS]}: it does not load: it takes longer than 0.1 s")


def all_are_named_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of loading files, which takes ten seconds."""

    async def loaded(config: object, code: dict[str, object]) -> dict[str, list[str]]:
        return dict.fromkeys(code, ["sort"])

    monkeypatch.setattr(own_code, "_load", loaded)


def test_a_name_of_two_tools_in_two_files(
    tools: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    all_are_named_sort(monkeypatch)
    error = run({**tools, STATEFUL: tools[FUNCTIONS]}, capsys)
    assert f"{FUNCTIONS}={tools[FUNCTIONS]}: has a tool sort, as tool_config_path has; rename one" in error


@pytest.mark.parametrize(
    ("selected", "words"),
    [
        (
            ["sort", "sor"],
            "extra_info.tool_selection has 'sor', and no tool has this name; give a list of sort, or leave",
        ),
        ("sort", "extra_info.tool_selection is no list; give a list of sort, or leave it out"),
        (["sort"], ""),
    ],
)
def test_rows_that_select_tools(
    tools: dict[str, str],
    selected: object,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = {**GOOD_ROW, "extra_info": {"index": 0, "tool_selection": selected}}
    pd.DataFrame([row] * 16).to_parquet(tools["data.train_files"])

    all_are_named_sort(monkeypatch)
    if words:
        error = run(tools, capsys)
        assert f"{words}" in error and "row 0" in error and tools["data.train_files"] in error
    else:
        main.check(composed(tools))
