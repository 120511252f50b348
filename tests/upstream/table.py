"""table.txt, what reading our sources does not find; and the tables of tests/upstream/README.md, written from it."""

from pathlib import Path
from typing import NamedTuple

from tests.upstream import theirs

ROOT = Path(__file__).parents[2]
TABLE, PAGE = Path(__file__).parent / "table.txt", ROOT / "tests/upstream/README.md"
_FIRST = "## When the pin moves\n"


class Row(NamedTuple):
    """One line of the table: `kind theirs text -- why`."""

    file: str
    kind: str
    theirs: str
    text: str
    why: str

    @property
    def symbols(self) -> list[str]:
        """The things of theirs that a row of `uses` or `replaces` names."""
        between = "." if ":" in self.theirs else ":"
        return [theirs.normal(self.theirs + between + name) for name in self.text.split()] or [self.theirs]


class Place(NamedTuple):
    """A file of ours, or several; what to read in upstream when the pin moves; and its rows."""

    file: str
    look_at: str
    rows: list[Row]


def places() -> list[Place]:
    """The table."""
    parts = (part.strip().splitlines() for part in TABLE.read_text().split("\n== ")[1:])
    heads = ((head.partition(": "), lines) for head, *lines in parts)
    return [Place(file, look_at, [row(file, line) for line in lines]) for (file, _, look_at), lines in heads]


def row(file: str, line: str) -> Row:
    facts, _, why = line.partition(" -- ")
    kind, symbol, *text = facts.split(" ", 2)
    assert kind in ("replaces", "uses", "string", "setting"), f"{TABLE.name}, {file}: {line}"
    return Row(file, kind, symbol, "".join(text), why)


def page(table: list[Place]) -> str:
    """The text of tests/upstream/README.md: its head as it is, and the tables."""
    parts = [PAGE.read_text().partition(_FIRST)[0], _FIRST]
    parts.append("\n| file | look at |\n| -- | -- |\n")
    parts += [f"| {place.file} | {place.look_at} |\n" for place in table]
    parts.append("\n## Replaced while our code runs\n\n| theirs | why |\n| -- | -- |\n")
    rows = (row for place in table for row in place.rows if row.kind == "replaces")
    parts += [f"| {_code([row.theirs, row.text])} | {row.why} |\n" for row in rows]
    return "".join(parts)


def _code(texts: list[str]) -> str:
    return ", ".join("`" + text.strip().replace("|", "\\|") + "`" for text in dict.fromkeys(texts) if text)
