"""deletions.csv says of each deletion and each kill in the product why it meets nothing of anybody else's."""

import ast
import csv
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.kit import ROOT

TABLE = Path(__file__).with_name("deletions.csv")
SOURCES = ("vcpo", "verl", "recipe", "sandbox/src", "scripts", "lab", "examples", "deploy")
# "replace" and "rename" delete what has the new name. Strings and tables have methods of these names, too.
METHODS = {
    *("unlink", "rmtree", "rmdir", "removedirs", "move", "truncate", "ftruncate", "shm_unlink", "sem_unlink"),
    *("kill", "killpg", "kill_all_processes", "pthread_kill", "pidfd_send_signal", "send_signal", "terminate"),
    *("TemporaryDirectory", "NamedTemporaryFile", "mkdtemp", "remove_placement_group"),
}
CALLS = re.compile(r"os\.(remove|replace|renames?)\(.*|ray\.shutdown\(\)|[^()]*(\(.*\))?\.re(name|place)\([^,=]+\)")
WORDS = {"umount2", "cgroup.kill", "rm", "rmdir", "kill", "pkill", "killall", "fuser"}
SHELL = re.compile(
    r"(?:^|[;&|(]|\b(?:then|do|else)\s|trap ')\s*((?:rm|rmdir|kill|pkill|killall|mv|truncate)\s[^;&|)']+)"
)

Row = tuple[str, str, str]  # file, function, what is called


def in_python(file: str, text: str) -> Iterator[Row]:
    def visit(node: ast.AST, function: str) -> Iterator[Row]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".removeprefix(".")
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)
        if isinstance(node, ast.Call):
            code, called = ast.unparse(node), ast.unparse(node.func).split(".")[-1]
            if called in METHODS or CALLS.fullmatch(code):
                yield file, function, code
            passed = [argument.attr for argument in node.args if isinstance(argument, ast.Attribute)]
            yield from ((file, function, name) for name in passed if name in METHODS)
        elif isinstance(node, ast.Constant) and node.value in WORDS:
            yield file, function, str(node.value)
        elif isinstance(node, ast.Tuple | ast.List):
            passed = [ast.unparse(one) for one in node.elts if isinstance(one, ast.Attribute) and one.attr in METHODS]
            yield from ((file, function, code) for code in passed)

    return visit(ast.parse(text), "")


def in_shell(file: str, text: str) -> Iterator[Row]:
    code = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return ((file, "", found.rstrip(" \\")) for line in code for found in SHELL.findall(line))


def found() -> Iterator[Row]:
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.is_file()):
        file = str(path.relative_to(ROOT))
        if "tests" not in path.parts and (path.suffix in (".py", ".sh") or path.name == "Dockerfile"):
            yield from (in_python if path.suffix == ".py" else in_shell)(file, path.read_text())


def test_each_has_a_row() -> None:
    rows = list(csv.reader(TABLE.read_text().splitlines()[1:]))
    assert all(len(row) == 4 and row[3] for row in rows)
    there, said = Counter(found()), Counter((file, function, code) for file, function, code, _ in rows)
    assert not there - said, "a deletion or a kill without a row: say in deletions.csv why it can be nobody else's"
    assert not said - there, "a row without its call"


def test_both_kinds_of_source_are_read() -> None:
    python = "class A:\n    def f(self):\n        for g in (P.kill,): path.unlink()\n        text.replace('a', 'b')\n"
    assert {*in_python("a.py", python)} == {("a.py", "A.f", "P.kill"), ("a.py", "A.f", "path.unlink()")}
    shell = "# rm it\nif x; then rm -f \"$a\"; fi\ntrap 'rm -rf b' EXIT\n"
    assert [code for _, _, code in in_shell("a.sh", shell)] == ['rm -f "$a"', "rm -rf b"]
