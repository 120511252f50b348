"""pass@k, its interval, and what `recipe.evaluate` refuses. tests/e2e/test_whole_stack.py evaluates a trained model."""

import itertools
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from filelock import FileLock
from omegaconf import DictConfig, OmegaConf

from recipe.evaluate import __main__ as evaluate
from recipe.evaluate import follow, results
from recipe.evaluate.estimates import Answer, interval, pass_at, powers_of_two
from recipe.evaluate.settings import of_task
from recipe.fully_async_policy import main as trainer
from recipe.fully_async_policy.settings.errors import SettingError
from tests.recipe.refused import composed
from verl_vcpo.common import start_up


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
    found = evaluate.measured(of_both, 2)
    assert list(found) == ["a", "b", "all"] and found["all"].problems == 3
    assert found["a"].pass_at[1].estimate == 0.25 and found["a"].pass_at[2].estimate == 0.5
    assert found["all"].pass_at[1].estimate == 0.5 and found["all"].score == 0.25
    assert evaluate.table(found).count("pass@2") == 3
    evaluate.write(tmp_path / "result.json", {"task": "both"}, found, of_both)
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
        (["{model}", "--task", "countdown", "actor_rollout_ref.model.path=x"], "names the models itself"),
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


def test_several_samples_are_not_drawn_greedily(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VCPO_HARDWARE", "cpu")
    (tmp_path / "config.json").write_text("{}")
    data = tmp_path / "val.parquet"
    data.touch()
    settings = ["hardware=cpu", f"data.val_files={data}"]
    one = of_task("countdown", tmp_path, None, settings, None).actor_rollout_ref.rollout.val_kwargs
    several = of_task("countdown", tmp_path, 4, settings, None).actor_rollout_ref.rollout.val_kwargs
    assert (one.n, one.temperature) == (1, 0) and (several.n, several.temperature) == (4, 1)


REWARD = """
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if not (asked := Path(__file__).with_suffix(".asked")).exists():
        asked.touch()
        raise OSError("503 Service Unavailable")
    return float(not extra_info["truncated"])
"""


def test_a_reward_that_fails_once_is_asked_again_and_a_greedy_response_is_drawn_once(
    good: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipe.evaluate import sampling

    (tmp_path / "reward.py").write_text(REWARD)
    reward = {"reward.custom_reward_function.path": f"{tmp_path}/reward.py"}
    config = composed({**good, **reward, "data.val_max_samples": "2"})
    drawn: list[int] = []

    def generate(prompts: list[Any], how: Any, use_tqdm: bool) -> list[Any]:
        drawn.append(how.n)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5, 6])] * how.n) for _ in prompts]

    monkeypatch.setattr(sampling, "_engine", lambda config: SimpleNamespace(generate=generate))
    found = sampling.answers_of(config, 3, temperature=0.0, top_p=1.0, top_k=-1)
    assert drawn == [1] and [answer.problem for answer in found] == [0, 0, 0, 1, 1, 1]
    assert [answer.score for answer in found] == [1.0] * 6 and (tmp_path / "reward.asked").exists()


@pytest.fixture(scope="module")
def settings() -> DictConfig:
    with start_up.environment({"VCPO_HARDWARE": "cpu"}):
        return trainer.compose(["hardware=cpu", "+task=countdown", "save_weights=true", "trainer.save_freq=2"])


