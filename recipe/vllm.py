"""vLLM's own command line, which a CPU installation cannot start by itself: the package has another name there.

    python -m recipe.vllm serve MODEL [option ...]     an OpenAI-compatible server
    python -m recipe.vllm chat                         talk to it

On a GPU this is the command `vllm`.
"""

import importlib
import sys

from recipe.fully_async_policy.main import prepare_environment


def main(argv: list[str] | None = None) -> None:
    """Run `vllm` with these arguments until the command ends."""
    arguments = sys.argv[1:] if argv is None else argv
    prepare_environment([])
    importlib.import_module("verl_vcpo.plugin")  # on a CPU it lets vLLM find its version
    sys.argv = ["vllm", *arguments]
    importlib.import_module("vllm.entrypoints.cli.main").main()


if __name__ == "__main__":
    main()
