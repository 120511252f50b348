"""docs/guide/cluster.md names the models that each installation trains: those of the table that the launcher checks."""

import re
from pathlib import Path

from verl_vcpo.actor.models import Install, trained_with

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "cluster.md"


def test_models_of_each_installation() -> None:
    (row,) = re.findall(r"^\| models.*\|$", PAGE.read_text(), re.MULTILINE)
    _, cpu, gpu, more = (set(re.findall(r"`(\w+)`", cell)) for cell in row.strip("|").split("|"))
    assert cpu == set(trained_with(Install.CPU))
    assert gpu == set(trained_with(Install.GPU))
    assert gpu | more == set(trained_with(Install.TRANSFORMER_ENGINE)) and not gpu & more
