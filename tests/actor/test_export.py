"""The Hugging Face folders of a trained policy, on several layouts: transformers computes what the engine computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe import export
from tests.kit.layout_run import ParallelLayout, run_processes
from verl_vcpo.actor.model.hugging_face import write_folder

LAYOUTS = [
    ParallelLayout("one process"),
    ParallelLayout("TP2 SP x PP2, tied", model="tied", tp=2, sequence_parallel=True, pp=2),
    ParallelLayout("MoE EP2", model="moe", dp=2, ep=2),
    ParallelLayout("Llama, TP2 SP x PP2", model="llama", tp=2, sequence_parallel=True, pp=2),
    ParallelLayout("Llama, tied", model="llama_tied"),
]
NIGHTLY = {"one process", "Llama, TP2 SP x PP2", "LoRA of attention, MoE EP2"}
"""Products of what the others have."""
VICUNAS = '{"do_sample": false, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [62, 61]}'
"""Settings of generation that transformers reads, and refuses to write."""
BESIDE_WEIGHTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def of_tier(layout: ParallelLayout) -> Any:
    """Return the case of a layout, with its tier."""
    return pytest.param(layout, id=layout.name, marks=[pytest.mark.nightly] if layout.name in NIGHTLY else [])


def log_probs(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    """[B, T] of the responses that the layouts are asked for, 0 beyond their ends."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert model.dtype == torch.float32
    return log_probs_of(PeftModel.from_pretrained(model, adapter) if adapter else model)


def log_probs_of(model: Any) -> torch.Tensor:
    """`log_probs` of a model of transformers."""
    from tests.kit.layout_worker import make_batch

    rows = []
    batch = make_batch(LAYOUTS[0])
    for ids, prompt in zip(batch["input_ids"].unbind(), batch["prompts"].unbind(), strict=True):
        with torch.no_grad():
            of_vocabulary = model(ids[None]).logits[0].log_softmax(-1)
        rows.append(of_vocabulary[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@pytest.mark.parametrize("layout", map(of_tier, LAYOUTS))
def test_transformers_agrees(layout: ParallelLayout, checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    from tests.kit.export_worker import CHECKPOINT, LOG_PROBS, MODEL

    model = checkpoints(layout.model)
    (model / "generation_config.json").write_text(VICUNAS)
    run_processes(layout.name, layout.world_size, "tests.kit.export_worker", (layout, model), tmp_path)
    export.export(tmp_path / CHECKPOINT, tmp_path / "exported")
    wanted = torch.load(tmp_path / LOG_PROBS)
    for folder in (tmp_path / MODEL, tmp_path / "exported"):
        for name in BESIDE_WEIGHTS:
            assert (folder / name).read_bytes() == (model / name).read_bytes(), f"{folder.name}/{name}"
        assert (log_probs(folder) - wanted).abs().max() < 1e-5, folder.name
        assert AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(model).get_vocab()
    assert (log_probs(model) - wanted).abs().max() > 1e-3, "the step changed nothing, so the comparison proves nothing"
    assert len(list((tmp_path / MODEL).glob("model-*-of-*.safetensors"))) > 1, "written in one file"


def test_a_disk_that_takes_no_folder(process_group: None, tmp_path: Path) -> None:
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(
        RuntimeError, match=rf"^{tmp_path}/run/model was not written; {tmp_path}/run has .* MB free \(.*No space left"
    ):
        write_folder(full, {}, tmp_path / "run" / "model")
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=r"/file/model was not written; .*/file has .* MB free \(.*Not a directory"):
        write_folder(full, {}, tmp_path / "file" / "model")
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    "layout",
    [
        of_tier(ParallelLayout("LoRA, TP2 SP x PP2", model="lora", tp=2, sequence_parallel=True, pp=2)),
        of_tier(ParallelLayout("LoRA of attention, MoE EP2", model="moe_lora", dp=2, ep=2)),
    ],
)
def test_adapters_are_merged_and_kept_in_pefts_format(
    layout: ParallelLayout, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    from tests.kit.export_worker import CHECKPOINT, LOG_PROBS, MODEL

    model = checkpoints(layout.model)
    run_processes(layout.name, layout.world_size, "tests.kit.export_worker", (layout, model), tmp_path)
    export.export(tmp_path / CHECKPOINT, tmp_path / "exported")
    wanted = torch.load(tmp_path / LOG_PROBS)
    for folder in (tmp_path / MODEL, tmp_path / "exported"):
        assert (log_probs(folder) - wanted).abs().max() < 1e-5, folder.name
    assert (log_probs(model, tmp_path / "exported" / "adapter") - wanted).abs().max() < 1e-5
    assert (log_probs(model) - wanted).abs().max() > 1e-3, "adapters of zero prove nothing"
