"""scripts/install.sh: which files of requirements/ are installed, and by what, where a machine has less than others."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.uv_pip import for_uv, settings

ROOT = Path(__file__).resolve().parent.parent
TORCH = ["torch-cpu.txt"]
OTHERS = ["setuptools", "cpu.lock", "megatron.txt", "project", "te-python.txt"]
# Makes an environment whose python is this program too. MISSING: what no index has, or net, http: one gave no answer.
PYTHON = """#!/usr/bin/env bash
echo "$*" >> "$CALLS"
case "$*" in
  "-m venv "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  "-c import sysconfig"*) echo "$PWD" ;;
  *requirements/installer.lock) [[ $MISSING != *uv* ]] || { echo 'ERROR: none of uv'; exit 1; } && mkdir .venv/uv ;;
  *requirements/torch-cpu.txt)
    [[ $MISSING != *net* ]] || echo 'Could not fetch URL https://a/torch/: timed out - skipping' >> "$PIP_LOG"
    [[ $MISSING != *http* ]] || echo 'a is not a trusted or secure host and is being ignored.' >> "$PIP_LOG"
    [[ $MISSING != *torch* ]] || echo 'Could not fetch URL https://b/torch/: 404 Client Error: Not Found' >> "$PIP_LOG"
    [[ $MISSING != *torch* ]] || { echo 'ERROR: No matching distribution found for torch==2.13.0+cpu' && exit 1; }
    [[ $MISSING != *limit* ]] || { echo 'ERROR: ResolutionImpossible: for help visit' && exit 1; }
    [[ $MISSING != *hash* ]] || { echo 'ERROR: THESE PACKAGES DO NOT MATCH THE HASHES' && exit 1; } ;;
esac
"""


@pytest.mark.parametrize(
    ("missing", "by_uv", "by_pip", "says"),
    [
        ("", TORCH + OTHERS, [], ""),
        ("uv", [], TORCH + OTHERS, "uv is not to be had (ERROR: none of uv)"),
        ("torch", [*TORCH, "torch-pypi.lock", *OTHERS], TORCH, "none of pip's indexes has torch's CPU build"),
        ("uv torch", [], [*TORCH, "torch-pypi.lock", *OTHERS], "none of pip's indexes has torch's CPU build"),
        ("limit", [*TORCH, "torch-pypi.lock", *OTHERS], TORCH, "none of pip's indexes has torch's CPU build"),
        ("hash", TORCH, TORCH, "'packages of requirements/torch-cpu.txt' failed"),
        ("net torch", TORCH, TORCH, "https://a/torch/: timed out"),
        ("http torch", TORCH, TORCH, "a is not a trusted or secure host"),
    ],
)
def test_a_machine_with_less(missing: str, by_uv: list[str], by_pip: list[str], says: str, tmp_path: Path) -> None:
    done = install(tmp_path, MISSING=missing)
    assert done.returncode == (missing in ("hash", "net torch", "http torch")), done.stderr
    assert says in done.stdout + done.stderr
    calls = [line for line in (tmp_path / "calls").read_text().splitlines() if " -r " in line or " -e " in line]
    assert all("--require-hashes" in line or line.endswith("-e . -e verl -e sandbox") for line in calls)

    def installed(how: str) -> list[str]:
        files = [re.search(r" -r (\S+)", line) for line in calls if how in line and "installer.lock" not in line]
        names = [Path(file[1]).name if file else "project" for file in files]
        return ["setuptools" if name.startswith("tmp.") else name for name in names]

    assert (installed("scripts.uv_pip"), installed("-m pip install")) == (by_uv, by_pip)


def test_a_machine_with_a_gpu_gets_torchs_build_for_cpus_alone(tmp_path: Path) -> None:
    """PyPI's build for CUDA would find the GPU in a CPU run."""
    (smi := tmp_path / "bin/nvidia-smi").parent.mkdir()
    smi.write_text("#!/bin/sh\n")
    smi.chmod(0o755)
    path = f"{smi.parent}:{os.environ['PATH']}"
    done = install(tmp_path, MISSING="torch", PATH=path)
    assert done.returncode == 2 and "none of pip's indexes has: set PIP_EXTRA_INDEX_URL" in done.stderr
    assert "torch-pypi.lock" not in (tmp_path / "calls").read_text()
    assert install(tmp_path, MISSING="", PATH=path).returncode == 0


def test_the_environment_for_gpus_stays(tmp_path: Path) -> None:
    (tmp_path / ".venv/lib/python3.12/site-packages/vllm-0.31.0.dist-info").mkdir(parents=True)
    done = install(tmp_path, MISSING="")
    assert done.returncode == 2 and ".venv has the GPU environment" in done.stderr
    assert not (tmp_path / "calls").exists()


def install(tmp_path: Path, **machine: str) -> subprocess.CompletedProcess[str]:
    for name in ("scripts", "requirements", "setup.py", "pyproject.toml", "verl/pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "sandbox").mkdir(exist_ok=True)
    (tmp_path / "sandbox/pyproject.toml").touch()
    (python := tmp_path / "python").write_text(PYTHON)
    python.chmod(0o755)
    machine |= {"PYTHON": str(python), "CALLS": f"{tmp_path}/calls", "TMPDIR": str(tmp_path)}
    command = ["bash", tmp_path / "scripts/install.sh"]
    return subprocess.run(command, env=os.environ | machine, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("listed", "options", "variables"),
    [
        ("", [], {}),
        ("global.index-url='https://a/simple'", ["--default-index", "https://a/simple"], {}),
        ("global.extra-index-url='\\nhttps://a\\nhttps://b'", ["--index", "https://a", "--index", "https://b"], {}),
        (":env:.find-links='/w'\nglobal.find-links='/v'", ["--find-links", "/w"], {}),
        ("install.index-url='https://b'\nglobal.index-url='https://a'", ["--default-index", "https://b"], {}),
        ("download.index-url='https://a'\nglobal.timeout='9'\nglobal.constraint='/c'", [], {}),
        ("global.no-index='true'\nglobal.trusted-host='a'", ["--no-index", "--allow-insecure-host", "a"], {}),
        (":env:.no-index='0'", [], {}),
        ("global.cert='/c'\n:env:.proxy='http://p'", [], {"SSL_CERT_FILE": "/c", "ALL_PROXY": "http://p"}),
    ],
)
def test_uv_gets_the_settings_of_pip(listed: str, options: list[str], variables: dict[str, str]) -> None:
    assert for_uv(settings(listed)) == (["--index-strategy", "unsafe-best-match", *options], variables)


@pytest.mark.parametrize("setting", ["global.no-binary=':all:'", ":env:.target='/t'", "install.new-one='1'"])
def test_a_setting_that_uv_cannot_be_given_lets_pip_install(setting: str) -> None:
    with pytest.raises(ValueError, match="uv has no counterpart"):
        for_uv(settings(setting))
