"""What agent-loop workers load of a user's own, tools and an agent loop: loaded once before a run.

verl's own loaders load the tools, as they do in the workers. A process that can be killed calls this file's functions,
and imports verl, which takes ten seconds.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf
from pydantic import ValidationError

from verl_vcpo.user_code.errors import LoadError, raised
from verl_vcpo.user_code.function import Function

_DESCRIBED = "give it a docstring with a line for each argument below Args:, and each argument a type"
_ARGUMENTS = (
    *("trainer_config", "server_manager", "tokenizer", "processor", "hf_model_type", "dataset_cls", "data_config"),
    "tools",
)
"""What verl's worker gives to every agent loop."""


class AgentCode(Function):
    """The function `name` of this file, with its arguments in `fixed`. A call returns what it has returned."""

    def load(self) -> Callable[..., Any]:
        """Do all of the work: the limit of loading holds. Raises LoadError."""
        found = super().load()(**self.fixed)
        return lambda **_: found


def of_tools(setting: str, path: str) -> AgentCode:
    """Gives the names of the tools in the file of this setting, `function_tool_path` or `tool_config_path`."""
    load = {"function_tool_path": function_tools, "tool_config_path": stateful_tools}[setting]
    return AgentCode(f"pkg://{__name__}", load.__name__, {"path": path}, math.inf)


def of_loop(target: str, given: dict[str, Any]) -> AgentCode:
    """Imports the class of an agent loop; the arguments are those of `agent_loop`."""
    return AgentCode(f"pkg://{__name__}", agent_loop.__name__, {"target": target, "given": given}, math.inf)


def function_tools(path: str) -> list[str]:
    """The names of the tools of a Python file, verl's `function_tool_path`. Raises LoadError."""
    from verl.tools import function_tool

    function_tool.function_tool = _naming(function_tool)
    with _loading():
        tools = function_tool.load_function_tools_from_path(path)
    if not tools:
        raise LoadError("has no tool", "put @function_tool above a function")
    return [tool.name for tool in tools]


def stateful_tools(path: str) -> list[str]:
    """The names of the tools of a YAML file, verl's `tool_config_path`. Raises LoadError."""
    from verl.tools.base_tool import BaseTool
    from verl.tools.tool_registry import initialize_tools_from_config

    with _loading():
        config = OmegaConf.load(path)
    entries = config.get("tools") if isinstance(config, DictConfig) else None
    if not isinstance(entries, ListConfig) or not entries:
        raise LoadError("has no list of tools", "give `tools:`, a list with a class_name and a config of each")
    for number, entry in enumerate(entries):
        kind = OmegaConf.select(entry, "config.type") if isinstance(entry, DictConfig) else None
        if kind != "native":
            what = f"has a tool, tools[{number}], whose config.type is {kind}"
            raise LoadError(what, "set it to native, which is all that verl loads")
        if not isinstance(entry.get("class_name"), str):
            raise LoadError(f"has a tool, tools[{number}], without class_name", "give the class's full name")
        _subclass(entry.class_name, BaseTool)
    with _loading():
        names = [tool.name for tool in initialize_tools_from_config(path)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise LoadError(f"has two tools with the name {min(twice)}", "rename one")
    return names


def agent_loop(target: str, given: dict[str, Any]) -> None:
    """Import an agent loop's class. Raises LoadError.

    Args:
        target: the class's full name.
        given: arguments beside those that verl gives.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase

    loop = _subclass(target, AgentLoopBase)
    if not inspect.iscoroutinefunction(inspect.unwrap(loop.run)):
        raise LoadError(f"names {target}, whose run is no coroutine", "define it with async def run")
    try:
        inspect.signature(loop).bind(**dict.fromkeys(_ARGUMENTS), **given)
    except TypeError as error:
        raise LoadError(f"names {target}, whose __init__ fails: {error}", "mend __init__ or the file") from None


def _subclass(target: str, base: type) -> Any:
    """The class of this full name. Raises LoadError."""
    try:
        found = get_object(target)
    except (ImportError, ValueError) as error:
        why = " ".join(str(error).splitlines()[:2]) or type(error).__name__
        raise LoadError(f"names {target}, which cannot be imported: {why}", "mend the name or its file") from None
    if not (isinstance(found, type) and issubclass(found, base)):
        raise LoadError(
            f"names {target}, which is no subclass of verl's {base.__name__}", f"derive it from {base.__name__}"
        )
    if missing := getattr(found, "__abstractmethods__", None):
        raise LoadError(f"names {target}, which has no method {min(missing)}", "define it")
    return found


def _naming(verls: Any) -> Callable[..., Any]:
    """verl's decorator `function_tool`, whose errors name the tool."""
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    register = verls.function_tool

    def function_tool(name: Any = None, *, schema: Any = None) -> Any:
        def decorate(function: Any) -> Any:
            tool = name if isinstance(name, str) else getattr(function, "__name__", str(function))
            there = verls.FUNCTION_TOOL_REGISTRY.get(tool)
            if there is not None and there.fn is not function:
                raise LoadError(f"has two tools with the name {tool}", "rename one")
            try:
                return register(tool, schema=schema)(function)
            except Exception as error:
                why, fix = " ".join(str(error).split()).rstrip(".!"), "mend the function"
                if isinstance(error, ValidationError):
                    why, fix = _first_of(error), _DESCRIBED
                elif isinstance(error, DocstringParsingException | TypeHintParsingException):
                    fix = _DESCRIBED
                raise LoadError(f"has a tool {tool}, for which verl makes no description: {why}", fix) from None

        return decorate(name) if callable(name) and schema is None else decorate

    return function_tool


@contextlib.contextmanager
def _loading() -> Iterator[None]:
    try:
        yield
    except LoadError:
        raise
    except ValidationError as error:
        raise LoadError(f"does not load: {_first_of(error)}", "mend the file") from None
    except (Exception, SystemExit) as error:  # a file may raise anything while it loads
        raise LoadError(f"does not load: it {raised(error).what}", "mend the file") from error


def _first_of(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
