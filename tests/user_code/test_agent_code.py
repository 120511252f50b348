"""Tools and agent loops of a user's own are refused in words that name the function or class, and the fix."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.tools import function_tool
from verl.tools.base_tool import BaseTool

from verl_vcpo.user_code import agent_code
from verl_vcpo.user_code.errors import LoadError

HEAD = "from typing import Any\nfrom verl.tools.function_tool import function_tool\n"
DOC = '    """Sort.\n\n    Args:\n        text: what.\n    """\n'
TOOL = HEAD + "@function_tool\ndef sort(text: str) -> str:\n" + DOC
NO_DESCRIPTION = "has a tool sort, for which verl makes no description: "
HERE = f"{__name__}."


class Stateful(BaseTool):
    pass


class Loop(AgentLoopBase):
    def __init__(self, *args: Any, marks: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    async def run(self, *_: Any, **__: Any) -> Any: ...


class Abstract(AgentLoopBase): ...


class Blocking(Loop):
    def run(self, *_: Any, **__: Any) -> Any: ...


class Narrow(Loop):
    def __init__(self, server_manager: Any, **kwargs: Any) -> None: ...


def refused(load: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(LoadError) as error:
        load(*arguments)
    return str(error.value)


@pytest.fixture(autouse=True)
def _verls_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(function_tool, "function_tool", function_tool.function_tool)
    yield
    function_tool.FUNCTION_TOOL_REGISTRY.clear()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def sort(text): ...", "has no tool; put @function_tool above a function"),
        (TOOL.replace(DOC, "    ..."), NO_DESCRIPTION + ".* no docstring; give it a docstring with a line for each"),
        (TOOL.replace("text: what.", ""), NO_DESCRIPTION + ".* no description for the argument 'text'; give it a"),
        (TOOL.replace(": str", ""), NO_DESCRIPTION + ".*text is missing a type hint.*; give it .* argument a type"),
        (TOOL.replace(": str", ": Any"), NO_DESCRIPTION + ".*properties.text.type: Field required; give it"),
        (TOOL.replace("text:", "*text:", 1), NO_DESCRIPTION + ".* variadic .*; mend the function"),
        (TOOL.replace("tool\ndef", "tool(schema={})\ndef"), NO_DESCRIPTION + ".*type: Field required"),
        (TOOL + TOOL, "has two tools with the name sort; rename one"),
        (TOOL + '@function_tool("sort")\nasync def other(text: str):\n' + DOC, "has two tools with the name sort"),
        ("import nothing_here", r"does not load: it raises ModuleNotFoundError: .*\(tools.py:1\); mend the file"),
        ("raise SystemExit(3)", "does not load: it raises SystemExit: 3"),
        ("def f(:", "does not load: it raises SyntaxError"),
    ],
)
def test_function_tools_that_verl_would_refuse_after_the_start(tmp_path: Path, code: str, words: str) -> None:
    (tmp_path / "tools.py").write_text(code)
    assert re.match(words, refused(agent_code.function_tools, str(tmp_path / "tools.py")))


def test_function_tools_that_are_right(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOL + '@function_tool("later")\nasync def _(text: str) -> dict:\n' + DOC)
    assert agent_code.function_tools(str(tmp_path / "tools.py")) == ["later", "sort"]


def entry(name: str = "Stateful", config: str = "type: native", tool: str = "state") -> str:
    schema = f"{{type: function, function: {{name: {tool}, description: it}}}}"
    return f"- {{class_name: {HERE}{name}, config: {{{config}}}, tool_schema: {schema}}}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tools: [\n", "does not load: it raises ParserError"),
        *((text, "has no list of tools; give `tools:`") for text in ("", "a: 1", "- a", "tools: 3", "tools: []")),
        ("tools: [a]", r"has a tool, tools\[0\], whose config.type is None; set it to native"),
        (
            f"tools:\n{entry()}{entry(config='type: mcp')}",
            r"has a tool, tools\[1\], whose config.type is mcp; set it to",
        ),
        (
            "tools: [{config: {type: native}}]",
            r"has a tool, tools\[0\], without class_name; give the class's full name",
        ),
        (f"tools:\n{entry('Gone')}", f"names {HERE}Gone, which cannot be imported: .*; mend the name or its file"),
        (
            f"tools:\n{entry('Loop')}",
            f"names {HERE}Loop, which is no subclass of verl's BaseTool; derive it from BaseT",
        ),
        (f"tools:\n{entry()}{entry()}", "has two tools with the name state; rename one"),
        (f"tools:\n{entry().replace('name: state, ', '')}", "does not load: function.name: Field required; mend"),
    ],
)
def test_stateful_tools_that_verl_would_refuse_after_the_start(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "tools.yaml").write_text(text)
    assert re.match(words, refused(agent_code.stateful_tools, str(tmp_path / "tools.yaml")))


def test_stateful_tools_that_are_right(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(f"tools:\n{entry()}{entry(tool='more')}")
    assert agent_code.stateful_tools(str(tmp_path / "tools.yaml")) == ["state", "more"]


@pytest.mark.parametrize(
    ("target", "given", "words"),
    [
        ("no_such_package.Loop", {}, ", which cannot be imported: .*No module named 'no_such_package'"),
        (HERE + "Stateful", {}, ", which is no subclass of verl's AgentLoopBase; derive it from AgentLoopBase"),
        (HERE + "refused", {}, ", which is no subclass of verl's AgentLoopBase"),
        (HERE + "Abstract", {}, ", which has no method run; define it"),
        (HERE + "Blocking", {"marks": "x"}, ", whose run is no coroutine; define it with async def run"),
        (
            HERE + "Loop",
            {},
            ", whose __init__ fails: missing a required .*argument: 'marks'; mend __init__ or the file",
        ),
        (HERE + "Narrow", {"server_manager": 1}, ", whose __init__ fails: .*multiple values for .*'server_manager'"),
    ],
)
def test_agent_loops_that_would_fail_at_the_first_prompt(target: str, given: dict[str, Any], words: str) -> None:
    assert re.match(f"names {target}{words}", refused(agent_code.agent_loop, target, given))


def test_agent_loops_that_are_right() -> None:
    agent_code.agent_loop(HERE + "Loop", {"marks": "x"})
    agent_code.agent_loop("verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop", {})
    agent_code.agent_loop("examples.guessing.loop.GuessingLoop", {})
    agent_code.agent_loop("recipe.tasks.tool_use.agent_loop.SimpleTIRAgentLoop", {})
