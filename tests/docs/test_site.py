"""The documentation as a site: no link, anchor or reference is dead, and a phone shows every page in its width."""

import functools
import http.server
import os
import subprocess
import threading
from pathlib import Path

import pytest

from testkit import browser

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-docs/bin/python"
PHONE = (390, 844)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-docs: bash scripts/install_docs.sh"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    # without --quiet, which would hide warnings from --strict
    command = [PYTHON, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_pages_have_what_the_hooks_make(site: Path) -> None:
    tutorial = (site / "tutorial/vcpo_in_one_file/index.html").read_text()
    assert "<math" in tutorial and 'class="arithmatex"' not in tutorial, "formulas are MathML"
    assert "optimal_baseline" in tutorial and "# %%" not in tutorial
    pages = [page.read_text() for page in (site / "index.html", site / "guide/start/index.html")]
    assert not [page for page in pages if 'vcpo_in_one_file.py"' in page], "links to the program lead to its page"
    assert 'id="vcpo.estimate"' in (site / "reference/vcpo/index.html").read_text()


@pytest.mark.skipif(not browser.PROGRAM, reason="no chromium: bash scripts/install_chromium.sh")
def test_no_page_is_wider_than_a_phone(site: Path, tmp_path: Path) -> None:
    names = sorted(str(page.relative_to(site)) for page in site.rglob("index.html"))
    assert len(names) > 20
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        wide = {}
        with browser.page(tmp_path) as page:
            page.size(*PHONE)
            for name in names:
                page.open(f"http://127.0.0.1:{server.server_port}/{name}", "document.readyState == 'complete'")
                width = page.run("document.documentElement.scrollWidth")
                if width > PHONE[0]:
                    wide[name] = width
        server.shutdown()
    assert not wide


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""
