"""How long the parts of `scripts/test.sh` took, and which tests took longest: `times.py FOLDER NAME=SECONDS ...`.

FOLDER has pytest's reports in JUnit's form. Nothing but Python is needed: the installation may have failed.
"""

import sys
from pathlib import Path
from xml.etree import ElementTree

LONGEST = 10


def longest(folder: Path) -> list[tuple[float, str]]:
    """Return the seconds, with those of its fixtures, and the name of the tests that took longest."""
    cases = [case for file in folder.glob("*.xml") for case in ElementTree.parse(file).iter("testcase")]
    times = [(float(case.attrib["time"]), f"{case.attrib['classname']}.{case.attrib['name']}") for case in cases]
    return sorted(times, reverse=True)[:LONGEST]


def main() -> None:
    folder, *parts = sys.argv[1:]
    for name, seconds in (part.rsplit("=", 1) for part in parts):
        print(f"{int(seconds) // 60:4} min {int(seconds) % 60:2} s  {name}")
    for took, name in longest(Path(folder)):
        print(f"{took:11.0f} s  {name}")


if __name__ == "__main__":
    main()
