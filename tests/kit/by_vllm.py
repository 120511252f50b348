"""The log-probs that vLLM computes on a CPU, in a process of its own: python -m tests.kit.by_vllm MODEL IDS OUT.

The weights come as a sampler's do: vLLM starts with weights of its own, and gets the model's in an update.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from glob import glob
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from tests.kit import ROOT
from verl_vcpo.common.run_folder import in_run_folder
from verl_vcpo.common.run_id import RUN_ID_VARIABLE


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
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, so that it takes a function
    import verl  # noqa: F401  # before vLLM, as in a run
    from vllm import LLM, SamplingParams

    from verl_vcpo.cpu.vllm_server import _WORKER_IN_THE_ENGINE, CPUvLLMHttpServer

    prompts = [{"prompt_token_ids": sequence} for sequence in json.loads(Path(ids).read_text())]
    engine = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=16,
        max_num_batched_tokens=64,  # prompts are computed in parts
        load_format="dummy",
        worker_extension_cls=object.__new__(CPUvLLMHttpServer)._get_worker_extension_cls(),
        distributed_executor_backend=_WORKER_IN_THE_ENGINE,
    )
    with tempfile.TemporaryDirectory() as folder:  # of pytest, a socket's path would be too long
        os.environ |= {"RAY_TMPDIR": folder, RUN_ID_VARIABLE: "0123456789ab"}
        for change in (1.5, 1.0):  # the second update must not find what the first one left
            engine.collective_rpc(update_weights, args=(model, folder, change))
    found = engine.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0, seed=1))
    of_each = [
        [of[token].logprob for of, token in zip(one.prompt_logprobs[1:], one.prompt_token_ids[1:], strict=True)]
        for one in found
    ]
    Path(out).write_text(json.dumps(of_each))


def update_weights(worker: Any, model: str, folder: str, change: float) -> None:
    """Send the weights of the folder `model`, times `change`, to vLLM's worker, as a run's trainer sends its own."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

    from verl_vcpo.cpu.weight_file import WeightFileCheckpointEngine

    file = WeightFileCheckpointEngine(0, True, os.environ[RUN_ID_VARIABLE], timeout_s=60.0, directory=folder)
    weights = safetensors_weights_iterator(sorted(glob(f"{model}/*.safetensors")), False)
    file.stage_weights(((name, weight * change) for name, weight in weights), 1)
    address = in_run_folder(vLLMColocateWorkerExtension._get_zmq_handle(worker))
    sender = BucketedWeightSender(address, bucket_size_mb=1, use_shm=True)
    sending = threading.Thread(target=lambda: asyncio.run(sender.async_send_weights(file.receive_weights(1))))
    sending.start()
    worker.update_weights_from_ipc()
    sending.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
