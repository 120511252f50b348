"""One HTML page that needs no other file and no network: plotly.js is in it, which is 4.8 MB of it."""

import json
import re
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from verl_vcpo.common.whole_file import write_whole

_PARTS = files("scripts.report")


def write(payload: dict[str, Any], path: Path) -> None:
    """Write the page of a payload."""
    write_whole(path, html(payload))


def html(payload: dict[str, Any], live: bool = False) -> str:
    """The page.

    Args:
        live: the page asks for `data.json` beside it again and again.
    """
    from plotly.offline import get_plotlyjs

    parts = {
        "TITLE": escape(payload["title"]),
        "LIVE": "true" if live else "false",
        "STYLE": (_PARTS / "page.css").read_text(),
        "SCRIPT": (_PARTS / "page.js").read_text(),
        "DATA": embedded(payload),
        "PLOTLY": get_plotlyjs(),
    }
    return re.sub("@@([A-Z]+)@@", lambda place: parts[place[1]], (_PARTS / "page.html").read_text())


def embedded(payload: dict[str, Any]) -> str:
    """JSON that cannot end the script element around it: a response may contain `</script>`."""
    return json.dumps(payload, allow_nan=False).replace("<", "\\u003c")
