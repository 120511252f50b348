"""What `pip install vcpo` brings: all files of the packages, and a `vcpo` that runs where torch alone is installed."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("vcpo", "verl", "recipe", "scripts", "testkit")
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "NOTICE")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, as pip does where there is no wheel."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "checkout"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
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


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    """An editable installation finds a file that package_data forgets; a wheel does not."""
    with zipfile.ZipFile(wheel) as archive:
        there = set(archive.namelist())
    wanted = {
        str(path.relative_to(ROOT / "verl" if package == "verl" else ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and not {"__pycache__"} & set(path.parts) and path.suffix not in (".md", ".pyc")
    }
    missing = {name for name in wanted - there if ".egg-info/" not in name}
    assert not missing, f"not in the wheel: {sorted(missing)}"


def test_vcpo_alone_requires_torch_alone(metadata: Message) -> None:
    required = map(Requirement, metadata.get_all("Requires-Dist") or ())
    assert [r.name for r in required if r.marker is None or r.marker.evaluate({"extra": ""})] == ["torch"]


def test_there_is_one_version(metadata: Message) -> None:
    version = metadata["Version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version
    for path in (*(ROOT / "deploy").rglob("*"), ROOT / "docs/guide/cluster.md"):
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
    print(importlib.import_module(module.name).__file__)
"""
    files = run_alone(torch_alone, program).splitlines()
    assert len(files) > 15 and all(file.startswith(f"{torch_alone}/vcpo/") for file in files)


def test_the_description_s_example_runs(torch_alone: Path, metadata: Message) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", str(metadata.get_payload()), re.DOTALL)
    assert "tensor(" in run_alone(torch_alone, example)


def test_a_plain_loop_learns_from_old_rollouts(torch_alone: Path) -> None:
    """examples/plain_loop.py: responses drawn at random have a tenth of their digits right."""
    program = f"""
import runpy
loop = runpy.run_path({str(ROOT / "examples/plain_loop.py")!r})
rewards = loop["train"](loop["VCPOConfig"](), lag=8, steps=300)
print(rewards[0], rewards[-1])
"""
    first, last = map(float, run_alone(torch_alone, program).splitlines()[-1].split())
    assert first < 0.2 and last > 0.8, (first, last)
