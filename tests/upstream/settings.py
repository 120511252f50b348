"""Settings of verl's configuration: which there are, and those that our yaml files give."""

import ast
import contextlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from tests.upstream import theirs
from tests.upstream.table import ROOT

_OURS = re.compile(  # settings of ours among verl's, in our yaml files
    r"(gpu_memory_gib|run_dir|samples_every|save_model|save_weights|async|vcpo|tool_use|reasoning_gym|method|sandbox"
    r"|defaults|hydra)(\.|$)"
    r"|actor_rollout_ref\.actor\.(vcpo|stabilizer)|data\.(shares|level)|reward\.custom_reward_function\.reward_kwargs"
)


@cache
def _of_verl() -> DictConfig:
    """verl's own configuration with the Megatron engine, before any setting of ours."""
    GlobalHydra.instance().clear()
    file = theirs.file_of("verl.trainer.config.config") or Path("/gone/config.py")
    with contextlib.suppress(HydraException), hydra.initialize_config_dir(str(file.parent), version_base="1.3"):
        return hydra.compose("ppo_trainer", ["model_engine=megatron"])
    return DictConfig({"gone": True})  # every setting is missed


def default_of(name: str) -> str:
    return repr(OmegaConf.select(_of_verl(), name))


def exists(name: str) -> bool:
    """Whether verl has a setting. Names inside a mapping without a dataclass, or inside an empty one, are free."""
    if name.startswith("ray_kwargs.ray_init."):
        return bool(re.search(rf"\b{name.rpartition('.')[2]}=", theirs.described(theirs.find("ray:init"))))
    node: Any = OmegaConf.to_container(_of_verl())
    kind: str | None = None
    for part in name.split("."):
        if isinstance(node, dict) and node.get("_target_"):
            kind = ":".join(node["_target_"].rsplit(".", 1))
        is_field = kind is not None and theirs.exists(f"{kind}.{part}")
        if not is_field and not (isinstance(node, dict) and part in node):
            return kind is None and not node
        node = node.get(part) if isinstance(node, dict) else None
        kind = _class_of(f"{kind}.{part}") if is_field else None
    return True


def _class_of(field: str) -> str | None:
    """The class in the annotation of a field, also in `X | None`."""
    found = theirs.find(field)
    names = (node.id for part in found.nodes for node in ast.walk(part) if isinstance(node, ast.Name))
    symbols = (f"{found.module}:{name}" for name in names)
    return next((one for one in symbols if theirs.exists(one) and theirs.find(one).kind == "class"), None)


def given() -> list[tuple[str, Path]]:
    """Every setting that a yaml file of ours gives verl, and the file."""
    files = sorted((ROOT / "recipe/fully_async_policy/config").rglob("*.yaml"))
    trees = ((yaml.safe_load(file.read_text()) or {}, file.relative_to(ROOT)) for file in files)
    leaves = ((name, file) for tree, file in trees for name in _leaves(tree))
    return [(name, file) for name, file in leaves if not _OURS.match(name)]


def _leaves(tree: dict[str, object], above: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}"
