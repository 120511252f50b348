"""docs/guide/tools.md: its preset composes, its lessons look like its turns, and verl's loop calls its tool."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.fully_async_policy import main
from recipe.warm_start.rows import load_answered_rows
from recipe.warm_start.tokenizer import prompt_text
from tests.kit import ROOT

GUIDE = ROOT / "docs" / "guide"


def files_of(page: str) -> str:
    """The page's bash blocks as far as they write files."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", (GUIDE / page).read_text(), re.DOTALL | re.MULTILINE)
    without_runs = [re.sub(r"^python -m (?:.*\\\n)*.*\n", "", block, flags=re.MULTILINE) for block in blocks]
    return "mkdir -p sort/task\n" + "".join(block for block in without_runs if "cat >" in block)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of both pages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    for page in ("own-task.md", "tools.md"):
        subprocess.run(["bash", "-euo", "pipefail", "-c", files_of(page)], check=True, timeout=120)
    return tmp_path


def sampler(tokenizer: Any, *texts: str) -> Any:
    """A sampler that answers with these texts, one after the other."""
    from verl.workers.rollout.replica import TokenOutput

    answers = iter(texts)

    async def generate(**arguments: Any) -> Any:
        tokens = tokenizer(next(answers) + "<|im_end|>")["input_ids"]
        return TokenOutput(token_ids=tokens, log_probs=[-0.5] * len(tokens), extra_fields={"min_global_steps": 3})

    return SimpleNamespace(generate=generate)


def test_the_loop_calls_the_tool(folder: Path) -> None:
    arguments = ["--config-dir", "sort", "+task=sort_by_tool", "hardware=cpu"]
    main.prepare_environment(arguments[2:])
    config = main.compose(arguments[2:], Path("sort"))
    rollout = config.actor_rollout_ref.rollout
    assert (config.data.train_batch_size, config.data.max_response_length) == (32, 128), "the task's, and the page's"

    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.tools.tool_registry import load_all_tools
    from verl.utils.dataset.rl_dataset import RLHFDataset

    lessons = load_answered_rows(folder / "sort" / "lessons.parquet", "answer")
    tokenizer = lessons.tokenizer(0)
    (asked, call), (told, answer) = lessons.taught[:2]

    async def run() -> Any:
        loop = ToolAgentLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=sampler(tokenizer, call, answer),
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(config.data),
            hf_model_type="qwen2",
            tools=ToolListWrap(load_all_tools(None, rollout.multi_turn.function_tool_path)),
        )
        return await loop.run({}, raw_prompt=asked)

    output = asyncio.run(run())
    whole = tokenizer.decode(output.prompt_ids + output.response_ids)
    assert whole == prompt_text(tokenizer, told) + answer + "<|im_end|>", "a turn looks as the lessons show it"
    sampled = [token for token, mask in zip(output.response_ids, output.response_mask, strict=True) if mask]
    assert tokenizer.decode(sampled) == f"{call}<|im_end|>{answer}<|im_end|>", "what the tool said is not trained on"
    assert json.loads(re.findall("<tool_call>(.*)</tool_call>", call)[0])["arguments"]["text"] in asked[0]["content"]
