"""Five steps of tool use at lag 2: the real Ray, vLLM and Megatron, and programs in the real sandbox."""

import random
from collections.abc import Iterator
from pathlib import Path

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
from verl_vcpo.trainer.ppo.v1.run_log import read_metrics

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


def test_tool_use_at_lag_2(assets: Path, model: Path, tmp_path: Path) -> None:
    with served("--concurrency", "48") as (url, _):
        run_id, config = prepared(
            [
                *small_task(assets, tmp_path),
                "+agent=simpletir",
                f"tool_use.sandbox_url={url}",
                "tool_use.max_turns=3",
                "tool_use.call_timeout_s=30",
                f"actor_rollout_ref.model.path={model}",
                "data.max_response_length=96",
                "actor_rollout_ref.rollout.max_model_len=192",
                f"async.lag={LAG}",
                f"trainer.total_training_steps={STEPS}",
                "trainer.val_before_train=false",
                "trainer.test_freq=0",
            ]
        )
        from verl_vcpo.trainer.main_ppo import LagKTaskRunner

        with main.ray_session(config, run_id):
            LagKTaskRunner().run(config)
        served_programs = requests.get(f"{url}/stats", timeout=10).json()

    steps = read_metrics(tmp_path)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    calls = sum(line["tool_use/calls"] for line in steps)
    assert 0 < calls <= served_programs["Success"] + served_programs["Failed"], "programs ran in the sandbox"
    assert sum(line["tool_use/call_s"] for line in steps) > 0
    for line in steps:
        assert line["lag_max"] <= LAG
        assert line["actor/vcpo/dropped_sequences"] == line["tool_use/dropped_trajectories"]
        assert 0 < line["ess_ratio"] <= 1
    assert steps[0]["ess_ratio"] > 0.99, "the first batch is on policy: observations have no part in the weights"
    assert steps[0]["kl"] < 1e-4
    # While they waited for their programs the weights were updated, and the next turn was the new policy's.
    assert sum(line["tool_use/calls_across_updates"] for line in steps) > 0
    assert max(line["training/off_policy/trajectory_spans/max"] for line in steps) > 1
    rows = [row for line in steps for row in line["trained_rows"]]
    assert len(rows) == len(set(rows)) == STEPS * BATCH, "every prompt is trained on once, none is lost"
