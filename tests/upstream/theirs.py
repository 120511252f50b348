"""Other packages, read and not imported (but for what is compiled): the meaning of a name, its signature, its source.

So it takes seconds, shows also what needs cupy or a GPU, and sees no function that a test has exchanged.
"""

import ast
import contextlib
import copy
import hashlib
import importlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FOLDERS: list[Path] = [Path(sys.prefix) / "te-python"]
"""Where packages are looked for before `sys.path`. The first has Transformer Engine on a machine without a GPU."""
FUNCTION, _ASSIGN = ast.FunctionDef | ast.AsyncFunctionDef, ast.Assign | ast.AnnAssign
_DEFINITION = FUNCTION | ast.ClassDef


def package_of(symbol: str) -> str:
    return re.split("[.:]", symbol)[0]


class GoneError(LookupError):
    """There is no such module or name. The message says which."""


class Found(NamedTuple):
    """The meaning of a name. `kind`: module, class, function, value (assigned or annotated), attribute, compiled."""

    kind: str
    module: str
    name: str = ""
    nodes: tuple[Any, ...] = ()


def forget() -> None:
    """Read everything again: the folders, or files in them, have changed."""
    for function in (file_of, version_of, _lines, _names_of_module, names_of_class, _found, normal, bases):
        function.cache_clear()


@cache
def file_of(module: str) -> Path | None:
    """The file of a module, or its folder where it has none."""
    folder = None
    for place in (*FOLDERS, *map(Path, sys.path)):
        path = place.joinpath(*module.split("."))
        compiled = sorted(path.parent.glob(f"{path.name}.*so"))
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py"), *compiled):
            if file.is_file():
                return file
        folder = folder or (path if path.is_dir() else None)
        if any(
            (above / "__init__.py").is_file() for above in path.parents if above != place and place in above.parents
        ):
            break  # another place has another version
    return folder


@cache
def version_of(package: str) -> str | None:
    """The version of the distribution that has a package, without its local part; None: it is not installed."""
    found = importlib.metadata.distributions(path=[*map(str, FOLDERS), *sys.path])
    versions = {re.sub("[-_]", "", one.name.lower()): one.version.partition("+")[0] for one in reversed([*found])}
    wanted = package.replace("_", "")
    close = (name for name in versions if re.fullmatch(f"{wanted}(core|cpu|cuda.*)?", name))
    return versions.get(min(close, default=""))


@cache
def _lines(module: str) -> list[str]:
    file = file_of(module)
    return file.read_text().splitlines() if file and file.suffix == ".py" else []


def source(found: Found) -> str:
    """The text of a definition, or of a module."""
    if not found.nodes:
        return "\n".join(_lines(found.module))
    node = found.nodes[-1]
    first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
    return "\n".join(_lines(found.module)[first - 1 : node.end_lineno])


def digest(text: str) -> str:
    """A hash of a text, which blank lines, comment lines and indentation do not change."""
    lines = (line.strip() for line in text.splitlines())
    return "#" + hashlib.sha256("\n".join(line for line in lines if line and line[0] != "#").encode()).hexdigest()[:10]


