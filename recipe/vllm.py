"""vLLM's own command line, which a CPU installation cannot start by itself: the package has another name there.

    python -m recipe.vllm serve MODEL [option ...]     an OpenAI-compatible server; --host opens it to others
    python -m recipe.vllm chat                         talk to it

On a GPU this is the command `vllm`.
"""

import importlib
import os
import sys
from argparse import SUPPRESS, ArgumentError, ArgumentParser
from pathlib import Path
from typing import Any

import yaml

from recipe.command_line import use_utf8
from recipe.fully_async_policy.launch.ray_access import LOOPBACK
from recipe.fully_async_policy.main import prepare_environment
from recipe.fully_async_policy.settings.errors import SettingError

_HERE = {"127.0.0.1", "localhost", "::1"}
_OF_ONE_NODE = {
    ("--nnodes", "-n"): {"1"},
    ("--node-rank", "-r"): {"0"},
    ("--master-addr",): _HERE,
    ("--distributed-executor-backend",): {"mp", "uni"},
    ("--data-parallel-address", "-dpa"): _HERE,
    ("--data-parallel-backend", "-dpb"): {"mp"},
}
"""vLLM's options of several nodes, and the values with which each process is on this machine."""


def main(argv: list[str] | None = None) -> None:
    """Run `vllm` with these arguments until the command ends."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        given = places(arguments)
        prepare_environment([])
    except SettingError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    importlib.import_module("verl_vcpo.plugin")  # on a CPU it lets vLLM find its version
    os.environ.update({name: os.environ.get(name, value) for name, value in meeting_place(given).items()})
    sys.argv = ["vllm", *arguments, *(on_loopback(given) if arguments[:1] == ["serve"] else [])]
    importlib.import_module("vllm.entrypoints.cli.main").main()


def places(arguments: list[str]) -> dict[str, Any]:
    """What the arguments, and the file of `--config`, say of addresses and nodes: names with underscores -> values.

    The spellings are those of vLLM's parser, an argparse that takes underscores for dashes.

    Raises:
        SettingError: the file cannot be read.
    """
    usage = "vllm serve MODEL [option ...]"
    parser = ArgumentParser("vllm", usage, add_help=False, argument_default=SUPPRESS, exit_on_error=False)
    for names in [*_OF_ONE_NODE, ("--host",), ("--uds",)]:
        parser.add_argument(*names)
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--help", "-h", nargs="?")
    parser.add_argument("-dp", "--n")  # which argparse would take for the beginnings of others
    words = [*(_of_file(arguments) if "--config" in arguments else []), *arguments]
    try:
        return vars(parser.parse_known_args([_with_dashes(word) for word in words])[0])
    except ArgumentError:
        return {}  # vLLM refuses it, in words of its own


def on_loopback(given: dict[str, Any]) -> list[str]:
    """Arguments with which `vllm serve`, which asks for no key unasked, listens where the user says, or on loopback."""
    return [] if {"host", "uds", "help"} & set(given) else ["--host", "127.0.0.1"]


def meeting_place(given: dict[str, Any]) -> dict[str, str]:
    """Variables with which vLLM's own processes, which ask nobody for a key, meet on loopback; {} on several nodes."""
    values = {names: given.get(names[0].strip("-").replace("-", "_")) for names in _OF_ONE_NODE}
    here = all(value is None or value in _OF_ONE_NODE[names] for names, value in values.items())
    return LOOPBACK if here and "headless" not in given else {}


def _with_dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    return (name.replace("_", "-") if name.startswith("--") else name) + equals + value


def _of_file(arguments: list[str]) -> list[str]:
    """The options of the file after `--config`, as words; vLLM prefers those of the command line."""
    file = "".join(arguments[arguments.index("--config") + 1 :][:1])
    try:
        options = yaml.safe_load(Path(file).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingError(f"--config {file}: {' '.join(str(error).split())}") from None
    if not isinstance(options, dict):
        raise SettingError(f"--config {file}: has no line `option: value`")
    given = {name: value for name, value in options.items() if value is not False}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]


if __name__ == "__main__":
    use_utf8()
    main()
