"""The pages of docs/reference, a row of the guide to a cluster, and the site's navigation say what is there."""

import re
from pathlib import Path

from omegaconf import OmegaConf

from recipe.fully_async_policy.settings import method, other_names, own_files
from tests.docs import settings_page
from vcpo.diagnostics import AlarmLevels, Sign
from verl_vcpo.actor.model.models import Install, trained_with
from verl_vcpo.report import advice
from verl_vcpo.report.run_log import ACCURACIES, HEADLINES

ROOT = Path(__file__).parents[2]
COMMANDS, METRICS, METHODS = (
    (ROOT / f"docs/reference/{name}.md").read_text() for name in ("commands", "metrics", "methods")
)
PROGRAMS = ("recipe", "scripts", "lab", "sandbox", "tests/reliability", "tests/exactness")
# Started by other programs: a child process, a script that others source.
INTERNAL = {
    "code_sandbox.interpreter",
    "recipe.fully_async_policy.launch.compiler",
    "recipe.fully_async_policy.launch.processes",
    "sandbox.attacks.programs.warm",
    "scripts.uv_pip",
    "scripts/install_steps.sh",
    "scripts/gpu_rehearsal.sh",
}


def test_every_command_is_on_the_page() -> None:
    programs = [path for folder in PROGRAMS for path in (ROOT / folder).rglob("*.py")]
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__").removeprefix("sandbox.src.")
        for path in programs
        if 'if __name__ == "__main__"' in path.read_text()
    }
    names |= {str(path.relative_to(ROOT)) for path in (ROOT / "scripts").glob("*.sh")}
    on_page = set(re.findall(r"`(?:python -m|bash) ([\w./]+)[ `]", COMMANDS))
    assert names >= INTERNAL, "no longer there"
    assert not (names - INTERNAL) - on_page


def test_every_method_has_one_row() -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", METHODS.split("## What to know")[0], re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(method.names())


def test_the_settings_are_what_the_command_writes() -> None:
    assert settings_page.PAGE.read_text() == settings_page.page(), "python -m tests.docs.settings_page --write"


def test_no_setting_is_left_out() -> None:
    """Also none whose line in the yaml lost its comment."""
    text = settings_page.page()
    trainer = OmegaConf.load(own_files.CONFIG_DIR / "vcpo_trainer.yaml")
    wanted = ["run_dir", "samples_every", "save_model", "vcpo.norms.how"]
    wanted += [f"async.{name}" for name in trainer["async"]]
    wanted += [f"vcpo.{name}" for name in trainer.vcpo if name not in ("_target_", "norms")]
    assert not [name for name in wanted if f"| `{name}` |" not in text]
    assert not [line for line in text.splitlines() if line.startswith("|") and line.endswith("|  |")]


def metrics_of(heading: str) -> list[list[str]]:
    """The cells of the table in a section about metrics, less its heading."""
    (text,) = (part for part in re.split(r"^#+ ", METRICS, flags=re.MULTILINE) if part.startswith(heading))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_every_headline_is_there_under_both_names() -> None:
    named = {name: source for name, source, _ in metrics_of("Metrics")}
    extra = {"step", "wall_clock_s", "val_accuracy", ACCURACIES, "collapse_signs"}
    assert {name: source for name, source in named.items() if name not in extra} == HEADLINES
    assert extra <= named.keys()


def test_the_levels_are_those_of_the_code() -> None:
    """The alarm's, and the advice's."""
    levels = AlarmLevels()
    numbers = {sign: [float(n) for n in re.findall(r"\d+(?:\.\d+)?", text)] for sign, text in metrics_of("The alarm")}
    assert numbers == {
        Sign.LOW_ESS_RATIO: [levels.ess_ratio, levels.ess_steps],
        Sign.VANISHED_GRADIENT: [levels.spike, levels.window, levels.window, levels.vanish, levels.vanish_steps],
        Sign.KL_GROWTH: [levels.kl, levels.kl_steps],
    }
    held_back = "vcpo/async/deadline_wait_s` as a share of `step_s"
    of_advice = {"trainer_idle_share": advice._IDLE, "sampler_idle_share": advice._IDLE, held_back: advice._HELD_BACK}
    of_advice["rise of `vcpo/truncated/share` above its lowest mean of ten steps"] = advice._RISE
    assert {what: float(level) for what, level in metrics_of("Advice")} == of_advice


def test_every_metric_of_ours_is_there() -> None:
    """A name in the code has `actor/` before it, or gets it from verl."""
    code = "".join(path.read_text() for path in (ROOT / "verl" / "verl_vcpo").rglob("*.py"))
    in_code = set(re.findall(r'"(?:actor/)?(vcpo/[a-z_]+(?:/[a-z_]+)*)"', code))
    on_page = {name.removeprefix("actor/") for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)+)`", METRICS)}
    assert len(in_code) > 20
    assert {name for name in in_code if "=" not in name} <= on_page
    assert {name for name in on_page if name.startswith("vcpo/")} <= in_code


def test_models_of_each_installation() -> None:
    page = (ROOT / "docs/guide/cluster.md").read_text()
    (row,) = re.findall(r"^\| models.*\|$", page, re.MULTILINE)
    _, cpu, gpu, more = (set(re.findall(r"`(\w+)`", cell)) for cell in row.strip("|").split("|"))
    assert (cpu, gpu) == (set(trained_with(Install.CPU)), set(trained_with(Install.GPU)))
    assert gpu | more == set(trained_with(Install.TRANSFORMER_ENGINE)) and not gpu & more


def test_the_published_settings_are_those_of_the_hints() -> None:
    """Each name has a row, which names what the hint names."""
    page = (ROOT / "docs/explanation/differences.md").read_text()
    rows = [line for line in page.partition("## The settings")[2].splitlines() if line.startswith("| `")]
    for name, hint in other_names.PUBLISHED.items():
        if any(other.startswith(f"{name}.") for other in other_names.PUBLISHED):  # of the section's other settings
            continue
        (row,) = (row for row in rows if re.search(rf"[`.]{re.escape(name)}[`=]", row.split("|")[1]))
        given = re.findall(r"\b(?:method=\w+|WANDB_\w+|(?:\w+\.)+\w+)", hint.replace("127.0.0.1", ""))
        there = row.split("|")[2]
        assert not [setting for setting in given if setting.removeprefix("method=") not in there]
        assert given or there.strip() in ("always so", "not offered"), name
        assert given or there.split()[0] in hint, name


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if f" {page}\n" not in navigation]
