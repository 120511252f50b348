"""Small mistakes in a file, one at a time, and the tests that should see them.

A mistake (a mutant) is written into a private copy of the tree. For each mistake a process that has imported all other
packages forks, so torch and Megatron are imported once; the fork and its children import the project from the copy.
Of the tests it runs those that may see the mistake (`in_order`), the quick ones first.
`cosmic-ray` imports everything again for each mistake; `mutmut` leaves out functions with decorators, such as
properties and context managers.
"""

import ast
import contextlib
import importlib
import inspect
import itertools
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS = ("vcpo", "verl_vcpo", "recipe", "tests.kit", "scripts", "tests")
"""The packages that a forked process imports again."""
_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Pow: ast.Mult, ast.Mod: ast.FloorDiv},
}
_PAIRS = (
    *(("min", "max"), ("amin", "amax"), ("any", "all"), ("double", "float"), ("floor", "ceil"), ("exp", "expm1")),
    *(("ones", "zeros"), ("ones_like", "zeros_like"), ("append", "extend"), ("minimum", "maximum")),
    *(("union", "intersection"), ("isfinite", "isnan"), ("argmin", "argmax"), ("logaddexp", "maximum")),
)
_NAMES = {**{b: a for a, b in _PAIRS}, **dict(_PAIRS), "sum": "mean", "mean": "sum", "reversed": "list"}
_DROPPED = {
    *("detach", "clamp", "clamp_", "double", "float", "abs", "sqrt", "square", "exp", "log", "nan_to_num"),
    *("masked_fill", "flip", "cumsum", "sorted", "max", "min", "clone", "sum"),
}
_SAID = {"print_line", "print", "warn", "warning", "debug", "info", "log_line"}
_SKIPPED = {"annotation", "returns", "decorator_list", "bases", "type_comment", "pattern"}
_ONLY_CHECKS = {"strict", "non_blocking"}  # arguments that change no result
_STATEMENTS = (ast.Expr, ast.AugAssign, ast.Continue, ast.Break, ast.Delete, ast.Raise)


@dataclass(frozen=True)
class Mutant:
    """A mistake in `file`; `number` is its place among the mistakes of the file."""

    file: str
    number: int
    line: int
    function: str
    before: str
    after: str

    @property
    def name(self) -> str:
        """The name of the mistake, which stays the same when lines move."""
        return f"{self.file} {self.function}: {self.before} -> {self.after}"


def _is_flipped(test: ast.expr) -> bool:
    """Return True if another mistake already negates the test."""
    match test:
        case ast.UnaryOp(op=ast.Not()) | ast.Compare(ops=[ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot()]):
            return True
        case ast.Compare(ops=[ast.In() | ast.NotIn()]):
            return True
    return False


