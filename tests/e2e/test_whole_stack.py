"""Five steps of tool use at lag 2: the real Ray, TransferQueue, vLLM and Megatron, and programs in the real sandbox."""

import asyncio
import contextlib
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import requests
import torch
import wandb
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.fully_async_policy.launch.processes import processes_of
from recipe.fully_async_policy.launch.session import ray_session
from recipe.warm_start.model import build_model
from recipe.warm_start.tokenizer import train_tokenizer
from recipe.warm_start.train import Settings, examples, fit, load_held_out
from tests.e2e.conftest import prepared
from tests.e2e.held_answers import held_answers, updates_meet_calls
from tests.e2e.ports import check_ports
from tests.e2e.updates_in_flight import Sampler, check_log_probs_around_an_update, log_probs, prompt_ids
from tests.kit import ROOT
from tests.kit.sandbox_server import served
from tests.kit.served_model import served_by_vllm
from tests.kit.small_run import BATCH, SEED, Listener, listening, small_task
from tests.kit.wandb_file import offline_run
from vcpo.ess import ess_ratio
from verl_vcpo.common.run_folder import run_folder
from verl_vcpo.report import sample_log
from verl_vcpo.report.overview import ACCURACY, CURVES, TABLE
from verl_vcpo.report.run_log import MODEL_FOLDER, read_metrics
from verl_vcpo.report.sample_log import read_samples
from verl_vcpo.samplers.kv_cache import KVCache

pytestmark = pytest.mark.e2e

STEPS, LAG = 5, 2
OTHER_TASK = "other"
OTHER_ROWS = 48  # from this row on, of the 64
MEETING = 2, 3  # the steps whose weight update meets running programs, which belong to batches up to the last
SAMPLES_EVERY, SAMPLES = 2, 16  # every trajectory of a recorded step: BATCH prompts with four each
TRUNCATION = 1.0  # so that some weights of every draw are truncated
SYNC_VERSION = 1000  # a version that no training step reaches
PROGRAM = "```python\nprint(6 * 7)\n```\n"
"""One token of the model's vocabulary: learning to write it takes seconds."""
TOKENS_64 = {"max_tokens": 64, "ignore_eos": True}
"""Of a response that is as long whatever is drawn."""


