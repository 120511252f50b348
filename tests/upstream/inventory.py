"""What our sources take from other packages, found by reading and importing them: the tables must have all of it."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

import verl_vcpo
from tests.upstream.reach import How, Place

ROOT = Path(__file__).parents[2]
UPSTREAM = ("verl", "megatron", "vllm", "mbridge", "ray", "transfer_queue", "transformer_engine")
_BASES, _OURS = (*UPSTREAM, "torch"), ("verl_vcpo", "recipe", "scripts", "tests.kit")
# Settings of ours among verl's, in our yaml files.
_OUR_SETTINGS = (
    "gpu_memory_gib",
    "run_dir",
    "samples_every",
    "save_model",
    "save_weights",
    "async",
    "vcpo",
    "tool_use",
    "method",
    "sandbox",
)
_OUR_SETTINGS_INSIDE = ("actor_rollout_ref.actor.vcpo", "actor_rollout_ref.actor.stabilizer", "data.shares")


@cache
def sources() -> tuple[Path, ...]:
    """Our Python files, without the tests and `vcpo`, which knows no other package but torch."""
    return tuple(
        sorted(path for part in ("verl", "recipe", "scripts", "tests.kit") for path in (ROOT / part).rglob("*.py"))
    )


def taken() -> dict[str, Path]:
    """`module:name` of everything that our files import or reach through an imported module -> one such file."""
    found: dict[str, Path] = {}
    for path in sources():
        for symbol in _taken_by(ast.parse(path.read_text())):
            found.setdefault(symbol, path.relative_to(ROOT))
    return found


def _taken_by(tree: ast.Module) -> Iterator[str]:
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in UPSTREAM:
            aliases |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in UPSTREAM:
                    aliases[alias.asname or alias.name.split(".")[0]] = alias.name
    for node in ast.walk(tree):
        chain = _chain(node)
        if len(chain) > 1 and chain[0] in aliases and (module := _as_module(aliases[chain[0]])):
            rest = chain[1:]
            while rest and (inner := _as_module(f"{module}.{rest[0]}")):
                module, rest = inner, rest[1:]
            if rest:
                yield f"{module}:{rest[0]}"
    yield from (symbol for name, symbol in aliases.items() if ":" in symbol and not _as_module(symbol))


def _chain(node: ast.AST) -> list[str]:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


@cache
def _as_module(symbol: str) -> str | None:
    name = symbol.replace(":", ".")
    try:
        return importlib.import_module(name).__name__
    except ImportError:
        return None


def overridden(without: set[str | None]) -> Iterator[str]:
    """`module:Class.method` of every method of a class of ours that a base from another package has too.

    Args:
        without: modules of ours that cannot be imported here.
    """
    for module in sorted(set(_modules_with_subclasses()) - without):
        for cls in vars(importlib.import_module(module)).values():
            if inspect.isclass(cls) and cls.__module__ == module:
                yield from (f"{module}:{cls.__qualname__}.{name}" for name in _overridden_by(cls))


def _modules_with_subclasses() -> Iterator[str]:
    """Import names of our files that have a class and take something from upstream."""
    patch = next(folder for folder in map(Path, verl_vcpo.__path__) if folder.is_dir())
    for path in sources():
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.ClassDef) and node.bases for node in tree.body) and any(_taken_by(tree)):
            inside = path.relative_to(patch.parent if path.is_relative_to(patch) else ROOT)
            yield ".".join(inside.with_suffix("").parts).replace(patch.name, "verl_vcpo", 1)


def _overridden_by(cls: type) -> Iterator[str]:
    theirs = [base for base in cls.__mro__ if base.__module__.split(".")[0] in _BASES]
    ours = [base for base in cls.__mro__ if base.__module__.split(".")[0] in _OURS]
    special = ("__post_init__", "__torch_function__", *(() if "__dataclass_fields__" in vars(cls) else ("__init__",)))
    own = (name for base in ours if base is cls or _is_mixin(base) for name in vars(base))
    for name in dict.fromkeys(own):
        internal = name == "_abc_impl" or (name.startswith("__") and name not in special)
        if not internal and any(name in vars(base) for base in theirs):
            yield name


def _is_mixin(base: type) -> bool:
    """Whether a class of ours has no base from another package, and so takes effect in subclasses only."""
    return not any(part.__module__.split(".")[0] in _BASES for part in base.__mro__)


def listed_overrides(places: tuple[Place, ...]) -> set[str]:
    """The same, of the tables."""
    return {
        f"{place.module}:{reach.ours}"
        for place in places
        for reach in place.reaches
        if reach.how is How.OVERRIDES and place.module
    }


def our_settings_of_verl() -> dict[str, Path]:
    """Every setting that a yaml file of ours gives verl -> the file."""
    found: dict[str, Path] = {}
    for path in sorted((ROOT / "recipe/fully_async_policy/config").rglob("*.yaml")):
        tree = yaml.safe_load(path.read_text()) or {}
        for name in _leaves({key: value for key, value in tree.items() if key not in ("defaults", "hydra")}):
            ours = name.split(".")[0] in _OUR_SETTINGS or name.startswith(_OUR_SETTINGS_INSIDE)
            if not ours:
                found[name] = path.relative_to(ROOT)
    return found


def _leaves(tree: dict[str, object], above: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}"
