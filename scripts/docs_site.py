"""Hooks of mkdocs.yml: what GitHub makes of pages by itself (formulas, diagrams), and pages that are no file in docs/.

These are the first page, which is the repository's README.md; the page of a program; and the reference of `API`.
"""

import html
import logging
import os
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[1]
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
    "veRL's trainer": "verl_vcpo.loop.trainer.LagKTrainer verl_vcpo.loop.replay_buffer.LagKReplayBuffer "
    "verl_vcpo.loop.deadlines verl_vcpo.user_code.killable.Pool",
    "veRL's actor": "verl_vcpo.actor.megatron_actor.VCPOMegatronEngine verl_vcpo.actor.engine_workers.VCPOActorWorker "
    "verl_vcpo.actor.vcpo_settings.VCPOSettings verl_vcpo.actor.norms.settings",
    "veRL's samplers": "verl_vcpo.samplers.client.ResumingLLMClient verl_vcpo.samplers.keeper.SamplerKeeper "
    "verl_vcpo.samplers.admission.AdmissionGate",
}
MERMAID = ROOT / ".venv-docs" / "mermaid" / "mermaid.min.js"  # scripts/install_docs.sh
MERMAID_ON_SITE = "assets/javascripts/mermaid.min.js"
# The theme's own script, which loads Mermaid from the network where a page with diagrams has not loaded it before.
THEME_SCRIPT = re.compile(r'<script src="[^"]*/bundle\.[^"]*"></script>')
# [text](../file#anchor)
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)\s#]*)(#[^)\s]*)?\)")
# [text](docs/file) of the repository's README.md
LOCAL_LINK = re.compile(r"\]\((?!\w+:|#)(docs/)?")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[([](.*?)\\[)\]]</\1>', re.DOTALL)
_NO_HEADING = "\n    options: {show_root_heading: false}"
_log = logging.getLogger("mkdocs.hooks.docs_site")  # a warning ends a strict build


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are no file in docs/, and the script that draws diagrams, where it is installed."""
    program = TUTORIAL_SOURCE.read_text(encoding="utf-8").replace("](../docs/", "](../")
    for page, content in (("README.md", front_page()), (TUTORIAL_PAGE, as_page(program)), (API_PAGE, api_page())):
        files.append(File.generated(config, page, content=content))
    if MERMAID.is_file():
        files.append(File.generated(config, MERMAID_ON_SITE, abs_src_path=str(MERMAID)))
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


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to files outside docs/ lead to the repository, or become plain text where no repository is named."""
    folder = (DOCS / page.file.src_uri).parent
    pages = {ROOT / "README.md": "README.md", TUTORIAL_SOURCE: TUTORIAL_PAGE}

    def mended(link: re.Match[str]) -> str:
        text, path, anchor = link.groups()
        target = (folder / path).resolve()
        if target in pages:
            return f"[{text}]({os.path.relpath(DOCS / pages[target], folder)}{anchor or ''})"
        if target.is_relative_to(DOCS):
            return link[0]
        if not (target.is_relative_to(ROOT) and target.exists()):
            _log.warning("%s: the link to %s leads nowhere", page.file.src_uri, path)
        if not config.repo_url:
            return text
        kind = "tree" if target.is_dir() else "blob"
        return f"[{text}]({config.repo_url.rstrip('/')}/{kind}/main/{target.relative_to(ROOT)}{anchor or ''})"

    return LINK.sub(mended, markdown)


def on_page_content(page_html: str, page: Any, config: Any, files: Any) -> str:
    """Formulas as MathML, which browsers show without a script."""

    def mathml(formula: re.Match[str]) -> str:
        display = "block" if formula[1] == "div" else "inline"
        return convert(html.unescape(formula[2]), display=display)

    return FORMULA.sub(mathml, page_html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Pages with diagrams load the site's own Mermaid, so that they are drawn without a network, too."""
    if not MERMAID.is_file() or 'class="mermaid"' not in output:
        return output
    script = f'<script src="{get_relative_url(MERMAID_ON_SITE, page.url)}"></script>'
    with_script, places = THEME_SCRIPT.subn(lambda theme: script + theme[0], output)
    if places != 1:
        _log.warning("%s: the theme's script is not where diagrams need it", page.file.src_uri)
    return with_script
