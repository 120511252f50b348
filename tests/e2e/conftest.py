"""Data and a small model, made by the project's own commands."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from recipe.fully_async_policy import main
from recipe.fully_async_policy.processes import new_run_id
from testkit.small_run import make_assets

if TYPE_CHECKING:
    from omegaconf import DictConfig


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/{train,val}.parquet and model/."""
    return make_assets(tmp_path_factory.mktemp("assets"))


def prepared(arguments: list[str]) -> "tuple[str, DictConfig]":
    """What `main.main` does before it trains: (a new run's id, the checked configuration)."""
    run_id = new_run_id()
    main.prepare_environment(arguments)
    config = main.compose(arguments)
    main.check(config)
    return run_id, config
