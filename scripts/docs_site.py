"""Hooks of mkdocs.yml: what GitHub makes of the same pages by itself, and the tutorial as a page."""

import html
import logging
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TUTORIAL_SOURCE, TUTORIAL_PAGE = "tutorial/vcpo_in_one_file.py", "tutorial/vcpo_in_one_file.md"
# [text](../file#anchor)
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)\s#]*)(#[^)\s]*)?\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[([](.*?)\\[)\]]</\1>', re.DOTALL)
_log = logging.getLogger("mkdocs.hooks.docs_site")  # a warning ends a strict build


def on_files(files: Files, config: Any) -> Files:
    """Add the tutorial, whose source is a program."""
    program = (DOCS / TUTORIAL_SOURCE).read_text(encoding="utf-8")
    files.append(File.generated(config, TUTORIAL_PAGE, content=as_page(program)))
    return files


def as_page(program: str) -> str:
    """A program in cells ("percent format") as Markdown: comments of Markdown cells as text, other cells as code."""
    parts = []
    for cell in re.split(r"^# %%", program, flags=re.MULTILINE)[1:]:
        kind, _, body = cell.partition("\n")
        if "[markdown]" in kind:
            parts.append(re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE))
        else:
            parts.append(f"```python\n{body.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to files outside docs/ lead to the repository, or become plain text where no repository is named."""
    folder = (DOCS / page.file.src_uri).parent

    def mended(link: re.Match[str]) -> str:
        text, path, anchor = link.groups()
        target = (folder / path).resolve()
        if target.is_relative_to(DOCS):
            return link[0]
        if not (target.is_relative_to(ROOT) and target.exists()):
            _log.warning("%s: the link to %s leads nowhere", page.file.src_uri, path)
        if not config.repo_url:
            return text
        kind = "tree" if target.is_dir() else "blob"
        return f"[{text}]({config.repo_url.rstrip('/')}/{kind}/main/{target.relative_to(ROOT)}{anchor or ''})"

    return LINK.sub(mended, markdown).replace(f"{TUTORIAL_SOURCE})", f"{TUTORIAL_PAGE})")


def on_page_content(page_html: str, page: Any, config: Any, files: Any) -> str:
    """Formulas as MathML, which browsers show without a script."""

    def mathml(formula: re.Match[str]) -> str:
        display = "block" if formula[1] == "div" else "inline"
        return convert(html.unescape(formula[2]), display=display)

    return FORMULA.sub(mathml, page_html)
