"""CPU support is on where VERL_PLATFORM=cpu says so, and nowhere else."""

import os
import subprocess
import sys


def run(code: str, **environment: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if k != "VERL_PLATFORM"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_without_the_variable_nothing_of_it_is_loaded() -> None:
    code = "import sys, verl_vcpo.plugin; print([m for m in sys.modules if m.startswith('verl_vcpo.cpu')])"
    assert run(code) == "[]"


def test_with_the_variable_verl_runs_on_cpu() -> None:
    code = (
        "import verl; from verl.utils.device import get_device_name, get_device_id; "
        "from importlib.metadata import version; "
        "print(get_device_name(), f'{get_device_name()}:{get_device_id()}', version('vllm').endswith('+cpu'))"
    )
    assert run(code, VERL_PLATFORM="cpu") == "cpu cpu:0 True"
