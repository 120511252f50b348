"""A reward that hangs or dies is ended, and named with its prompt; the others get their scores."""

import asyncio
import copy
import re
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.trainer.ppo.reward import get_custom_reward_fn

from verl_vcpo.user_code import killable, reward
from verl_vcpo.user_code.errors import UserCodeError
from verl_vcpo.user_code.reward import OwnReward, bound_custom_reward, compute_score, without_workers

LIMIT_S, SHORT_S = 60.0, 1.0  # of calls that end by themselves, and of calls that do not
REWARDS = Path(__file__).with_name("rewards_that_fail.py")


def run(
    work: Callable[[Callable[..., Coroutine[Any, Any, Any]]], Coroutine[Any, Any, Any]],
    name: str = "sync",
    limit_s: float = LIMIT_S,
) -> Any:
    """Do `work` with a reward function; afterwards none of its processes is left."""

    async def scored(text: str, row: int = 0, path: Path | str = REWARDS) -> Any:
        return await compute_score(
            "toy",
            text,
            "truth",
            {"index": row},
            reward_path=str(path),
            reward_name=name,
            reward_fixed={"bonus": 1},
            reward_timeout_s=limit_s,
        )

    others = len(processes())

    async def main() -> Any:
        try:
            return await work(scored)
        finally:
            for pool in reward._pools.values():
                pool.close()
            reward._pools.clear()  # the next event loop has its own
            assert len(processes()) == others

    return asyncio.run(main())


def _array(value: Any) -> np.ndarray:
    array = np.empty(1, dtype=object)
    array[0] = value
    return array


def processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [p for p in children if p.status() != psutil.STATUS_ZOMBIE and "killable_process" in " ".join(p.cmdline())]


@pytest.mark.parametrize("name", ["sync", "coroutine"])
def test_scores_are_those_of_the_function(name: str) -> None:
    async def work(scored: Any) -> list[Any]:
        return await asyncio.gather(*[scored(f"text {i}", i) for i in range(50)])

    assert run(work, name) == [{"score": float(i + 1), "acc": 0.5, "truth": "truth"} for i in range(50)]


@pytest.mark.parametrize("name", ["sync", "coroutine"])
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("sleep", "took longer than"),
        ("loop", "took longer than"),
        ("regex", "took longer than"),  # holds the interpreter's lock: no thread could end it
        ("os._exit", "its process ended with exit code 3"),
        ("segfault", "its process ended with SIGSEGV"),
        ("sys.exit", "raises SystemExit: bye"),
        ("raise", r"raises ValueError: no number \(rewards_that_fail.py:\d+\)"),
        ("none", "returned None, on row 7 .*; return a finite number"),
        ("nan", "returned nan, on row 7 .*; return a finite number"),
    ],
)
def test_a_failure_names_the_reward_and_its_prompt(name: str, text: str, complaint: str) -> None:
    async def work(scored: Any) -> Any:
        with pytest.raises(UserCodeError) as raised:
            await scored(text, row=7)
        assert re.search(complaint, str(raised.value)), raised.value
        for part in (f"{REWARDS}:{name}", "row 7 of 'toy'", repr(text)):
            assert part in str(raised.value)
        assert "\n" not in str(raised.value)
        return await scored("text 1")

    limit_s = 3 * SHORT_S if "took longer" in complaint else LIMIT_S  # the next call has to end in time
    assert run(work, name, limit_s)["score"] == 1.0, "it goes on"


