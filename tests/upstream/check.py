"""Compares what is installed with snapshot.txt and table.txt."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from tests.upstream import settings, theirs
from tests.upstream.ours import UPSTREAM, Inventory, Use
from tests.upstream.table import Place, Row
from tests.upstream.theirs import GoneError, package_of

SNAPSHOT = Path(__file__).parent / "snapshot.txt"
_HEAD = """# What our code reaches in other packages. Written, also at a merge, by `python -m tests.upstream --write`.
# A line: the name, its signature or value, a hash of the source where ours takes its place, and our files.
# `name@version`: where a GPU's version of the package differs."""
_MAY_LACK = ("cupy", "transformer_engine")
Lines = dict[str, tuple[str, str]]  # by the name of a thing of theirs, or of a package: what it is, and our files


def read() -> Lines:
    """The snapshot."""
    lines = (line.partition(" <-") for line in SNAPSHOT.read_text().splitlines() if not line.startswith("#"))
    known = ((*what.partition(" ")[::2], files.strip()) for what, _, files in lines)
    return {symbol: (what, files) for symbol, what, files in known}


def text(lines: Lines) -> str:
    """The file of the snapshot."""
    entries = (f"{symbol} {what} <- {files}".strip() for symbol, (what, files) in sorted(lines.items()))
    return "\n".join((_HEAD, *entries, ""))


def is_now(symbol: str, use: Use) -> str:
    """What a thing of theirs is, as a line of the snapshot has it; a GoneError where there is no such thing."""
    if symbol in UPSTREAM:
        return str(theirs.version_of(symbol))
    found = theirs.find(symbol)
    if package_of(found.module) not in (*UPSTREAM, "torch"):
        return f"from {package_of(found.module)}"
    hashed = use.replaced and found.kind == "function" and package_of(symbol) != "torch"  # a GPU has another torch
    return theirs.described(found, frozenset(use.given)) + (f" {theirs.digest(theirs.source(found))}" if hashed else "")


def renewed(old: Lines, uses: dict[str, Use], beside: bool = False) -> Lines:
    """A snapshot of what is installed; of what is not, as it was. `beside`: another version leaves the lines there."""
    new = {symbol: line for symbol, line in old.items() if "@" in symbol and symbol.partition("@")[0] in uses}
    for symbol, use in uses.items():
        package, files = package_of(symbol), ", ".join(sorted(use.files))
        version = theirs.version_of(package)
        is_other = f"{package}@{version}" in old or (beside and old.get(package, (version,))[0] != version)
        new |= {symbol: (old[symbol][0], files)} if (is_other or not version) and symbol in old else {}
        new.pop(f"{symbol}@{version}", None)
        if version and (symbol in UPSTREAM or theirs.exists(symbol)):
            now = is_now(symbol, use)
            if now != new.get(symbol, ("",))[0]:
                new[f"{symbol}@{version}" if is_other else symbol] = (now, files)
    return new


def differences(inventory: Inventory, places: list[Place], lines: Lines) -> list[str]:
    """A line for everything that is not as the snapshot and the table have it."""
    uses = inventory.uses
    return [
        *(line for symbol in sorted({*lines, *uses}) if "@" not in symbol for line in _of_symbol(symbol, uses, lines)),
        *(line for override in inventory.overrides for line in _of_override(*override)),
        *(line for place in places for row in place.rows for line in _of_row(row)),
        *(f"{file}: verl has no setting {name}" for name, file in settings.given() if not settings.exists(name)),
    ]


def _of_symbol(symbol: str, uses: dict[str, Use], lines: Lines) -> Iterator[str]:
    version = theirs.version_of(package_of(symbol))
    if version is None and package_of(symbol) in _MAY_LACK:
        return
    before = (lines.get(f"{symbol}@{version}") or lines.get(symbol) or (None,))[0]
    use = uses.get(symbol, Use())
    files = ", ".join(sorted(use.files)) or lines.get(symbol, ("", ""))[1] or "requirements/"
    try:
        now = is_now(symbol, use)
    except GoneError as error:
        yield f"{symbol} is gone: {error}. Used in {files}"
        return
    if symbol not in uses:
        yield f"{symbol} is in the snapshot, and nothing uses it: --write"
    elif before is None:
        yield f"{symbol} is not in the snapshot: --write. Used in {files}"
    elif before.partition(" #")[0] != now.partition(" #")[0]:
        yield f"{symbol} is {now}, was {before}. Used in {files}"
    elif before != now:
        yield f"{symbol} has another body: compare the two versions. Ours takes its place in {files}"
    elif use.files and files != (known := lines.get(symbol, ("", files))[1]):
        yield f"{symbol} is used in {files}, and the snapshot has {known}: --write"


def _of_row(row: Row) -> Iterator[str]:
    why = f" ({row.why})" if row.why else ""
    if row.kind == "string" and (theirs.version_of(package_of(row.theirs)) or package_of(row.theirs) not in _MAY_LACK):
        try:
            if row.text not in theirs.source(theirs.find(row.theirs)):
                yield f"{row.file}: {row.theirs} no longer has the text {row.text}{why}"
        except GoneError as error:
            yield f"{row.file}: {row.theirs}, which had the text {row.text}{why}, is gone: {error}"
    elif row.kind == "setting" and not settings.exists(row.theirs):
        yield f"{row.file}: verl has no setting {row.theirs}{why}"
    elif row.kind == "setting" and row.text not in ("", f"= {(default := settings.default_of(row.theirs))}"):
        yield f"{row.file}: {row.theirs} is {default} by default, and ours relies on {row.text}{why}"


def _of_override(ours: str, node: theirs.FUNCTION, symbol: str) -> Iterator[str]:
    """But constructors may differ: they are called by whoever names the class."""
    function = theirs.find(symbol).nodes[0]
    if isinstance(function, ast.AsyncFunctionDef) and not isinstance(node, ast.AsyncFunctionDef):
        yield f"{ours}: {symbol} is asynchronous, ours is not"
    if not symbol.endswith(".__init__") and (why := unsuited(_signature(node), _signature(function))):
        yield f"{ours} takes the place of {symbol}, but not all its calls: {why}"


def _signature(node: theirs.FUNCTION) -> inspect.Signature:
    """The signature of a function that was read; of defaults only that there are some."""
    arguments = theirs.plain(node.args)
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    return inspect.signature(eval(f"lambda {ast.unparse(arguments)}: None"))


def unsuited(ours: inspect.Signature, theirs: inspect.Signature) -> str | None:
    """Why a call that suits `theirs` would not suit `ours`."""
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    free = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in ours.parameters.values())
    given = [parameter for parameter in theirs.parameters.values() if parameter.kind not in stars]
    by_name = [p.name for p in given if p.kind is p.KEYWORD_ONLY or (free and p.name not in ours.parameters)]
    bind = ours.bind if len(given) == len(theirs.parameters) else ours.bind_partial
    try:
        bound = bind(*(p.name for p in given if p.name not in by_name), **{name: name for name in by_name})
    except TypeError as error:
        return str(error)
    moved = [name for name, value in bound.arguments.items() if isinstance(value, str) and value != name]
    return f"{moved[0]} is at another place" if moved else None
