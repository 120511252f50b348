"""vLLM's own command line, which a CPU installation cannot start by itself: the package has another name there.

    python -m recipe.vllm serve MODEL [option ...]     an OpenAI-compatible server
    python -m recipe.vllm chat                         talk to it

On a GPU this is the command `vllm`.
"""

import importlib
import sys

from recipe.command_line import use_utf8
from recipe.fully_async_policy.main import prepare_environment
from recipe.fully_async_policy.settings.errors import SettingError


def main(argv: list[str] | None = None) -> None:
    """Run `vllm` with these arguments until the command ends."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        prepare_environment([])
    except SettingError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    importlib.import_module("verl_vcpo.plugin")  # on a CPU it lets vLLM find its version
    sys.argv = ["vllm", *arguments]
    importlib.import_module("vllm.entrypoints.cli.main").main()


if __name__ == "__main__":
    use_utf8()
    main()
