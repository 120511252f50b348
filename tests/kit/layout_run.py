"""A few VCPO steps of the real Megatron actor on one parallel layout, in real gloo processes on CPU."""

import importlib
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import torch

from verl_vcpo.cpu import environment

STEPS, GROUPS, GROUP_SIZE, VOCABULARY, LEARNING_RATE = 3, 4, 4, 64, 3e-3
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "eos_token_id": VOCABULARY - 2,
    "pad_token_id": VOCABULARY - 1,
    "initializer_range": 0.1,
}
"""The settings of transformers' configuration that all small models have."""
_TIMEOUT_S = 1200


@dataclass(frozen=True)
class ParallelLayout:
    """A layout of the model and the batch over processes."""

    name: str
    model: str = "untied"
    """The kind: untied, tied (output layer = embedding), qk_norms (of queries and keys), moe, llama, llama_tied, or
    lora and moe_lora (untied and moe, of which adapters alone are trained; moe_lora: of attention)."""
    dp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    vpp: int | None = None
    """The model chunks per pipeline stage."""
    cp: int = 1
    ep: int = 1
    """Expert parallelism."""
    etp: int | None = None
    """The tensor parallelism of the experts; None: the model's."""
    packed: bool = True
    dynamic_batch: bool = False
    """Micro-batches by tokens, not by sequences."""
    distributed_optimizer: bool = True
    recompute: bool = False
    layers: str = "local"
    """The kind of layers: Megatron's own (local), or Transformer Engine's (te, tests/kit/te_on_cpu.py)."""

    @property
    def lora_rank(self) -> int:
        """The rank of the trained adapters; 0: all weights are trained."""
        return 4 if self.model in ("lora", "moe_lora") else 0

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


@dataclass(frozen=True)
class Method:
    """A way to measure gradient norms, for a kind of baseline."""

    name: str
    vcpo: dict[str, Any]
    """The arguments of VCPOSettings."""
    whole_groups: bool = False
    """True: a prompt's samples lie on one data-parallel rank; False: on all ranks."""
    straddling: bool = False
    """True, with `whole_groups`: two prompts have a sample on another rank."""
    dominance: float = 0.0
    """The increase of the log-weight of one sequence of a mini-batch."""
    truncated: str | None = None
    """The treatment of every third response, as if a limit had ended it."""
    two_passes: bool = False
    """Without norms: a forward pass of its own measures the weights."""

    @property
    def scope(self) -> str:
        return str(self.vcpo.get("opob_scope", "group"))


CAPPED = {"baseline": "opob_capped"}
PER_TRAJECTORY = Method("per trajectory", CAPPED | {"norms": {"how": "per_trajectory"}})
PER_TRAJECTORY_MINI_BATCH = Method(
    "per trajectory, mini-batch", {"norms": {"how": "per_trajectory"}, "opob_scope": "minibatch"}
)
TWO_BACKWARDS = Method("packed, two backwards", CAPPED | {"norms": {"how": "two_backwards"}})
PACKED = Method("packed", CAPPED, whole_groups=True)
PACKED_MINI_BATCH = Method("packed, mini-batch", {"opob_scope": "minibatch"})


def methods(layout: ParallelLayout) -> list[Method]:
    """Return the methods to compare on a layout: all in which its updates differ."""
    if layout.model.startswith("moe"):
        return [PER_TRAJECTORY, TWO_BACKWARDS]
    return [PER_TRAJECTORY, TWO_BACKWARDS, *([PACKED] if layout.vpp is None else []), PACKED_MINI_BATCH]


@dataclass(frozen=True)
class Result:
    """The result of a layout, which is the same on every layout, up to rounding."""

    squared_norm: torch.Tensor
    """[steps, B] ||g_i||^2; zeros where the method measures none."""
    ess_ratio: torch.Tensor
    """[steps] rho."""
    baseline: torch.Tensor
    """[steps, B] b of each sequence."""
    parameters: dict[str, torch.Tensor]
    """The parameters after the last step, under their Hugging Face names."""
    step_s: float
    """The median seconds of a step on rank 0, without the first step."""


