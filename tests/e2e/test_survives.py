"""A run goes on where a reward hangs, dies and is NaN, a tool hangs, a sampler is killed, and a row always fails."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.calls_a_tool import CallsATool
from tests.kit.own_method import written
from tests.reliability.faults import FAULTS, FaultVerdict, order_of_rows, try_fault
from verl_vcpo.common.step_lines import read_lines
from verl_vcpo.loop.prompts.failed_prompts import MAX_ATTEMPTS
from verl_vcpo.report.run_log import ANSWERS, SKIPPED, SKIPPED_FILE, VAL_SKIPPED, read_metrics

pytestmark = pytest.mark.e2e

TOOL = "the tool wait"


@dataclasses.dataclass
class Survivor:
    """A run that had all of these faults."""

    verdict: FaultVerdict
    marks: set[str]
    """What the reward and the tool did."""
    output: str
    lines: list[dict[str, Any]]
    skipped: list[dict[str, Any]]


@pytest.fixture(scope="module")
def survivor(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Survivor:
    """Its reward fails in the validation before step 1 and in step 1; a tool hangs for a prompt submitted at step 3;
    the sampler is killed after step 3. A row of the first batch and a held-out row always fail, and are skipped.

    Its method, its loss, its agent loop and its tool are the user's own.
    """
    folder = tmp_path_factory.mktemp("survivor")
    marks = folder / "marks"
    marks.mkdir()
    loops = folder / "loops.yaml"
    loops.write_text(f"- name: mine\n  _target_: {CallsATool.__module__}.CallsATool\n  marks: {marks}\n")
    loss = f"actor_rollout_ref.actor.policy_loss.loss_mode={folder}/mine/loss.py:truncated"
    settings = [
        *written(folder),
        loss,  # the run works in another folder than the page's commands
        "reward.custom_reward_function.name=fails_thrice",
        f"+reward.custom_reward_function.reward_kwargs.marks={marks}",
        f"+reward.custom_reward_function.reward_kwargs.never=[val-3,train-{order_of_rows(assets, 1)[0]}]",
        "async.on_failure=skip",
        "async.reward_timeout_s=5",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=mine",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={Path(__file__).with_name('waiting_tool.py')}",
        "async.tool_timeout_s=5",
        "trainer.val_before_train=true",
    ]
    (kill_engine,) = (fault for fault in FAULTS if fault.name == "kill -9 of a vLLM engine")
    verdict = try_fault(dataclasses.replace(kill_engine, prepare=lambda _: settings), assets, folder / "run")
    output = (folder / "run.log").read_text()
    skipped = list(read_lines(folder / "run" / SKIPPED_FILE))
    return Survivor(verdict, {mark.name for mark in marks.iterdir()}, output, read_metrics(folder / "run"), skipped)


def test_nothing_is_lost(survivor: Survivor) -> None:
    assert survivor.verdict.ok, survivor.verdict
    assert "1 sampler(s) restarted" in survivor.output
    failed = {f"{when}-{what}" for when in ("val", "train") for what in ("hang", "die", "nan")}
    assert survivor.marks == failed | {"tool-returned"}


def test_the_trainer_called_the_loss_of_the_users_own(survivor: Survivor) -> None:
    assert all(0 <= line["actor/own/truncated"] <= 1 for line in survivor.lines if line["step"])


def sampled_again(survivor: Survivor) -> list[str]:
    """Lines about prompts that failed and whose row does not always fail."""
    return [line for line in survivor.output.splitlines() if "sampled again" in line and "no truth" not in line]


def test_rows_that_always_fail_are_skipped(survivor: Survivor, assets: Path) -> None:
    held_out, trained = survivor.skipped
    assert [(line["row"], line["held_out"], line["tries"]) for line in survivor.skipped] == [
        (3, True, MAX_ATTEMPTS),
        (order_of_rows(assets, 1)[0], False, MAX_ATTEMPTS),
    ]
    assert all("no truth" in line["reason"] and line["prompt"] for line in survivor.skipped)
    assert held_out["step"] == 0
    assert {line["step"] for line in survivor.lines[1:] if line[SKIPPED]} == {trained["step"]}
    assert (survivor.lines[0][VAL_SKIPPED], survivor.lines[0][ANSWERS]) == (1, 15)
    assert survivor.output.count(SKIPPED_FILE) >= 2


def test_the_prompt_of_a_tool_that_hangs_is_sampled_again_by_the_same_worker(survivor: Survivor) -> None:
    """The mark shows that the worker goes on: its next call of the tool has returned."""
    (said,) = (line for line in sampled_again(survivor) if TOOL in line)
    assert "took longer than 5 s; raise async.tool_timeout_s" in said and "(the prompt: " in said
    assert "tool-returned" in survivor.marks


def test_prompts_whose_reward_failed_are_sampled_again(survivor: Survivor) -> None:
    said = [line for line in sampled_again(survivor) if TOOL not in line]
    retried = int(sum(line["vcpo/async/retried_prompts"] for line in survivor.lines if line["step"]))
    retried -= 1 + MAX_ATTEMPTS - 1  # of the tool, and of the row that always fails
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
