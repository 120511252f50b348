"""A task of the user's own: its rows and its reward are asked, the lag is exact unasked, the report reads the run."""

import json
from pathlib import Path

import pandas as pd
import pytest

from lab.simulator import main
from lab.simulator.simulator import Simulator
from lab.stability import __main__ as comparison
from scripts.report.runs import read_run
from scripts.report.table import make_table
from tests.kit import own_method
from verl_vcpo.report.run_log import ANSWERS

REWARD = """
async def compute_score(data_source, solution_str, ground_truth, extra_info, worth):
    assert (data_source, ground_truth) == (("long", "short")[len(ground_truth) < 3], extra_info["sorted"])
    return {"score": worth * 0.5, "acc": float(data_source == "long")}
"""


@pytest.fixture
def own_task(assets: Path, tmp_path: Path) -> list[str]:
    """Settings of a run of one step on digits to sort: three rows of two digits, one of three."""
    rows = [
        {
            "prompt": [{"role": "user", "content": text}],
            "data_source": "long" if len(text) > 2 else "short",
            "reward_model": {"ground_truth": "".join(sorted(text))},
            "extra_info": {"index": index, "sorted": "".join(sorted(text))},
        }
        for index, text in enumerate(["21", "43", "65", "321"])
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    return [
        "+task=countdown",
        "method=vcpo",
        f"data.train_files={tmp_path}/rows.parquet",
        f"data.val_files=[{tmp_path}/rows.jsonl]",
        f"actor_rollout_ref.model.path={assets}/model",
        f"reward.custom_reward_function.path={tmp_path}/reward.py",
        "+reward.custom_reward_function.reward_kwargs.worth=0.25",
        f"run_dir={tmp_path}/own",
        "data.train_batch_size=2",
        "data.max_response_length=3",
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
        "async.lag=1",
    ]


def test_any_task(own_task: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(own_task) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "before training" in line] == [
        "held-out accuracy: 50.0% before training, 50.0% after, the mean over 2 data sources:",
        "  short: 0.0% before training, 0.0% after",
        "  long: 100.0% before training, 100.0% after",
    ]
    zero, *steps = [json.loads(line) for line in (tmp_path / "own" / "metrics.jsonl").read_text().splitlines()]
    assert [step["reward"] for step in steps] == [0.125, 0.125], "what is trained on is the score"
    assert zero["val_accuracy"] == steps[-1]["val_accuracy"] == 0.5, "the mean over the two sources of acc"
    assert zero["val_accuracies"] == steps[-1]["val_accuracies"] == {"short": 0.0, "long": 1.0}
    assert [step["lag_max"] for step in steps] == [0, 1]
    assert [line.get(ANSWERS) for line in (zero, *steps)] == [4, None, 4]

    run = read_run(tmp_path / "own")
    assert run.finished and (run.method, run.steps, run.accuracy) == ("vcpo", 2, 0.5)
    assert 0 < run.lines[1]["wall_clock_s"] <= run.lines[2]["wall_clock_s"] <= run.wall_clock_s
    assert make_table([run])[-1][:3] == ["vcpo, lag 1, simulated", "50.0%", "2"]
    summary = json.loads((tmp_path / "own" / "summary.json").read_text())
    assert summary["max_realized_lag"] == 1 and summary["tokens_per_s"] > 0


def test_a_second_run_does_not_overwrite_the_first(
    own_task: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "metrics.jsonl").write_text('{"step": 0}\n')
    assert main.main([*own_task, "trainer.total_training_steps=1"]) == 0
    assert f"{tmp_path}/own had an earlier run's files: they are now in {tmp_path}/own.1\n" in capsys.readouterr().out
    assert (tmp_path / "own.1" / "metrics.jsonl").read_text() == '{"step": 0}\n'
    assert len((tmp_path / "own" / "metrics.jsonl").read_text().splitlines()) == 2


def test_prompts_that_are_too_long_are_left_out_where_the_run_says_so(own_task: list[str]) -> None:
    widest = Simulator(main.compose(own_task)).task.train.tokens.shape[1]
    settings = [f"data.max_prompt_length={widest - 1}", "data.filter_overlong_prompts=true"]
    assert len(Simulator(main.compose([*own_task, *settings])).task.train) == 3


def test_a_reward_that_raises_in_the_run_is_one_line(
    own_task: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reward.py").write_text(
        "def compute_score(solution_str, ground_truth, **_):\n"
        "    return 0.0 if solution_str == 'I do not know.' else int('x')\n"
    )
    assert main.main([*own_task, "~reward.custom_reward_function.reward_kwargs.worth"]) == 1
    line = capsys.readouterr().err
    assert "raises ValueError: invalid literal" in line and "(reward.py:2), on row 0 of 'short'" in line
    assert "(the prompt: '21')" in line and line.count("\n") == 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent "
            "actor_rollout_ref.rollout.multi_turn.function_tool_path=tests/e2e/waiting_tool.py",
            "knows single_turn_agent only",
        ),
        ("actor_rollout_ref.rollout.temperature=0.5", "rollout.temperature=0.5: the simulator knows 1.0 only"),
        ("async.exact_lag=false", "async.exact_lag=False: the simulator knows true only"),
        (
            "actor_rollout_ref.rollout.val_kwargs.do_sample=true actor_rollout_ref.rollout.val_kwargs.temperature=0.5",
            "val_kwargs.temperature=0.5: the simulator knows 1.0 only",
        ),
        ("trainer.resume_mode=auto", "trainer.resume_mode=auto: the simulator knows disable only"),
        ("method=a2c", "critic.enable=True: the simulator knows false only"),
        ("data.max_prompt_length=8", "data.max_prompt_length=8: "),
        ("reward.custom_reward_function.path=null", "the simulator needs a reward of the run's own"),
        ("reward.custom_reward_function.name=no", "does not load: there is no function no, but compute_score"),
        ("data.train_batch_size=16", "data.train_batch_size=16: "),
    ],
)
def test_what_the_simulator_cannot_do(
    own_task: list[str], capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    assert main.main([*own_task, *setting.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_shares_of_files(own_task: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = pd.read_parquet(tmp_path / "rows.parquet")
    for name in ("short", "long"):
        rows[rows["data_source"] == name].to_parquet(tmp_path / f"{name}.parquet")
    files = f"data.train_files=[{tmp_path}/short.parquet,{tmp_path}/long.parquet]"
    main_settings = [*own_task, files, "data.shares=[1,3]", "data.train_batch_size=4"]
    run = Simulator(main.compose(main_settings))
    for _ in range(3):
        assert sorted(row == 3 for row in run.next_prompts()) == [False, True, True, True]
    assert main.main([*main_settings, "data.train_batch_size=2", "data.train_max_samples=3"]) == 2
    error = capsys.readouterr().err
    assert "data.shares: data.train_max_samples=3 and " in error and f"leave no row of {tmp_path}/long.parq" in error


PRESET = """# @package _global_
defaults: [{/scale: "${oc.env:VCPO_HARDWARE}"}, _self_]
data: {max_response_length: 0}
actor_rollout_ref: {model: {path: models/mine}}
"""


def test_the_simulator_takes_presets_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "mine.yaml").write_text(PRESET)
    files = [f"data.{part}_files=no.parquet" for part in ("train", "val")]
    assert main.main(["+task=mine", "--config-dir", str(tmp_path), "hardware=cpu", *files]) == 2
    assert "task/mine.yaml:3: data.max_response_length=0: give a whole number" in capsys.readouterr().err


COMPARED = """# @package _global_
defaults: [countdown_lag, _self_]
data: {train_files: ASSETS/data/train.parquet, val_files: ASSETS/data/val.parquet, train_batch_size: 2}
actor_rollout_ref:
  model: {path: ASSETS/model}
  actor: {ppo_micro_batch_size_per_gpu: 4}
  rollout: {n: 4}
trainer: {test_freq: 3}
"""


def test_methods_and_tasks_of_ones_own_are_compared(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    method = own_method.written(tmp_path)[-1].removeprefix("method=")
    (tmp_path / "mine" / "task").mkdir()
    (tmp_path / "mine" / "task" / "compared.yaml").write_text(COMPARED.replace("ASSETS", str(assets)))
    command = ["--task", "compared", "--methods", method, "none", "--lags", "1", "--seeds", "1", "--lr", "1e-3"]
    with pytest.raises(SystemExit):
        comparison.main(command)
    assert "no task compared: choose from countdown, " in capsys.readouterr().err
    command += ["--config-dir", "mine", "--steps", "3", "--workers", "1"]
    assert comparison.main(command) == 0
    assert f"`{method}`" in capsys.readouterr().out
    file = tmp_path / "mine" / "method" / f"{method}.yaml"
    file.write_text(file.read_text().replace("most: 2.0", "most: 3.0"))
    assert comparison.main(command) == 2
    assert f"holds runs of another method/{method}.yaml" in capsys.readouterr().err
