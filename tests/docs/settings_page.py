"""docs/reference/settings.md, from the code: `python -m tests.docs.settings_page [--write]`.

Without --write it compares the page with the code. Exit code 1 where they differ.
"""

import argparse
import ast
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING
from enum import EnumType
from pathlib import Path
from typing import Any
from unittest.mock import patch

from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy.main import compose_unchecked
from recipe.tasks.tool_use.settings import ToolUseSettings
from verl_vcpo.actor.norms_settings import NormsConfig
from verl_vcpo.actor.vcpo_settings import VCPOSettings
from verl_vcpo.common.whole_file import write_whole

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "settings.md"
CONFIG = ROOT / "recipe" / "fully_async_policy" / "config"
# "  name: value # meaning", and the meaning alone, on the line above
_LINE, _ABOVE = re.compile(r"^( *)(\w+): ([^#\s].*?)(?: # (.*))?$"), re.compile(r"^ *# (.*)$")

_HEAD = """# Settings

Three settings make a run: `+task=NAME` says what is learned, `method=NAME` what is done with old rollouts, and
`async.lag=K` how old rollouts may be. All others have defaults. A setting that is wrong, or that would have no effect,
ends the launcher with exit code 2 and one line that says what to give instead.

```bash
python -m recipe.fully_async_policy.main +task=countdown method=vcpo async.lag=8
python -m recipe.fully_async_policy.main +task=countdown --print-config    # all settings, verl's own too
```

[When to change a setting of VCPO](../explanation/algorithm.md#when-to-change-a-setting). [All methods](methods.md).
This page is written from the code: `python -m tests.docs.settings_page --write`.
"""
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# Settings of verl, Megatron and Ray: what it is.
_LAYOUTS = {
    "`trainer.nnodes`, `trainer.n_gpus_per_node`": "the trainer's GPUs",
    f"`{_ACTOR}.megatron.{{tensor_model,pipeline_model,expert_model,context}}_parallel_size`": (
        "how the model is split over the trainer's GPUs; the rest is data parallel. With "
        "`virtual_pipeline_model_parallel_size` the micro-batches must be a multiple of the stages"
    ),
    f"`{_ROLLOUT}.nnodes`, `{_ROLLOUT}.n_gpus_per_node`": "the samplers' GPUs, besides the trainer's",
    f"`{_ROLLOUT}.tensor_model_parallel_size`": "GPUs of one sampler",
    f"`{_ACTOR}.ppo_max_token_len_per_gpu`": "tokens of a forward pass: lower it first when memory is short",
    f"`{_ACTOR}.megatron.optimizer_offload=true`": "the optimizer's state is on the GPU for its step only",
    f"`{_ACTOR}.megatron.param_offload=true`": "weights and gradients leave the GPU between updates",
    f"`{_ROLLOUT}.checkpoint_engine.backend=nccl`": (
        "how weights reach the samplers: `hardware=gpu` sets it. `naive` is refused, and `delta_sharded`, which "
        "sends changes alone"
    ),
    f"`{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes`": "memory of that transfer on each side",
    f"`{_ACTOR}.megatron.router_replay.mode=R3`, `{_ROLLOUT}.enable_rollout_routing_replay=true`": (
        "of a mixture of experts, together: an update takes the experts that samplers chose, 2 bytes for each token, "
        "layer and chosen expert"
    ),
    "`trainer.save_freq=25`, `trainer.resume_mode=auto`": "checkpoints; continue from the newest",
    "`trainer.max_actor_ckpt_to_keep=2`": "the two newest checkpoints stay",
    "`RAY_ADDRESS`, or `ray_kwargs.ray_init.address`": (
        "joins a cluster. Without it a run starts its own Ray, which alone obeys `ray_kwargs.ray_init.num_cpus`, "
        "`num_gpus` and `object_store_memory`"
    ),
}
_LAYOUTS_HEAD = """## Layouts of GPUs

Settings of verl, Megatron and Ray that a cluster needs most often ([your cluster](../guide/cluster.md)).

| setting | what it is |
| -- | -- |
"""


