"""The ports of a command, compared with the table of all ports in docs/explanation/security.md."""

import re

from tests.kit import ROOT
from tests.kit.small_run import Listener

_COMMANDS = {"recipe.vllm", "recipe.evaluate", "scripts.report", "code_sandbox"}
_RUNS_ROWS = 7  # at least
_FIVE_CELLS = re.compile(r"^\| (`.*?) \| .* \| .* \| .* \| .* \|$", re.MULTILINE)


def check_ports(listeners: list[Listener], command: str | None = None) -> None:
    """Each port is on loopback, and of a row of the table; each row has one.

    Args:
        command: whose rows; None: a run's, on one machine.
    """
    cells = _FIVE_CELLS.findall((ROOT / "docs/explanation/security.md").read_text())
    rows = [set(re.findall(r"`([^`]+)`", cell)) for cell in cells if not cell.endswith("on a cluster only")]
    rows = [names for names in rows if (command in names if command else not names & _COMMANDS)]
    assert len(rows) >= (1 if command else _RUNS_ROWS), "the table is not read"
    for names in rows:
        found = [one for one in listeners if any(name in one.process for name in names)]
        assert found, f"none of {names} is found, so these may listen anywhere"
    strange = [one for one in listeners if not any(name in one.process for names in rows for name in names)]
    assert not strange, "without a row in docs/explanation/security.md"
    assert not [one for one in listeners if not one.on_loopback], "other machines can connect"
