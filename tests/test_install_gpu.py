"""scripts/install_gpu.sh: what it refuses before anything is installed, and what it asks pip for."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipe.fully_async_policy import main
from recipe.fully_async_policy.launch.compiler import missing_for_triton
from recipe.fully_async_policy.plan.devices import check_gpus
from recipe.fully_async_policy.settings.errors import SettingError

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("awk", "bash", "cat", "cp", "dirname", "grep", "mkdir", "mktemp", "rm", "tail", "touch", "uname")
# Makes an environment whose python is this program too, with CUDA's headers where the wheels have them.
PYTHON = """#!/usr/bin/env bash
echo "CUDA_HOME=${CUDA_HOME:-} CPATH=${CPATH:-} $*" >> "$CALLS"
if [[ $1 == -m && $2 == venv ]]; then
  include=$4/lib/python3.11/site-packages/nvidia/cu13/include
  mkdir -p "$4/bin" "$include"
  cp "$0" "$4/bin/python"
  touch "$include/$HEADER"
fi
"""
LOCKED = "--no-deps --no-build-isolation --require-hashes"
NVCC = "#!/usr/bin/env bash\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"


def program(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine without a compiler, without CUDA, and with a python that only writes down calls."""
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, tool
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / tool).symlink_to(found)
    return {
        "PATH": f"{tmp_path}/bin",
        "PYTHON": str(program(tmp_path / "python", PYTHON)),
        "CALLS": f"{tmp_path}/calls",
        "HEADER": "cuda_runtime_api.h",
        "TMPDIR": str(tmp_path),
        "VENV": f"{tmp_path}/venv",
    }


def run(machine: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "scripts/install_gpu.sh", *options]
    return subprocess.run(command, cwd=ROOT, env=machine, capture_output=True, text=True, timeout=60)


def refused(machine: dict[str, str], *options: str) -> str:
    """The one line, after which nothing is there."""
    done = run(machine, *options)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert not Path(machine["VENV"]).exists()
    (line,) = done.stderr.splitlines()
    return line


def add(machine: dict[str, str], tool: str, text: str = "#!/usr/bin/env bash\n") -> None:
    program(Path(machine["PATH"]) / tool, text)


def pip_calls(machine: dict[str, str]) -> list[str]:
    """Of each installation, its arguments."""
    calls = Path(machine["CALLS"]).read_text().splitlines()
    return [call.split("pip-version-check ")[1] for call in calls if "-m pip install " in call]


def test_a_machine_without_a_c_compiler_is_refused(machine: dict[str, str], tmp_path: Path) -> None:
    of_the_right_version = f'#!/usr/bin/env bash\n[[ $1 == -c ]] || exec {sys.executable} "$@"\n'
    machine["PYTHON"] = str(program(tmp_path / "python", of_the_right_version))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    line = refused(machine)
    assert line.startswith("install_gpu: no C compiler (gcc, clang, or CC), and Triton compiles during a run")
    assert line.endswith(f"apt install gcc {version}-dev")
    assert "CC=no-such-cc is no compiler on this machine" in refused(machine | {"CC": "no-such-cc"})


def test_pythons_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", sys.executable)
    assert missing_for_triton() is None
    monkeypatch.setattr(sysconfig, "get_paths", lambda **_: {"include": str(tmp_path)})
    assert f"no Python.h in {tmp_path}" in (missing_for_triton() or "")


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_a_disk_that_nothing_is_loaded_from(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setenv(name, f"{tmp_path}/cache")
    noexec = SimpleNamespace(f_flag=os.ST_NOEXEC)
    mounted = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda place: noexec if place == tmp_path else mounted(place))
    assert f"{tmp_path}/cache is mounted noexec" in (why := missing_for_triton() or "") and f"set {name}" in why


def test_the_launcher_refuses_a_gpu_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    main.prepare_environment(["hardware=cpu"])
    config = main.compose(["+task=countdown"])
    config.trainer.device = "cuda"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CC", sys.executable)
    check_gpus(config)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "/nowhere")
    for address in (None, "10.0.0.1:6379"):
        config.ray_kwargs.ray_init.address = address
        with pytest.raises(SettingError, match="hardware=gpu: no C compiler"):
            check_gpus(config)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    check_gpus(config)  # a head without GPUs, of a cluster that has some


def test_wheels_come_from_the_lock(machine: dict[str, str]) -> None:
    done = run(machine)
    assert done.returncode == 0, done.stderr
    uv, setuptools, lock, project = pip_calls(machine)
    assert uv.endswith("/venv/uv -r requirements/installer.lock") and LOCKED in uv and LOCKED in setuptools
    assert lock == f"{LOCKED} -r requirements/gpu.lock"
    assert project == "--no-deps --no-build-isolation -e . -e verl -e sandbox"
    assert "-m pip check" in Path(machine["CALLS"]).read_text()


def test_transformer_engine_takes_a_c_compiler_and_the_wheels_headers(machine: dict[str, str]) -> None:
    """nvcc's name says nothing: Transformer Engine's bindings have no CUDA file."""
    assert "--te compiles C++, and there is no g++" in refused(machine, "--te")
    add(machine, "g++")
    done = run(machine, "--te")
    assert done.returncode == 0, done.stderr
    assert pip_calls(machine)[4:] == [f"{LOCKED} -r requirements/te.lock"]
    (call,) = [line for line in Path(machine["CALLS"]).read_text().splitlines() if line.endswith("te.lock")]
    wheels = f"{machine['VENV']}/lib/python3.11/site-packages/nvidia"
    assert f"CUDA_HOME={wheels}/cu13 CPATH={wheels}/cudnn/include:{wheels}/nccl/include " in call


def test_flash_attention_takes_a_toolkit(machine: dict[str, str], tmp_path: Path) -> None:
    add(machine, "g++")
    assert "give --te too" in refused(machine, "--flash-attn")
    both = ("--te", "--flash-attn")
    assert "/bin/nvcc is not there or another version" in refused(machine, *both)
    add(machine, "nvcc", NVCC)  # a wrapper, outside the toolkit
    assert re.search(r"/include has no cuda_runtime_api\.h: set CUDA_HOME", refused(machine, *both))
    (tmp_path / "cuda/include").mkdir(parents=True)
    (tmp_path / "cuda/include" / machine["HEADER"]).touch()
    program(tmp_path / "cuda/bin/nvcc", NVCC)
    done = run(machine | {"CUDA_HOME": f"{tmp_path}/cuda"}, *both)
    assert done.returncode == 0, done.stderr
    assert pip_calls(machine)[4:] == [f"{LOCKED} -r requirements/te.lock -r requirements/flash-attn.lock"]
