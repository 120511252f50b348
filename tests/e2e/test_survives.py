"""A run goes on where a reward hangs, dies and is NaN, and where a sampler is killed; nothing is lost of it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.kit.own_method import written
from tests.reliability.injected_faults import FAULTS, FaultVerdict, try_fault
from verl_vcpo.report.run_log import read_metrics

pytestmark = pytest.mark.e2e


@dataclasses.dataclass
class Survivor:
    """A run that had all of these faults."""

    verdict: FaultVerdict
    failed: set[str]
    """What the reward did."""
    output: str
    lines: list[dict[str, Any]]


@pytest.fixture(scope="module")
def survivor(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Survivor:
    """Its reward fails in the validation before step 1 and in step 1; the sampler is killed after step 3.

    Its method and its loss are the user's own.
    """
    folder = tmp_path_factory.mktemp("survivor")
    marks = folder / "marks"
    marks.mkdir()
    loss = f"actor_rollout_ref.actor.policy_loss.loss_mode={folder}/mine/loss.py:truncated"
    settings = [
        *written(folder),
        loss,  # the run works in another folder than the page's commands
        "reward.custom_reward_function.name=fails_thrice",
        f"+reward.custom_reward_function.reward_kwargs.marks={marks}",
        "async.reward_timeout_s=5",
        "trainer.val_before_train=true",
    ]
    (kill_engine,) = (fault for fault in FAULTS if fault.name == "kill -9 of a vLLM engine")
    verdict = try_fault(dataclasses.replace(kill_engine, prepare=lambda _: settings), assets, folder / "run")
    output = (folder / "run.log").read_text()
    return Survivor(verdict, {mark.name for mark in marks.iterdir()}, output, read_metrics(folder / "run"))


def test_nothing_is_lost(survivor: Survivor) -> None:
    assert survivor.verdict.ok, survivor.verdict
    assert "1 sampler(s) restarted" in survivor.output
    assert survivor.failed == {f"{when}-{what}" for when in ("val", "train") for what in ("hang", "die", "nan")}


def test_the_trainer_called_the_loss_of_the_users_own(survivor: Survivor) -> None:
    assert all(0 <= line["actor/mine/truncated"] <= 1 for line in survivor.lines if line["step"])


def test_prompts_whose_reward_failed_are_sampled_again(survivor: Survivor) -> None:
    said = [line for line in survivor.output.splitlines() if "sampled again" in line]
    retried = int(sum(line["vcpo/async/retried_prompts"] for line in survivor.lines if line["step"]))
    assert retried in (1, 2, 3), "the calls may be of the same prompt, of which only the last reason is said"
    assert len(said) in range(retried + 1, retried + 4), "those of the validation come first"
    in_training = said[-retried:]
    assert all(":fails_thrice" in line and "on row " in line for line in in_training), survivor.output
    assert all("for the response that starts with" in line and "(the prompt: " in line for line in in_training)
    reasons = ("took longer than 5 s", "its process ended with exit code 1", "returned a dict whose 'score' is nan")
    named = [reason for reason in reasons if any(reason in line for line in in_training)]
    assert len(named) == retried, survivor.output


def test_no_answer_counts_as_wrong_because_its_reward_failed(survivor: Survivor) -> None:
    validation = survivor.lines[0]
    (accuracy,) = (value for name, value in validation.items() if "/acc_success_only/mean@" in name)
    assert validation["val_accuracy"] == accuracy > 0
