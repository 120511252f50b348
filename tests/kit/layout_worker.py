"""One process of `layout_run`; importing the module imports the whole training stack."""

import contextlib
import json
import random
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.kit.actor import ON_GPU, adamw, build_engine, join_processes, loss_function, two_passes  # environment first

import torch  # isort: skip
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.kit.layout_run import GROUP_SIZE, GROUPS, STEPS, VOCABULARY, Method, ParallelLayout, Result
from verl_vcpo.actor.vcpo_settings import VCPOSettings
from verl_vcpo.cpu.megatron_shims import megatron_on_cpu


def order_of_rows(whole_groups: bool, straddling: bool = False) -> list[int]:
    """Return the order in which sequences go to data-parallel ranks: prompt by prompt, or from each prompt in turn.

    Args:
        whole_groups: prompt by prompt.
        straddling: two samples in the middle, of neighbouring prompts, change places.
    """
    order = sorted(range(GROUPS * GROUP_SIZE), key=lambda i: i % GROUPS if whole_groups else i)
    if straddling:
        middle = len(order) // 2
        order[middle - 1], order[middle] = order[middle], order[middle - 1]
    return order


def make_batch(
    layout: ParallelLayout,
    seed: int = 0,
    rank: int = 0,
    ranks: int = 1,
    whole_groups: bool = False,
    dominance: float = 0.0,
    straddling: bool = False,
    holes: bool = True,
    truncated: str | None = None,
) -> TensorDict:
    """Make data-parallel rank `rank`'s part of a batch that depends on `seed`, `dominance` and `holes` only.

    Version 8 trains; versions 8 and 7 have sampled each response, and in one of four nobody knows which of its tokens.
    With `holes` two of three responses have one or two tokens of a tool's output, with mask 0 and log-prob 0. With
    `truncated` every third one is marked, to be treated so.
    """
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for i in range(GROUPS * GROUP_SIZE):
        length = rng.randint(2, 12)
        prompt, response = (torch.tensor([rng.randrange(VOCABULARY - 2) for _ in range(n)]) for n in (5, length))
        reward = torch.zeros(length)
        reward[-1] = rng.random() + 0.5
        log_prob = torch.tensor([-4.3 + 0.6 * rng.random() for _ in range(length)])
        mask = torch.ones(length, dtype=torch.int64)
        if holes:
            mask[length // 2 :][: (i + 1) % 3] = 0
        if i == 0:
            log_prob -= dominance / mask.sum()
        log_prob = log_prob * mask
        rows.append(
            {
                "uid": f"{i % GROUPS:032x}",
                "extra_fields": {
                    "truncated": i % 3 == 1,
                    "min_global_steps": 8 if i % 4 == 0 else 7 - i % 8,
                    "token_versions": [[8, 1], [7 if i % 4 else None, int(mask.sum()) - 1]],
                },
                "prompts": prompt,
                "responses": response,
                "input_ids": torch.cat([prompt, response]),
                "position_ids": torch.arange(5 + length),
                "response_mask": mask,
                "loss_mask": mask.clone(),
                "rollout_log_probs": log_prob,
                "rm_scores": reward,
                # what verl's own loss (method=none, ...) reads instead
                "old_log_probs": log_prob.clone(),
                "advantages": torch.full((length,), rng.random() - 0.5),
            }
        )
    rows = [rows[i] for i in order_of_rows(whole_groups, straddling)]
    size = len(rows) // ranks
    rows = rows[rank * size : (rank + 1) * size]
    tensors: dict[str, Any] = {
        name: torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged)
        for name in rows[0]
        if name not in ("uid", "extra_fields")
    }
    tensors |= {name: [row[name] for row in rows] for name in ("uid", "extra_fields")}
    micro_batches = (
        {"use_dynamic_bsz": True, "max_token_len_per_gpu": 40}
        if layout.dynamic_batch
        else {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
    )
    return tu.get_tensordict(
        tensors,
        {
            "temperature": 1.0,
            "use_remove_padding": layout.packed,
            "global_batch_size": GROUPS * GROUP_SIZE,
            **({"truncated": truncated} if truncated else {}),
            "policy_version": 8,
            **micro_batches,
        },
    )


def run(layout: ParallelLayout, of: list[Method], checkpoint: Path, folder: Path, rank: int) -> None:
    """Train `STEPS` steps with each method as rank `rank`; rank 0 writes `folder/result`."""
    join_processes(rank, layout.world_size, folder)
    results = {method.name: asdict(_train(layout, method, checkpoint)) for method in of}
    if rank == 0:
        torch.save(results, folder / "result")
    dist.barrier()


def _train(layout: ParallelLayout, method: Method, checkpoint: Path) -> Result:
    engine = build_engine(layout, checkpoint, adamw())
    settings = VCPOSettings(base_ess_ratio=0.9, **method.vcpo)
    assert not (settings.packs_gradient_norms and engine.packing.unpackable), engine.packing.unpackable
    loss = loss_function(settings)
    norms, ratios, baselines, seconds = [], [], [], []
    canonical = torch.tensor(order_of_rows(method.whole_groups, method.straddling)).argsort()
    for step in range(STEPS):
        rank = engine.get_data_parallel_rank()
        of_method = method.whole_groups, method.dominance, method.straddling
        batch = make_batch(layout, step, rank, layout.dp, *of_method, truncated=method.truncated)
        start = time.perf_counter()
        with engine.train_mode(), two_passes() if method.two_passes else contextlib.nullcontext():
            engine.train_batch(batch, loss)
            engine.lr_scheduler_step()
        seconds.append(time.perf_counter() - start)
        mini_batch, estimate = engine.last_update
        squared_norm = mini_batch.squared_norm
        norms.append(torch.zeros(len(canonical)) if squared_norm is None else squared_norm[canonical])
        ratios.append(estimate.ess_ratio)
        baselines.append(estimate.baseline[canonical])
    measured: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(measured, json.dumps(engine.mismatch.state_dict()))
    assert len(set(measured)) == 1, "ranks would take different steps"
    with contextlib.nullcontext() if ON_GPU else megatron_on_cpu(), torch.no_grad():
        export = engine.bridge.export_adapter_weights if layout.lora_rank else engine.bridge.export_hf_weights
        parameters = {name: p.detach().clone() for name, p in export(engine.module, show_progress=False)}
    return Result(
        torch.stack(norms), torch.tensor(ratios), torch.stack(baselines), parameters, statistics.median(seconds[1:])
    )
