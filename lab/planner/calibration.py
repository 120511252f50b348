"""Rates from the folders of runs: what each part took, by the runs' own metrics.jsonl."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from scipy.optimize import nnls

from lab.planner.processors import Processors, fitted_line
from lab.planner.rates import Layout, PlanError, Rates, SamplerRate, TrainerRate, Workload
from lab.planner.simulation import Simulation
from verl_vcpo.loop.deadlines import POLL_S
from verl_vcpo.report.metrics_file import METRICS_FILE, SAVE_S, read_metrics
from verl_vcpo.report.processor_meter import CORES
from verl_vcpo.samplers.admission import gpus_of_sampler, slots_of_sampler

_WARM_UP = 2  # steps whose kernels, caches and buffers are made
_FEWEST = 4  # steps after these
_NEEDED = {
    "step_s": "",
    "trainer_idle_share": "",
    "weight_sync_s": "",
    "perf/total_num_tokens": "",
    "response_lengths": " (a run of an older version)",
    "sampler_decode": " (a run of an older version, or with rollout.disable_log_stats=true)",
    "sampler_idle_share": "",
    (_BUSY := "vcpo/sampler/busy_s"): "",
}
_NEEDED_ON_CPU = {CORES: " (a run of an older version)"}
_DRAWS = 4096
_SIMULATED_STEPS, _SIMULATED_SAMPLERS = 30, 4
_SHARED = "trainer, samplers and agent loops share the cores: where they ask for more, all are slowed down alike"


def calibrate(folders: list[Path]) -> Rates:
    """The rates of these runs; layout, batch and workload are those of the first.

    Runs with different numbers of trainer GPUs give the exponent with which the trainer's speed grows.

    Raises:
        PlanError: a folder holds no run, or its metrics lack something.
    """
    runs = [_read(folder) for folder in folders]
    first, lines = runs[0][1], [line for _, _, steps in runs for line in steps]
    rollout = first.actor_rollout_ref.rollout
    trainer, trainer_misfit = _trainer_rate(runs)
    sampler, sampler_misfit = _sampler_rate(lines, rollout)
    on_cpu = first.trainer.device == "cpu"
    work = _workload(first, runs[0][2])
    between_s = max(0.0, float(np.median([line["period_s"] - line["step_s"] for line in lines])))
    trainer_s = float(np.mean([trainer_seconds(line) + between_s for line in lines]))
    busy_s = float(np.mean([line[_BUSY] for line in lines]))
    processors = Processors(lines) if on_cpu else None
    if processors:
        sampler = sampler.faster(busy_s / processors.engine_s(busy_s))
    scaling = (
        "linear, an assumption" if trainer.exponent == 1 else f"GPUs ** {trainer.exponent:.2f}, fitted to the runs"
    )
    rates = Rates(
        trainer,
        sampler,
        work,
        sync_s=float(np.median([line["weight_sync_s"] for line in lines])),
        start_s=runs[0][0],
        recompute=first["async"].kv_cache == "recompute",
        between_s=between_s,
        poll_s=POLL_S,
        cores=processors.shared(trainer_s, busy_s) if processors else None,
        workers=int(rollout.agent.num_workers),
        agent_s=processors.agent_s(work.responses) if processors else 0.0,
        source=f"{len(lines)} steps of {', '.join(map(str, folders))}",
        assumptions=[
            f"the trainer's speed grows with its GPUs: {scaling}",
            "a sampler is as fast beside others as in the run, and their number does not change a weight update's time",
            *([_SHARED] if on_cpu else []),
            "lengths and tools' times of responses are independent draws of those in the run, at every step the same",
        ],
        fits={"trainer seconds": trainer_misfit, "sampler iterations": sampler_misfit},
    )
    return replace(rates, call_s=_call_s(rates, first, runs[0][2]))


def _read(folder: Path) -> tuple[float, DictConfig, list[dict[str, Any]]]:
    """(seconds before the first step, configuration, lines after the warm-up)."""
    for name in (METRICS_FILE, "config.yaml"):
        if not (folder / name).is_file():
            raise PlanError(f"{folder}: no {name}; give the folder (run_dir) of a run")
    try:
        lines = read_metrics(folder)
        config = OmegaConf.create(OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise PlanError(f"{folder}: not the files of a run ({type(error).__name__})") from None
    steps = [line for line in lines if line.get("step_s") is not None]
    for before, line in itertools.pairwise(steps):
        line["period_s"] = line["wall_clock_s"] - before["wall_clock_s"]
    kept = steps[_WARM_UP:]
    if len(kept) < _FEWEST:
        raise PlanError(f"{folder}: {len(steps)} steps; a calibration needs {_WARM_UP + _FEWEST}")
    for name, why in (_NEEDED | (_NEEDED_ON_CPU if config.trainer.device == "cpu" else {})).items():
        if any(line.get(name) is None for line in kept):
            raise PlanError(f"{folder}: metrics.jsonl has no {name}{why}; calibrate on a run of this version")
    assert isinstance(config, DictConfig)
    return steps[0]["wall_clock_s"] - steps[0]["step_s"], config, kept


def _call_s(rates: Rates, config: DictConfig, lines: list[dict[str, Any]]) -> float:
    """Seconds of a request's way to an engine and of the response's way back, together.

    Meanwhile the sampler has a request and its engine has none. Requests that come together are on their way together,
    so those seconds of a step are divided by how often in a step a sampler without requests is given one. How often
    that is no run records; a simulation of the run's steps counts it.
    """
    samplers = float(np.mean([line["vcpo/sampler/count"] for line in lines]))
    with_requests_only = [
        (1 - line["sampler_idle_share"]) * line["period_s"] - line[_BUSY] / samplers for line in lines
    ]
    seconds = max(0.0, float(np.mean(with_requests_only)))
    settings, gpus = config["async"], round(samplers) * rates.sampler.gpus
    layout = Layout(rates.trainer.gpus, gpus, settings.lag, exact=bool(settings.exact_lag))
    simulation = Simulation(rates, layout, share=min(1.0, _SIMULATED_SAMPLERS / samplers))
    steps = simulation.run(min(len(lines), _SIMULATED_STEPS))
    return seconds * len(steps) / simulation.begun


def trainer_seconds(line: dict[str, Any]) -> float:
    """What the trainer worked in a step: without waiting for rollouts, the weight update, and a checkpoint."""
    saved = line.get(SAVE_S) or 0.0
    return line["step_s"] * (1 - line["trainer_idle_share"]) - line["weight_sync_s"] - saved


def _trainer_rate(runs: list[tuple[float, DictConfig, list[dict[str, Any]]]]) -> tuple[TrainerRate, float]:
    first = runs[0][1]
    gpus = [int(config.trainer.n_gpus_per_node * config.trainer.nnodes) for _, config, _ in runs]
    per_run = [
        (np.array([line["perf/total_num_tokens"] for line in lines]), np.array(list(map(trainer_seconds, lines))))
        for _, _, lines in runs
    ]
    fixed_s, token_s = fitted_line(*per_run[0])
    exponent = 1.0
    other = next((i for i, count in enumerate(gpus) if count != gpus[0]), None)
    if other is not None:
        tokens, seconds = per_run[other]
        slower = max(float(np.mean(seconds)) - fixed_s, 1e-9) / max(token_s * float(np.mean(tokens)), 1e-9)
        exponent = float(np.clip(np.log(slower) / np.log(gpus[0] / gpus[other]), 0.0, 1.0))
    tokens, seconds = per_run[0]
    misfit = float(np.mean(np.abs(fixed_s + token_s * tokens - seconds)) / np.mean(seconds))
    return TrainerRate(fixed_s, token_s, gpus[0], trainer_unit(first), exponent), misfit


def trainer_unit(config: DictConfig) -> int:
    """GPUs of one replica of the trainer's model."""
    megatron = config.actor_rollout_ref.actor.megatron
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    return math.prod(int(OmegaConf.select(megatron, size) or 1) for size in sizes)


