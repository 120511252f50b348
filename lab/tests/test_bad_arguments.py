"""Wrong arguments of the lab's commands: exit code 2, and one line that names the argument and what to give."""

from pathlib import Path

import pytest

from lab.simulator import main as simulator
from tests.kit.wrong_argument import check_refused

WRONG = [
    ("lab.simulator.main", ["--async.lag=8"], "a setting has no dashes: async.lag=8"),
    ("lab.stability.real_stack", ["--lag", "9", "--steps", "9"], "--steps 9: there is no evaluation after step"),
    ("lab.stability.__main__", ["--lr", "nan"], "argument --lr: nan: give a number above 0"),
]


@pytest.mark.parametrize(("module", "arguments", "expected"), WRONG, ids=[f"{m} {' '.join(a)}" for m, a, _ in WRONG])
def test_a_wrong_argument(
    module: str,
    arguments: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_refused(module, arguments, expected, monkeypatch, capsys)


PRESET = """# @package _global_
defaults: [{/scale: "${oc.env:VCPO_HARDWARE}"}, _self_]
data: {max_response_length: LENGTH}
actor_rollout_ref: {model: {path: models/mine}}
"""


@pytest.mark.parametrize(
    ("length", "said"),
    [
        ("7", "actor_rollout_ref.model.path=models/mine: no such folder"),
        ("0", "task/mine.yaml:3: data.max_response_length=0: give a whole number"),
    ],
)
def test_the_simulator_takes_presets_of_ones_own(
    length: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "mine.yaml").write_text(PRESET.replace("LENGTH", length))
    files = [f"data.{part}_files=no.parquet" for part in ("train", "val")]
    assert simulator.main(["+task=mine", "--config-dir", str(tmp_path), "hardware=cpu", *files]) == 2
    assert said in capsys.readouterr().err
