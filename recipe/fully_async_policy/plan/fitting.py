"""Whether a launch fits its GPUs, and with which settings it would: every advice was tried on the plan before."""

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy.plan.gpu_memory import (
    Layout,
    kv_tokens,
    longest_sequence,
    read_layout,
    sampler_memory,
    trainer_memory,
)
from recipe.fully_async_policy.plan.model_shape import ModelShape, read_shape
from recipe.fully_async_policy.settings.consistency import check_consistency, layout_of_devices
from recipe.fully_async_policy.settings.errors import Found, SettingError, shown

GPUS_PER_NODE = 8
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_TP, _CP, _OFFLOAD = (
    f"{_ACTOR}.megatron.{name}" for name in ("tensor_model_parallel_size", "context_parallel_size", "optimizer_offload")
)
_TOKENS, _GPUS, _NODES = f"{_ACTOR}.ppo_max_token_len_per_gpu", "trainer.n_gpus_per_node", "trainer.nnodes"
_RECOMPUTED = {
    f"{_ACTOR}.megatron.override_transformer_config.recompute_{name}": value
    for name, value in (("granularity", "full"), ("method", "uniform"), ("num_layers", 1))
}
_UTILIZATION, _SAMPLER_TP = f"{_ROLLOUT}.gpu_memory_utilization", f"{_ROLLOUT}.tensor_model_parallel_size"
_RANK = "actor_rollout_ref.model.lora.rank"
_LONG = 4096
"""Tokens of a sequence from which on parts of it on several GPUs are worth their messages."""


class Fit(NamedTuple):
    """Settings with which a launch fits."""

    settings: dict[str, Any]
    gib: float
    """What each GPU then needs."""

    def __str__(self) -> str:
        """As the command line has them, with the GiB."""
        return f"{' '.join(f'{name}={shown(value)}' for name, value in self.settings.items())} ({self.gib:.1f} GiB)"


def check_shape(layout: Layout, shape: ModelShape) -> None:
    """Whether the model can be split so. Raises SettingError with a size that works."""
    for setting, tp in ((_TP, layout.tp), (_SAMPLER_TP, layout.sampler_tp)):
        fits = [n for n in range(1, tp) if shape.heads % n == 0 and shape.kv_heads % n == 0]
        if shape.heads % tp or (shape.kv_heads % tp and tp % shape.kv_heads):
            raise SettingError(
                f"{setting}={tp}: does not divide the model's {shape.heads} attention heads ({shape.kv_heads} of keys "
                f"and values); set it to {fits[-1] if fits else 1}"
            )
    if shape.layers % layout.pp:
        raise SettingError(
            f"{_ACTOR}.megatron.pipeline_model_parallel_size={layout.pp}: does not divide the model's "
            f"{shape.layers} layers; set it to a divisor"
        )


def check_layout(config: DictConfig) -> None:
    """`check_shape` of a run, where the model's kind is known."""
    if shape := read_shape(config.actor_rollout_ref.model.path):
        check_shape(read_layout(config), shape)


def check_memory(config: DictConfig, shape: ModelShape) -> None:
    """Refuse what cannot run whatever the sequences' lengths are. Raises SettingError with the setting and the fix."""
    layout, gpu = read_layout(config), float(config.gpu_memory_gib)
    trainer = trainer_memory(config, layout, shape)
    if trainer.state > gpu:
        raise SettingError(
            f"{_TP}: weights, gradients and optimizer need {trainer.state:.1f} GiB on each trainer GPU, which has "
            f"{gpu:.1f}; {_for_the_trainer(config, shape)}"
        )
    sampler = sampler_memory(config, layout, shape, gpu)
    length = longest_sequence(config)
    if kv_tokens(layout, shape, sampler["KV cache"]) < length:
        raise SettingError(
            f"{_UTILIZATION}: leaves {max(0.0, sampler['KV cache']):.1f} GiB for the KV cache, less than one sequence "
            f"of {length} tokens; {_for_a_sampler(config, shape)}"
        )
    if sum(sampler.values()) > gpu:
        beside = sampler["weight transfer"] + sampler.get("log-probs again", 0.0)
        raise SettingError(
            f"{_UTILIZATION}: leaves less than the {beside:.1f} GiB that weight transfers and log-probs that are "
            f"computed again need beside vLLM; {_for_a_sampler(config, shape)}, or lower "
            f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
        )


