"""The command `vcpo`: one word for each command of a checkout, from any folder."""

import os
import runpy
import sys
from pathlib import Path

_CHECKOUT = Path(__file__).parents[2]
COMMANDS = {
    "data": ("scripts.prepare_data", "rows of a task, or of your own file"),
    "tasks": ("recipe.tasks.reasoning_gym", "the tasks of reasoning-gym, each with an example"),
    "check": ("scripts.check_data", "looks at a file of rows, and scores known answers"),
    "warmup": ("recipe.warm_start.train", "a small first policy, by imitation"),
    "train": ("recipe.fully_async_policy.main", "trains: Ray, vLLM, Megatron"),
    "plan": ("recipe.fully_async_policy.main", "GPUs, memory and time of a training that is not started"),
    "report": ("scripts.report", "table, figure and page of runs"),
    "evaluate": ("recipe.evaluate", "pass@1 and pass@k of a model"),
    "export": ("recipe.export", "the model of a checkpoint"),
    "serve": ("recipe.vllm", "vLLM's server of a model"),
    "chat": ("recipe.vllm", "talk to a model that is served"),
    "sandbox": ("code_sandbox", "the service that runs programs, isolated"),
}
_FIRST = {"plan": ["--dry-run"], "serve": ["serve"], "chat": ["chat"]}
"""What a command's module is given before the user's arguments."""


def _usage() -> str:
    lines = [f"  {word:<10}{what}" for word, (_, what) in COMMANDS.items()]
    return "\n".join(["vcpo COMMAND [arguments]; `vcpo COMMAND --help` has its arguments.", "", *lines])


def main() -> None:
    """Run the command that the first argument names, as `python -m MODULE` with the other arguments does.

    Raises:
        SystemExit: the command's exit code; 2 where there is no such command, or no checkout beside this package.
    """
    word, *arguments = sys.argv[1:] or ["--help"]
    if word in ("-h", "--help"):
        print(_usage())
        return
    if word not in COMMANDS:
        print(f"vcpo: there is no command {word}: one of {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    module, _ = COMMANDS[word]
    if not (_CHECKOUT / "recipe" / "fully_async_policy").is_dir():
        print(f"vcpo: {module} is in no wheel: install from a checkout, by scripts/install.sh", file=sys.stderr)
        sys.exit(2)
    # For the run's processes too: this folder's `recipe` and `scripts` come before those of other packages.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_CHECKOUT), os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, str(_CHECKOUT))
    sys.path.append(os.getcwd())  # the user's own modules; last, so that no folder there hides a package
    sys.argv = [word, *_FIRST.get(word, []), *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
