"""The command: a table, a page, one JSON line; one line where no forecast is possible."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from lab.planner.__main__ import main
from lab.planner.answers import Forecast, Plan, limit, marked, plan
from lab.planner.like import print_forecast
from lab.tests.planner.made_up import rates, run_folder

ROOT = Path(__file__).parents[3]
SENTENCE = (
    r"Take (\d+) \+ (\d+) GPUs \(trainer \+ samplers\) at lag (\S+): \S+ s a step, \S+ GPU hours; "
    r"one more trainer GPU gains \d+ %, one more sampler GPU \d+ % \(what binds: .*\)\."
)
GUESS = ["--gpus", "4", "--response-tokens", "9", "--model", "MODEL", "--device"]
OF_14_BILLION = {
    "model_type": "qwen2",
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 13824,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
SCRIPT = "recipe/fully_async_policy/shell/vcpo/countdown/vcpo_k=10.sh"


def test_a_plan_from_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "run")
    assert main([str(run), "--gpus", "6", "--lags", "0,2", "--steps", "50", "--out", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    said = re.fullmatch(SENTENCE, printed.splitlines()[-2])
    assert said, "the last line for people"
    table = printed[: printed.index("Calibration:")].splitlines()
    assert max(map(len, table)) <= 118 and len(table) < 6 + 2 * 4, "a row has a line or two"
    advised = found["advised"]
    assert [float(number) for number in said.groups()[:3]] == [
        advised[name] for name in ("trainer_gpus", "sampler_gpus", "lag")
    ]
    assert {(row["trainer_gpus"], row["sampler_gpus"], row["lag"]) for row in found["rows"]} == {
        (trainer, 6 - trainer, lag) for trainer in (2, 4) for lag in (0, 2)
    }
    best = [row for row in found["rows"] if row["pareto"]]
    assert best and all(row["trainer_gain"] is not None for row in best)
    assert "Assumed: the trainer's speed grows with its GPUs: linear" in printed
    html = (tmp_path / "plan.html").read_text()
    assert html.index(said[0]) < html.index("Plotly.newPlot") and "prefers-color-scheme: dark" in html
    assert "What is assumed" in html and "Plotly.newPlot" in html and html.count("<tr") == 1 + 4


def test_of_very_many_splits_those_around_the_cheapest_are_forecast() -> None:
    rows = plan(rates(train_s=0.0, token_s=0.1, lengths=1000.0), 60, [1], 10).rows
    trainers = [row.trainer_gpus for row in rows]
    cheapest = min(rows, key=lambda row: row.gpu_hours).trainer_gpus
    gaps = [abs(trainer - cheapest) for trainer in trainers if trainer != cheapest]
    assert trainers == sorted(set(trainers)) and 12 <= len(trainers) <= 14 and min(gaps) <= 3


def test_the_front_has_the_cheapest_row_and_those_with_less_lag() -> None:
    def row(hours: float, lag: float) -> Forecast:
        return Forecast(1, 1, lag, 1.0, hours, 0, 0, lag, lag, 1, 0, 1, 0, "")

    assert [r.pareto for r in marked([row(3, 0), row(2, 1), row(1, 2), row(2.5, 1.5)])] == [True, True, True, False]


def test_the_least_lag_is_advised_among_rows_that_cost_hardly_more() -> None:
    def row(hours: float, lag: float) -> Forecast:
        return Forecast(1, 1, lag, 1.0, hours, 0, 0, lag, lag, 1, 0, 1, 0, "the trainer")

    def advised(*rows: Forecast) -> Forecast:
        found = Plan("", [], {}, 2, 10, 8, marked(list(rows))).advised
        assert found.pareto, "the gains of one GPU more are known of the front"
        return found

    assert advised(row(20, 0), row(10.9, 2), row(10.5, 2), row(10, 8)).gpu_hours == 10.5
    assert advised(row(20, 0), row(11.1, 2), row(10, 8)).lag == 8
    assert advised(row(10, 8)).lag == 8


def test_what_binds_and_what_one_gpu_more_gains() -> None:
    slow_trainer = plan(rates(train_s=0.0, token_s=0.01), 3, [2], 100, only=(1, 2)).rows[0]
    assert slow_trainer.binds == "the trainer" and slow_trainer.trainer_gain == pytest.approx(0.47, abs=0.05)
    assert slow_trainer.sampler_gain == pytest.approx(0, abs=0.01)
    slow_samplers = plan(rates(train_s=0.0, token_s=1e-4, slots=2), 2, [2], 100, only=(1, 1)).rows[0]
    assert slow_samplers.binds.startswith("the samplers") and (slow_samplers.sampler_gain or 0) > 0.4


def test_where_the_trainer_waits_a_little_the_rest_is_named_too() -> None:
    def binds(**changed: float) -> str:
        row = plan(rates(), 3, [2], 100, only=(1, 2)).rows[0]
        return limit(rates(), replace(row, **changed))  # type: ignore[arg-type]

    assert binds(trainer_idle=0.0) == "the trainer"
    assert binds(trainer_idle=0.05, sampler_idle=0.5) == "the trainer; besides, the lag: both sides wait"
    assert binds(trainer_idle=0.05, sampler_idle=0.0).startswith("the trainer; besides, the samplers")
    assert binds(trainer_idle=0.3, sampler_idle=0.5) == "the lag: both sides wait"
    assert binds(trainer_idle=0.05, cores_full=0.8) == "the cores, which all parts share"


def test_a_guess_is_called_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--device", "h100", "--model", "Qwen2.5-7B", "--response-tokens", "200", "--gpus", "4", "--lags", "1"]
    assert main([*given, "--samples", "4", "--out", str(tmp_path)]) == 0
    assert "a guess: the data sheet of h100, no run" in capsys.readouterr().out


def test_the_help_of_an_option_is_a_sentence_with_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    helped = re.findall(r"^  (?:--\S+|RUN)(?: \S+)?\s+(\w+)", capsys.readouterr().out, flags=re.MULTILINE)
    assert len(helped) > 10 and not {"of", "as", "for", "the"} & {*helped}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "4"], "give the folder of a run"),
        (["nowhere", "--gpus", "4"], "nowhere: no metrics.jsonl"),
        (["RUN"], "--gpus: give the number"),
        (["RUN", "--gpus", "2"], "--gpus 2: nothing fits: the trainer's model takes 2, a sampler 1; give 3 or more"),
        (["RUN", "--gpus", "0"], "--gpus 0: give 1 or more"),
        (["RUN", "--gpus", "4", "--lags", "1,x"], "--lags 1,x"),
        (["RUN", "--gpus", "4", "--lags", "-1"], "--lags -1"),
        (["RUN", "--gpus", "4", "--device", "h100"], "--device: is for a plan without a run"),
        (["--gpus", "4", "--device", "h99", "--model", "Qwen2.5-7B", "--response-tokens", "9"], "choose one of"),
        (["--gpus", "4", "--device", "h100"], "also needs --model"),
        ([*GUESS, "b200", "--longest", "1e7"], "nothing fits: a sampler of 1 cannot hold"),
        (
            [*GUESS, "a100"],
            "nothing fits: weights and gradients take 89 GB of each of the trainer's GPUs, which have 80",
        ),
        (["RUN", "--like", "no.sh"], "--like no.sh: no such file"),
    ],
)
def test_what_allows_no_forecast_is_said_in_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path / "run")
    (tmp_path / "config.json").write_text(json.dumps(OF_14_BILLION))
    places = {"RUN": str(run), "MODEL": str(tmp_path)}
    given = [places.get(argument, argument) for argument in arguments]
    assert main([*given, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_dry_run_prints_the_forecast_of_its_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = OmegaConf.load(run_folder(tmp_path / "run") / "config.yaml")
    assert isinstance(config, DictConfig)
    config.trainer.total_training_steps = 30
    config.actor_rollout_ref.model = {"path": "somewhere"}
    config.actor_rollout_ref.rollout.update({"n_gpus_per_node": 3, "nnodes": 1})
    print_forecast(config, tmp_path / "run")
    printed = capsys.readouterr().out
    assert "5 GPUs, 30 steps of 8 responses" in printed
    assert printed.splitlines()[-1].startswith("2 + 3 GPUs (trainer + samplers) at lag 0: "), "nothing to choose"


@pytest.mark.slow
def test_a_launch_scripts_layout_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--like", str(ROOT / SCRIPT), "--device", "h100", "--response-tokens", "300", "--out", str(tmp_path)]
    assert main([*given, "--steps", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = found["rows"]
    assert (row["trainer_gpus"], row["sampler_gpus"], row["lag"], found["responses"]) == (4, 4, 10, 512)
