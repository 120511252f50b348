"""Five steps of tool use at lag 2: the real Ray, vLLM and Megatron, and programs in the real sandbox.

Responses keep their keys and values when new weights arrive; in tests/e2e/test_whole_stack.py they do not.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from tokenizers import AddedToken

from recipe.fully_async_policy import main
from recipe.warm_start.model import build_model
from recipe.warm_start.tokenizer import train_tokenizer
from recipe.warm_start.train import Settings, examples, fit, load_held_out
from testkit.sandbox_server import served
from testkit.small_run import BATCH, small_task
from tests.e2e.conftest import prepared
from tests.e2e.updates_in_flight import Sampler, check_log_probs_around_an_update
from verl_vcpo.trainer.ppo.v1.run_log import read_metrics
from verl_vcpo.workers.rollout.kv_cache import KVCache

pytestmark = pytest.mark.e2e

STEPS, LAG = 5, 2  # what is submitted from step 2 on meets an update while its program runs
PROGRAM = "```python\nimport time\ntime.sleep(3)\nprint(6 * 7)\n```\n"
"""One token of the model's vocabulary: learning to write it takes seconds."""


def conversations(pairs: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The warm start's examples, answered after a program."""
    return ((prompt, f"{PROGRAM}Code execution result: 42\n{response}") for prompt, response in pairs)


@pytest.fixture(scope="module")
def model(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned to run the program."""
    data = load_held_out(assets / "data")
    torch.manual_seed(0)
    tokenizer = train_tokenizer(data.difficulty)
    tokenizer.add_tokens([AddedToken(PROGRAM, special=False, normalized=False)])
    model = build_model(tokenizer)
    pairs = conversations(examples(data.difficulty, data.keys, 0.2, random.Random(0)))
    fit(model, tokenizer, pairs, Settings(steps=30, batch_size=16))
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class ToolRun:
    """A run that has trained, and whose processes are up. `programs`: what the sandbox had run by then."""

    run_id: str
    trainer: Any
    kv_cache: KVCache
    steps: list[dict[str, Any]]
    programs: int


@pytest.fixture(scope="module", params=[KVCache.KEEP, pytest.param(KVCache.RECOMPUTE, marks=pytest.mark.nightly)])
def run(
    request: pytest.FixtureRequest, assets: Path, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ToolRun]:
    run_dir = tmp_path_factory.mktemp("tool_use")
    with served("--concurrency", "48") as (url, _):
        run_id, config = prepared(
            [
                *small_task(assets, run_dir),
                "+agent=simpletir",
                f"tool_use.sandbox_url={url}",
                "tool_use.max_turns=3",
                "tool_use.call_timeout_s=30",
                f"actor_rollout_ref.model.path={model}",
                "data.max_response_length=96",
                "actor_rollout_ref.rollout.max_model_len=192",
                f"async.lag={LAG}",
                f"async.kv_cache={request.param}",
                f"trainer.total_training_steps={STEPS}",
                "trainer.val_before_train=false",
                "trainer.test_freq=0",
            ]
        )
        from verl_vcpo.trainer.main_ppo import LagKTaskRunner

        with main.ray_session(config, run_id):
            runner = LagKTaskRunner()
            runner.run(config)
            stats = requests.get(f"{url}/stats", timeout=10).json()
            programs = stats["Success"] + stats["Failed"]
            yield ToolRun(run_id, runner.trainer, request.param, read_metrics(run_dir), programs)


def test_programs_ran_in_the_sandbox(run: ToolRun) -> None:
    calls = sum(line["tool_use/calls"] for line in run.steps)
    assert 0 < calls <= run.programs
    assert sum(line["tool_use/call_s"] for line in run.steps) > 0


def test_observations_have_no_part_in_the_weights(run: ToolRun) -> None:
    assert run.steps[0]["ess_ratio"] > 0.99, "the first batch is on policy"
    assert run.steps[0]["kl"] < 1e-4
    for line in run.steps:
        assert line["actor/vcpo/dropped_sequences"] == line["tool_use/dropped_trajectories"]
        assert 0 < line["ess_ratio"] <= 1


def test_the_lag_is_bounded_and_no_prompt_is_lost(run: ToolRun) -> None:
    assert [line["step"] for line in run.steps] == list(range(1, STEPS + 1))
    assert all(line["lag_max"] <= LAG for line in run.steps)
    rows = [row for line in run.steps for row in line["trained_rows"]]
    assert len(rows) == len(set(rows)) == STEPS * BATCH, "every prompt is trained on once"


def test_weights_are_updated_while_programs_run(run: ToolRun) -> None:
    assert sum(line["tool_use/calls_across_updates"] for line in run.steps) > 0
    assert max(line["training/off_policy/trajectory_spans/max"] for line in run.steps) > 1, "the next turn is the new's"


def test_log_probs_around_an_update(run: ToolRun, model: Path) -> None:
    check_log_probs_around_an_update(Sampler(run.trainer, run.run_id, model), run.kv_cache)
