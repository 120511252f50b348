"""The documentation as a site: `.venv-docs/bin/python -m tests.docs.site`. It is built in outputs/docs/site.

Zensical makes the site of pages in docs/ that this program writes: links to files outside docs/ are mended, and the
first page (README.md), the page of a program and the reference of `API` are added. The program is Zensical's extension
of Markdown, too, which shows formulas.
"""

import argparse
import html
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.postprocessors import Postprocessor

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TUTORIAL_SOURCE, TUTORIAL_PAGE = ROOT / "examples" / "plain_loop.py", "tutorial/plain_loop.md"
# The page of public functions and classes: a heading, and what mkdocstrings shows below it.
API_PAGE = "reference/api.md"
API = {
    "The update": "vcpo.estimate vcpo.Estimate",
    "Settings of the update": "vcpo.VCPOConfig vcpo.config",
    "Weights": "vcpo.importance",
    "Effective sample size": "vcpo.ess",
    "Lag and arithmetic": "vcpo.mismatch",
    "Baselines": "vcpo.baseline",
    "Gradient norms": "vcpo.gradnorm.Segments vcpo.gradnorm.squared_norms",
    "The alarm": "vcpo.diagnostics",
    "Other methods": "vcpo.stabilizers.bapo vcpo.stabilizers.m2po vcpo.stabilizers.off_policy_mask "
    "vcpo.stabilizers.topr vcpo.stabilizers.vespo vcpo.stabilizers.tba",
    "veRL's trainer": "verl_vcpo.loop.trainer.LagKTrainer verl_vcpo.loop.prompts.replay_buffer.LagKReplayBuffer "
    "verl_vcpo.loop.prompts.deadlines verl_vcpo.user_code.killable.Pool",
    "veRL's actor": "verl_vcpo.actor.megatron_actor.VCPOMegatronEngine verl_vcpo.actor.engine_workers.VCPOActorWorker "
    "verl_vcpo.actor.vcpo_settings.VCPOSettings verl_vcpo.actor.norms_settings",
    "veRL's samplers": "verl_vcpo.samplers.client.ResumingLLMClient verl_vcpo.samplers.keeper.SamplerKeeper "
    "verl_vcpo.samplers.admission.AdmissionGate",
}
MERMAID = ROOT / ".venv-docs" / "mermaid" / "mermaid.min.js"  # scripts/install_docs.sh
# Pages with diagrams load the site's own Mermaid before the theme's script, which else loads it from the network.
TEMPLATE = """{% extends "base.html" %}
{% block libs %}
  {% if 'class="mermaid"' in page.content %}
    <script src="{{ 'assets/mermaid.min.js' | url }}"></script>
  {% endif %}
{% endblock %}
"""
# [text](../file#anchor)
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)\s#]*)(#[^)\s]*)?\)")
# [text](docs/file) of the repository's README.md
LOCAL_LINK = re.compile(r"\]\((?!\w+:|#)(docs/)?")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[([](.*?)\\[)\]]</\1>', re.DOTALL)
MADE_HERE = ".docs_site"  # in a folder that this program has made, and may remove
_NO_HEADING = "\n    options: {show_root_heading: false}"


def write_pages(folder: Path, repository: str) -> None:
    """Write what Zensical reads into a folder: mkdocs.yml, the pages, and Mermaid where it is installed.

    Args:
        folder: an earlier site in it is removed.
        repository: the address of the repository, or nothing.

    Raises:
        ValueError: for a link that leads nowhere, and for a folder with other files.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / MADE_HERE).exists():
        raise ValueError(f"{folder} has other files: give --out a new folder")
    program = TUTORIAL_SOURCE.read_text(encoding="utf-8").replace("](../docs/", "](../")
    made = {"README.md": front_page(), TUTORIAL_PAGE: as_page(program), API_PAGE: api_page()}
    pages = {str(page.relative_to(DOCS)): page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")}
    mended = {name: with_links_mended(text, name, repository) for name, text in {**pages, **made}.items()}
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder / "docs")
    (folder / MADE_HERE).touch()
    for name, text in mended.items():
        target = folder / "docs" / name
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8")
    (folder / "theme").mkdir()
    if MERMAID.is_file():
        (folder / "theme" / "main.html").write_text(TEMPLATE)
        (folder / "docs" / "assets").mkdir()
        shutil.copy(MERMAID, folder / "docs" / "assets")
    shutil.copy(ROOT / "mkdocs.yml", folder)


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


def front_page() -> str:
    """The repository's README.md, with its links as they are from docs/."""
    front = (ROOT / "README.md").read_text(encoding="utf-8")
    return LOCAL_LINK.sub(lambda link: "](" if link[1] else "](../", front)


def api_page() -> str:
    """The example of vcpo/README.md, and the reference of `API` for mkdocstrings. Modules have no headings."""
    parts = ["# Functions and classes", "In a run the settings of `VCPOConfig` are `vcpo.NAME=VALUE`. An update:"]
    parts += re.findall(r"^```python\n.*?^```$", (ROOT / "vcpo/README.md").read_text(), re.DOTALL | re.MULTILINE)
    for title, names in API.items():
        parts.append(f"## {title}")
        for name in names.split():
            path = name.replace(".", "/")
            is_module = any((root / f"{path}.py").is_file() for root in (ROOT, ROOT / "verl"))
            parts.append(f"::: {name}" + (_NO_HEADING if is_module else ""))
    return "\n\n".join(parts) + "\n"


def with_links_mended(text: str, name: str, repository: str) -> str:
    """Links to files outside docs/ lead to the repository, or become plain text where no repository is named."""
    folder = (DOCS / name).parent
    pages = {ROOT / "README.md": "README.md", TUTORIAL_SOURCE: TUTORIAL_PAGE}

    def mended(link: re.Match[str]) -> str:
        words, path, anchor = link.groups()
        target = (folder / path).resolve()
        if target in pages:
            return f"[{words}]({os.path.relpath(DOCS / pages[target], folder)}{anchor or ''})"
        if target.is_relative_to(DOCS):
            return link[0]
        if not (target.is_relative_to(ROOT) and target.exists()):
            raise ValueError(f"{name}: the link to {path} leads nowhere")
        if not repository:
            return str(words)
        kind = "tree" if target.is_dir() else "blob"
        return f"[{words}]({repository.rstrip('/')}/{kind}/main/{target.relative_to(ROOT)}{anchor or ''})"

    return LINK.sub(mended, text)


class _MathML(Postprocessor):
    def run(self, text: str) -> str:
        def mathml(formula: re.Match[str]) -> str:
            display = "block" if formula[1] == "div" else "inline"
            return str(convert(html.unescape(formula[2]), display=display))

        return FORMULA.sub(mathml, text)


class Formulas(Extension):
    """Formulas as MathML, which browsers show without a script."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Add it after all else, because other extensions hold back parts of the page until the end."""
        md.postprocessors.register(_MathML(md), "mathml", -100)


def main() -> int:
    """Write the pages, and build the site or serve it. Return 1 with a line on stderr where `write_pages` raises."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs.site", description="Build the documentation's site.")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "docs", help="folder of pages and site")
    parser.add_argument("--serve", action="store_true", help="show the site, as it is now, at a local address")
    settings = parser.parse_args()
    folder = settings.out.resolve()
    try:
        write_pages(folder, os.environ.get("REPO_URL", ""))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    what = ["serve"] if settings.serve else ["build", "--strict"]
    command = [sys.executable, "-m", "zensical", *what, "-f", folder / "mkdocs.yml"]
    # mkdocstrings finds packages on Python's path, and Markdown this file
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'verl'}"}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
