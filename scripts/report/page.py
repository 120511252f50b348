"""Table and figure in one HTML page that needs no other file."""

import base64
from html import escape
from pathlib import Path

from scripts.report.runs import ReportedRun
from scripts.report.table import NOTE, Table, has_speed_ups
from verl_vcpo.whole_file import write_whole

_STYLE = (
    "body{font-family:system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse}th,td{padding:.3rem .9rem;border-bottom:1px solid #ddd;text-align:left}"
    "img{max-width:100%}small{color:#666}"
)


def write(table: Table, picture: Path, runs: list[ReportedRun], path: Path) -> None:
    """Write the page; `picture` is a PNG, embedded."""
    header, *rows = table
    head = _row(header, "th")
    body = "\n".join(_row(row, "td") for row in rows)
    image = base64.b64encode(picture.read_bytes()).decode()
    title = escape(f"Runs: {', '.join(dict.fromkeys(run.task for run in runs))}")
    note = f"<p><small>{escape(NOTE)}</small></p>" if has_speed_ups(table) else ""
    folders = "".join(f"<li>{escape(run.label)}: <code>{escape(str(run.folder))}</code></li>" for run in runs)
    write_whole(
        path,
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n"
        f"<body><h1>{title}</h1>\n<table>\n{head}\n{body}\n</table>\n{note}\n"
        f'<p><img alt="Accuracy, effective sample size, gradient norm and KL over the training steps" '
        f'src="data:image/png;base64,{image}"></p>\n<ul>{folders}</ul>\n</body></html>\n',
    )


def _row(cells: list[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
