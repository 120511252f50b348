"""The section `reasoning_gym`: the files of its tasks, which a run makes where they are not there.

A task has a file for each level of its curriculum, in a folder whose name says what the rows were made from.
"""

import hashlib
import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy.settings.errors import SettingError, wrong
from recipe.fully_async_policy.settings.values import check_types
from recipe.tasks import reasoning_gym
from verl_vcpo.common.whole_file import whole_file

FOLDER = Path("data/reasoning_gym")


def name_files(config: DictConfig) -> None:
    """Set the files, shares and levels of `data`. Refuses what reasoning-gym, or we, cannot make."""
    if not _has_tasks(config):
        if "reasoning_gym" in config and config.data.train_files is None:
            words = "give tasks, each with its share, '{gsm_symbolic: 2, countdown: 1}', or data.train_files"
            raise wrong(config, "reasoning_gym.tasks", f"{words}; `python -m recipe.tasks.reasoning_gym` lists them")
        return
    check_types(config, "reasoning_gym.")
    data, asked = config.data, config.reasoning_gym
    for name in ("train_files", "val_files", "shares", "levels"):
        if data[name] is not None:
            raise wrong(config, f"data.{name}", "reasoning_gym.tasks decides; leave one of them out")
    if strangers := [task for task in asked.difficulty or {} if task not in asked.tasks]:
        raise wrong(config, "reasoning_gym.difficulty", f"{strangers[0]} is none of reasoning_gym.tasks")
    files, levels = list(_folders(config)), [len(_levels(task, asked.levels)) for task in asked.tasks]
    if asked.levels > 1 and max(levels) == 1:
        raise wrong(config, "reasoning_gym.levels", "none of the tasks has a curriculum in reasoning-gym; set it to 0")
    data.train_files, data.val_files = (
        [f"{folder}/{part}.parquet" for folder, _ in files] for part in ("train", "val")
    )
    if len(files) > 1:
        data.shares = list(asked.tasks.values())
    if max(levels) > 1:
        data.levels = levels


def make_files(config: DictConfig) -> None:
    """Write the files that are not there: minutes for a few tasks, seconds for most."""
    for folder, made_from in _folders(config) if _has_tasks(config) else ():
        if (folder / "train.parquet").is_file():
            continue
        print(f"Making the problems of {made_from.name}, level {made_from.level}, in {folder}", flush=True)
        prepared = reasoning_gym.build(made_from)
        if not prepared.train:
            found = f"{made_from.name} has {len(prepared.val)} different problems of this difficulty"
            raise wrong(config, "reasoning_gym.val", f"{found}; lower it, or change reasoning_gym.difficulty")
        again = sum(prepared.removed.values())
        repeated = f" ({again} more were repeated)" if again else ""
        print(f"{len(prepared.train)} training and {len(prepared.val)} held-out problems{repeated}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        for part in ("val", "train"):
            with whole_file(folder / f"{part}.parquet") as file:
                pq.write_table(pa.Table.from_pylist(getattr(prepared, part)), file)


def _has_tasks(config: DictConfig) -> bool:
    return OmegaConf.select(config, "reasoning_gym.tasks") is not None


def _levels(task: str, most: int) -> range:
    """The levels that the rows of a task are made of; 0: reasoning-gym's default settings."""
    return range(1, min(most, reasoning_gym.levels_of(task)) + 1) or range(1)


def _folders(config: DictConfig) -> Iterator[tuple[Path, Namespace]]:
    """Each task's and level's folder, and what its rows are made from."""
    asked = OmegaConf.to_container(config.reasoning_gym)
    tasks, levels = asked.pop("tasks"), asked.pop("levels")
    for task in tasks:
        try:
            for level in _levels(task, levels):
                made_from = {**asked, "name": task, "level": level}
                made_from["difficulty"] = (asked["difficulty"] or {}).get(task, {})
                settings = reasoning_gym.settings_of(task, made_from["difficulty"], level)
                whole = json.dumps([made_from, settings, reasoning_gym.installed()])
                digest = hashlib.sha256(whole.encode()).hexdigest()[:10]
                yield FOLDER / f"{task}-{level}-{digest}", Namespace(**made_from)
        except ValueError as error:
            raise SettingError(f"reasoning_gym.tasks: {error}") from None