def warning(config: DictConfig, shape: ModelShape) -> str | None:
    """What does not fit if all sequences of a micro-batch have the full length, and the fix; None if all fits."""
    trainer, gpu = trainer_memory(config, read_layout(config), shape), float(config.gpu_memory_gib)
    if trainer.peak <= gpu:
        return None
    actor: Any = config.actor_rollout_ref.actor
    name, size = _TOKENS, actor.ppo_max_token_len_per_gpu
    least = -(-longest_sequence(config) // actor.megatron.context_parallel_size)
    if not actor.use_dynamic_bsz:
        name, size, least = f"{_ACTOR}.ppo_micro_batch_size_per_gpu", actor.ppo_micro_batch_size_per_gpu or 1, 1
    smaller = _first(config, shape, ({name: value} for value in _divisors(size, least)), _peak)
    fix = f"set {smaller}" if smaller else _for_the_trainer(config, shape)
    return (
        f"Warning: a micro-batch in which all sequences have the full length needs {trainer.peak:.1f} GiB on each "
        f"trainer GPU, which has {gpu:.1f}: {fix}."
    )


def micro_batch(config: DictConfig) -> Found:
    """Micro-batches of fewer tokens than a sequence of full length has, at which verl ends a run."""
    actor, longest = config.actor_rollout_ref.actor, longest_sequence(config)
    share = -(-longest // actor.megatron.context_parallel_size)
    if not actor.use_dynamic_bsz or actor.ppo_max_token_len_per_gpu >= share:
        return
    words = f"a sequence of full length has {longest} tokens (data.max_prompt_length + data.max_response_length)"
    shape = read_shape(config.actor_rollout_ref.model.path) if config.trainer.device != "cpu" else None
    if shape is None:
        yield _TOKENS, f"{words}; raise it to {share}"
        return
    whole = _first(config, shape, [{_TOKENS: share}], _peak)
    halves = {
        _CP: 2 * actor.megatron.context_parallel_size,
        _TOKENS: max(-(-share // 2), actor.ppo_max_token_len_per_gpu),
    }
    spread = _first(config, shape, (halves | gpus for gpus in _gpus(config)), _peak) if longest >= _LONG else None
    ways = [f"set {whole}" if whole else _for_the_trainer(config, shape, {_TOKENS: share})]
    yield _TOKENS, f"{words}; {' or '.join([*ways, *([str(spread)] if spread else [])])}"


def _divisors(size: int, least: int) -> Iterator[int]:
    """Halves, quarters, ... of a size, and at last the least."""
    while size // 2 > least:
        size //= 2
        yield size
    yield least


def _peak(config: DictConfig, layout: Layout, shape: ModelShape) -> float:
    return trainer_memory(config, layout, shape).peak


def _state(config: DictConfig, layout: Layout, shape: ModelShape) -> float:
    return trainer_memory(config, layout, shape).state


def _for_the_trainer(config: DictConfig, shape: ModelShape, also: dict[str, Any] | None = None) -> str:
    """The fewest changes with which the trainer fits: on the same GPUs, else on more; `also`: given anyway."""
    tries = list(_changes(config, also or {}))
    fit = _first(config, shape, tries, _peak) or _first(config, shape, tries, _state)
    if fit:
        return f"set {fit}"
    with_adapters = [] if OmegaConf.select(config, _RANK) else [{**(also or {}), _RANK: 32}]
    adapters = _first(config, shape, with_adapters, _peak)
    ways = [f"set {adapters}", "take a smaller model"] if adapters else ["take a smaller model"]
    return f"no layout of up to four times the GPUs fits; {', or '.join(ways)}"


def _changes(config: DictConfig, also: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Layouts of the trainer, those of the fewest GPUs first, and of these the ones with the fewest changes."""
    megatron = config.actor_rollout_ref.actor.megatron
    tensor, context = megatron.tensor_model_parallel_size, megatron.context_parallel_size
    axes: tuple[list[dict[str, Any]], ...] = (
        [{}, {_OFFLOAD: True}],
        [{}, *({_TP: tensor * more} for more in (2, 4, 8))],
        [{}, *({_CP: context * more} for more in (2, 4) if longest_sequence(config) >= _LONG)],
        [{}, _RECOMPUTED],
    )
    ways = sorted(itertools.product(*axes), key=lambda way: sum(map(bool, way)))
    for gpus in _gpus(config):
        for way in ways:
            yield {name: value for part in (also, gpus, *way) for name, value in part.items()}


def _gpus(config: DictConfig) -> Iterator[dict[str, Any]]:
    """The trainer's GPUs as they are, twice, and four times as many: nodes are filled first."""
    of_node, nodes = config.trainer.n_gpus_per_node, config.trainer.nnodes
    for gpus in (of_node * nodes * more for more in (1, 2, 4)):
        each = max(of_node, min(gpus, GPUS_PER_NODE))
        places = {_GPUS: (each, of_node), _NODES: (gpus // each, nodes)}
        yield {name: new for name, (new, old) in places.items() if new != old}


def _for_a_sampler(config: DictConfig, shape: ModelShape) -> str:
    """The share of memory for vLLM nearest to the given one, or the tensor-parallel size, with which a sampler fits."""
    rollout = config.actor_rollout_ref.rollout
    shares = sorted((i / 20 for i in range(2, 20)), key=lambda i: abs(i - rollout.gpu_memory_utilization))

    def needs(trial: DictConfig, layout: Layout, shape: ModelShape) -> float:
        use = sampler_memory(trial, layout, shape, float(trial.gpu_memory_gib))
        enough = kv_tokens(layout, shape, use["KV cache"]) >= longest_sequence(trial)
        return sum(use.values()) if enough else math.inf

    sizes = [{}, *({_SAMPLER_TP: rollout.tensor_model_parallel_size * more} for more in (2, 4, 8))]
    fit = _first(config, shape, ({_UTILIZATION: share} | size for size in sizes for share in shares), needs)
    return f"set {fit}" if fit else f"give {_SAMPLER_TP} and {_ROLLOUT}.n_gpus_per_node more GPUs, or a smaller model"


def _first(
    config: DictConfig,
    shape: ModelShape,
    tries: Iterable[dict[str, Any]],
    needs: Callable[[DictConfig, Layout, ModelShape], float],
) -> Fit | None:
    """The first settings that the checks of the layout accept and with which a GPU has the GiB that it needs."""
    trial = copy.deepcopy(config)
    for settings in tries:
        with _given(trial, settings):
            layout = read_layout(trial)
            try:
                check_consistency(trial, layout_of_devices)
                check_shape(layout, shape)
            except SettingError:
                continue
            if (gib := needs(trial, layout, shape)) <= trial.gpu_memory_gib:
                return Fit(settings, gib)
    return None


@contextlib.contextmanager
def _given(config: DictConfig, settings: dict[str, Any]) -> Iterator[None]:
    """The configuration with other settings, for the block."""
    before = {}
    for name, value in settings.items():
        section, _, last = name.rpartition(".")
        raw: Any = OmegaConf.to_container(OmegaConf.select(config, section), resolve=False)
        before[name] = raw.get(last)
        OmegaConf.update(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            OmegaConf.update(config, name, value)
