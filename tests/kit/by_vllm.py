"""The log-probs that vLLM computes on a CPU, in a process of its own: python -m tests.kit.by_vllm MODEL IDS OUT."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from tensordict import TensorDict

from tests.kit import ROOT


def log_probs(model: Path, batch: TensorDict, folder: Path) -> torch.Tensor:
    """Return [B, T] of the responses of `batch`, 0 beyond their ends, by the model in the folder `model`.

    Args:
        folder: a folder for the files that the process reads and writes.

    Raises:
        CalledProcessError: vLLM failed; its output is on this process's.
    """
    (folder / "ids.json").write_text(json.dumps([ids.tolist() for ids in batch["input_ids"].unbind()]))
    names = [str(model), str(folder / "ids.json"), str(folder / "log_probs.json")]
    subprocess.run([sys.executable, "-m", "tests.kit.by_vllm", *names], check=True, cwd=ROOT, timeout=900)
    rows = json.loads((folder / "log_probs.json").read_text())
    prompts = batch["prompts"].unbind()
    of_responses = [torch.tensor(row[len(prompt) - 1 :]) for row, prompt in zip(rows, prompts, strict=True)]
    return torch.nn.utils.rnn.pad_sequence(of_responses, batch_first=True)


def main(model: str, ids: str, out: str) -> None:
    """Write the log-probs of all tokens but the first of each sequence in the file `ids` to the file `out`."""
    from verl_vcpo.cpu import environment

    environment.apply()
    import verl  # noqa: F401  # before vLLM, as in a run
    from vllm import LLM, SamplingParams

    prompts = [{"prompt_token_ids": sequence} for sequence in json.loads(Path(ids).read_text())]
    engine = LLM(model, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=16)
    found = engine.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0))
    of_each = [
        [of[token].logprob for of, token in zip(one.prompt_logprobs[1:], one.prompt_token_ids[1:], strict=True)]
        for one in found
    ]
    Path(out).write_text(json.dumps(of_each))


if __name__ == "__main__":
    main(*sys.argv[1:])
