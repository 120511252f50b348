"""Compares what is installed with what we know of it: `python -m tests.upstream [--write] [--packages FOLDER]`."""

import argparse
import sys
from pathlib import Path

from tests.upstream import check, table, theirs
from tests.upstream.ours import Inventory


def main() -> int:
    """Returns 1 where something differs, after the writing if there is one."""
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write tests/upstream/snapshot.txt and the page")
    parser.add_argument("--beside", action="store_true", help="write what differs beside the other version's lines")
    parser.add_argument("--packages", type=Path, help="a folder whose packages are read in place of the installed ones")
    arguments = parser.parse_args()
    if arguments.packages:
        theirs.FOLDERS.insert(0, arguments.packages.resolve())
    places = table.places()
    inventory = Inventory(places)
    found = check.differences(inventory, places, check.read())
    print("\n".join(found) or "nothing differs")
    if arguments.write or arguments.beside:
        lines = check.renewed(check.read(), inventory.uses, arguments.beside)
        check.SNAPSHOT.write_text(check.text(lines))
        table.PAGE.write_text(table.page(places))
        found = check.differences(inventory, places, check.read())
        print(f"written; {len(found)} differences remain")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
