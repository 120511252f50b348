"""`python -m scripts.check_data` says what a file of rows holds, and which row is wrong."""

from pathlib import Path

import pandas as pd
import pytest

from recipe.tasks.countdown.problems import Difficulty, make_split, to_row
from recipe.tasks.rows import Row, make_row
from scripts import check_data
from tests.recipe.conftest import model_folder as model_folder  # a fixture


def checked(
    rows: list[Row], folder: Path, model: Path, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[int, str, str]:
    """The exit code, what was printed, and the line on stderr."""
    pd.DataFrame(rows).to_parquet(folder / "rows.parquet")
    settings = ["hardware=cpu", f"actor_rollout_ref.model.path={model}", *more]
    code = check_data.main([str(folder / "rows.parquet"), "--task", "countdown", *settings])
    printed = capsys.readouterr()
    errors = [line for line in printed.err.splitlines() if line.startswith("check_data: ")]
    return code, printed.out, "".join(errors)


def countdown_rows() -> list[Row]:
    train, _ = make_split(Difficulty(numbers=3), train=8, val=1, seed=0)
    return [to_row(problem, "train", index) for index, problem in enumerate(train)]


def test_a_good_file(tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = checked(countdown_rows(), tmp_path, model_folder, capsys)
    assert (code, error) == (0, "")
    assert "8 rows; columns data_source, prompt" in out and "prompts: " in out and " tokens, half above " in out
    assert "'countdown': 8 rows; a made-up response scores 0; no form of the ground truth" in out
    assert "not used" not in out
    _, out, _ = checked([{**row, "responses": "5"} for row in countdown_rows()], tmp_path, model_folder, capsys)
    assert "rows.parquet: not used, as the run makes its own: column responses" in out


def test_what_is_wrong_is_named(tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = countdown_rows()
    rows[5]["data_source"] = "cuontdown"
    code, _, error = checked(rows, tmp_path, model_folder, capsys)
    assert code == 2 and "rows.parquet: row 5: the reward raises ValueError: data_source='cuontdown'" in error
    rows = countdown_rows()
    rows[5]["prompt"][0]["role"] = "usr"
    code, _, error = checked(rows, tmp_path, model_folder, capsys)
    assert code == 2 and "rows.parquet: row 5: a message of 'prompt' has the role 'usr'; did you mean user?" in error
    limit = "data.max_prompt_length=3"
    code, _, error = checked(countdown_rows(), tmp_path, model_folder, capsys, limit)
    assert code == 2 and f"{limit}: 8 prompts are longer, the first is row 0 with" in error
    code, out, _ = checked(countdown_rows(), tmp_path, model_folder, capsys, limit, "data.filter_overlong_prompts=true")
    assert code == 0 and f"8 are longer than {limit} and left out" in out


def test_ways_of_writing() -> None:
    assert check_data.ways_of_writing("1500") == {
        **{"with a dot at its end": "1500.", "in bold": "**1500**", "between dollar signs": "$1500$"},
        **{"with commas": "1,500", "as a power of ten": "1.500 \\times 10^{3}"},
    }
    small = check_data.ways_of_writing("1e-05")
    assert (small["as a plain decimal"], small["as a fraction"]) == ("0.00001", "\\frac{1}{100000}")
    assert len(check_data.ways_of_writing("\\sqrt{2}")) == 3


def test_ways_of_writing_that_score_nothing_are_counted(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [make_row("own", "1 + 1?", truth, "train", index) for index, truth in enumerate(("1e-05", "3", "4000"))]
    (tmp_path / "reward.py").write_text(
        "def compute_score(solution_str, ground_truth, **_): return float(solution_str == '#### ' + ground_truth)"
    )
    own = f"reward.custom_reward_function.path={tmp_path / 'reward.py'}"
    code, out, _ = checked(rows, tmp_path, model_folder, capsys, own)
    assert code == 0 and "as a plain decimal, 1 of 3 known answers score nothing; first: " in out
    assert "in bold, 3 of 3 known answers score nothing" in out
    for row in rows:
        row["data_source"] = "math"
    code, out, _ = checked(rows, tmp_path, model_folder, capsys)
    assert code == 0 and "score nothing" not in out


def test_answers_that_do_not_score(tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [make_row("own", "1 + 1?", truth, "train", index) for index, truth in enumerate(("2", "3", "4"))]
    for scored, expected in (
        ("solution_str == '#### ' + ground_truth and ground_truth != '3'", (2, "row 1: the known answer scores 0")),
        ("solution_str == '#### ' + ground_truth", (0, "the known answer 1 (3 rows)")),
        ("solution_str == 'the answer is ' + ground_truth", (0, "no form of the ground truth that is known here")),
        ("{'score': 1, 'form': 'short'} if solution_str == ground_truth else 0.0", (0, "the known answer 1 (3 rows)")),
        (
            "{'score': 1, 'reward': 1} if solution_str == ground_truth else 0.0",
            (2, "row 0: the reward returned a dict w"),
        ),
    ):
        reward = tmp_path / "reward.py"
        reward.write_text(f"def compute_score(solution_str, ground_truth, **_):\n    return {scored}\n")
        own = f"reward.custom_reward_function.path={reward}"
        code, out, error = checked(rows, tmp_path, model_folder, capsys, own)
        assert code == expected[0] and expected[1] in out + error
