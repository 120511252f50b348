"""docs/guide/read-a-run.md shows lines of docs/quickstart."""

import json
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def shown(step: int) -> list[str]:
    cells = [str(step)]
    for method in ("none", "vcpo"):
        lines = (json.loads(line) for line in (DOCS / "quickstart" / method / "metrics.jsonl").read_text().splitlines())
        (line,) = (line for line in lines if line["step"] == step)
        cells += [f"{line['ess_ratio']:.2f}", f"{line['kl']:.2f}", f"{100 * line['val_accuracy']:.1f} %"]
    return cells


def test_the_table_is_of_the_published_runs() -> None:
    text = (DOCS / "guide/read-a-run.md").read_text().split("## In the quickstart's runs")[1].split("## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 3 and rows == [shown(int(row[0])) for row in rows]
