"""What the published repository and others call a setting leads to what gives it here."""

import csv
from pathlib import Path

import pytest

from recipe.fully_async_policy import main
from recipe.fully_async_policy.settings.errors import SettingError
from tests.recipe.refused import ACTOR, ROLLOUT, run

PUBLISHED = list(csv.reader(Path(__file__).with_name("published_overrides.tsv").open(), delimiter="\t"))[1:]
"""A row for each override of two published launch scripts: name, value in each, and what is said of it."""


@pytest.mark.parametrize(
    ("task", "column", "count", "more"),
    [("math", 1, 119, []), ("tool_use", 2, 123, [f"{ACTOR}.megatron.tensor_model_parallel_size=2"])],
)
def test_a_published_command_line(
    task: str, column: int, count: int, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets one list, with the right hint for each line of it; what is not on the list is a run that can start."""
    monkeypatch.setenv("VCPO_RUN_ID", "test")
    monkeypatch.setenv("WANDB_MODE", "offline")
    main.prepare_environment(["hardware=gpu"])
    given = {row[0]: (f"{row[0]}={row[column]}", row[3]) for row in PUBLISHED if row[column] != "absent"}
    assert len(given) == count
    preset = [f"+task={task}", "method=vcpo", "hardware=gpu"]
    with pytest.raises(SettingError) as refused:
        main.compose([*preset, *(override for override, _ in given.values())])
    said = {line.partition("=")[0]: line for line in refused.value.lines}
    assert len(said) == len(refused.value.lines) and said.keys() == {name for name, (_, hint) in given.items() if hint}
    assert not {name: line for name, line in said.items() if given[name][1] not in line}
    # What the hints say to give, where the preset does not have it. Tensor parallelism of 4 is too much for 2 GPUs.
    more = [*more, "async.lag=2", f"{ROLLOUT}.n_gpus_per_node=4"]
    main.check(
        main.compose([*preset, *(override for override, hint in given.values() if not hint), *more]), files=False
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("async_training.staleness_threshold=12", "give async.lag=12"),
        ("+async_training.staleness_threshold=12", "give async.lag=12"),
        ("async_training.use_trainer_do_validate=false", "async.lag, async.on_deadline and async.kv_cache take"),
        (f"{ACTOR}.ess_scaling.enable=True", "true in both sections is method=vcpo_published"),
        (f"{ACTOR}.grad_baselining.scope=group", "give vcpo.opob_scope=group"),
        (f"+{ACTOR}.grad_baselining.eps=1", "give vcpo.opob_scope or vcpo.opob_weights"),
        (f"{ACTOR}.update_policy_per_traj=True", "gradient is measured; leave it out"),
        ("rollout.total_rollout_steps=4000", "give trainer.total_training_steps: 4000 prompts / data.train"),
        ("+trainer.wandb_entity=me", "set WANDB_ENTITY=me in the environment"),
    ],
)
@pytest.mark.usefixtures("nothing_starts")
def test_a_setting(good: dict[str, str], capsys: pytest.CaptureFixture[str], given: str, expected: str) -> None:
    said = run(good, capsys, given)
    assert said.startswith(f"error: {given}: there is no such setting; ") and expected in said


@pytest.mark.parametrize(
    ("gpus", "expected"), [("40gb", "about gpu_memory_gib=39.4; presets are 141gb"), ("80gb", "leave it out")]
)
@pytest.mark.usefixtures("nothing_starts")
def test_a_card(good: dict[str, str], capsys: pytest.CaptureFixture[str], gpus: str, expected: str) -> None:
    assert expected in run(good, capsys, f"+gpus={gpus}")


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (["--config-name=X"], "leave it out: +task=NAME chooses a preset"),
        (["--config-path", "conf"], "give --config-dir DIR"),
        (["--cfg", "job"], "give --print-config"),
        (["-m"], "one command starts one run"),
    ],
)
def test_an_option_of_hydras(capsys: pytest.CaptureFixture[str], option: list[str], expected: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(["+task=countdown", *option])
    error = capsys.readouterr().err
    assert f"unrecognized arguments: {' '.join(option)}; {expected}" in error and "dashes" not in error


@pytest.mark.usefixtures("nothing_starts")
def test_an_own_loss_without_its_function(
    good: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (folder := tmp_path / "mine/method").mkdir(parents=True)
    text = "# @package _global_\nmethod: own\nvcpo: {enable: false}\n"
    (folder / "own.yaml").write_text(f"{text}actor_rollout_ref: {{actor: {{policy_loss: {{loss_mode: own.py}}}}}}\n")
    said = run(good, capsys, "method=own", "--config-dir", str(folder.parent))
    assert "loss_mode=own.py: names no function of the file; give own.py:FUNCTION" in said
