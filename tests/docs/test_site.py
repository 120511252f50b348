"""The documentation as a site: no link is dead, diagrams are drawn, and a phone shows every page in its width."""

import contextlib
import functools
import http.server
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.kit import browser

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-docs/bin/python"
MERMAID = ROOT / ".venv-docs/mermaid/mermaid.min.js"
PHONE, LAPTOP = (390, 844), (1280, 800)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-docs: bash scripts/install_docs.sh"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("docs")
    command = [PYTHON, "-m", "tests.docs.site", "--out", folder]
    environment = {**os.environ, "PYTHONPATH": "", "REPO_URL": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[x](own-task.md#nowhere)", "--strict"),
        ("[x](nowhere.md)", "--strict"),
        ("::: vcpo.nothing", "Could not collect 'vcpo.nothing'"),
    ],
)
def test_a_dead_link_anchor_or_reference_ends_the_build(site: Path, tmp_path: Path, text: str, error: str) -> None:
    shutil.copytree(site.parent, tmp_path, dirs_exist_ok=True)
    with open(tmp_path / "docs/guide/start.md", "a") as page:
        page.write(f"\n{text}\n")
    command = [PYTHON, "-m", "zensical", "build", "--strict", "-f", tmp_path / "mkdocs.yml"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'verl'}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and error in done.stderr


def test_pages_have_what_the_program_makes(site: Path) -> None:
    tutorial = (site / "tutorial/plain_loop/index.html").read_text()
    assert "<math" in tutorial and 'class="arithmatex"' not in tutorial, "formulas are MathML"
    assert "score_gradients" in tutorial and "# %%" not in tutorial
    pages = [page.read_text() for page in (site / "index.html", site / "guide/start/index.html")]
    assert not [page for page in pages if 'plain_loop.py"' in page], "links to the program lead to its page"


def test_the_page_of_functions_has_the_update_and_its_example(site: Path) -> None:
    page = (site / "reference/api/index.html").read_text()
    assert all(f'id="{name}"' in page for name in ("vcpo.estimate", "verl_vcpo.loop.trainer.LagKTrainer"))
    assert "update.step_size_multiplier" in re.sub("<[^>]*>", "", page)


def test_the_first_page_is_the_repository_s(site: Path) -> None:
    first = (site / "index.html").read_text()
    assert "What VCPO does" in first and "Where to go next" in first
    assert 'src="accuracy.png"' in first and 'href="guide/start/"' in first


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[str]:
    """The address under which a browser finds the folder, for the block."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.skipif(not browser.PROGRAM, reason="no chromium: bash scripts/install_chromium.sh")
def test_the_search_finds_what_users_ask_for(site: Path, tmp_path: Path) -> None:
    # the theme puts the dialog in a shadow tree
    inside = "[...document.querySelectorAll('*')].map(element => element.shadowRoot).filter(Boolean)"
    links = f"{inside}.flatMap(root => [...root.querySelectorAll('a')]).map(link => link.pathname)"
    answers = {
        "lora": "guide/cluster/",
        "lag": "explanation/architecture/",
        "resume": "guide/start/",
        "out of memory": "guide/troubleshooting/",
    }
    with _served(site) as address, browser.page(tmp_path) as page:
        page.size(*LAPTOP)
        for query, answer in answers.items():
            page.open(f"{address}/index.html", "document.readyState == 'complete'")
            page.click(".md-search__button")
            page.wait(f"{inside}.some(root => root.activeElement)")
            page.command("Input.insertText", text=query)
            page.wait(f"{links}.length")
            assert f"/{answer}" in page.run(links)


@pytest.mark.skipif(not browser.PROGRAM, reason="no chromium: bash scripts/install_chromium.sh")
def test_no_page_is_wider_than_a_phone(site: Path, tmp_path: Path) -> None:
    names = sorted(str(page.relative_to(site)) for page in site.rglob("index.html"))
    assert len(names) > 20
    wide = {}
    with _served(site) as address, browser.page(tmp_path) as page:
        page.size(*PHONE)
        for name in names:
            page.open(f"{address}/{name}", "document.readyState == 'complete'")
            width = page.run("document.documentElement.scrollWidth")
            if width > PHONE[0]:
                wide[name] = width
    assert not wide


@pytest.mark.skipif(not browser.PROGRAM, reason="no chromium: bash scripts/install_chromium.sh")
@pytest.mark.skipif(not MERMAID.exists(), reason="no Mermaid: install npm, bash scripts/install_docs.sh")
@pytest.mark.parametrize("size", [PHONE, LAPTOP], ids=["phone", "laptop"])
def test_diagrams_are_drawn_without_a_network(site: Path, tmp_path: Path, size: tuple[int, int]) -> None:
    with _served(site) as address, browser.page(tmp_path) as page:
        page.size(*size)
        for name in ("index.html", "explanation/architecture/index.html"):
            wanted = (site / name).read_text().count('<pre class="mermaid"')
            assert wanted > 0
            page.errors.clear()
            # the theme puts a drawing in the place of the text
            page.open(f"{address}/{name}", f"document.querySelectorAll('div.mermaid').length == {wanted}")
            heights = page.run("[...document.querySelectorAll('div.mermaid')].map(drawing => drawing.clientHeight)")
            assert min(heights) > 150 and not page.errors, "lower ones are too wide to be read on a phone"
            assert page.run("document.documentElement.scrollWidth") <= size[0]


def test_pages_are_formatted() -> None:
    """As the hook of .pre-commit-config.yaml would."""
    (hook,) = (
        hook
        for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
        for hook in repository["hooks"]
        if hook["id"] == "mdformat"
    )
    texts = (*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *(ROOT / "docs").rglob("*.md"))
    pages = [str(page.relative_to(ROOT)) for page in texts]
    pages = [page for page in pages if re.search(hook["files"], page)]
    assert len(pages) > 20
    command = [PYTHON, "-m", "mdformat", "--check", *pages]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""