def page() -> str:
    """The text of the page. The column "default" has what a run gets that gives nothing else."""
    with patch.dict(os.environ, VCPO_HARDWARE="cpu"):
        run = compose_unchecked(["+agent=simpletir"])
    return "\n".join(
        [
            _HEAD,
            _section("The run", "", _of_yaml(CONFIG / "vcpo_trainer.yaml", depth=0)),
            _section("Asynchrony", "", _of_yaml(CONFIG / "vcpo_trainer.yaml", "async")),
            _section("The data", "", _of_yaml(CONFIG / "vcpo_trainer.yaml", "data")),
            _section("VCPO's update", "", _of_class(VCPOSettings, "vcpo", run)),
            _section("Gradient norms", "", _of_class(NormsConfig, "vcpo.norms", run)),
            _section("Tool use", "With `+agent=simpletir`.\n\n", _of_class(ToolUseSettings, "tool_use", run)),
            _section(
                "reasoning-gym",
                "With `+task=reasoning_gym`.\n\n",
                _of_yaml(CONFIG / "task" / "reasoning_gym.yaml", "reasoning_gym"),
            ),
            _LAYOUTS_HEAD + "".join(f"| {setting} | {meaning} |\n" for setting, meaning in _LAYOUTS.items()),
            _files("Tasks", "task", "`+task=NAME`; [a task of your own](../guide/own-task.md)."),
        ]
    )


def _section(title: str, lead: str, rows: Iterator[tuple[str, str, str]]) -> str:
    lines = [f"| `{name}` | {_code(value) if value else ''} | {_cell(meaning)} |" for name, value, meaning in rows]
    return "\n".join([f"## {title}\n\n{lead}| setting | default | what it is |", "| -- | -- | -- |", *lines, ""])


def _files(title: str, group: str, lead: str) -> str:
    rows = [f"| `{file.stem}` | {_cell(_comment(file))} |" for file in sorted((CONFIG / group).glob("*.yaml"))]
    return "\n".join([f"## {title}\n\n{lead}\n\n| name | what it is |", "| -- | -- |", *rows, ""])


def _comment(file: Path) -> str:
    """The first sentence of a preset's comment."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return lines[1].removeprefix("# ").split(". ")[0].rstrip(".")


def _of_yaml(file: Path, group: str = "", depth: int = 2) -> Iterator[tuple[str, str, str]]:
    """(setting, default, comment) of the commented lines in a group, or of those on top."""
    inside, above = not group, ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if group and re.match(r"\S", line):
            inside = line.startswith(f"{group}:")
        found, comment = _LINE.match(line), _ABOVE.match(line)
        if inside and found and len(found[1]) == depth and (meaning := found[4] or above):
            yield f"{group}.{found[2]}".lstrip("."), found[3], meaning
        above = comment[1] if comment else ""


def _of_class(settings: type, prefix: str, run: DictConfig) -> Iterator[tuple[str, str, str]]:
    """(setting, value in `run`, docstring) of a dataclass; of an enum each choice has its docstring, too."""
    meanings = {name: text for of in settings.__mro__[:-1] for name, text in _docstrings(of).items()}
    for name, field in settings.__dataclass_fields__.items():  # type: ignore[attr-defined]  # a dataclass
        if field.default is MISSING:  # a group of its own
            continue
        kind, choices = type(field.default), ""
        if isinstance(kind, EnumType):
            of_choice = _docstrings(kind)
            choices = "".join(f"\n`{choice.value}`: {of_choice[choice.name]}" for choice in kind)
        value = OmegaConf.select(run, f"{prefix}.{name}", default=field.default)
        yield f"{prefix}.{name}", _as_yaml(value), meanings[name] + choices


def _as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _docstrings(of: type) -> dict[str, str]:
    """Name of an attribute -> the string below its assignment."""
    (body,) = (
        node for node in ast.parse(textwrap.dedent(inspect.getsource(of))).body if isinstance(node, ast.ClassDef)
    )
    found = {}
    for above, below in zip(body.body, body.body[1:], strict=False):
        target = above.target if isinstance(above, ast.AnnAssign) else getattr(above, "targets", [None])[0]
        if isinstance(target, ast.Name) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[target.id] = inspect.cleandoc(str(below.value.value))
    return found


def _cell(text: str) -> str:
    """A text as the cell of a table, as mdformat would write it."""
    lines = re.sub(r"\n(?!`)", " ", text).splitlines()
    return "<br>".join(lines).replace("|", r"\|").replace("<=", r"\<=")


def _code(value: str) -> str:
    """A value as the cell of a table. A bar between backticks would end the cell."""
    escaped = re.sub(r"[\\|<]", r"\\\g<0>", value)
    return f"<code>{escaped}</code>" if "|" in value else f"`{value}`"


def main() -> int:
    """Returns 1 where page and code differ."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs.settings_page", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the page")
    if parser.parse_args().write:
        write_whole(PAGE, page())
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE.relative_to(ROOT)} is not what the code says: python -m tests.docs.settings_page --write")
    return 1


if __name__ == "__main__":
    sys.exit(main())
