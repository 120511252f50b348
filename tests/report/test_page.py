"""report.html, opened and clicked in Chromium; and `--live`, which serves it."""

import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from scripts.report.__main__ import main
from scripts.report.live import Server, serve
from scripts.report.page import write
from scripts.report.payload import make, read_samples
from scripts.report.runs import read_run
from tests.kit import browser
from tests.report.test_report import config, with_two_sets, write_run
from verl_vcpo.report.learning_signal import IN_A_ROW
from verl_vcpo.report.run_log import SAMPLES_FILE

NEEDS_CHROMIUM = pytest.mark.skipif(browser.PROGRAM is None, reason="no chromium: bash scripts/install_chromium.sh")
DRAWN = "document.querySelectorAll('.plot .main-svg').length >= 9"
HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">@@PLOTLY@@"


def write_samples(run: Path, responses: list[str]) -> None:
    """As many samples, two of each group, of growing weight, with a lag that is lower the larger the weight."""
    with open(run / SAMPLES_FILE, "w") as file:
        for i, response in enumerate(responses):
            sample = {"step": 1, "prompt": "What is 1+1?", "response": response, "reward": i % 2, "lag": 99 - i}
            file.write(json.dumps(sample | {"weight": 0.5 + i, "uid": f"uid-{i // 2}"}) + "\n")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One that collapses, and one with samples that attack the page."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        write_run(
            folder / "off",
            config(10, name="tis_seq", enable=False),
            [0.4, 0.5, 0.3, 0.0, 0.0],
            60,
        ),
        write_run(folder / "vcpo", config(10), [0.4, 0.6, 0.7], 60, finished=False),
    ]
    lines = (runs[0] / "metrics.jsonl").read_text().replace('"collapse_signs": []', '"collapse_signs": ["kl_growth"]')
    (runs[0] / "metrics.jsonl").write_text(lines.replace(f'"{IN_A_ROW}": 0', f'"{IN_A_ROW}": 1', 3))
    of_lags = {"share": 1.0, "reward": 0.25, "weight": 0.9, "gradient_share": 1.0}
    lags = "".join(f', "actor/vcpo/lag/0/{name}": {value}' for name, value in of_lags.items())
    lines = (runs[1] / "metrics.jsonl").read_text().replace('"collapse_signs": []', f'"collapse_signs": []{lags}')
    (runs[1] / "metrics.jsonl").write_text(lines)
    write_samples(runs[1], [HOSTILE, *(f"response {i}" for i in range(1, 60))])
    (runs[1] / "command.txt").write_text("python -m recipe.fully_async_policy.main +task=math async.lag=10\n")
    return runs


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    with browser.page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def url(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write(make([read_run(run) for run in runs]), path)
    return path.as_uri()


def curves(page: browser.Page, panel: str) -> int:
    """How many traces the panel shows."""
    return page.run(f"document.querySelectorAll('#plot-{panel} .scatterlayer .trace').length")


@NEEDS_CHROMIUM
def test_the_page_in_a_browser(url: str, page: browser.Page) -> None:
    page.errors.clear()
    page.colour_scheme("light")
    page.open(url, DRAWN)
    assert page.run("document.title") == "Runs: MATH-500", "no response was run as a program"
    panels = page.run("[...document.querySelectorAll('.plot')].map(e => e.id.slice(5))")
    names = "accuracy reward ess_ratio kl grad_norm equal_groups lag idle tokens_per_s"
    assert panels == names.split()
    assert page.run("[...document.querySelectorAll('.panel .note')].every(e => e.textContent.length > 20)"), "explained"
    assert all(page.run(f"document.querySelectorAll('#plot-{p} .scatterlayer path.js-line').length") for p in panels)
    assert page.run("[...document.querySelectorAll('.annotation-text')].map(e => e.textContent)") == ["alarm"] * 2
    parts = ["outcome", "panels", "warnings", "results", "samples"]
    tops = [page.run(f"document.getElementById('{part}').getBoundingClientRect().top") for part in parts]
    assert tops == sorted(tops), "what came out, then the curves, then the rest"
    said = "MATH-500: vcpo, lag 10, is at 70.0 ± 4.6 % from 40.0 ± 4.9 % after 2 of 4 steps; tis_seq, lag 10, ended at"
    assert page.run("document.getElementById('outcome').textContent").startswith(said)
    assert page.run("[...document.querySelectorAll('#warnings li')].map(e => e.textContent)") == [
        "tis_seq, lag 10: collapse ahead: KL(rollout || policy) stays large, at 4 steps, from 1",
        "tis_seq, lag 10: no signal: all rewards of every group are equal, at 3 steps, from 1",
    ]
    lags = page.run("[...document.querySelectorAll('#lags td')].map(e => e.textContent)")
    assert lags == ["vcpo, lag 10", "0", "0.25", "0.9", "100%", "100%"]
    settings = page.run("document.getElementById('settings').innerText")
    assert "method\ttis_seq\tvcpo" in settings
    assert "async.lag=10" in page.run("document.getElementById('details').innerText")

    assert curves(page, "ess_ratio") == 2
    page.click("#chips label:first-child input")
    assert curves(page, "ess_ratio") == 1, "the run is hidden"
    page.click("#chips label:first-child input")
    assert curves(page, "ess_ratio") == 2

    before = page.run("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.run("getComputedStyle(document.body).backgroundColor") != before
    assert page.run("document.querySelector('#plot-kl text').style.fill") == "rgb(230, 237, 243)", "curves too"
    assert page.errors == []


@NEEDS_CHROMIUM
def test_each_held_out_set_has_a_curve(page: browser.Page, tmp_path: Path) -> None:
    page.errors.clear()
    drawn = {}
    for name, run in (
        ("one", write_run(tmp_path / "one", config(0), [0.4, 0.6], 60)),
        ("two", with_two_sets(tmp_path / "two")),
    ):
        write(make([read_run(run)]), tmp_path / f"{name}.html")
        page.open((tmp_path / f"{name}.html").as_uri(), DRAWN)
        drawn[name] = curves(page, "accuracy")
    assert drawn["two"] == drawn["one"] + 2 and page.errors == []


@NEEDS_CHROMIUM
def test_samples_are_sorted_and_searched(url: str, page: browser.Page) -> None:
    page.errors.clear()
    page.open(url, DRAWN)

    def column(number: int) -> list[str]:
        cells = f"document.querySelectorAll('#samples tbody td:nth-child({number})')"
        return page.run(f"[...{cells}].map(e => e.textContent)")

    assert column(1)[:2] == ["59.50", "58.50"] and len(column(1)) == 50, "by weight, the largest first"
    page.click("#samples-more")
    assert column(1)[-1] == "0.5000" and column(8)[-1] == HOSTILE, "as text"
    assert column(6)[-4:] == ["2", "2", "1", "1"], "groups are numbered in the order of the file"
    page.click("#samples th:first-child")
    assert column(1)[0] == "0.5000"
    page.click("#samples th:nth-child(4)")
    assert column(4)[0] == "99", "by lag"
    page.run("document.getElementById('samples-search').focus()")
    page.command("Input.insertText", text="response 17")
    assert column(8) == ["response 17"]
    assert page.errors == []


@NEEDS_CHROMIUM
def test_on_a_phone_in_the_dark(url: str, page: browser.Page) -> None:
    page.errors.clear()
    page.colour_scheme("dark")
    page.size(360, 800)
    page.open(url, DRAWN)
    assert page.run("document.documentElement.scrollWidth") <= 360, "nothing is to the right of the window"
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    assert page.errors == []


@NEEDS_CHROMIUM
def test_a_run_is_followed(tmp_path: Path, page: browser.Page) -> None:
    """From before its first step on, without a reload."""
    run = tmp_path / "run"
    run.mkdir()
    server = Server([run])
    Thread(target=server.serve_forever, daemon=True).start()
    with server:
        page.errors.clear()
        page.open(server.url, "document.getElementById('outcome').textContent.includes('no metrics.jsonl')")
        run.rmdir()
        write_run(run, config(10), [0.4, 0.6], 60, finished=False)
        page.wait("document.getElementById('chips').textContent.includes('step 1 of 4')")
        with open(run / "metrics.jsonl", "a") as file:
            line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
            file.write(json.dumps(line | {"step": 2}) + "\n")
        page.wait("document.getElementById('chips').textContent.includes('step 2 of 4')")
        assert curves(page, "ess_ratio") == 1
        assert page.errors == []
        server.shutdown()


def test_only_who_has_the_address_gets_the_page(runs: list[Path]) -> None:
    server = Server(runs)
    Thread(target=server.serve_forever, daemon=True).start()
    with server:
        data = server.url + "data.json"
        with urllib.request.urlopen(data) as answer:
            assert [run["lag"] for run in json.load(answer)["runs"]] == [10, 10]
            unchanged = urllib.request.Request(data, headers={"If-None-Match": answer.headers["ETag"]})
        with pytest.raises(urllib.error.HTTPError, match="304"):
            urllib.request.urlopen(unchanged)
        port = server.server_address[1]
        for path in ("", "data.json", "../", f"{server.root.strip('/')}x/"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}")
        assert server.server_address[0] == "127.0.0.1"
        server.shutdown()


def test_a_port_or_a_folder_that_cannot_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--live", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err
    with Server([tmp_path]) as taken:
        assert serve([tmp_path], taken.server_address[1]) == 2
    assert capsys.readouterr().err.startswith("error: --port ")


def test_the_newest_and_the_heaviest_samples_are_kept(tmp_path: Path) -> None:
    """Of 2000 whose log-weight falls: the first 500 and the last 500. A line that is being written is no sample."""
    with open(tmp_path / SAMPLES_FILE, "w") as file:
        for i in range(2000):
            log_weight = None if i == 1999 else 20.0 - i / 100
            weight = None if log_weight is None else min(math.exp(log_weight), 8.0)
            sample = {"step": i, "response": "x", "weight": weight, "log_weight": log_weight, "uid": f"u{i}"}
            file.write(json.dumps(sample) + "\n")
        file.write('{"step": 2000, "resp')
    samples = read_samples(tmp_path)
    assert samples is not None and samples["of"] == 2000
    assert [row["step"] for row in samples["rows"]] == [*range(500), *range(1500, 2000)]
    assert [row["group"] for row in samples["rows"][::999]] == [1, 2000] and samples["rows"][0]["prompt"] is None
    assert read_samples(tmp_path / "none") is None
