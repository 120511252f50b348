"""docs/reference/methods.md has every method."""

import re
from pathlib import Path

from recipe.fully_async_policy.settings import method

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "methods.md"


def test_every_method_has_one_row() -> None:
    tables = PAGE.read_text().split("## What to know")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", tables, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(method.names())
