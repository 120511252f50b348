"""`python -m scripts.uv_pip ARGUMENTS`: `pip install --no-deps ARGUMENTS`, by the uv of scripts/install_steps.sh.

uv reads none of pip's settings: those that say where packages come from are handed over. Where pip has a setting that
uv cannot be given, the exit code is 2 and scripts/install_steps.sh lets pip install. The standard library alone.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

# Settings of pip, and the options of uv that take their words one by one.
_OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
_VARIABLES = {"cert": "SSL_CERT_FILE", "client-cert": "SSL_CLIENT_CERT", "proxy": "ALL_PROXY"}
# Settings that change neither what is installed nor where it comes from: a lock has one version of each package, so a
# constraint chooses none.
_OF_PIP_ALONE = {
    *(
        "cache-dir",
        "compile",
        "constraint",
        "debug",
        "disable-pip-version-check",
        "exists-action",
        "log",
        "no-cache-dir",
        "no-color",
    ),
    *("no-input", "no-python-version-warning", "no-warn-script-location", "prefer-binary", "progress-bar", "quiet"),
    *("require-virtualenv", "resume-retries", "retries", "root-user-action", "timeout", "default-timeout", "verbose"),
}
_SECTIONS = ("global", "install", ":env:")  # the later one holds


def settings(listed: str) -> dict[str, str]:
    """Return pip's settings for `pip install`, from what `pip config list` prints."""
    found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        if section in found:
            found[section][key] = str(ast.literal_eval(value))
    return {key: value for section in _SECTIONS for key, value in found[section].items()}


def for_uv(of_pip: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return uv's options and environment variables for settings of pip.

    Raises:
        ValueError: uv has nothing for a setting.
    """
    options, variables = ["--index-strategy", "unsafe-best-match"], {}
    for key, value in of_pip.items():
        if key in _OPTIONS:
            for word in value.split():
                options += [_OPTIONS[key], word]
        elif key in _VARIABLES:
            variables[_VARIABLES[key]] = value
        elif key == "no-index" and value.lower() in ("1", "true", "yes", "on"):
            options += ["--no-index"]
        elif key != "no-index" and key not in _OF_PIP_ALONE:
            raise ValueError(f"uv has no counterpart of pip's setting {key}={value}")
    return options, variables


def main(arguments: list[str]) -> None:
    """Replace this process by uv."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    listed = subprocess.run(pip, stdout=subprocess.PIPE, text=True, check=True).stdout
    try:
        options, variables = for_uv(settings(listed))
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    uv = Path(sys.prefix, "uv/bin/uv")
    fixed = ["pip", "install", "--python", sys.executable, "--no-deps", "--compile-bytecode"]
    taken = [argument for argument in arguments if argument != "--ignore-requires-python"]  # uv obeys --python-version
    os.execve(uv, [str(uv), *fixed, *options, *taken], {**os.environ, **variables})


if __name__ == "__main__":
    main(sys.argv[1:])
