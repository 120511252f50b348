"""Rates and run folders with known answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from lab.planner.rates import Rates, SamplerRate, SharedCores, TrainerRate, Workload


def rates(
    *,
    lengths: Any = 100.0,
    outside_s: Any = 0.0,
    prompts: int = 4,
    samples: int = 4,
    train_s: float = 10.0,
    token_s: float = 0.0,
    slots: int = 64,
    prefill_s: float = 0.0,
    sync_s: float = 0.5,
    cores: SharedCores | None = None,
    calls: int = 0,
    **others: Any,
) -> Rates:
    """A trainer of one GPU, and samplers whose iteration of n requests lasts 0.01 + 0.001 n seconds."""
    return Rates(
        TrainerRate(train_s, token_s, 1),
        SamplerRate(0.01, 0.001, prefill_s, slots),
        Workload(
            prompts,
            samples,
            10.0,
            np.atleast_1d(np.asarray(lengths, dtype=float)),
            np.atleast_1d(np.asarray(outside_s, dtype=float)),
            calls,
        ),
        sync_s,
        start_s=0.0,
        cores=cores,
        workers=1,
        **others,
    )


CONFIG = """
async: {lag: 0, kv_cache: recompute, exact_lag: false}
data: {train_batch_size: 4}
trainer: {device: gpu, n_gpus_per_node: GPUS, nnodes: 1}
actor_rollout_ref:
  actor: {megatron: {tensor_model_parallel_size: 2}}
  rollout:
    {n: 2, max_num_seqs: 16, agent: {num_workers: 8},
     tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1, data_parallel_size: 1}
"""


def run_folder(folder: Path, gpus: int = 2, exponent: float = 1.0, device: str = "gpu", **changed: Any) -> Path:
    """Of a run whose trainer takes 1 s + 0.002 s a token on 2 GPUs, and whose iterations take 0.01 + 0.001 n seconds.

    A token of a prompt takes 0.0001 s, a weight update 0.5 s, the start 30 s, the metrics of a step 0.25 s. A trainer
    that waits takes 0.1 of the 4 cores, the data plane 0.25 more.
    """
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.replace("GPUS", str(gpus)).replace("device: gpu", f"device: {device}"))
    lines, wall = [], 30.0
    for step in range(1, 11):
        tokens = 800 + 40 * (step % 3)
        trainer_s, wait_s = 1 + 0.002 * tokens * (2 / gpus) ** exponent, 3.0 + 2 * (step % 2)
        step_s = trainer_s + wait_s + 0.5
        period_s = step_s + 0.25
        wall += period_s
        prefill = [5, 5 * (0.01 + 4 * 0.001) + 100 * 0.0001, 20, 100]
        lines.append(
            {
                "step": step,
                "wall_clock_s": wall,
                "step_s": step_s,
                "trainer_idle_share": wait_s / step_s,
                "weight_sync_s": 0.5,
                "perf/total_num_tokens": tokens,
                "response_lengths": {"60": 4, "90": 4},
                "sampler_decode": {"2": [10, 10 * 0.012, 20], "8": [10, 10 * 0.018, 80]},
                "sampler_prefill": prefill,
                "outside_s": {"0": 4, "1": 4},
                "reward_s": {"0.5": 8},
                "sampler_idle_share": 1 - (2 + 0.8) / period_s,
                "vcpo/sampler/count": 1,
                "vcpo/sampler/busy_s": 2.0,
                "vcpo/processor/cores": 4,
                "vcpo/processor/trainer_s": 2.0 + 0.1 * wait_s,
                "vcpo/processor/engines_s": 2.0,
                "vcpo/processor/servers_s": 0.5,
                "vcpo/processor/agent_loops_s": 0.4,
                "vcpo/processor/others_s": 0.2 + 0.25 * wait_s,
            }
            | changed
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