def test_without_reward_workers_a_reward_gets_what_verls_manager_gives(tmp_path: Path) -> None:
    file = tmp_path / "shown.py"
    file.write_text("def score(**given):\n    return {'score': 0.5, 'all': repr(sorted(given.items()))}\n")
    custom = {"path": str(file), "name": "score", "reward_kwargs": {"bonus": 2}}
    manager = {"source": "register", "name": "naive"}
    of_reward = {"custom_reward_function": custom, "reward_manager": manager, "reward_model": {"enable": False}}
    config = OmegaConf.create({"reward": {**of_reward, "num_workers": 8}, "async": {"reward_timeout_s": LIMIT_S}})
    without_workers(config)
    bound_custom_reward(config)
    assert config.reward.num_workers == 0
    row = {"data_source": "toy", "reward_model": {"ground_truth": ["7"]}, "extra_info": {"index": 3}}
    output = AgentLoopOutput(
        prompt_ids=[1], response_ids=[4, 5], response_mask=[1, 1], num_turns=2, metrics={},
        extra_fields={"max_global_steps": 4, "truncated": None},
    )  # fmt: skip
    tensors = {"responses": torch.tensor([[4, 5]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
    others = {**row, "__num_turns__": 2, "tool_extra_fields": output.extra_fields}
    item = DataProto.from_dict(tensors, {name: _array(value) for name, value in copy.deepcopy(others).items()})
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: f"tokens {list(map(int, ids))}")

    async def work(_: Any) -> None:
        told = await NaiveRewardManager(config, tokenizer, get_custom_reward_fn(config)).run_single(item)
        assert await OwnReward(config).result("tokens [4, 5]", output, row) == told["reward_extra_info"]

    run(work)
    assert row["extra_info"] == {"index": 3}


@pytest.mark.parametrize(
    "setting", ["reward_manager.name=dapo", "reward_manager.source=importlib", "reward_model.enable=true"]
)
def test_other_managers_have_their_workers(setting: str) -> None:
    custom = {"path": "reward.py", "name": "score"}
    manager = {"source": "register", "name": "naive"}
    of_reward = {"custom_reward_function": custom, "reward_manager": manager, "reward_model": {"enable": False}}
    config = OmegaConf.create({"reward": {**of_reward, "num_workers": 8}})
    config.merge_with_dotlist([f"reward.{setting}"])
    without_workers(config)
    assert config.reward.num_workers == 8


def test_a_call_that_hangs_takes_no_other_with_it() -> None:
    async def work(scored: Any) -> list[Any]:
        texts = ["regex", "sleep", "os._exit", *["text 0"] * 20]
        return await asyncio.gather(*[scored(text) for text in texts], return_exceptions=True)

    bad, good = (results := run(work, limit_s=5 * SHORT_S))[:3], results[3:]
    assert all(isinstance(result, UserCodeError) for result in bad)
    assert all(result["score"] == 1.0 for result in good)


def test_a_fast_reward_has_one_process_and_a_waiting_one_has_several() -> None:
    async def fast(scored: Any) -> int:
        for _ in range(20):
            await scored("text 1")
        return len(processes())

    async def waiting(scored: Any) -> int:
        await asyncio.gather(*[scored("wait") for _ in range(8)])
        return len(processes())

    assert run(fast) == 1
    assert 1 < run(waiting) <= killable._MOST_PROCESSES


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        *(("child", "took longer"), ("orphan", "exit code 3"), ("daemon, exit", "exit code 3")),
        *(("daemon, wait", "took longer"), ("daemon, stop the parent", "took longer")),
        *(("daemon, kill the parent", "SIGKILL"), ("daemon, kill all", "SIGKILL")),
    ],
)
def test_what_a_reward_started_ends_with_it(text: str, complaint: str) -> None:
    """Also what it started in a session and an environment of its own, and where its process ended by itself."""

    async def work(scored: Any) -> None:
        with pytest.raises(UserCodeError, match=complaint):
            await scored(text)

    run(work, limit_s=5 * SHORT_S)
    left = [p for p in psutil.process_iter(["cmdline"]) if "86399" in (p.info["cmdline"] or [])]
    assert not psutil.wait_procs(left, timeout=20)[1], "killed, a process is gone a moment later"


def test_what_a_reward_prints_has_a_limit(capfd: pytest.CaptureFixture[str]) -> None:
    async def work(scored: Any) -> list[Any]:
        return [await scored("flood"), await scored("text 1")]

    assert [result["score"] for result in run(work)] == [1.0, 1.0]
    printed = capfd.readouterr().err
    after_it = 2 << 16  # what the reader's buffer and the pipe hold when the call ends counts for the next call
    assert len(printed) < (1 << 20) + after_it + 1000 and printed.count("the rest is dropped") == 1


def test_a_reward_that_does_not_load_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module\n")

    async def work(scored: Any) -> list[Any]:
        return await asyncio.gather(*[scored("x", path=broken) for _ in range(8)], return_exceptions=True)

    for result in run(work):
        assert "does not load: it raises ModuleNotFoundError: No module named 'no_such_module'" in str(result)


def test_a_process_does_not_outlive_its_worker() -> None:
    """Its call would never return, and nobody is there to end it."""
    program = f"""
import asyncio, sys
from verl_vcpo.user_code.killable import Pool
from verl_vcpo.user_code.reward_function import RewardFunction
async def main():
    pool = Pool(RewardFunction({str(REWARDS)!r}, "sync", {{}}, 600))
    call = dict(data_source="", solution_str="regex", ground_truth="", extra_info={{}})
    task = asyncio.create_task(pool.call(call))
    while not pool._processes:
        await asyncio.sleep(0.1)
    print(pool._processes[0]._process.pid, flush=True)
    await task
asyncio.run(main())
"""
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    process = psutil.Process(int(worker.stdout.readline()))
    worker.kill()
    worker.wait()
    process.wait(30)


def test_verl_loads_it_in_the_place_of_the_users() -> None:
    custom = {"path": str(REWARDS), "name": "sync", "reward_kwargs": {"bonus": 2}}
    config = OmegaConf.create({"async": {"reward_timeout_s": 5}, "reward": {"custom_reward_function": custom}})
    OmegaConf.set_struct(config, True)
    bound_custom_reward(config)

    async def work(_: Any) -> Any:
        function = get_custom_reward_fn(config)
        return await function(data_source="toy", solution_str="text 1", ground_truth="truth", extra_info={})

    assert run(work)["score"] == 2.0


def test_without_a_custom_reward_nothing_changes() -> None:
    config = OmegaConf.create({"async": {"reward_timeout_s": 5}, "reward": {"custom_reward_function": {"path": None}}})
    bound_custom_reward(config)
    assert get_custom_reward_fn(config) is None
