"""vLLM's own command line, which a CPU installation cannot start by itself: the package has another name there.

    python -m recipe.vllm serve MODEL [option ...]     an OpenAI-compatible server; --host opens it to others
    python -m recipe.vllm chat                         talk to it

On a GPU this is the command `vllm`.
"""

import importlib
import os
import sys

from recipe.command_line import use_utf8
from recipe.fully_async_policy.launch.ray_access import LOOPBACK
from recipe.fully_async_policy.main import prepare_environment
from recipe.fully_async_policy.settings.errors import SettingError

_SEVERAL_NODES = {
    *("--nnodes", "--master-addr", "--headless"),
    *("--data-parallel-address", "-dpa", "--data-parallel-backend", "-dpb"),
}


def main(argv: list[str] | None = None) -> None:
    """Run `vllm` with these arguments until the command ends."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        prepare_environment([])
    except SettingError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    importlib.import_module("verl_vcpo.plugin")  # on a CPU it lets vLLM find its version
    os.environ.update({name: os.environ.get(name, value) for name, value in meeting_place(arguments).items()})
    sys.argv = ["vllm", *on_loopback(arguments)]
    importlib.import_module("vllm.entrypoints.cli.main").main()


def on_loopback(arguments: list[str]) -> list[str]:
    """Arguments with which `vllm serve`, which asks for no key unasked, listens where the user says, or on loopback."""
    told = any(given.split("=")[0] in ("--host", "--uds", "--config", "--help", "-h") for given in arguments)
    return [*arguments, "--host", "127.0.0.1"] if arguments[:1] == ["serve"] and not told else arguments


def meeting_place(arguments: list[str]) -> dict[str, str]:
    """Variables with which vLLM's own processes, which ask nobody for a key, meet on loopback; {} on several nodes."""
    return {} if _SEVERAL_NODES & {given.split("=")[0] for given in arguments} else LOOPBACK


if __name__ == "__main__":
    use_utf8()
    main()
