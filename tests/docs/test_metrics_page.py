"""docs/reference/metrics.md says what the code says: the names of metrics.jsonl, and the levels of the alarm."""

import re
from pathlib import Path

from vcpo.diagnostics import AlarmLevels, Sign
from verl_vcpo.report import advice
from verl_vcpo.report.run_log import ACCURACIES, HEADLINES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/metrics.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of a section's table, less its heading."""
    section = re.split(r"^#+ ", PAGE, flags=re.MULTILINE)
    (text,) = (part for part in section if part.startswith(heading))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_every_headline_is_there_under_both_names() -> None:
    shown = {name: source for name, source, _ in rows("Metrics")}
    extra = {"step", "wall_clock_s", "val_accuracy", ACCURACIES, "collapse_signs"}
    assert {name: source for name, source in shown.items() if name not in extra} == HEADLINES
    assert extra <= shown.keys()


def test_the_alarm_s_levels_are_those_of_the_code() -> None:
    levels = AlarmLevels()
    numbers = {sign: [float(n) for n in re.findall(r"\d+(?:\.\d+)?", text)] for sign, text in rows("The alarm")}
    assert numbers == {
        Sign.LOW_ESS_RATIO: [levels.ess_ratio, levels.ess_steps],
        Sign.VANISHED_GRADIENT: [levels.spike, levels.window, levels.window, levels.vanish, levels.vanish_steps],
        Sign.KL_GROWTH: [levels.kl, levels.kl_steps],
    }


def test_the_levels_of_the_advice_are_those_of_the_code() -> None:
    held_back = "vcpo/async/deadline_wait_s` as a share of `step_s"
    levels = {"trainer_idle_share": advice._IDLE, "sampler_idle_share": advice._IDLE, held_back: advice._HELD_BACK}
    levels["rise of `vcpo/truncated/share` above its lowest mean of ten steps"] = advice._RISE
    assert {what: float(level) for what, level in rows("Advice")} == levels


def test_every_metric_of_ours_is_there() -> None:
    """A name in the code has `actor/` before it, or gets it from verl."""
    code = "".join(path.read_text() for path in (ROOT / "verl" / "verl_vcpo").rglob("*.py"))
    in_code = set(re.findall(r'"(?:actor/)?(vcpo/[a-z_]+(?:/[a-z_]+)*)"', code))
    on_page = {name.removeprefix("actor/") for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)+)`", PAGE)}
    assert len(in_code) > 20
    assert {name for name in in_code if "=" not in name} <= on_page
    assert {name for name in on_page if name.startswith("vcpo/")} <= in_code
