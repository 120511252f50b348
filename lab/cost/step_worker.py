"""One process of a case of `steps`: the same update of a model in several ways, one after the other."""

import gc
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.kit.actor import adamw, build_engine, join_processes, loss_function  # applies the environment first

import torch  # isort: skip
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from lab.cost.steps import METHODS, PADDED, PER_TRAJECTORY, PLAIN, SLOW, TWICE, Case
from tests.kit.layout_run import ParallelLayout
from verl_vcpo.actor.update.losses import padded_responses
from verl_vcpo.actor.vcpo_settings import VCPOSettings

_PROMPT = 16


def make_batch(case: Case, seed: int = 0) -> TensorDict:
    """`groups` prompts of `group_size` samples; lengths are drawn evenly from the case's range."""
    generator = torch.Generator().manual_seed(seed)
    columns: dict[str, list[Any]] = defaultdict(list)
    for i in range(case.groups * case.group_size):
        total = int(torch.randint(case.shortest, case.longest + 1, (1,), generator=generator))
        ids = torch.randint(case.vocabulary - 2, (total,), generator=generator)
        length = total - _PROMPT
        reward = torch.zeros(length)
        reward[-1] = float(i % 2)  # two values, as most rewards have
        columns["uid"].append(f"{i // case.group_size:032x}")
        for name, value in {
            "prompts": ids[:_PROMPT],
            "responses": ids[_PROMPT:],
            "input_ids": ids,
            "position_ids": torch.arange(total),
            "response_mask": torch.ones(length, dtype=torch.int64),
            "loss_mask": torch.ones(length, dtype=torch.int64),
            "rollout_log_probs": torch.zeros(length),
            "old_log_probs": torch.zeros(length),
            "rm_scores": reward,
            "advantages": torch.full((length,), float(i % 2) - 0.5),
        }.items():
            columns[name].append(value)
    uids = columns.pop("uid")
    tensors: dict[str, Any] = {k: torch.nested.as_nested_tensor(v, layout=torch.jagged) for k, v in columns.items()}
    return tu.get_tensordict(
        {**tensors, "uid": uids},
        {
            "temperature": 1.0,
            "use_remove_padding": True,
            "global_batch_size": case.groups * case.group_size,
            "use_dynamic_bsz": True,
            "max_token_len_per_gpu": case.micro_batch_tokens,
        },
    )


