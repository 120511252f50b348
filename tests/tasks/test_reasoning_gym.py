"""reasoning-gym's tasks: right answers score, other texts do not, and verifiers that say otherwise are refused."""

import inspect
import json
import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from recipe.tasks import reasoning_gym as tasks
from recipe.tasks.reward import compute_score
from recipe.tasks.rows import Prepared, Row
from scripts import prepare_data

gym = pytest.importorskip("reasoning_gym", reason="scripts/test.sh installs requirements/tasks.txt")

GARBAGE = ["zzz", "?", "I do not know.", "nan", "inf", "1e999", "()", "[]", "{}", "-", "0/0", "The answer is", "\n"]
RUNS = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")


def built(name: str, *options: str) -> Prepared:
    parser = ArgumentParser()
    tasks.add_arguments(parser)
    return tasks.build(parser.parse_args(["--name", name, "--train", "1", "--val", "2", *options]))


def score(row: Row, response: str) -> float:
    truth = row["reward_model"]["ground_truth"]
    return compute_score(row["data_source"], response, truth, row["extra_info"])["score"]


def answer_to(row: Row) -> str | None:
    made = json.loads(row["reward_model"]["ground_truth"])
    problems = gym.create_dataset(made["task"], seed=made["seed"], size=made["size"], **made["settings"])
    return problems[int(row["extra_info"]["index"].rpartition("/")[2])]["answer"]


def runs_its_answer(name: str) -> bool:
    """Whether the text of the verifier evaluates something that is no part of the problem."""
    found = RUNS.findall(re.sub(r"\w+\((?:entry|metadata)\[[^)]*\)", "", inspect.getsource(verifier(name))))
    return bool(found)


def verifier(name: str) -> Any:
    return gym.factory.DATASETS[name][0].score_answer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_right_answers_score_and_garbage_does_not() -> None:
    names = sorted(set(gym.factory.DATASETS) - {*tasks.REFUSED})
    assert len(names) >= 90
    wrong = []
    for name in names:
        for row in built(name).val:
            answer = answer_to(row)
            if answer is not None and score(row, f"So it is <answer>{answer}</answer>.") != 1:
                wrong.append(f"{name}: the right answer {answer!r} does not score")
            scored = [text for text in GARBAGE if text.strip() != answer and score(row, f"<answer>{text}</answer>")]
            wrong += [f"{name}: {text!r} scores" for text in scored]
    assert wrong == []


def test_no_verifier_runs_what_a_model_writes() -> None:
    running = {name for name in gym.factory.DATASETS if runs_its_answer(name)}
    refused = {name for name, why in tasks.REFUSED.items() if why == tasks._RUNS_PYTHON}
    assert running == refused | {*tasks._BY_COUNTDOWN}
    row = built("countdown").val[0]
    assert score(row, "<answer>__import__('os').abort()</answer>") == 0


def test_why_others_are_refused() -> None:
    life = gym.create_dataset("game_of_life_halting", seed=1, size=1)
    assert life.score_answer("zzz", entry=life[0]) == 1
    numbers = gym.create_dataset("complex_arithmetic", seed=1, size=1)
    assert numbers.score_answer("nan", entry=numbers[0]) == 1
    boxes = gym.create_dataset("boxnet", seed=1, size=1)
    assert boxes[0]["answer"] is None
    with pytest.raises(TypeError):
        boxes.score_answer("1", entry=boxes[0])
    for name, why in tasks.REFUSED.items():
        with pytest.raises(ValueError, match=re.escape(f"{name}: {why}")):
            built(name)


def test_rows_are_distinct_and_the_same_again() -> None:
    made = built("chain_sum", "--train", "400", "--val", "20", "--difficulty", '{"max_terms": 2, "max_digits": 1}')
    questions = [row["prompt"][0]["content"] for row in made.train + made.val]
    assert len(made.val) == 20 and len({*questions}) == len(questions) == 420 - made.removed["repeated"]
    assert all(re.search(r": -?\d [+-] \d =\nWrite the answer between", text) for text in questions)
    again = built("chain_sum", "--train", "400", "--val", "20", "--difficulty", '{"max_terms": 2, "max_digits": 1}')
    assert again == made


def test_levels_are_reasoning_gyms_own() -> None:
    settings = [tasks.settings_of("chain_sum", {}, level) for level in (1, 2, tasks.levels_of("chain_sum"))]
    assert settings[0]["max_terms"] < settings[1]["max_terms"] < settings[2]["max_terms"]
    assert tasks.settings_of("chain_sum", {"max_terms": 2}, 3)["max_terms"] == 2
    with pytest.raises(ValueError, match="gsm_symbolic: has no levels"):
        tasks.settings_of("gsm_symbolic", {}, 1)


def test_answers() -> None:
    assert tasks.answer_of("<answer>1</answer> no, <answer> 2 </answer>", tasks.TAGGED) == "2"
    assert tasks.answer_of(r"so \boxed{3}", tasks.TAGGED) == "3"
    assert tasks.answer_of("it is 4", tasks.TAGGED) is None
    assert tasks.answer_of("</answer>5<answer>", tasks.TAGGED) is None
    assert tasks.answer_of("<answer>" + "6" * 5000 + "</answer>", tasks.TAGGED) is None
    assert tasks.answer_of("4 + 1,000 is 1,004.", tasks.LAST_NUMBER) == "1004"
    row = built("chain_sum", "--answer", "last_number").val[0]
    assert score(row, f"The sum is {answer_to(row)}.") == 1


def test_a_verifier_that_fails_on_an_answer_finds_it_wrong() -> None:
    row = built("prime_factorization").val[0]
    assert score(row, "<answer>zzz</answer>") == 0 and score(row, f"<answer>{answer_to(row)}</answer>") == 1


def test_a_verifier_that_fails_without_an_own_answer_gives_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    row = built("graph_color").val[0]
    assert answer_to(row) is None and score(row, "<answer>zzz</answer>") == 0
    monkeypatch.setattr(gym.factory.DATASETS["graph_color"][0], "score_answer", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score(row, "<answer>zzz</answer>")


def test_a_row_of_another_version_is_no_zero() -> None:
    row = built("gcd").val[0]
    row["reward_model"]["ground_truth"] = row["reward_model"]["ground_truth"].replace(tasks.installed(), "0.1.1")
    with pytest.raises(ValueError, match="the row is of reasoning-gym 0.1.1"):
        score(row, "<answer>1</answer>")


def test_prepared_as_a_file(tmp_path: Path) -> None:
    options = ["--name", "countdown", "--level", "1", "--train", "5", "--val", "2", "--out", str(tmp_path)]
    assert prepare_data.main(["reasoning_gym", *options]) == 0
    assert [*pd.read_parquet(tmp_path / "train.parquet")["data_source"].unique()] == ["reasoning_gym/countdown"]


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert tasks.main(["chain_sum"]) == 0
    assert "chain_sum: 11 levels; settings min_terms, max_terms" in capsys.readouterr().out
    assert tasks.main(["chain_sums"]) == 2
    assert "reasoning-gym has no such task" in capsys.readouterr().err


@pytest.mark.slow
def test_the_list_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert tasks.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n    answer: ") + len(tasks.REFUSED) == len(gym.factory.DATASETS)
