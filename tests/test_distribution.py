"""Our two wheels have one package each, harm no other, and `vcpo` runs where torch alone is installed."""

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("vcpo", "verl", "recipe", "scripts", "lab", "sandbox", "tests")
FILES = ("setup.py", "pyproject.toml", "LICENSE", "NOTICE")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone has, without what tests and installations have left in it."""
    source = tmp_path_factory.mktemp("build") / "checkout"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    return _wheel(checkout, checkout.parent / "vcpo")


@pytest.fixture(scope="module")
def wheel_of_the_patch(checkout: Path) -> Path:
    return _wheel(checkout / "verl", checkout.parent / "vcpo-verl")


@pytest.fixture(scope="module")
def wheel_of_the_sandbox(checkout: Path) -> Path:
    return _wheel(checkout / "sandbox", checkout.parent / "vcpo-code-sandbox")


def _wheel(source: Path, folder: Path) -> Path:
    """Built from the source distribution, as pip does where there is no wheel."""
    folder.mkdir()
    _build("sdist", source, folder)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder, filter="data")
    _build("wheel", folder / archive.name.removesuffix(".tar.gz"), folder)
    (built,) = folder.glob("*.whl")
    return built


def _build(kind: str, source: Path, folder: Path) -> None:
    program = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


@pytest.fixture(scope="module")
def torch_alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `vcpo` of the wheel, torch, and what torch requires."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith("vcpo/")])
    for name in _required("torch"):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution.locate_file(top))
    return folder


def _required(name: str) -> set[str]:
    """`name` and all that it requires on this machine."""
    found, waiting = set(), [name]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        wanted = map(Requirement, importlib.metadata.requires(name) or ())
        waiting += [r.name for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def run_alone(folder: Path, program: str, *arguments: str) -> str:
    """Output of a program in an interpreter that finds the standard library and `folder`, nothing else."""
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{program}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_wheel_has_every_file_of_its_package_and_no_other(
    wheel: Path, wheel_of_the_patch: Path, wheel_of_the_sandbox: Path
) -> None:
    """An editable installation finds a file that package-data forgets; a wheel does not."""
    packages = {wheel: "vcpo", wheel_of_the_patch: "verl/verl_vcpo", wheel_of_the_sandbox: "sandbox/src/code_sandbox"}
    for built, package in ((built, ROOT / path) for built, path in packages.items()):
        with zipfile.ZipFile(built) as archive:
            there = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert there == {
            str(path.relative_to(package.parent))
            for path in package.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }


def test_the_wheels_come_and_go_without_a_trace_in_other_packages(
    wheel: Path, wheel_of_the_patch: Path, wheel_of_the_sandbox: Path, tmp_path: Path
) -> None:
    """verl has a package `scripts`, TransferQueue a package `recipe`: pip writes over a file that is there already."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    for name in ("verl", "TransferQueue"):
        for file in importlib.metadata.distribution(name).files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), site / file)

    def state() -> dict[str, str]:
        files = (path for path in site.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {str(path.relative_to(site)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    def pip(*arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=120)

    before = state()
    assert {"scripts/__init__.py", "verl/__init__.py"} <= set(before)
    pip("install", "--no-deps", "--no-index", *map(str, (wheel, wheel_of_the_patch, wheel_of_the_sandbox)))
    assert before.items() < state().items()
    pip("uninstall", "--yes", "vcpo", "vcpo-verl", "vcpo-code-sandbox")
    assert state() == before


def test_vcpo_alone_requires_torch_alone(metadata: Message) -> None:
    required = map(Requirement, metadata.get_all("Requires-Dist") or ())
    assert [r.name for r in required if r.marker is None or r.marker.evaluate({"extra": ""})] == ["torch"]


def test_there_is_one_version(metadata: Message) -> None:
    version = metadata["Version"]
    patch = tomllib.loads((ROOT / "verl/pyproject.toml").read_text())["project"]
    assert (patch["version"], patch["dependencies"]) == (version, [f"vcpo=={version}"])
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version
    for path in (ROOT / "deploy").rglob("*"):
        tags = re.findall(r"/vcpo:([\w.]+)", path.read_text()) if path.is_file() else []
        assert set(tags) <= {version}, path


def test_the_description_stands_alone(metadata: Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    links = re.findall(r"\]\(([^)]+)\)", str(metadata.get_payload()))
    assert links and all(link.startswith("https://") for link in links), "relative links are dead elsewhere"


def test_every_module_of_vcpo_imports(torch_alone: Path) -> None:
    program = """
import importlib, pkgutil, vcpo
for module in pkgutil.walk_packages(vcpo.__path__, "vcpo."):
    if module.name != "vcpo.gradnorm.gram_kernel":  # of Triton, which torch's CPU build leaves out
        print(importlib.import_module(module.name).__file__)
"""
    files = run_alone(torch_alone, program).splitlines()
    assert len(files) > 15 and all(file.startswith(f"{torch_alone}/vcpo/") for file in files)


def test_the_description_s_example_runs(torch_alone: Path, metadata: Message) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", str(metadata.get_payload()), re.DOTALL)
    assert "tensor(" in run_alone(torch_alone, example)


def test_a_plain_loop_learns_from_old_rollouts(torch_alone: Path) -> None:
    """examples/plain_loop.py, which collapses without VCPO. Drawn at random, a tenth of all digits are right."""
    program = f"""
import runpy
loop = runpy.run_path({str(ROOT / "examples/plain_loop.py")!r})
for name, weighted in (("GRPO", False), ("VCPO", True)):
    rewards = loop["train"](loop[name], lag=32, steps=200, weighted=weighted).reward
    print(rewards[0], sum(rewards[-20:]) / 20)
"""
    (_, collapsed), (first, last) = (map(float, line.split()) for line in run_alone(torch_alone, program).splitlines())
    assert first < 0.2 and collapsed < 0.4 and last > 0.6, (first, collapsed, last)
