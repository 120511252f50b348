"""Compares the tables with what is installed."""

import ast
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

from omegaconf import DictConfig, OmegaConf

from tests.upstream import inventory
from tests.upstream.reach import How, Place, Reach

SIGNATURES = Path(__file__).parent / "signatures.txt"
_RAYS_OWN = "_ray_trace_ctx"  # Ray adds this parameter to the methods of its actors


def differences(places: tuple[Place, ...]) -> list[str]:
    """A line for each row that what is installed does not satisfy."""
    found = []
    for place in places:
        for reach in place.reaches:
            if not (_installed(place.only) and _installed(reach.only)):
                continue
            try:
                _check(place, reach)
            except Exception as error:
                wrong = str(error) if isinstance(error, LookupError) else f"{type(error).__name__}: {error}"
                found.append(f"{place.file}: {reach.ours} {reach.how} {reach.theirs}: {wrong}")
    return found


@cache
def _installed(name: str) -> bool:
    """Whether there is such a module or distribution; of no name: yes."""
    if not name or any(name == found.name for found in importlib.metadata.distributions()):
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _check(place: Place, reach: Reach) -> None:
    if reach.how is How.SETTING:
        _check_setting(reach)
    elif reach.how is How.NAMES:
        if reach.shape not in _source(resolve(reach.theirs)):
            raise LookupError(f"{reach.shape!r} is not in its source")
    elif reach.how is How.USES:
        _check_attribute(reach)
    elif reach.how is How.SUBCLASSES:
        _check_base(place, reach)
    elif reach.how in (How.OVERRIDES, How.REPLACES):
        _check_attribute(reach)
        if (found := signature(reach)) is not None:
            _check_signature(reach.theirs, found)
            if reach.how is How.OVERRIDES:
                _check_override(place, reach)
    else:
        _check_parameters(resolve(reach.theirs), reach.shape)


def resolve(symbol: str) -> Any:
    """The object that `module:name.name` means; functions as they stand in their class.

    Raises:
        LookupError: there is no such thing.
    """
    module, _, name = symbol.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise LookupError(f"no module ({error})") from None
    for part in name.split(".") if name else ():
        found = _plain_class(found)
        try:
            found = getattr(found, part)
        except AttributeError:
            raise LookupError(f"has no {part}") from None
    return found


def _plain_class(found: Any) -> Any:
    """Of a class that `ray.remote` has wrapped, the class."""
    metadata = getattr(found, "__ray_metadata__", None)
    return found if metadata is None else metadata.modified_class


@cache
def _source(found: Any) -> str:
    found = found if isinstance(found, ModuleType) else inspect.unwrap(_plain_class(found))
    try:
        return inspect.getsource(found)
    except OSError:  # a class that Ray has subclassed: its module
        return inspect.getsource(importlib.import_module(found.__module__))


def _check_attribute(reach: Reach) -> None:
    symbol, _, name = reach.theirs.rpartition(".") if "." in reach.theirs.partition(":")[2] else (reach.theirs, "", "")
    owner: Any = _plain_class(resolve(symbol))
    if inspect.isclass(owner) and name:
        if not (hasattr(owner, name) or name in _instance_attributes(owner)):  # type: ignore[arg-type]
            raise LookupError(f"has no {name}")
        value = getattr(owner, name, dataclasses.MISSING)
    else:
        value = resolve(reach.theirs)
    if reach.shape and reach.shape != f"= {value!r}":
        raise LookupError(f"is {value!r}, and ours relies on {reach.shape}")


@cache
def _instance_attributes(owner: Any) -> frozenset[str]:
    """Names that a class annotates, or that its methods or those of its bases assign to `self`."""
    names = set(getattr(owner, "__dataclass_fields__", ())) | set(getattr(owner, "model_fields", ()))
    for base in owner.__mro__:
        names |= set(getattr(base, "__annotations__", ()))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                names.add(node.attr)
    return frozenset(names)


def _check_base(place: Place, reach: Reach) -> None:
    assert place.module is not None
    base, ours = _plain_class(resolve(reach.theirs)), resolve(f"{place.module}:{reach.ours}")
    if not issubclass(ours, base):
        raise LookupError("is no base of ours")


def parameters(function: Any) -> list[inspect.Parameter]:
    """Without `self`, `cls` and what Ray adds."""
    if _plain_class(function) is not function:
        function = _plain_class(function)
    found = list(inspect.signature(function).parameters.values())
    if found and found[0].name in ("self", "cls"):
        del found[0]
    return [parameter for parameter in found if parameter.name != _RAYS_OWN]


_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def as_shape(found: list[inspect.Parameter]) -> str:
    """Names in their order, as a row's shape has them: `a, b, *, c, **kwargs`."""
    shown, seen_star = [], False
    for parameter in found:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not seen_star:
            shown.append("*")
        seen_star |= parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
        shown.append(_STARS.get(parameter.kind, "") + parameter.name)
    return ", ".join(shown)


def signature(reach: Reach) -> str | None:
    """The parameters of a function that ours overrides or replaces; None of what is no function."""
    try:
        theirs = resolve(reach.theirs)
    except LookupError:  # an attribute that instances have
        return None
    return as_shape(parameters(theirs)) if inspect.isroutine(theirs) or inspect.isclass(theirs) else None


@cache
def known_signatures() -> dict[str, str]:
    lines = SIGNATURES.read_text().splitlines()
    return {symbol: shape.removesuffix(")") for symbol, _, shape in (line.partition("(") for line in lines)}