@pytest.fixture
def run(tmp_path: Path, settings: DictConfig) -> Path:
    """The folder of a run with its first policy and the models of steps 2 and 4, whose trainer has been killed."""
    folder, first = tmp_path / "run", tmp_path / "first"
    for model in (first, folder / "weights/step_2", folder / "weights/step_4"):
        write_model(model)
    settings.data.val_files, settings.actor_rollout_ref.model.path = str(first / "config.json"), str(first)
    OmegaConf.save(settings, folder / "config.yaml")
    (folder / "metrics.jsonl").write_text('{"step": 6}\n')
    return folder


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were evaluated, with one right answer of two; those named `step_4` fail at first."""
    models: list[str] = []

    def run_(arguments: list[str], log: Path) -> tuple[int, str]:
        models.append(Path(arguments[3]).name)
        if models.count("step_4") == 1 and models[-1] == "step_4":
            return 1, "error: no memory"
        given = {"answers": [{"data_source": "sums", "correct": share} for share in (0.0, 1.0)]}
        Path(arguments[arguments.index("--json") + 1]).write_text(json.dumps(given))
        return 0, ""

    monkeypatch.setattr(follow, "_run", run_)
    monkeypatch.setattr(follow, "_POLL_S", 0.01)
    return models


def test_each_model_of_a_run_is_evaluated_once(
    run: Path, evaluated: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main(["--follow", str(run)]) == 1
    assert evaluated == ["first", "step_2", "step_4"], "one that fails does not keep others from being evaluated"
    said = capsys.readouterr().out
    assert "step 4: failed, no memory" in said and "step 2: held-out accuracy 50.0%, 2 answers" in said
    assert "ended before its last step" in said and [result.step for result in results.read(run)] == [0, 2]

    write_model(run / "weights/step_2")
    assert evaluate.main(["--follow", str(run), "data.val_max_samples=9"]) == 0
    assert evaluated[3:] == ["step_2", "step_4"], "one that was written again, and the one that failed"
    assert "step 0: evaluated with data.val_max_samples -1, now 9. Kept" in capsys.readouterr().out
    assert [result.as_the_run for result in results.read(run)] == [True, False, False]


def test_a_run_that_goes_on_is_waited_for(
    run: Path, evaluated: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "weights/step_4/config.json").unlink()
    write_model(run / "model")  # by an earlier end of the run
    trainers = FileLock(run / ".lock")
    trainers.acquire()

    def ends(seconds: float) -> None:
        assert evaluated == ["first", "step_2"]
        (run / "summary.json").touch()
        trainers.release()

    monkeypatch.setattr(follow.time, "sleep", ends)
    assert evaluate.main(["--follow", str(run)]) == 0
    assert evaluated[2:] == ["model"] and results.read(run)[-1].step == 6
    assert "Waiting for the next model (the run is at step 6)" in capsys.readouterr().out


def test_settings_that_change_meanwhile_are_those_of_no_result(
    run: Path, evaluated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was resumed with others, or a model was removed."""
    before = follow._run

    def resumed(arguments: list[str], log: Path) -> tuple[int, str]:
        ended = before(arguments, log)
        if evaluated == ["first"]:
            config = OmegaConf.load(run / "config.yaml")
            config.data.val_max_samples = 7
            OmegaConf.save(config, run / "config.yaml")
        if evaluated[-1] == "step_2":
            shutil.rmtree(run / "weights/step_2")
            return 2, "error: step_2: no such folder"
        return ended

    monkeypatch.setattr(follow, "_run", resumed)
    assert evaluate.main(["--follow", str(run)]) == 1, "step 4 fails at first"
    assert evaluated == ["first", "first", "step_2", "step_4"]
    assert [(of.step, of.settings["data.val_max_samples"]) for of in results.read(run)] == [(0, 7)]


def test_a_follower_ends_with_what_it_has_started(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = follow._run
    started = tmp_path / "started"
    child = ["bash", "-c", f"touch {started}; sleep 600"]
    monkeypatch.setattr(follow, "_run", lambda arguments, log: real(child, log))

    def stop() -> None:
        while not started.exists():
            time.sleep(0.01)
        time.sleep(0.5)  # Popen itself returns when the child has begun
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    assert evaluate.main(["--follow", str(run), "data.val_max_samples=9"]) == 128 + signal.SIGTERM
    assert f"python -m recipe.evaluate --follow {run} data.val_max_samples=9" in capsys.readouterr().err
    assert not [left for left in psutil.Process().children(recursive=True) if "600" in left.cmdline()]
    assert not results.read(run)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--follow", "{run}/none"], "none: no such folder; start the run first"),
        (["--follow", "{run}/weights"], "weights: no config.yaml; give the folder (run_dir) of a run"),
        (["--follow", "{run}", "data.val_max_sample=1"], "did you mean data.val_max_samples"),
        (["--follow", "{run}", "+task=gsm8k"], "+task=gsm8k: chooses a preset, and the settings are those of {run}"),
        (["--follow", "{run}", "actor_rollout_ref.rollout.agent.default_agent_loop=mine"], "the run itself evaluates"),
        (["--follow", "{run}", "save_weights=false", "save_model=false"], "it writes no model"),
        (["{run}/weights/step_2", "--settings-of", "{run}", "data.val_files=/no.parquet"], "no.parquet: no such file"),
    ],
)
def test_what_cannot_be_followed(
    arguments: list[str], complaint: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main([argument.format(run=run) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and complaint.format(run=run) in error and error.count("\n") == 1


def test_when_a_follower_ends(
    run: Path, evaluated: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with follow._alone(run):
        assert evaluate.main(["--follow", str(run)]) == 2
    assert "another `vcpo evaluate --follow` writes there" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(follow, "_run", lambda *given: (2, "error: data.val_files=x: no such file"))
        assert evaluate.main(["--follow", str(run)]) == 2
    assert capsys.readouterr().err == "error: data.val_files=x: no such file\n"
    (run / "run_id.txt").write_text("a" * 12)
    follower = follow._Follower(run, None, [], [])
    (run / "run_id.txt").write_text("b" * 12)
    with pytest.raises(SettingError, match="another run has begun there"):
        follower.run()
    for argument in ("--task=countdown", str(run / "weights/step_2")):
        with pytest.raises(SystemExit):
            evaluate.main(["--follow", str(run), argument])
    assert not evaluated
