"""What our sources take from other packages, found by reading them: imports, calls, base classes, what is overridden or
replaced, and attributes of what is imported, of `self`, and of parameters that have a class of theirs."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path

from tests.upstream import theirs
from tests.upstream.table import ROOT, Place
from tests.upstream.theirs import chain_of, exists, package_of

UPSTREAM = ("verl", "megatron", "vllm", "ray", "transfer_queue", "transformer_engine", "wandb", "cupy")
_SOURCES = ("verl/verl_vcpo", "recipe", "scripts", "lab", "tests/kit", "tests/reliability", "tests/exactness")
Override = tuple[str, theirs.FUNCTION, str]
"""A function of ours, by name and by its source, that takes the place of one of theirs."""


@dataclass
class Use:
    """One thing of theirs: the files that use it, whether one replaces it, and what calls give it by name."""

    files: set[str] = field(default_factory=set)
    replaced: bool = False
    given: set[str] = field(default_factory=set)


class Source:
    """A file of ours, and what its names mean."""

    def __init__(self, path: Path) -> None:
        self.file = path.relative_to(ROOT).as_posix().removeprefix("verl/verl_vcpo/")
        inside = path.relative_to(ROOT).as_posix().removeprefix("verl/").removesuffix(".py")
        self.module = inside.removesuffix("/__init__").replace("/", ".")
        self.tree = ast.parse(path.read_text())
        nodes = (node for _, node in theirs.bound(self.tree.body) if isinstance(node, ast.ClassDef))
        self.classes = {node.name: Class(self, node) for node in nodes}
        self.aliases = {name: cls.symbol for name, cls in self.classes.items()}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                self.aliases |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names = ((alias.asname, alias.name) for alias in node.names)
                self.aliases |= dict((new, name) if new else (name.split(".")[0],) * 2 for new, name in names)
        for node in self.tree.body:  # another name, as in `_UPSTREAM: Any = module.Class`
            if isinstance(node, ast.Assign | ast.AnnAssign) and (symbol := self.symbol(node.value)):
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                self.aliases |= {target.id: symbol} if isinstance(target, ast.Name) else {}

    def symbol(self, node: ast.AST | None) -> str | None:
        """`module:name` for an expression `a.b` that begins with a class of the file or an imported name."""
        first, *others = chain_of(node) or [""]
        others = others[: others.index("__ray_metadata__")] if "__ray_metadata__" in others else others  # the class
        symbol = first in self.aliases and reduce(_joined, others, self.aliases[first])
        return theirs.normal(symbol) if symbol and is_theirs(symbol) else symbol or None


class Class:
    """A class of ours."""

    def __init__(self, source: Source, node: ast.ClassDef) -> None:
        self.source, self.node, self.symbol = source, node, f"{source.module}:{node.name}"
        self.names = dict(theirs.bound(node.body))

    @cached_property
    def bases(self) -> list[str]:
        """Symbols of its bases; of all parts of a base that is an expression, such as `A or B`."""
        symbols = (self.source.symbol(part) for base in self.node.bases for part in ast.walk(base))
        return [symbol for symbol in map(theirs.normal, filter(None, symbols)) if ":" in symbol]


def _joined(symbol: str, name: str) -> str:
    return f"{symbol}{'.' if ':' in symbol else ':'}{name}"


def is_theirs(symbol: str, *more: str) -> bool:
    return package_of(symbol) in (*UPSTREAM, *more)


class Inventory:
    """`uses`: what our sources use, by `module:name`, and packages. `overrides`: our functions in place of theirs."""

    def __init__(self, places: list[Place]) -> None:
        paths = sorted(path for part in _SOURCES for path in (ROOT / part).rglob("*.py"))
        sources = [Source(path) for path in paths if not path.is_relative_to(ROOT / "lab/tests")]
        self.uses: dict[str, Use] = {}
        self.overrides: list[Override] = []
        self._sources = {source.module: source for source in sources}
        self._classes = {cls.symbol: cls for source in sources for cls in source.classes.values()}
        for source in sources:
            self._read(source)
        for cls in self._classes.values():
            self._read_class(cls)
        for row in (row for place in places for row in place.rows if row.kind in ("uses", "replaces")):
            for symbol in row.symbols:
                self._note(symbol, row.file, replaced=row.kind == "replaces")
        self.uses |= {package: Use() for package in map(package_of, [*self.uses]) if package in UPSTREAM}

    def _note(self, symbol: str, files: str, replaced: bool = False) -> Use:
        use = self.uses.setdefault(symbol, Use())
        use.files |= {*files.split(", ")}
        use.replaced |= replaced
        return use

    def _read(self, source: Source) -> None:
        for symbol in map(theirs.normal, filter(is_theirs, source.aliases.values())):
            if ":" in symbol or not exists(symbol):
                self._note(symbol, source.file)
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute):
                for symbol in self._followed(source.symbol(node)):
                    self._note(symbol, source.file, replaced=isinstance(node.ctx, ast.Store))
            elif isinstance(node, ast.Call):
                self._read_call(source, node)
            elif isinstance(node, theirs.FUNCTION):
                self._read_typed(source, node)

    def _read_call(self, source: Source, node: ast.Call) -> None:
        """Names that are given; and `setattr(theirs, "name", ...)` with all that looks like it."""
        for symbol in self._followed(source.symbol(node.func)):
            self._note(symbol, source.file).given |= {keyword.arg for keyword in node.keywords if keyword.arg}
        first = source.symbol(node.args[0]) if len(node.args) > 1 else None
        name = node.args[1].value if first and isinstance(node.args[1], ast.Constant) else None
        if first and isinstance(name, str) and name.isidentifier():
            for symbol in self._followed(_joined(first, name)):
                self._note(symbol, source.file, replaced=True)

    def _read_typed(self, source: Source, function: theirs.FUNCTION) -> None:
        """Attributes of parameters that have a class of theirs."""
        arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        parts = ((one.arg, part) for one in arguments if one.annotation for part in ast.walk(one.annotation))
        kinds = {name: symbol for name, part in parts if (symbol := source.symbol(part))}
        for node in ast.walk(function) if kinds else ():
            first, *others = chain_of(node) or [""]
            if others and first in kinds and first not in source.aliases:
                for symbol in self._followed(_joined(kinds[first], others[0])):
                    self._note(symbol, source.file)

    def _followed(self, symbol: str | None) -> Iterator[str]:
        """Theirs in `module:a.b.c`: `a`, and `b` where `a` is a class; through classes of ours."""
        module, _, name = (symbol or "").partition(":")
        reached = module
        for part in name.split(".") if name else ():
            if cls := self._our_class(reached):
                yield from (f"{base}.{part}" for base in self._theirs_of(cls, part))
                return
            reached = _joined(reached, part)
            if is_theirs(reached) and (exists(reached) or part == name.split(".")[0]):
                yield reached
            if is_theirs(reached) and not exists(reached):
                return

    def _our_class(self, symbol: str) -> Class | None:
        """A class of ours, also where another module of ours imports it, or its module."""
        module, _, name = symbol.partition(":")
        first, _, others = name.partition(".")
        if others and f"{module}.{first}" in self._sources:
            return self._our_class(f"{module}.{first}:{others}")
        alias = self._sources[module].aliases.get(name) if module in self._sources else None
        return self._classes.get(symbol) or (self._our_class(alias) if alias and alias != symbol else None)

    def _family(self, cls: Class) -> list[Class]:
        above = [base for symbol in cls.bases if (base := self._our_class(symbol)) and base is not cls]
        return [cls, *(one for base in above for one in self._family(base))]

    def _their_bases(self, cls: Class) -> list[str]:
        """The first bases from other packages, over classes of ours."""
        bases = (base for one in self._family(cls) for base in one.bases if is_theirs(base, "torch"))
        return list(dict.fromkeys(bases))

    def _theirs_of(self, cls: Class, name: str) -> list[str]:
        """The first base from another package that has a name which no class of ours has."""
        own = any(name in one.names for one in self._family(cls))
        bases = (base for base in self._their_bases(cls) if is_theirs(base) and exists(f"{base}.{name}"))
        return [] if own else list(bases)[:1]

    def _read_class(self, cls: Class) -> None:
        bases = self._their_bases(cls)
        for base in bases:
            self._note(base, cls.source.file)
        for one in self._family(cls) if bases else ():
            if one is cls or not self._their_bases(one):  # what is mixed in has effect here only
                self._read_overrides(one, bases)
                self._read_self(one, cls, bases)

    def _read_overrides(self, one: Class, bases: list[str]) -> None:
        for name, node in one.names.items():
            if name.startswith("__") and name not in ("__init__", "__post_init__", "__torch_function__"):
                continue
            for base in (base for base in bases if exists(f"{base}.{name}")):
                found, cls = theirs.find(f"{base}.{name}"), theirs.find(base)
                above = (above for above in theirs.bases(cls) if name in theirs.names_of_class(above.nodes[0]))
                for symbol in (base, *filter(is_theirs, (f"{known.module}:{known.name}" for known in above))):
                    self._note(f"{symbol}.{name}", one.source.file, replaced=found.kind == "function")
                if found.kind == "function" and isinstance(node, theirs.FUNCTION):
                    self.overrides.append((f"{one.symbol}.{name}", node, f"{base}.{name}"))

    def _read_self(self, one: Class, cls: Class, bases: list[str]) -> None:
        """What is read of `self`, and what `super()` is asked for."""
        for node in (node for node in ast.walk(one.node) if isinstance(node, ast.Attribute)):
            found: list[str] = []
            if chain_of(node) in (["self", node.attr], ["cls", node.attr]):
                found = self._theirs_of(cls, node.attr)
            elif isinstance(node.value, ast.Call) and chain_of(node.value.func) == ["super"]:
                found = [base for base in bases if is_theirs(base) and exists(f"{base}.{node.attr}")][:1]
            for base in found:
                self._note(f"{base}.{node.attr}", one.source.file)
