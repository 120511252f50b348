"""The method file and the loss of docs/reference/methods.md, which are those of method=tis_token."""

import re
import subprocess
from pathlib import Path

from tests.kit import ROOT

PAGE = ROOT / "docs" / "reference" / "methods.md"


def written(folder: Path) -> list[str]:
    """Write the page's files into `folder`. Returns the arguments that find the method."""
    section = PAGE.read_text().split("## A method of your own\n")[1]
    (block,) = re.findall(r"^```bash\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    files, command = block.strip().rsplit("\n", 1)
    subprocess.run(["bash", "-euc", files], cwd=folder, check=True)
    (option, found, method) = re.findall(r"(--config-dir) (\S+) .*(method=\S+)", command)[0]
    return [option, str(folder / found), method]
