"""What our code takes from other packages is there, and is written down: tests/upstream/README.md."""

from inspect import signature
from pathlib import Path

import pytest

from tests.upstream import check, table, theirs
from tests.upstream.ours import Inventory

_TRAINER, _VLLM = "verl/trainer/ppo/v1/trainer_base.py", "vllm/v1/engine/async_llm.py"
# A file of theirs, its text, another text, and what is told.
_CHANGES = (
    (_TRAINER, "def _balance_batch(self, batch:", "def _balance_batch(self, rows:", "_balance_batch is (self, rows,"),
    (_TRAINER, "def _balance_batch(self, batch:", "def _balance_batch(self, rows:", "LagKTrainer._balance_batch takes"),
    (
        _TRAINER,
        "def _add_async_warmup_batches(",
        "def _add_batches(",
        "has no _add_async_warmup_batches. Used in loop/",
    ),
    (_TRAINER, '"gen", timing_raw', '"generate", timing_raw', 'no longer has the text "gen", timing_raw'),
    (
        _VLLM,
        "pause_scheduler_async(mode=mode, ",
        "pause_scheduler_async(",
        "AsyncLLM.pause_generation has another body",
    ),
    (
        "megatron/core/model_parallel_config.py",
        "overlap: bool = False",
        "overlap: bool = True",
        "overlap is = True, was",
    ),
)


@pytest.fixture(scope="module")
def inventory() -> Inventory:
    return Inventory(table.places())


def test_what_is_installed_is_what_we_rely_on(inventory: Inventory) -> None:
    found = check.differences(inventory, table.places(), check.read())
    assert not found, f"{len(found)} differences; see tests/upstream/README.md:\n" + "\n".join(found)
    assert table.page(table.places()) == table.PAGE.read_text(), "python -m tests.upstream --write"


def test_what_is_not_there_is_told() -> None:
    """Made-up rows."""
    expected = {
        "uses verl.no_such_module.at_all name": "is gone: there is no module verl.no_such_module.at_all",
        "uses verl.trainer.main_ppo:TaskRunnerV1 no_such_method": "TaskRunnerV1 has no no_such_method",
        "replaces vllm.no_such_module f -- why": "is gone: there is no module vllm.no_such_module. Used in ours.py",
        "uses ray._raylet:NoSuchClass": "ray._raylet:NoSuchClass is gone",
        "uses verl.trainer.main_ppo main": "verl.trainer.main_ppo:main is not in the snapshot",
        "string verl.no_such_module text -- why": "which had the text text (why), is gone: there is no module",
        "setting data.custom_cls.path = 1": "data.custom_cls.path is None by default, and ours relies on = 1",
        "setting trainer.no_such_setting": "verl has no setting trainer.no_such_setting",
    }
    places = [table.Place("ours.py", "", [table.row("ours.py", line) for line in expected])]
    found = check.differences(Inventory(places), places, {})
    assert not [told for told in expected.values() if not any(told in difference for difference in found)], found


def test_a_change_is_told(inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file, old, new, _ in _CHANGES:
        ours, module = tmp_path / file, file.removesuffix(".py").replace("/", ".")
        ours.parent.mkdir(parents=True, exist_ok=True)
        ours.write_text((ours if ours.exists() else theirs.file_of(module)).read_text().replace(old, new))
    with monkeypatch.context() as patch:
        patch.setattr(theirs, "FOLDERS", [tmp_path, *theirs.FOLDERS])
        theirs.forget()
        found = check.differences(inventory, table.places(), check.read())
    theirs.forget()
    assert not [told for *_, told in _CHANGES if not any(told in difference for difference in found)], found


def test_a_method_that_takes_less_than_theirs_is_told() -> None:
    def theirs(batch: int, metrics: int, *, keep: bool = False) -> None: ...
    def same(batch: int, metrics: int, *, keep: bool = False) -> None: ...
    def wider(batch: int, *args: int, **kwargs: int) -> None: ...
    def narrower(batch: int, metrics: int) -> None: ...
    def swapped(metrics: int, batch: int, *, keep: bool = False) -> None: ...
    def needier(batch: int, metrics: int, more: int, *, keep: bool = False) -> None: ...

    all_ours = (same, wider, narrower, swapped, needier)
    told = [ours for ours in all_ours if check.unsuited(signature(ours), signature(theirs))]
    assert told == [narrower, swapped, needier]
