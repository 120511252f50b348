"""docs/reference/commands.md has every command that a person may run."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/commands.md").read_text()
# Started by other programs: a child process, a script that others source.
FOLDERS = ("recipe", "scripts", "lab", "sandbox", "tests/reliability", "tests/exactness")
INTERNAL = {
    "code_sandbox.interpreter",
    "recipe.fully_async_policy.settings.compiler",
    "recipe.fully_async_policy.launch.processes",
    "sandbox.attacks.programs.warm",
    "scripts/install_steps.sh",
    "scripts/gpu_rehearsal.sh",
}


def test_every_command_is_on_the_page() -> None:
    programs = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__").removeprefix("sandbox.src.")
        for path in programs
        if 'if __name__ == "__main__"' in path.read_text()
    }
    names |= {str(path.relative_to(ROOT)) for path in (ROOT / "scripts").glob("*.sh")}
    on_page = set(re.findall(r"`(?:python -m|bash) ([\w./]+)[ `]", PAGE))
    assert names >= INTERNAL, "no longer there"
    assert not (names - INTERNAL) - on_page
