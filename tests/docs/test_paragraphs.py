"""Pages are read at a glance: no long paragraph, and every page is in the site's navigation."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
# A blank line, or the beginning of a list's item, a table's row or a heading
END = re.compile(r"\n\s*\n|\n(?=\s*(?:[-|#]|\d+\.) )")


def shown(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_no_paragraph_has_more_than_90_words(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    parts = [part for part in END.split(text) if not part.lstrip().startswith("|")]
    assert len(parts) > 1
    assert not [part for part in parts if len(part.split()) > 90]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert not [page for page in PAGES[1:] if f" {page.relative_to(DOCS)}\n" not in navigation]