def now() -> float:
    """On a GPU: when it has done its work. One CPU process: processor time, which other programs don't take."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time() if dist.get_world_size() == 1 else time.perf_counter()


def _held_bytes() -> int:
    """Of all tensors that live on the CPU."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _peak_bytes(step: Callable[[], None]) -> int:
    """The most that tensors hold at a time while `step` runs, without what libraries and allocators keep for later."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    held = _held_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiled:
        step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return held + max(accumulate(changes))


def _units(engine: Any, step: Callable[[], None], tokens: int) -> float:
    """The passes of one step over the mini-batch: 1 for a forward, 2 for a backward."""
    seen, of_verl = 0, engine.forward_step

    def forward_step(batches: Iterator[TensorDict], *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        batch = next(batches)
        seen += len(batch["input_ids"].values()) * (3 if torch.is_grad_enabled() else 1)
        return of_verl(iter([batch]), *args, **kwargs)

    with patch.object(engine, "forward_step", forward_step):
        step()
    return seen / tokens


def _record_log_probs(engine: Any, batch: TensorDict) -> None:
    """Log-probs under which every importance weight of `batch` is the truncation; on all ranks the same.

    A weight below it is as uncertain as the sum of its tokens' log-probs, whose rounding changes with the micro-batch:
    errors of the gradient would be those of the weights.
    """
    with engine.eval_mode():
        out = engine.infer_batch(batch.copy())
    recorded: list[Any] = [None]
    if engine.is_mp_src_rank_with_outputs():
        rows = padded_responses(out["model_output"]["log_probs"], batch).cpu()
        lengths = batch["responses"].offsets().diff().tolist()
        margin = math.log(VCPOSettings().truncation or 1.0) + 2.0
        recorded = [[row[:n] - margin / n for row, n in zip(rows, lengths, strict=True)]]
    dist.broadcast_object_list(recorded)
    for name in ("rollout_log_probs", "old_log_probs"):
        batch[name] = torch.nested.as_nested_tensor(recorded[0], layout=torch.jagged)


def _check(engine: Any, step: Callable[..., Any], rows: dict[str, dict[str, Any]]) -> None:
    """Every method takes a step, to warm up and for its `errors`: of the packed ones, relative.

    norms: the largest of a squared norm, beside one backward per sequence.
    gradient: of the whole gradient, beside that of `PER_TRAJECTORY`: a plain packed step with the coefficients that
        these norms lead to.

    `noise` of `TWICE`, in the same measures: how much it differs from itself with smaller micro-batches.
    """

    def result() -> tuple[Tensor, list[Tensor]]:
        gradient = [p.main_grad.cpu().clone() for p in _trained(engine)]  # type: ignore[attr-defined]
        return _squared_norms(engine), gradient

    def errors(norms: Tensor, gradient: list[Tensor]) -> dict[str, float]:
        error = (_squared_norms(engine) / norms - 1).abs().max().item()
        return {"norms": error, "gradient": _relative_difference(_trained(engine), gradient)}

    step(PLAIN)
    of_itself = step(TWICE, result)
    rows[TWICE]["noise"] = step(TWICE, lambda: errors(*of_itself), micro_batches=4)
    expected = step(PER_TRAJECTORY, result)
    for method in METHODS:
        if method.startswith("packed"):
            rows[method]["errors"] = step(method, lambda: errors(*expected))
            _free(engine)


def _free(engine: Any) -> None:
    """The memory that one method has kept for its next step and others have no use for."""
    if engine._packing:
        engine.packing.second_buffers.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _squared_norms(engine: Any) -> Tensor:
    return engine.last_update[0].squared_norm


def _relative_difference(parameters: list[torch.nn.Parameter], expected: list[Tensor]) -> float:
    """|difference| / |expected| of the gradients of all ranks."""
    parts = torch.zeros(2, dtype=torch.float64, device=get_device_id())
    for parameter, gradient in zip(parameters, expected, strict=True):
        whole = gradient.to(parameter.device)
        difference = parameter.main_grad - whole  # type: ignore[attr-defined]
        parts += torch.stack([difference.norm(), whole.norm()]).double().square()
    dist.all_reduce(parts)
    return (parts[0] / parts[1]).sqrt().item()


def _trained(engine: Any) -> list[torch.nn.Parameter]:
    return [p for chunk in engine.module for p in chunk.parameters() if p.requires_grad]


def run(case: Case, rounds: int, checkpoint: Path, folder: Path, rank: int) -> None:
    """Measure every method as rank `rank`; rank 0 writes `folder/result`: a dictionary per method."""
    join_processes(rank, case.tp, folder)
    layout = ParallelLayout(case.name, tp=case.tp, sequence_parallel=case.tp > 1, layers=case.layers_of)
    # at a learning rate of 0 a step costs what it costs, and every method has the same weights
    engine = build_engine(layout, checkpoint, adamw(learning_rate=0.0), case.dtype)
    batch = make_batch(case)
    _record_log_probs(engine, batch)

    def step(method: str, look: Callable[[], Any] = lambda: None, micro_batches: int = 1) -> Any:
        """micro_batches: at least so many, by smaller ones than the case's."""
        data = batch.copy()
        if micro_batches > 1:
            tokens = sum(batch["input_ids"].offsets().diff().tolist())
            tu.assign_non_tensor(data, max_token_len_per_gpu=max(case.longest, tokens // micro_batches))
        with engine.train_mode():  # which ends with gradients of zero
            without = patch("vcpo.gradnorm.linear.kernel", return_value=None) if method == PADDED else nullcontext()
            with without:
                engine.train_batch(data, loss_function(VCPOSettings(**METHODS[method])))
            return look()

    rows: dict[str, dict[str, Any]] = {method: {} for method in METHODS}
    _check(engine, step, rows)
    for method, row in rows.items():
        _free(engine)
        row["peak_bytes"] = _peak_bytes(partial(step, method))
        row["units"] = _units(engine, partial(step, method), len(batch["input_ids"].values()))
    for method, seconds in _in_turns(step, rounds).items():
        rows[method] |= seconds
    if rank == 0:
        torch.save(rows, folder / "result")
    dist.barrier()


def _in_turns(step: Callable[[str], None], rounds: int) -> dict[str, dict[str, float]]:
    """Per method {seconds: the median step's; ratio: to the plain step of the same round, the median;
    processor_ratio: the same of all processes' processor time, which other programs don't take}."""
    methods, seconds = list(METHODS), defaultdict[str, list[float]](list)
    work: dict[str, list[float]] = defaultdict(list)
    for turn in range(rounds):
        first = turn % len(methods)  # each comes after each: what one leaves in caches and memory, the next one finds
        for method in methods[first:] + methods[:first]:
            if method in SLOW and len(seconds[method]) >= max(1, rounds // 3):
                continue
            start, worked = now(), time.process_time()
            step(method)
            seconds[method].append(now() - start)
            work[method].append(_of_all_ranks(time.process_time() - worked))

    def ratio(times: dict[str, list[float]], method: str) -> float:
        # within a round methods follow each other: what slows the machine down slows all of them
        return statistics.median(a / b for a, b in zip(times[method], times[PLAIN], strict=False))

    return {
        method: {
            "seconds": statistics.median(times),
            "ratio": ratio(seconds, method),
            "processor_ratio": ratio(work, method),
        }
        for method, times in seconds.items()
    }


def _of_all_ranks(seconds: float) -> float:
    total = torch.tensor(seconds, dtype=torch.float64, device=get_device_id())
    dist.all_reduce(total)
    return total.item()
