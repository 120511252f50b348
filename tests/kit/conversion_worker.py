"""A process that exports a checkpoint with Megatron's own shards, as `recipe.export` does."""

from pathlib import Path

import tests.kit.export_worker  # noqa: F401  # the imports that the processes of a test share
from recipe import export


def run(checkpoint: Path, out: Path, model: str, folder: Path, rank: int) -> None:
    """Write `out`; the arguments after `out` are those of `tests.kit.layout_run`."""
    export.export(checkpoint, out, model)