def _sampler_rate(lines: list[dict[str, Any]], rollout: Any) -> tuple[SamplerRate, float]:
    """The line of an iteration's seconds over its tokens; what prompts took besides."""
    sums: dict[str, NDArray[np.float64]] = {}
    for line in lines:
        for size, values in line["sampler_decode"].items():
            sums[size] = sums.get(size, np.zeros(3)) + np.array(values)
    if not sums:
        raise PlanError("sampler_decode: the samplers had no iteration without a prompt; calibrate on longer responses")
    iterations, seconds, tokens = np.array(list(sums.values())).T
    weight = np.sqrt(seconds)
    design = np.stack([np.ones_like(tokens), tokens / iterations], 1)
    mean_s = seconds / iterations
    (fixed_s, request_s), _ = nnls(design * weight[:, None], mean_s * weight)
    misfit = float(np.average(np.abs(design @ [fixed_s, request_s] - mean_s) / mean_s, weights=seconds))
    prefills = np.sum([line["sampler_prefill"] for line in lines], axis=0)
    beyond_s = prefills[1] - prefills[0] * fixed_s - prefills[2] * request_s
    prefill_s = max(0.0, float(beyond_s)) / max(1.0, float(prefills[3]))
    gpus = gpus_of_sampler(rollout)
    engines = int(rollout.data_parallel_size)  # their iterations are recorded one after the other
    iteration_s, one_more_s = engines * float(fixed_s), engines * float(request_s)
    rate = SamplerRate(iteration_s, one_more_s, engines * prefill_s, slots_of_sampler(rollout), gpus, engines)
    return rate, misfit


def _workload(config: DictConfig, lines: list[dict[str, Any]]) -> Workload:
    prompts, samples = int(config.data.train_batch_size), int(config.actor_rollout_ref.rollout.n)
    lengths = draws([line["response_lengths"] for line in lines])
    tokens = float(np.mean([line["perf/total_num_tokens"] for line in lines]))
    outside = [line["outside_s"] for line in lines if line.get("outside_s")]
    rewards = [line["reward_s"] for line in lines if line.get("reward_s")]
    return Workload(
        prompts,
        samples,
        prompt_tokens=max(0.0, tokens / (prompts * samples) - float(lengths.mean())),
        lengths=lengths,
        outside_s=draws(outside) if outside else np.zeros(1),
        calls=round(float(np.mean([line.get("tool_use/calls/mean") or 0.0 for line in lines]))),
        reward_s=float(draws(rewards).mean()) if rewards else 0.0,
    )


def draws(histograms: list[dict[str, int]]) -> NDArray[np.float64]:
    """As many values as there are in the histograms, at most `_DRAWS` (then in their shares), the smallest first."""
    counts: dict[float, int] = {}
    for histogram in histograms:
        for value, count in histogram.items():
            counts[float(value)] = counts.get(float(value), 0) + count
    values = np.array(sorted(counts))
    numbers = np.array([counts[value] for value in values])
    every = np.repeat(values, numbers)
    if len(every) <= _DRAWS:
        return every
    return every[np.linspace(0, len(every) - 1, _DRAWS).round().astype(int)]
