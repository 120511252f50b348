"""Every command on a page is there, with the options it is given, and every file that a page names."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERL = find_spec("verl")
assert VERL is not None and VERL.origin
UPSTREAM = Path(VERL.origin).parents[1]
PAGES = sorted(
    {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("examples/*/*.md")}
)
OURS = ("docs", "examples", "lab", "recipe", "sandbox", "scripts", "tests", "vcpo", "verl", "deploy", "requirements")
COMMAND = re.compile(r"(?:python(?: -P)? (-m )?|bash )([\w./=-]+)([^`\n|&;#]*)")
OPTION = re.compile(r"(?<=\s)--[a-z][a-z-]*")
PASSED_ON = ("recipe/vllm.py",)  # its options are vLLM's
# A path in code or in a link: below a folder of ours, with a suffix.
FILE = re.compile(rf"[`(](?:\.\./)*((?:{'|'.join(OURS)})/[\w./-]+\.(?:py|sh|yaml|md|txt|lock|png|parquet))(?=[`)#])")


def text_of(page: Path) -> str:
    """With lines that go on joined, and without what only an earlier commit has."""
    text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
    return re.sub(r"`[^`]+`\s+of\s+commit\s+`\w+`", "", text)


def commands(page: Path) -> Iterator[tuple[str, Path | None, list[str]]]:
    """(the command as shown, its file or None, its options) of those that are ours."""
    for shown in COMMAND.finditer(text_of(page)):
        is_module, name, rest = shown.groups()
        if name.split("/" if not is_module else ".")[0] not in OURS:
            continue
        places = [ROOT / name]
        if is_module:
            base = ROOT / name.rstrip(".").replace(".", "/")
            places = [base.with_suffix(".py"), base / "__main__.py"]
        yield shown[0].strip(), next((place for place in places if place.is_file()), None), OPTION.findall(rest)


def sources(file: Path) -> str:
    """What may define the options of a command."""
    files = [file, ROOT / "recipe/fully_async_policy/main.py"]  # add_config_dir, which others call
    if file.name == "__main__.py":
        files += file.parent.glob("*.py")
    if file.name == "prepare_data.py":
        files += (ROOT / "recipe/tasks").rglob("*.py")  # each task adds its own
    return "".join(path.read_text(encoding="utf-8") for path in files)


def defines(source: str, option: str) -> bool:
    """By its text, or as a field of the settings that options are made of."""
    field = option.removeprefix("--").replace("-", "_")
    return option in source or re.search(rf"^    {field}: ", source, re.MULTILINE) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_there(page: Path) -> None:
    wrong = []
    for shown, file, options in commands(page):
        if file is None:
            wrong.append(f"{shown}: no such command")
        elif str(file.relative_to(ROOT)) not in PASSED_ON:
            known = sources(file)
            wrong += [f"{shown}: no option {option}" for option in options if not defines(known, option)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_is_there(page: Path) -> None:
    named = FILE.findall(text_of(page))
    missing = [name for name in named if not (ROOT / name).exists() and not (UPSTREAM / name).exists()]
    assert not missing


def test_the_commands_are_found() -> None:
    """A page whose commands are written in another way would pass unseen."""
    assert sum(1 for page in PAGES for _ in commands(page)) > 80