def chain_of(node: ast.AST | None) -> list[str]:
    """`["a", "b"]` for the expression `a.b`; nothing for one that begins with anything but a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def bound(body: list[Any]) -> Iterator[tuple[str, ast.AST]]:
    """Every name that the statements of a module or a class bind, also inside `if`, `try`, `with`; `*` for all."""
    for node in body:
        if isinstance(node, _DEFINITION):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)
        elif isinstance(node, _ASSIGN):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from ((part.id, node) for part in ast.walk(target) if isinstance(part, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            for part in ("body", "handlers", "orelse", "finalbody"):
                yield from bound(getattr(node, part, []))


def _by_name(body: list[Any]) -> dict[str, list[Any]]:
    names: dict[str, list[Any]] = {}
    for name, node in bound(body):
        names.setdefault(name, []).append(node)
    return names


@cache
def _names_of_module(module: str) -> dict[str, list[Any]]:
    return _by_name(ast.parse("\n".join(_lines(module))).body)


@cache
def names_of_class(node: ast.ClassDef) -> dict[str, list[Any]]:
    """What the body of a class binds; `self.x` for what its methods assign."""
    stores = (part for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store))
    return {f"self.{part.attr}": [part] for part in stores if chain_of(part)[0:1] == ["self"]} | _by_name(node.body)


def find(symbol: str) -> Found:
    """The meaning of `module:name.name`, through imports and base classes; a GoneError where it has none."""
    found = _found(symbol)
    if isinstance(found, GoneError):
        raise found
    return found


@cache
def _found(symbol: str) -> Found | GoneError:
    module, _, name = symbol.partition(":")
    file = file_of(module)
    if file is None:
        return GoneError(f"there is no module {module}")
    found = Found("module", module)
    try:
        if name and (file.suffix == ".so" or module.endswith("_pb2")):
            return _imported(module, name)
        for part in name.split(".") if name else ():
            found = _inside(found, part)
    except GoneError as error:
        return error
    return found


@cache
def normal(symbol: str) -> str:
    """The same with submodules before the colon: `a.b:c` for `a:b.c`."""
    module, _, name = symbol.partition(":")
    first, _, others = name.partition(".")
    inner = f"{module}.{first}"
    if not first or _found(f"{module}:{first}") != Found("module", inner):
        return symbol
    return normal(f"{inner}:{others}" if others else inner)


def exists(symbol: str) -> bool:
    return isinstance(_found(symbol), Found)


def _inside(found: Found, name: str) -> Found:
    if found.kind == "module":
        return _in_module(found.module, name)
    if found.kind == "compiled":
        return _imported(found.module, f"{found.name}.{name}")
    for cls in (found, *bases(found)) if found.kind == "class" else ():
        if nodes := names_of_class(cls.nodes[0]).get(name):
            return _defined(cls.module, f"{cls.name}.{name}", nodes)
        if f"self.{name}" in names_of_class(cls.nodes[0]):
            return Found("attribute", cls.module, f"{cls.name}.{name}")
    raise GoneError(f"{found.module}:{found.name} has no {name}")


def _in_module(module: str, name: str) -> Found:
    nodes = _names_of_module(module).get(name, [])
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    if not any(isinstance(node, _DEFINITION) for node in nodes):
        for node in (*imports, *_names_of_module(module).get("*", [])):
            with contextlib.suppress(GoneError):  # another branch of a `try` may have it
                return _through(module, node, name)
    if len(imports) < len(nodes):
        return _defined(module, name, nodes)
    if file_of(f"{module}.{name}") not in (None, file_of(module)):
        return Found("module", f"{module}.{name}")
    if any(file_of(re.split("[. ]", ast.unparse(node))[1]) is None for node in imports):
        return Found("module", module, name)  # of a package that is not installed
    raise GoneError(f"{module} has no {name}")


def _through(module: str, node: Any, name: str) -> Found:
    """The meaning of a name that a module imports."""
    original = next((alias.name for alias in node.names if alias.asname == name), name)
    if isinstance(node, ast.Import):
        return find(original)
    file, inside = file_of(module), module.split(".")
    above = len(inside) - node.level + (file is not None and file.name == "__init__.py")
    whence = ".".join((*(inside[:above] if node.level else ()), *filter(None, (node.module,))))
    return find(f"{whence}.{original}" if whence == module else f"{whence}:{original}")


def _defined(module: str, name: str, nodes: list[Any]) -> Found:
    for node in reversed(nodes):  # the last: those before may be overloads
        if isinstance(node, _DEFINITION):
            return Found("class" if isinstance(node, ast.ClassDef) else "function", module, name, (node,))
    return Found("value", module, name, tuple(node for node in nodes if isinstance(node, _ASSIGN)))


@cache
def bases(found: Found) -> tuple[Found, ...]:
    """The classes above a class, nearest first, as far as they can be read."""
    above: list[Found] = []
    for base in found.nodes[0].bases if found.kind == "class" else ():
        name = ".".join(chain_of(base.value if isinstance(base, ast.Subscript) else base))
        if name and exists(f"{found.module}:{name}") and (cls := find(f"{found.module}:{name}")).kind == "class":
            above += [cls, *bases(cls)] if cls != found else []
    return tuple(dict.fromkeys(above))


def _imported(module: str, name: str) -> Found:
    try:
        thing: Any = importlib.import_module(module)
        for part in name.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError) as error:
        raise GoneError(str(error)) from None
    return Found("compiled", module, name, (thing,))


def described(found: Found, given: frozenset[str] = frozenset()) -> str:
    """A signature, or a value, on one line; of a dataclass, fields without a default and those that are given."""
    if found.kind == "function":
        node = found.nodes[0]
        marks = "".join(f"@{mark} " for part in node.decorator_list for mark in chain_of(part)[-1:])
        return f"{marks}{'async ' * isinstance(node, ast.AsyncFunctionDef)}({ast.unparse(plain(node.args))})"
    if found.kind == "class":
        return f"class({_constructor(found, given)})"
    if found.kind == "value":
        text = " | ".join(dict.fromkeys(ast.unparse(node.value) for node in found.nodes if node.value is not None))
        return f"= {text if len(text) < 100 else digest(text)}" if text else "field"
    if found.kind == "compiled":
        with contextlib.suppress(TypeError, ValueError):
            return f"compiled {inspect.signature(found.nodes[0])}"
    return found.kind


def plain(arguments: ast.arguments) -> ast.arguments:
    """The same without annotations."""
    arguments = copy.deepcopy(arguments)
    for part in ast.walk(arguments):
        if isinstance(part, ast.arg):
            part.annotation = None
    return arguments


def _constructor(found: Found, given: frozenset[str]) -> str:
    classes = [cls.nodes[0] for cls in (found, *bases(found))]
    if not any("dataclass" in ast.unparse(mark) for cls in classes for mark in cls.decorator_list):
        init = next((nodes[-1] for cls in classes if (nodes := names_of_class(cls).get("__init__"))), None)
        return ast.unparse(plain(init.args)) if isinstance(init, ast.FunctionDef) else ""
    fields: dict[str, str] = {}
    for node in (node for cls in reversed(classes) for node in cls.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            fields[node.target.id] = f"={ast.unparse(node.value)}" if node.value is not None else ""
    return ", ".join(name + default for name, default in fields.items() if not default or name in given)
