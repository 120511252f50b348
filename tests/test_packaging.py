"""What the packaging promises: a checkout never shadows verl, one plug-in is registered, vcpo/ knows only torch."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON_FOLDERS = ("vcpo", "verl", "recipe", "scripts", "tests", "lab", "sandbox")
MAX_LINES = 450


def test_import_verl_in_the_checkout_gives_the_installed_verl() -> None:
    program = "import json, verl; print(json.dumps([verl.__version__, verl.__file__]))"
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    ).stdout
    version, file = json.loads(output.splitlines()[-1])
    assert version == "0.9.1"
    assert "site-packages" in Path(file).parts


def test_the_patch_folder_is_no_package_named_verl() -> None:
    assert not (ROOT / "verl" / "__init__.py").exists()


def test_the_entry_point_is_registered_once() -> None:
    found = {(point.name, point.value) for point in entry_points(group="verl.plugins")}
    ours = [point for point in entry_points(group="verl.plugins") if point.name == "vcpo"]
    assert [point.value for point in ours] == ["verl_vcpo.plugin"], f"registered: {found}. Run scripts/install.sh"


def test_transformer_engines_python_is_tested_at_the_version_of_gpus() -> None:
    pinned = (ROOT / "requirements" / "te-python.txt").read_text()
    (version,) = re.findall(r"^transformer-engine==(\S+)", pinned, re.MULTILINE)
    assert pins("te") == {"transformer-engine": version}


def pins(name: str) -> dict[str, str]:
    """The extra of this name in verl/pyproject.toml: package, without extras of its own, and version."""
    pinned = tomllib.loads((ROOT / "verl/pyproject.toml").read_text())["project"]["optional-dependencies"][name]
    return {re.sub(r"\[.*\]", "", package): version for package, version in (pin.split("==") for pin in pinned)}


def locked(file: Path) -> dict[str, str]:
    """The packages of a file of requirements/, and their versions. Each has a version and hashes, and nothing else."""
    lines = re.sub(r"\\\n", "", file.read_text()).splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    entry = r"([\w.-]+)==([\w.+!]+)(?: ; [^-]+)?(?:\s+--hash=sha256:[0-9a-f]{64})+"
    assert [line for line in packages if not re.fullmatch(entry, line)] == [], file
    found = dict(re.fullmatch(entry, line).groups() for line in packages)
    assert len(found) == len(packages) or file.name == "docs.lock"  # one package for each of two Pythons
    return found


def canonical(packages: dict[str, str]) -> dict[str, str]:
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in packages.items()}


@pytest.mark.parametrize("extra", ["gpu", "te", "flash-attn"])
def test_the_locks_of_gpus_have_the_pins_of_their_extras(extra: str) -> None:
    """And no package twice, nor one that the environment or the checkout brings."""
    gpu, lock = locked(ROOT / "requirements/gpu.lock"), locked(ROOT / f"requirements/{extra}.lock")
    assert {name: lock.get(name) for name in canonical(pins(extra))} == canonical(pins(extra))
    assert not {"pip", "vcpo", "vcpo-verl"} & set(lock) and (extra == "gpu" or not set(gpu) & set(lock))
    assert {version for name, version in lock.items() if name.startswith("transformer-engine")} <= {"2.11.0"}


def test_nothing_of_other_people_comes_without_its_hash() -> None:
    """No package, no image and no action of the continuous integration."""
    files = [file for file in (ROOT / "requirements").iterdir() if file.suffix in (".lock", ".txt")]
    versions = {file.name: locked(file) for file in files}
    assert len(files) > 10 and versions["torch-cpu.txt"]["torch"] == versions["torch-pypi.lock"]["torch"] + "+cpu"
    steps = (ROOT / "scripts/install_steps.sh").read_text()
    assert re.search(r"^locked\(\) .* --require-hashes -r ", steps, re.MULTILINE)
    scripts = [*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci/run", ROOT / "deploy/Dockerfile"]
    lines = [line for file in scripts for line in file.read_text().splitlines() if not line.startswith("#")]
    calls = [
        line for line in lines if re.search(r"\bpip (install|download|wheel) -|^ *(add|[\w=:$}{-]* ?by_pip) \"", line)
    ]
    # This project, what a function's caller gives, and a wheel that the line before has fetched by its hash.
    own = r"(--editable|-e) \. |\"\$\{?@|/gguf-\*\.whl"
    assert len(calls) > 10
    assert [line for line in calls if "--require-hashes" not in line and not re.search(own, line)] == []
    sources = re.findall(r"^FROM (\S+)", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    assert len(sources) == 2 and all(re.search(r"@sha256:[0-9a-f]{64}$", image) for image in sources)
    used = re.findall(r"uses: (\S+)", (ROOT / ".github/workflows/tests.yml").read_text())
    assert used and all(re.search(r"@[0-9a-f]{40}$", action) for action in used)


def test_vcpo_imports_only_torch_and_the_standard_library() -> None:
    """Besides a kernel, in a module that is imported where torch's CUDA build has brought Triton."""
    allowed = set(sys.stdlib_module_names) | {"torch", "vcpo"}
    of_kernels = {ROOT / "vcpo/gradnorm/gram_kernel.py": {"triton"}}
    foreign = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / "vcpo").rglob("*.py"))
        for line, name in imported_modules(path)
        if name.split(".")[0] not in allowed | of_kernels.get(path, set())
    ]
    assert not foreign, "\n".join(foreign)


def test_no_test_of_the_product_imports_the_lab() -> None:
    """import-linter sees no file of a folder without an `__init__.py`. The text is searched: of programs in it too."""
    files = [path for folder in ("tests", "sandbox", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    assert [str(path) for path in files if re.search(r"\b(?:from|import) lab\b", path.read_text("utf-8"))] == []


def test_no_module_is_too_long_to_read() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for folder in PYTHON_FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) >= MAX_LINES
    }
    assert not long, f"{MAX_LINES} lines or more: {long}"


def imported_modules(path: Path) -> list[tuple[int, str]]:
    """(line, absolute module name) of every import in a file, inside functions too. Relative imports are our own."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append((node.lineno, node.module))
    return found


def test_scripts_choose_tests_by_marks_and_folders_that_there_are() -> None:
    """pytest runs nothing where a mark is unknown."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    marks = {line.split(":")[0] for line in options["markers"]} | {"not", "and", "or"}
    calls = re.findall(r"pytest ((?:.*\\\n)*.*)", (ROOT / "scripts/check_gpu_stack.sh").read_text())
    assert calls
    for call in calls:
        assert {word for choice in re.findall(r'-m "([^"]*)"', call) for word in choice.split()} <= marks
        assert all((ROOT / folder).exists() for folder in re.findall(r"tests/[\w./]+", call))


def test_folders_beside_the_caller_hide_no_package(tmp_path: Path) -> None:
    """The authors' clone is a folder `vcpo`."""
    names = ("vcpo", "verl_vcpo", "code_sandbox", "recipe", "lab")
    for name in names:
        (tmp_path / name).mkdir()
    code = f"from importlib.util import find_spec; print(*(find_spec(name).origin for name in {names}))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert all(Path(origin).is_relative_to(ROOT) for origin in done.stdout.decode().split())


def test_its_files_are_found_from_any_folder(tmp_path: Path) -> None:
    """Another package of the environment has a folder `recipe` too, without an `__init__.py`."""
    code = "from scripts.report import page; assert (page._PARTS / 'page.css').is_file()"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
