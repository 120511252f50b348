"""pass@k, its interval, and what `recipe.evaluate` refuses. tests/e2e/test_whole_stack.py evaluates a trained model."""

import itertools
import json
from pathlib import Path

import pytest

from recipe.evaluate import __main__ as evaluate
from recipe.evaluate.estimates import Answer, interval, pass_at, powers_of_two


def test_pass_at_k_is_the_share_of_draws_with_a_correct_sample() -> None:
    for samples, correct in ((1, 0), (1, 1), (5, 0), (5, 2), (6, 5), (6, 6)):
        answers = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            draws = [any(draw) for draw in itertools.combinations(answers, k)]
            assert pass_at(k, samples, correct) == pytest.approx(sum(draws) / len(draws))
    assert pass_at(1, 8, 3) == pytest.approx(3 / 8)
    with pytest.raises(ValueError, match="pass@4 needs 4 samples of each problem, not 3"):
        pass_at(4, 3, 1)
    assert powers_of_two(1) == [1] and powers_of_two(6) == [1, 2, 4, 6] and powers_of_two(8) == [1, 2, 4, 8]


def test_with_one_sample_it_is_wilsons_interval() -> None:
    """Newcombe 1998, table I: 81 of 263 and 0 of 20, with a score interval without continuity correction."""
    for correct, count, low, high in ((81, 263, 0.2553, 0.3662), (0, 20, 0.0, 0.1611)):
        found = interval([1.0] * correct + [0.0] * (count - correct))
        assert found.estimate == correct / count
        assert found.low == pytest.approx(low, abs=1e-4) and found.high == pytest.approx(high, abs=1e-4)


def test_more_samples_count_as_far_as_they_tell_something_new() -> None:
    different = [0.0] * 5 + [1.0] * 5
    assert interval(different, 8) == interval(different, 1), "the samples of a problem are all alike"
    same = interval([0.5] * 10, 8)
    assert same.low == pytest.approx(interval([0.0] * 40 + [1.0] * 40).low), "80 independent answers"
    certain = interval([1.0] * 10, 8)
    assert certain.high == 1 and certain.low == interval([1.0] * 10).low, "nothing is known of other problems"
    with pytest.raises(ValueError, match="at least one problem"):
        interval([])


def answers(source: str, first: int, *correct: list[float]) -> list[Answer]:
    return [Answer(first + i, source, "text", c / 2, c) for i, of_one in enumerate(correct) for c in of_one]


def test_results_of_each_source_and_of_all(tmp_path: Path) -> None:
    of_both = answers("a", 0, [1, 0], [0, 0]) + answers("b", 2, [1, 1])
    results = evaluate.measured(of_both, 2)
    assert list(results) == ["a", "b", "all"] and results["all"].problems == 3
    assert results["a"].pass_at[1].estimate == 0.25 and results["a"].pass_at[2].estimate == 0.5
    assert results["all"].pass_at[1].estimate == 0.5 and results["all"].score == 0.25
    assert evaluate.table(results).count("pass@2") == 3
    evaluate.write(tmp_path / "result.json", {"task": "both"}, results, of_both)
    content = json.loads((tmp_path / "result.json").read_text())
    assert content["task"] == "both" and len(content["answers"]) == 6
    assert content["results"]["b"]["pass_at"]["2"]["estimate"] == 1


def test_a_reward_without_right_and_wrong_has_a_score_only() -> None:
    (result,) = evaluate.measured(answers("a", 0, [0.5, 0.2]), 2).values()
    assert result.pass_at == {} and result.score == pytest.approx(0.175)
    assert "no acc of 0 or 1" in evaluate.table({"a": result})


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["{tmp}", "--task", "countdown"], "is no checkpoint with a model"),
        (["{model}", "--task", "countdown", "data.val_files=/no.parquet"], "data.val_files=/no.parquet: no such file"),
        (["{model}", "--task", "countdown", "--samples", "0", "data.val_files={data}"], "--samples 0: give 1 or more"),
        (["{model}", "--task", "tool_use"], "trainer.val_only=true"),
        (["{model}", "--task", "countdown", "actor_rollout_ref.model.path=x"], "MODEL names it"),
        (["{model}", "--task", "countdown", "--json", "{tmp}"], "cannot be written; give a file in a folder"),
        (["{model}", "--task", "countdown", "--json", "{data}/x.json"], "cannot be written; give a file in a folder"),
        (["{model}", "--task", "countdown", "--json", "{tmp}/" + "x" * 250], "cannot be written; give a file in a fol"),
        (["{model}", "--task", "countdown", "data.max_response_length=999"], "together are 1063 tokens; raise it"),
        (["{model}", "--task", "countdown", "actor_rollout_ref.rollout.val_kwargs.top_p=2"], "top_p=2: give a share"),
    ],
)
def test_what_is_refused(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = tmp_path / "model", tmp_path / "val.parquet"
    model.mkdir()
    (model / "config.json").write_text("{}")
    data.touch()
    filled = [argument.format(tmp=tmp_path, model=model, data=data) for argument in arguments]
    assert evaluate.main(filled) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and complaint in error and error.count("\n") == 1


def test_several_samples_are_not_drawn_greedily(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    data = tmp_path / "val.parquet"
    data.touch()
    settings = ["hardware=cpu", f"data.val_files={data}"]
    one = evaluate.composed(tmp_path, "countdown", None, settings).actor_rollout_ref.rollout.val_kwargs
    several = evaluate.composed(tmp_path, "countdown", 4, settings).actor_rollout_ref.rollout.val_kwargs
    assert (one.n, one.temperature) == (1, 0) and (several.n, several.temperature) == (4, 1)
