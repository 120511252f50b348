"""A command that refuses its arguments."""

import importlib
import sys

import pytest


def check_refused(
    module: str,
    arguments: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fails unless the command ends with code 2 and one line, which has the words that are expected."""
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    try:
        code = importlib.import_module(module).main()
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2 and expected in error and error.count("\n") == 1, error