def _swaps(node: ast.AST) -> Iterator[tuple[str, object]]:
    """Yield (field, other value) for each exchange in `node`."""
    match node:
        case ast.Compare(ops=operators):
            for i, operator in enumerate(operators):
                yield "ops", [*operators[:i], _OPERATORS[type(operator)](), *operators[i + 1 :]]
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) | ast.AugAssign(op=operator):
            if type(operator) in _OPERATORS:
                yield "op", _OPERATORS[type(operator)]()
        case ast.UnaryOp(op=ast.USub()):
            yield "op", ast.UAdd()
        case ast.IfExp() | ast.If() | ast.While() if not _is_flipped(node.test):
            yield "test", ast.UnaryOp(ast.Not(), node.test)
        case ast.Attribute(attr=name) if name in _NAMES:
            yield "attr", _NAMES[name]
        case ast.Name(id="min" | "max" | "any" | "all" as name, ctx=ast.Load()):
            yield "id", _NAMES[name]
        case ast.Constant(value=bool() as value):
            yield "value", not value
        case ast.Constant(value=int() as value):
            yield "value", value + 1
            if value:
                yield "value", value - 1
        case ast.Constant(value=float() as value):
            yield "value", 2 * value if value else 1.0


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that mistakes put in the place of the whole `node`."""
    match node:
        case ast.UnaryOp(op=ast.Not() | ast.Invert()):
            yield node.operand
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _DROPPED:
            yield value
        case ast.Call(func=ast.Name(id=name), args=[value, *_]) if name in _DROPPED:
            yield value
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()
    if isinstance(node, _STATEMENTS) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        yield ast.Pass()
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript):
        yield ast.Pass()


def _is_said(node: ast.AST) -> bool:
    """Return True if the node is text for people."""
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", getattr(node.func, "id", "")) in _SAID
    return isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert)


def _is_left_out(node: ast.AST) -> bool:
    return isinstance(node, ast.keyword) and node.arg in _ONLY_CHECKS


def _short(node: ast.AST) -> str:
    return " ".join(ast.unparse(ast.fix_missing_locations(node)).split("\n")[0].split())


def _in_place(
    node: ast.AST, put: Callable[[Any], None], shown: ast.AST, function: str
) -> Iterator[tuple[int, str, str, str]]:
    """Yield (line, function, before, after) of each mistake in `node` and below, while the tree has the mistake."""
    line, before = getattr(node, "lineno", 0), _short(shown)
    if not isinstance(node, ast.Raise | ast.Expr) or not _is_said(getattr(node, "value", node)):
        for field, other in _swaps(node):
            was = getattr(node, field)
            setattr(node, field, other)
            yield line, function, before, _short(shown)
            setattr(node, field, was)
    if not (isinstance(node, ast.Expr) and _is_said(node.value)):
        for replaced in _replacements(node):
            put(replaced)
            statement = isinstance(node, ast.stmt)
            yield line, function, _short(node) if statement else before, _short(replaced if statement else shown)
            put(node)
    if _is_said(node) or _is_left_out(node):
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}" if function != "module" else node.name
    for name, value in ast.iter_fields(node):
        if name in _SKIPPED:
            continue
        for i, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST):

                def put_child(other: Any, owner: ast.AST = node, name: str = name, i: int | None = i) -> None:
                    if i is None:
                        setattr(owner, name, other)
                    else:
                        getattr(owner, name)[i] = other

                small = isinstance(child, ast.Constant | ast.Name | ast.Attribute | ast.UnaryOp | ast.Call)
                context = node if small and isinstance(node, ast.expr) else child
                if small and isinstance(node, ast.keyword | ast.Slice):
                    context = shown
                yield from _in_place(child, put_child, context, function)


def _mistakes(tree: ast.Module, file: str) -> Iterator[Mutant]:
    """Yield each mistake of the module `tree`, while the tree has the mistake."""
    seen: Counter[tuple[str, str, str]] = Counter()
    numbers = itertools.count()
    for line, function, before, after in _in_place(tree, lambda _: None, tree, "module"):
        if before != after:
            seen[function, before, after] += 1
            again = seen[function, before, after]
            yield Mutant(file, next(numbers), line, function, before, after + (f" ({again})" if again > 1 else ""))


def mutants(file: str, root: Path) -> list[Mutant]:
    """Return all mistakes of `file`, a path from `root`."""
    return list(_mistakes(ast.parse((root / file).read_text()), file))


def with_mistake(mutant: Mutant, root: Path) -> str:
    """Return the source of the mutant's file with the mistake."""
    tree = ast.parse((root / mutant.file).read_text())
    next(each for each in _mistakes(tree, mutant.file) if each.number == mutant.number)
    return ast.unparse(ast.fix_missing_locations(tree))


