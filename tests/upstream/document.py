"""docs/reference/upstream.md, docs/reference/upstream/*.md and signatures.txt, from the tables."""

import textwrap
from itertools import groupby
from pathlib import Path

from tests.upstream.check import SIGNATURES, known_signatures, signature
from tests.upstream.reach import How, Place, Reach
from tests.upstream.tables import PAGES, PLACES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "upstream.md"

_HEAD = """# Where we reach into other packages

When a pinned version moves, run

```bash
python -m tests.upstream
```

It compares the tables of these pages with what is installed and prints every difference, in half a minute. Where
nothing differs, names, base classes, parameters and strings are as we know them. Behaviour can differ all the same:
"look at" says where. The tests run the same comparison.

The tables are `tests/upstream/*.py`. `python -m tests.upstream --write` writes these pages from them, and what the
parameters of overridden methods are into `tests/upstream/signatures.txt`. Read the differences first.

| kind | what it means | what is compared |
| -- | -- | -- |
| subclasses | a class of ours has theirs as a base | it still has |
| overrides | a method of ours replaces theirs | all parameters, and that ours takes every call that theirs takes |
| replaces | a function or global is exchanged while our code runs | as above, of functions |
| registers with | ours is entered in a registry | the parameters we give; no other is needed |
| calls | ours calls theirs | as above, and defaults that we rely on |
| uses | ours reads or sets an attribute, a type or a constant | it exists; its value, where we rely on it |
| names | ours has a string that theirs has: a field, a tag, a metric, a message, a variable | it is in their source |
| setting | the code reads a setting of verl's configuration | it exists; its default, where we rely on it |

Settings that our yaml files give verl are not listed: each is looked up in verl's own configuration. Files are below
`verl/verl_vcpo/` where no other folder is named. {count} rows.

| file | when the pin moves, look at |
| -- | -- |
"""


def pages() -> dict[Path, str]:
    """The text of every page: docs/reference/upstream.md and, one for each table, docs/reference/upstream/*.md."""
    index = [_HEAD.format(count=len([reach for place in PLACES for reach in place.reaches]))]
    texts = {}
    for name, (title, places) in PAGES.items():
        file = PAGE.with_suffix("") / f"{name}.md"
        texts[file] = f"# {title.removesuffix('.')}\n\n[What the columns mean](../{PAGE.name})\n\n" + "\n".join(
            map(_section, places)
        )
        for place in places:
            index.append(f"| [{_shown(place)}]({PAGE.stem}/{name}.md) | {place.look_at} |\n")
    return {PAGE: "".join(index), **texts}


def _shown(place: Place) -> str:
    return place.file.removeprefix("verl/verl_vcpo/")


def _section(place: Place) -> str:
    rows = [_row(how, why, list(same)) for (how, why), same in groupby(place.reaches, lambda r: (r.how, r.why))]
    table = ["| ours |  | theirs | why |", "| -- | -- | -- | -- |", *rows]
    only = f" Only where `{place.only}` is installed." if place.only else ""
    text = f"Look at: {place.look_at}{only}"
    look_at = textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)  # as mdformat wraps it
    return f"## {_shown(place)}\n\n{look_at}\n\n" + "\n".join(table) + "\n"


def _row(how: How, why: str, reaches: list[Reach]) -> str:
    """A row of the page: several of the table, where kind and reason are the same."""
    ours = ", ".join(dict.fromkeys(_code(reach.ours) for reach in reaches))
    theirs = "<br>".join(_theirs(how, reach) for reach in reaches)
    only = f" (only where `{reaches[0].only}` is installed)" if reaches[0].only else ""
    return f"| {ours} | {how} | {theirs} | {why}{only} |"


def _code(text: str) -> str:
    return text if text.startswith("(") else f"`{text}`"


def _theirs(how: How, reach: Reach) -> str:
    shape = reach.shape.replace("|", "\\|")
    if how is How.NAMES:
        return f"`{shape}` in `{reach.theirs}`"
    if how in (How.CALLS, How.REGISTERS):
        return f"`{reach.theirs}({shape})`"
    return f"`{reach.theirs}`" + (f" `{shape}`" if shape else "")


def signatures() -> str:
    """The text of signatures.txt."""
    found = {}
    for reach in (reach for place in PLACES for reach in place.reaches):
        if reach.how not in (How.OVERRIDES, How.REPLACES):
            continue
        shape = signature(reach)
        if shape is None and reach.only:  # it may be installed elsewhere
            shape = known_signatures().get(reach.theirs)
        if shape is not None:
            found[reach.theirs] = shape
    return "".join(f"{symbol}({shape})\n" for symbol, shape in sorted(found.items()))


def write() -> None:
    """Write all of it."""
    for file, text in pages().items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    SIGNATURES.write_text(signatures())
