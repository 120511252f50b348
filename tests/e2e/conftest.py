"""Data and a small model, made by the project's own commands."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

from recipe.fully_async_policy import main
from recipe.fully_async_policy.launch.processes import new_run_id
from tests.kit.small_run import make_assets

if TYPE_CHECKING:
    from omegaconf import DictConfig


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/{train,val}.parquet and model/, made once, however many processes (pytest -n) use it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # each process has one of its own in there
    with FileLock(folder / "assets.lock"):
        if not (folder / "assets").exists():
            make_assets(tmp_path_factory.mktemp("assets")).rename(folder / "assets")
    return folder / "assets"


def prepared(arguments: list[str]) -> "tuple[str, DictConfig]":
    """What `main.main` does before it trains: (a new run's id, the checked configuration)."""
    run_id = new_run_id()
    main.prepare_environment(arguments)
    config = main.compose(arguments)
    main.check(config)
    return run_id, config
