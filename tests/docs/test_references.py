"""What a page calls `file.py:name` is in that very file, below verl/verl_vcpo/ or the repository's root."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("architecture.md", "differences.md")
# path/file.py:name.name
REFERENCE = re.compile(r"`((?:\w+/)*\w+\.py):(\w+(?:\.\w+)*)`")


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, classes and assignments of a file, and what is in its classes as Class.name."""

    def names(body: list[ast.stmt], above: str = "") -> list[str]:
        found = []
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.append(above + node.name)
                if isinstance(node, ast.ClassDef):
                    found += names(node.body, f"{above}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found += [above + target.id for target in targets if isinstance(target, ast.Name)]
        return found

    return frozenset(names(ast.parse(path.read_text()).body))


def is_there(file: str, name: str) -> bool:
    places = [ROOT / "verl/verl_vcpo" / file, ROOT / file]
    return any(place.is_file() and name in names_in(place) for place in places)


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_name_on_the_page_exists(page: str) -> None:
    references = REFERENCE.findall((ROOT / "docs/explanation" / page).read_text())
    assert references, "no references found: has their form changed?"
    wrong = [f"{file}:{name}" for file, name in references if not is_there(file, name)]
    assert not wrong, f"docs/explanation/{page}: {wrong}"