def _check_signature(symbol: str, found: str) -> None:
    known = known_signatures().get(symbol)
    if known is None:
        raise LookupError(f"has the parameters ({found}), which are not in {SIGNATURES.name}")
    if found != known:
        raise LookupError(f"has the parameters ({found}), no longer ({known})")


def _check_parameters(theirs: Any, shape: str) -> None:
    found = parameters(theirs)
    by_name = {parameter.name: parameter for parameter in found}
    open_ended = any(parameter.kind in _STARS for parameter in found)
    places = []
    for entry in filter(None, shape.split(", ")):
        name, has_default, default = entry.partition("=")
        if name not in by_name and not open_ended:
            raise LookupError(f"has no parameter {name}: ({as_shape(found)})")
        if name not in by_name:
            continue
        places.append(found.index(by_name[name]))
        if has_default and repr(by_name[name].default) != default:
            raise LookupError(f"{name} is {by_name[name].default!r} by default, and ours relies on {default}")
    if places != sorted(places):
        raise LookupError(f"has the parameters in another order: ({as_shape(found)})")
    given = {entry.partition("=")[0] for entry in shape.split(", ")}
    for parameter in found:
        if parameter.default is parameter.empty and parameter.kind not in _STARS and parameter.name not in given:
            raise LookupError(f"needs a parameter that ours does not give, {parameter.name}: ({as_shape(found)})")


def _check_override(place: Place, reach: Reach) -> None:
    assert place.module is not None
    ours, theirs = resolve(f"{place.module}:{reach.ours}"), resolve(reach.theirs)
    for complaint in incompatible(parameters(ours), parameters(theirs)):
        if reach.ours.rpartition(".")[2] != "__init__":  # constructors are called by whoever names the class
            raise LookupError(f"ours has ({as_shape(parameters(ours))}): {complaint}")
    if inspect.iscoroutinefunction(theirs) and not (
        inspect.iscoroutinefunction(ours) or inspect.isasyncgenfunction(ours)
    ):
        raise LookupError("theirs is asynchronous, ours is not")


def incompatible(ours: list[inspect.Parameter], theirs: list[inspect.Parameter]) -> Iterator[str]:
    """Why a call that suits `theirs` would not suit `ours`: a line for each reason."""
    kinds = {parameter.kind for parameter in ours}
    names = [parameter.name for parameter in ours]
    for i, parameter in enumerate(theirs):
        if parameter.kind in _STARS:
            continue
        if parameter.name not in names:
            if inspect.Parameter.VAR_KEYWORD not in kinds:  # what comes last is given by keyword
                yield f"it has no {parameter.name}"
        elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY and names.index(parameter.name) != i:
            yield f"its {parameter.name} is at another place"
    known = {parameter.name for parameter in theirs}
    if any(parameter.kind in _STARS for parameter in theirs):
        return
    for parameter in ours:
        if parameter.name not in known and parameter.default is parameter.empty and parameter.kind not in _STARS:
            yield f"it needs a {parameter.name}, which no caller gives"


@cache
def verls_configuration() -> DictConfig:
    """verl's own configuration with the Megatron engine, before any setting of ours."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with hydra.initialize_config_module("verl.trainer.config", version_base="1.3"):
        return hydra.compose("ppo_trainer", ["model_engine=megatron"])


def has_setting(name: str) -> bool:
    """Whether verl has a setting: in its yaml files, or in the dataclass that one of their `_target_`s names.

    What is inside a mapping without a dataclass, or empty, is free. `ray_kwargs.ray_init` takes Ray's arguments.
    """
    if name.startswith("ray_kwargs.ray_init."):
        return any(
            p.name == name.rpartition(".")[2] or p.kind is p.VAR_KEYWORD for p in parameters(resolve("ray:init"))
        )
    node: Any = OmegaConf.to_container(verls_configuration())
    kind: type | None = None
    for part in name.split("."):
        if isinstance(node, dict) and node.get("_target_"):
            kind = resolve(":".join(node["_target_"].rsplit(".", 1)))
        fields = get_type_hints(kind) if kind else {}
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif part in fields:
            node = None
        else:
            return kind is None and not node
        kind = _dataclass_of(fields.get(part))
    return True


def _dataclass_of(hint: Any) -> type | None:
    """The dataclass in a type hint, also in `X | None`."""
    kinds = (kind for kind in (hint, *get_args(hint)) if inspect.isclass(kind) and dataclasses.is_dataclass(kind))
    return next(kinds, None)


def _check_setting(reach: Reach) -> None:
    if not has_setting(reach.theirs):
        raise LookupError("verl's configuration has no such setting")
    if reach.shape:
        value = OmegaConf.select(verls_configuration(), reach.theirs)
        if reach.shape != f"= {value!r}":
            raise LookupError(f"is {value!r} by default, and ours relies on {reach.shape}")


def missing(places: tuple[Place, ...]) -> list[str]:
    """A line for everything that our sources take from upstream and no row has."""
    reaches = [reach for place in places for reach in place.reaches]
    listed = {reach.theirs for reach in reaches} | {f"{r.theirs}:{r.shape}" for r in reaches if r.how is How.NAMES}
    found = []
    for symbol, path in inventory.taken().items():
        if not any(theirs == symbol or theirs.startswith((f"{symbol}.", f"{symbol}:")) for theirs in listed):
            found.append(f"{path}: {symbol} is in no table")
    known = inventory.listed_overrides(places)
    found += [
        f"{method} overrides a method of theirs and is in no table"
        for method in inventory.overridden(without={p.module for p in places if not _installed(p.only)})
        if method not in known
    ]
    for name, path in inventory.our_settings_of_verl().items():
        if not has_setting(name):
            found.append(f"{path}: verl's configuration has no setting {name}")
    return found
