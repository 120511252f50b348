"""Every setting that a page names is there, and so is every task, method, agent loop and hardware that it chooses."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import vcpo
from recipe.fully_async_policy import main
from recipe.fully_async_policy.settings import names, own_files
from tests.docs.test_commands import PAGES, ROOT, text_of

# A change says what the settings were called before; the reference of other packages has their names.
PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
CHOICE = re.compile(r"(?<![\w.])\+?(task|method|agent|hardware)=([a-z]\w*)")
# Sections whose entries others read: Megatron, Ray, an agent loop of a user's own. A column of rows
OPEN = ("override_transformer_config.", "ray_init._", "rollout.custom.", "reward_model.ground_truth")


@pytest.fixture(scope="module")
def known() -> set[str]:
    """All settings of a run, with their sections."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VCPO_HARDWARE", "cpu")
        tasks = ("tool_use", "reasoning_gym", "human_eval")
        runs = [main.compose_unchecked([f"+task={task}", "method=m2po"]) for task in tasks]
        return {name for run in runs for name in names.all_names(run)}


def code_of(page: Path) -> str:
    return "\n".join(CODE.findall(text_of(page)))


def is_code(name: str) -> bool:
    """`vcpo.ess` is a module, and `vcpo.estimate` a function."""
    package, member = name.split(".")[:2]
    return package == "vcpo" and (hasattr(vcpo, member) or find_spec(f"vcpo.{member}") is not None)


def settings(page: Path, known: set[str]) -> set[str]:
    """What begins with the name of a section and a dot, and is no file."""
    sections = "|".join(sorted({name.partition(".")[0] for name in known if "." in name}))
    found = re.findall(rf"(?<![\w./])((?:{sections})\.[a-z_][\w.]*\w)(?![\w(/{{])", code_of(page))
    return {name for name in found if not name.endswith((".pt", ".md", ".py"))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_setting_is_there(page: Path, known: set[str]) -> None:
    named = {name for name in settings(page, known) if not any(part in name for part in OPEN)}
    missing = {name for name in named if not any(of == name or of.startswith(f"{name}.") for of in known)}
    assert not {name for name in missing if not is_code(name)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_choice_is_there(page: Path) -> None:
    """Or the page makes it, as the guide to a task of one's own does, or an example has it."""
    code = code_of(page)
    folders = [own_files.CONFIG_DIR, *(ROOT / name for name in re.findall(r"--config-dir (examples/\w+)", code))]
    chosen = {f"{group}/{name}.yaml" for group, name in CHOICE.findall(code)}
    found = {file for file in chosen if any((folder / file).is_file() for folder in folders)}
    assert not {file for file in chosen - found if f"/{file} <<" not in code}


def test_settings_are_found(known: set[str]) -> None:
    """A page whose settings are written in another way would pass unseen."""
    assert len(set().union(*(settings(page, known) for page in PAGES))) > 80