def copy_of_tree(root: Path, to: Path) -> None:
    """Copy the files of `root` that git knows, or does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=root, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)


@dataclass(frozen=True)
class Outcome:
    """The outcome of tests in a forked process."""

    passed: bool
    wall_s: float
    processor_s: float


@dataclass(frozen=True)
class Called:
    """The functions of the project that a test called in its own process, and the time that the test took."""

    test: str
    seconds: float
    functions: dict[str, list[str]]
    """File -> names of functions, as `Mutant.function` has them."""


def in_order(tests: Sequence[Called], mutant: Mutant) -> list[str]:
    """Return the tests that may see the mistake, the quick ones first.

    First those that call its function; then those that call nothing of its file: other processes may do that for them.
    A mistake outside of all functions, or in one that no test calls, may be seen by any test. A function that a fixture
    of a module calls is noted for the module's first test.
    """
    callers = [each for each in tests if mutant.function in each.functions.get(mutant.file, ())]
    others = [each for each in tests if mutant.file not in each.functions] if callers else tests
    return [each.test for part in (callers, others) for each in sorted(part, key=lambda each: each.seconds)]


class _Calls:
    """A pytest plugin that notes the functions which each test calls."""

    def __init__(self, folder: Path, to: Path) -> None:
        self._folder, self._to = f"{folder.resolve()}{os.sep}", to
        self._notes: list[tuple[str, float, dict[str, list[str]]]] = []
        self._called, self._begun = defaultdict[str, set[str]](set), 0.0

    def _note(self, frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        of_function = code.co_flags & inspect.CO_OPTIMIZED  # and not of a module or a class
        if event == "call" and of_function and code.co_filename.startswith(self._folder):
            file = code.co_filename.removeprefix(self._folder)
            self._called[file].add(code.co_qualname.replace(".<locals>", ""))

    def pytest_runtest_logstart(self) -> None:
        self._called = defaultdict(set)
        self._begun = time.monotonic()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
        functions = {file: sorted(names) for file, names in list(self._called.items())}  # a thread may go on
        self._notes.append((nodeid, time.monotonic() - self._begun, functions))

    def pytest_sessionfinish(self) -> None:
        self._to.write_text(json.dumps(self._notes))


class Copy:
    """A private copy of a tree, in which tests run with one mistake at a time.

    Args:
        folder: the copy's folder.
        sources: the copy's folders with packages, which come first on the path.
    """

    def __init__(self, folder: Path, sources: Sequence[str] = ("", "verl")) -> None:
        self.folder = folder
        self.path = [str(folder / name) for name in sources]

    def import_others(self, tests: Sequence[str], wall_s: float) -> None:
        """Import all other packages that collecting `tests` imports, for the processes forked later.

        The first collection also compiles the tests; later compiled files may have a mistake, and are not kept.
        """
        listing = self.folder / "imported.txt"
        self.run([*tests, "--collect-only"], wall_s=wall_s, listing=listing)
        for name in listing.read_text().split() if listing.exists() else ():
            with contextlib.suppress(Exception):  # some modules expect imports of the project's modules before
                importlib.import_module(name)
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

    def calls(self, tests: Sequence[str], wall_s: float) -> tuple[Outcome, list[Called]]:
        """Run the tests without a mistake, and note what each of them calls; nothing where they fail.

        They run once more in the order of `in_order`, which gives the outcome: a test that passes only after another
        would be taken for one that sees every mistake.
        """
        noted = self.folder / "called.json"
        outcome = self.run(tests, wall_s=wall_s, noted=noted)
        if not outcome.passed:
            return outcome, []
        called = [Called(*each) for each in json.loads(noted.read_text())]
        quick_first = [each.test for each in sorted(called, key=lambda each: each.seconds)]
        return self.run(quick_first, wall_s=wall_s), called

    def run(
        self,
        arguments: Sequence[str],
        *,
        wall_s: float,
        processor_s: float = 0.0,
        listing: Path | None = None,
        noted: Path | None = None,
    ) -> Outcome:
        """Run pytest in a fork of this process. A run beyond a limit has failed; `processor_s` 0: no limit."""
        begun = time.monotonic()
        child = os.fork()
        if child == 0:
            self._tests(arguments, processor_s, listing, noted)
        while (ended := os.wait4(child, os.WNOHANG))[0] == 0 and time.monotonic() < begun + wall_s:
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):  # processes that pytest started and left
            os.killpg(child, signal.SIGKILL)
        if ended[0] == 0:
            ended = os.wait4(child, 0)
        passed = os.waitstatus_to_exitcode(ended[1]) == 0
        return Outcome(passed, time.monotonic() - begun, ended[2].ru_utime + ended[2].ru_stime)

    def _is_ours(self, name: str) -> bool:
        file = getattr(sys.modules[name], "__file__", None)
        return name.split(".")[0] in OURS or (file is not None and Path(file).is_relative_to(self.folder))

    def _tests(self, arguments: Sequence[str], processor_s: float, listing: Path | None, noted: Path | None) -> None:
        code = 1
        try:
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nothing, stream)
            if processor_s:
                resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(processor_s), resource.RLIM_INFINITY))
            os.chdir(self.folder)
            for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
                del sys.modules[name]
            sys.path[:0] = self.path
            os.environ["PYTHONPATH"] = os.pathsep.join(self.path)
            importlib.invalidate_caches()
            import pytest

            plugins = [] if noted is None else [_Calls(self.folder, noted)]
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments], plugins))
            if listing is not None:
                listing.write_text("\n".join(name for name in sys.modules if not self._is_ours(name)))
        except BaseException:
            code = 1
        finally:
            os._exit(code)

    def passes_with(self, mutant: Mutant, tests: Sequence[str], *, wall_s: float, processor_s: float) -> bool:
        """Return True if all `tests` pass with the mistake, within the limits."""
        file = self.folder / mutant.file
        right = file.read_text()
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()
        try:
            file.write_text(with_mistake(mutant, self.folder))
            return self.run(tests, wall_s=wall_s, processor_s=processor_s).passed
        finally:
            file.write_text(right)