def norm_error(squared: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest error of a norm, in units of the longest gradient of its batch.

    The rounding of a float32 sum depends on its terms. The terms of a short gradient are as large as those of a long
    one, but cancel: in units of the gradient's own length the error has no bound, on any processor.

    Args:
        squared, wanted: [..., B] ||g_i||^2.
    """
    norms, exact = squared.sqrt(), wanted.sqrt()
    return float(((norms - exact).abs() / exact.amax(-1, keepdim=True)).max())


def make_checkpoint(model: str, folder: Path, **of_shape: Any) -> Path:
    """Write a small random Qwen2 (qk_norms: Qwen3, moe: Qwen3-MoE) checkpoint with one token per character.

    A Llama has the scaled positions of Llama 3.1, and frequencies so low that the scaling changes most of them.

    Args:
        model: a kind of `ParallelLayout.model`.
        folder: the folder in which to write.
        of_shape: settings of transformers' configuration to change.
    """
    import transformers

    shape: dict[str, Any] = dict(
        SMALL,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=model in ("tied", "llama_tied"),
    )
    shape |= of_shape
    torch.manual_seed(0)
    if model.startswith("moe"):
        experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, head_dim=16)
        network: Any = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape, **experts))
    elif model == "qk_norms":
        network = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, head_dim=16))
    elif model.startswith("llama"):
        scaled: dict[str, Any] = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0)
        scaled |= dict(high_freq_factor=4.0, original_max_position_embeddings=8192)
        network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, rope_parameters=scaled))
    else:
        network = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape))
    write_checkpoint(network, folder / model)
    return folder / model


def write_checkpoint(network: Any, path: Path) -> None:
    """Write a model of transformers to `path`, in float32, with a tokenizer of one token per character."""
    import transformers
    from tokenizers import Tokenizer, models

    for name, parameter in network.named_parameters():
        if name.endswith("bias"):  # zeros would stay near zero, where rounding is all there is
            torch.nn.init.normal_(parameter, std=0.1)
    network.float().save_pretrained(path)
    tokens = {chr(i + 32): i for i in range(VOCABULARY - 2)} | {"<eos>": VOCABULARY - 2, "<pad>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    special = {"eos_token": "<eos>", "pad_token": "<pad>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)


def run_layout(layout: ParallelLayout, checkpoint: Path, of: list[Method]) -> dict[str, Result]:
    """Run `layout` in processes of its own, with each method from the same start.

    Returns:
        The result of each method, by its name.

    Raises:
        RuntimeError: a process failed, with the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        worker = {"local": "tests.kit.layout_worker", "te": "tests.kit.te_stack"}[layout.layers]
        run_processes(layout.name, layout.world_size, worker, (layout, of, checkpoint), Path(folder))
        results = torch.load(Path(folder) / "result", weights_only=True)
        return {name: Result(**result) for name, result in results.items()}


def run_processes(
    name: str,
    world_size: int,
    worker: str,
    arguments: tuple[Any, ...],
    folder: Path,
    timeout_s: float = _TIMEOUT_S,
) -> None:
    """Call `run(*arguments, folder, rank)` of the module `worker` in processes of their own.

    Raises:
        RuntimeError: a process failed or did not end in time, with the end of its output.
    """
    if not torch.cuda.is_available():
        environment.apply()  # before they start, which is when the memory allocator reads it
    # a process that has asked for a GPU must not fork
    context: SpawnContext | ForkServerContext = (
        multiprocessing.get_context("spawn") if torch.cuda.is_available() else multiprocessing.get_context("forkserver")
    )
    context.set_forkserver_preload([worker])  # import once, fork for every process; no matter for "spawn"
    processes = [context.Process(target=_start, args=(worker, arguments, folder, rank)) for rank in range(world_size)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
        if any(p.exitcode not in (None, 0) for p in processes):
            break  # the other processes would wait for the failed one for ever
        time.sleep(0.02)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    if codes != [0] * world_size:
        failed = next((rank for rank, code in enumerate(codes) if code), 0)
        raise RuntimeError(
            f"{name!r}: exit codes {codes} (None: no answer within {timeout_s:.0f} s); rank {failed}:\n"
            + (folder / f"rank{failed}.log").read_text()[-4000:]
        )


def _start(worker: str, arguments: tuple[Any, ...], folder: Path, rank: int) -> None:
    module = importlib.import_module(worker)
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    module.run(*arguments, folder, rank)