def conversations(pairs: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The warm start's examples, answered after a program."""
    return ((prompt, f"{PROGRAM}Code execution result: 42\n{response}") for prompt, response in pairs)


@pytest.fixture(scope="module")
def model(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned to run the program."""
    data = load_held_out(assets / "data")
    seed = int(SEED or 0)
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(data.difficulty)
    tokenizer.add_tokens([AddedToken(PROGRAM, special=False, normalized=False)])
    model = build_model(tokenizer)
    pairs = conversations(examples(data.difficulty, data.keys, 0.2, random.Random(seed)))
    fit(model, tokenizer, pairs, Settings(steps=30, batch_size=16), lambda: 0.0)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def two_tasks(assets: Path, folder: Path) -> list[str]:
    """Settings: a quarter of the rows, the last ones, are of another task, whose truths have another type."""
    files: dict[str, list[Path]] = {"train": [], "val": []}
    for part, found in files.items():
        rows = pd.read_parquet(assets / "data" / f"{part}.parquet")
        others = rows[len(rows) * 3 // 4 :].assign(data_source=OTHER_TASK, answer="yes")
        others["reward_model"] = [{"ground_truth": "a text"}] * len(others)
        for name, some in (("first", rows[: len(rows) - len(others)]), (OTHER_TASK, others)):
            found.append(folder / f"{name}-{part}.parquet")
            some.to_parquet(found[-1])
    return [*(f"data.{part}_files=[{','.join(map(str, found))}]" for part, found in files.items()), "data.shares=[3,1]"]


@dataclass
class Stack:
    """A run that has trained. Its processes are up until `session` is closed.

    programs: what the sandbox had run by then.
    niceness: of each process.
    weights: the trainer's after the last step; `served` are the log-probs of `response` that vLLM reported then.
    """

    run_id: str
    run_dir: Path
    token: str
    trainer: Any
    kv_cache: KVCache
    listeners: list[Listener]
    of_sandbox: list[Listener]
    niceness: list[int]
    session: contextlib.ExitStack
    programs: int
    zero: dict[str, Any]
    steps: list[dict[str, Any]]
    response: list[int]
    served: list[float]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=[KVCache.KEEP, pytest.param(KVCache.RECOMPUTE, marks=pytest.mark.nightly)])
def stack(
    request: pytest.FixtureRequest, assets: Path, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    run_dir = tmp_path_factory.mktemp("whole_stack")
    with contextlib.ExitStack() as session:
        patch = session.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(sample_log, "SAMPLES", SAMPLES)
        patch.setenv("WANDB_MODE", "offline")
        for name in ("WANDB_DIR", "VERL_FILE_LOGGER_PATH"):  # the run sets them; the next one has another folder
            patch.setenv(name, "")
            patch.delenv(name)
        session.callback(wandb.teardown)  # as at the end of a process: raises where the run left W&B's own
        url, sandbox = session.enter_context(served("--concurrency", "48", "--time-s", "30"))
        held = session.enter_context(held_answers(url))
        run_id, config = prepared(
            [
                *small_task(assets, run_dir),
                *two_tasks(assets, tmp_path_factory.mktemp("two_tasks")),
                "+agent=simpletir",
                f"tool_use.sandbox_url={held.url}",
                "tool_use.max_turns=3",
                "tool_use.call_timeout_s=30",
                f"actor_rollout_ref.model.path={model}",
                "data.max_response_length=96",
                "actor_rollout_ref.rollout.max_model_len=192",
                f"async.lag={LAG}",
                f"async.kv_cache={request.param}",
                f"trainer.total_training_steps={STEPS}",
                f"trainer.test_freq={STEPS}",
                f"samples_every={SAMPLES_EVERY}",
                f"vcpo.truncation={TRUNCATION}",
                "trainer.logger=[tensorboard,file,wandb]",
            ]
        )
        from verl_vcpo.loop.main import LagKTaskRunner

        listeners: list[Listener] = []
        session.enter_context(ray_session(config, run_id))
        runner = LagKTaskRunner()
        with updates_meet_calls(held, MEETING):
            runner.run(config, lambda: listeners.extend(listening([psutil.Process(), *processes_of(run_id)])))
        stats = requests.get(f"{url}/stats", timeout=10).json()
        response, log_probs_served = served_response(runner.trainer, prompt_ids(model))
        zero, *steps = read_metrics(run_dir)
        yield Stack(
            run_id=run_id,
            run_dir=run_dir,
            token=os.environ["RAY_AUTH_TOKEN"],
            trainer=runner.trainer,
            kv_cache=request.param,
            listeners=listeners,
            of_sandbox=listening([psutil.Process(sandbox)]),
            niceness=[process.nice() for process in processes_of(run_id)],
            session=session,
            programs=stats["Success"] + stats["Failed"],
            zero=zero,
            steps=steps,
            response=response,
            served=log_probs_served,
            weights=trainer_weights(runner.trainer, run_id),
        )


def served_response(trainer: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Tokens that vLLM samples now, and the log-probabilities it reports for them."""
    output = asyncio.run(
        trainer.get_llm_client().generate(
            "check", prompt_ids=prompt, sampling_params={"temperature": 1.0, "logprobs": True, **TOKENS_64}
        )
    )
    return output.token_ids, output.log_probs


def trainer_weights(trainer: Any, run_id: str) -> dict[str, torch.Tensor]:
    """The trainer's weights now, written by its checkpoint engine."""
    import ray

    ray.get(trainer.actor_rollout_wg.update_weights(global_steps=SYNC_VERSION, mode="weight_file"))
    file = Path(f"/dev/shm/vcpo-{run_id}-weights-v{SYNC_VERSION}")
    assert file.stat().st_mode & 0o777 == 0o600
    return torch.load(file, weights_only=True)


def test_no_other_machine_can_connect(stack: Stack) -> None:
    tests = " ".join(psutil.Process().cmdline()[:5])
    driver = [one._replace(process="fully_async_policy") for one in stack.listeners if one.process == tests]
    check_ports([one for one in stack.listeners if one.process != tests] + driver)
    check_ports(stack.of_sandbox, "code_sandbox")
    follows = [sys.executable, "-u", "-m", "scripts.report", "--live", str(stack.run_dir)]
    with psutil.Popen(follows, cwd=ROOT, stdout=subprocess.PIPE) as report:
        assert report.stdout.readline()
        check_ports(listening([report]), "scripts.report")
        report.terminate()


def test_the_trainers_processes_meet_on_a_port_that_no_connection_is_given(stack: Stack) -> None:
    trainers = [listener for listener in stack.listeners if listener.process.startswith("ray::WorkerDict")]
    given_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert any(given_out * 3 // 4 - 100 <= listener.port < given_out for listener in trainers), stack.listeners


def test_vllm_serves_the_weights_that_the_trainer_has(stack: Stack, model: Path) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model)
    prompt = prompt_ids(model)
    before = log_probs(policy, prompt, stack.response)
    policy.load_state_dict(stack.weights)
    after = log_probs(policy, prompt, stack.response)
    assert (after - torch.tensor(stack.served)).abs().max() < 1e-3, "vLLM serves other weights than the trainer's"
    assert (before - after).abs().max() > 1e-3, "the steps changed nothing, so the comparison proves nothing"


def test_what_the_run_logs(stack: Stack) -> None:
    assert stack.zero["step"] == 0 and 0 <= stack.zero["val_accuracy"] <= 1
    for line in (stack.zero, stack.steps[-1]):
        accuracies = line["val_accuracies"]
        assert accuracies.keys() == {"countdown", OTHER_TASK}, "each held-out set has its own"
        assert line["val_accuracy"] == pytest.approx(sum(accuracies.values()) / 2)
    for line in stack.steps:
        usable = SAMPLES - line["tool_use/dropped_trajectories"]
        assert (1 / usable if usable else 0) <= line["ess_ratio"] <= 1
        assert line["lr_multiplier"] == pytest.approx(math.sqrt(line["ess_ratio"]), rel=1e-6)
        assert line["kl"] >= 0 and math.isfinite(line["grad_norm"])
        assert 0 <= line["lag_min"] <= line["lag_mean"] <= line["lag_max"]
        assert line["tokens_per_s"] > 0 and line["weight_sync_s"] > 0
        share = line["vcpo/truncated/share"]
        kinds = [(share, "truncated"), (1 - share, "finished")]
        rewards = sum(part * line[f"vcpo/{kind}/reward"] for part, kind in kinds if part > 1e-9)
        assert rewards == pytest.approx(line["reward"], abs=1e-6)
        assert 0 <= line["trainer_idle_share"] <= 1 and 0 <= line["sampler_idle_share"] <= 1
    assert list((stack.run_dir / "tensorboard").iterdir())
    in_wandb = offline_run(stack.run_dir).history
    assert in_wandb[0][ACCURACY] == stack.zero["val_accuracy"]
    assert in_wandb[STEPS][ACCURACY] == stack.steps[-1]["val_accuracy"]
    for line in stack.steps:
        shown = in_wandb[line["step"]]
        assert {name: shown.get(name) for name in CURVES} == {name: line[source] for name, source in CURVES.items()}
    logged = [json.loads(line) for line in (stack.run_dir / "verl_metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == list(range(STEPS + 1)), "verl's file logger"


def test_sampled_responses_are_kept(stack: Stack) -> None:
    samples = read_samples(stack.run_dir)
    assert samples == [row for step in (1, 2, 4) for row in offline_run(stack.run_dir).table(step, TABLE)], "in W&B"
    assert [sample["step"] for sample in samples] == [1] * SAMPLES + [2] * SAMPLES + [4] * SAMPLES
    lines = {line["step"]: line for line in stack.steps}
    for sample in samples:
        line = lines[sample["step"]]
        assert line["lag_min"] <= sample["lag"] <= line["lag_max"]
        assert sample["data_source"] in ("countdown", OTHER_TASK) and "write an expression" in sample["prompt"]
        assert 0 <= sample["weight"] <= TRUNCATION and 0 <= sample["reward"] <= 1
        assert 0 < sample["tokens"] <= 96
    assert any(PROGRAM in sample["response"] for sample in samples)
    for sample in samples[:SAMPLES]:
        assert sample["weight"] == 0 or sample["weight"] == pytest.approx(1, rel=1e-2), "on policy"


def test_weights_of_samples_are_those_of_the_update(stack: Stack) -> None:
    samples, lines = read_samples(stack.run_dir), {line["step"]: line for line in stack.steps}
    for step in (1, 2, 4):
        weights = [(sample["log_weight"], sample["weight"]) for sample in samples if sample["step"] == step]
        excluded = sum(log_weight is None for log_weight, _ in weights)
        assert excluded == lines[step]["tool_use/void_trajectories"], "by the agent loop"
        for log_weight, weight in weights:
            assert weight == pytest.approx(0.0 if log_weight is None else min(math.exp(log_weight), TRUNCATION))
        assert max(weight for _, weight in weights) == pytest.approx(lines[step]["actor/vcpo/weight/max"])
        used = torch.tensor([log_weight for log_weight, _ in weights if log_weight is not None], dtype=torch.float64)
        assert ess_ratio(used) == pytest.approx(lines[step]["ess_ratio"]), "of untruncated weights"


def test_the_run_leaves_its_model(stack: Stack, model: Path) -> None:
    kept = AutoModelForCausalLM.from_pretrained(stack.run_dir / MODEL_FOLDER).state_dict()
    assert kept.keys() == stack.weights.keys()
    assert all(weight.equal(stack.weights[name]) for name, weight in kept.items())
    tokenizer = AutoTokenizer.from_pretrained(stack.run_dir / MODEL_FOLDER)
    message = [{"role": "user", "content": PROGRAM}]
    assert tokenizer.apply_chat_template(message) == AutoTokenizer.from_pretrained(model).apply_chat_template(message)


def test_programs_ran_in_the_sandbox(stack: Stack) -> None:
    calls = sum(line["tool_use/calls"] for line in stack.steps)
    assert 0 < calls <= stack.programs
    assert sum(line["tool_use/call_s"] for line in stack.steps) > 0


def test_observations_have_no_part_in_the_weights(stack: Stack) -> None:
    assert stack.steps[0]["ess_ratio"] > 0.99, "the first batch is on policy"
    assert stack.steps[0]["kl"] < 1e-4
    for line in stack.steps:
        assert line["actor/vcpo/dropped_sequences"] == line["tool_use/dropped_trajectories"]


def test_the_lag_is_bounded_and_no_prompt_is_lost(stack: Stack) -> None:
    assert [line["step"] for line in stack.steps] == list(range(1, STEPS + 1))
    for line in stack.steps:
        assert line["lag_max"] <= min(line["step"] - 1, LAG)
        assert sum(line["buffer_ages"].values()) == LAG * BATCH, "submitted ahead, exactly as far as allowed"
    assert max(line["lag_max"] for line in stack.steps) > 0, "no batch was sampled ahead"
    rows = [row for line in stack.steps for row in line["trained_rows"]]
    assert len(rows) == len(set(rows)) == STEPS * BATCH, "every prompt is trained on once"
    others = sum(row >= OTHER_ROWS for row in rows)
    assert 0 < others <= (STEPS + LAG) * BATCH / 4, "a quarter of all that were submitted"


def test_weights_are_updated_while_programs_run(stack: Stack) -> None:
    assert sum(line["tool_use/calls_across_updates"] for line in stack.steps) > 0
    assert max(line["training/off_policy/trajectory_spans/max"] for line in stack.steps) > 1, "turns of two policies"


@pytest.mark.parametrize("kv_cache", KVCache)
def test_log_probs_around_an_update(stack: Stack, model: Path, kv_cache: KVCache) -> None:
    sampler = Sampler(stack.trainer, stack.run_id, model)
    sampler.switch_to(kv_cache)
    check_log_probs_around_an_update(sampler, kv_cache)


def test_the_runs_processes_are_as_nice_as_the_launcher(stack: Stack) -> None:
    """Ray would start its workers with 15 more, and a busy laptop would leave them hardly any time."""
    assert {*stack.niceness} == {psutil.Process().nice()}


def test_nothing_is_left_of_it(stack: Stack) -> None:
    assert len(stack.niceness) > 5, "the run's processes are not found, so their absence proves nothing"
    stack.session.close()
    assert not processes_of(stack.run_id)
    assert not list(Path("/dev/shm").glob(f"vcpo-{stack.run_id}-*"))
    assert not run_folder(stack.run_id).exists()
    files = [file for file in stack.run_dir.rglob("*") if file.is_file()]
    assert not [file for file in files if stack.token.encode() in file.read_bytes()], "Ray's token is on disk"


def test_vllm_serves_the_model_that_the_run_left(stack: Stack) -> None:
    folder = stack.run_dir / MODEL_FOLDER
    prompt = prompt_ids(folder)
    with served_by_vllm(folder, stack.run_dir / "serve.log") as url:
        (server,) = (child for child in psutil.Process().children() if "recipe.vllm" in child.cmdline())
        check_ports(listening([server, *server.children(recursive=True)]), "recipe.vllm")
        question = {"model": str(folder), "temperature": 1.0, "skip_special_tokens": False, **TOKENS_64}
        completion = requests.post(
            f"{url}/v1/completions",
            json={**question, "prompt": prompt, "logprobs": 0, "return_token_ids": True},
            timeout=120,
        ).json()["choices"][0]
        messages = [{"role": "user", "content": "Using the numbers 1, 2 and 3, write an expression that equals 6."}]
        chat = requests.post(f"{url}/v1/chat/completions", json={**question, "messages": messages}, timeout=120)
    assert chat.json()["choices"][0]["message"]["content"]
    policy = AutoModelForCausalLM.from_pretrained(folder)
    wanted = log_probs(policy, prompt, completion["token_ids"])
    assert (wanted - torch.tensor(completion["logprobs"]["token_logprobs"])).abs().max() < 1e-3


def test_the_model_can_be_evaluated(stack: Stack, assets: Path, tmp_path: Path) -> None:
    command = ["recipe.evaluate", str(stack.run_dir / MODEL_FOLDER), "--task", "countdown", "--samples", "2"]
    settings = [
        f"data.val_files={assets}/data/val.parquet",
        "reward.custom_reward_function.path=pkg://tests.kit.digits_reward",
    ]
    result = tmp_path / "result.json"
    listeners: list[Listener] = []
    with open(tmp_path / "said", "w+") as said:
        done = psutil.Popen(
            [sys.executable, "-m", *command, "--json", str(result), *settings], stdout=said, stderr=subprocess.STDOUT
        )
        while done.poll() is None:
            listeners += listening([done])
            time.sleep(0.2)
        said.seek(0)
        text = said.read()
    assert done.returncode == 0, text[-2000:]
    assert "95% interval" in text
    check_ports(listeners, "recipe.evaluate")
    content = json.loads(result.read_text())
    assert content["results"]["countdown"]["problems"] == 16 and len(content["answers"]) == 32
    assert any(answer["score"] > 0 for answer in content["answers"])
