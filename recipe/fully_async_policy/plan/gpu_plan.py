"""What a launch would do, without starting it.

Which GPU does what, what fills its memory (gpu_memory.py), what is not here.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy.plan.fitting import GPUS_PER_NODE, check_memory, check_shape, warning
from recipe.fully_async_policy.plan.gpu_memory import (
    Layout,
    is_mixture_of_experts,
    kv_tokens,
    longest_sequence,
    obstacle,
    read_layout,
    sampler_memory,
    trainer_memory,
)
from recipe.fully_async_policy.plan.model_shape import MODEL_TYPES, ModelShape, read_shape
from recipe.fully_async_policy.settings.method import description
from recipe.fully_async_policy.settings.model import OF_HUB, needs_transformer_engine
from recipe.fully_async_policy.settings.variables import cluster_address
from verl_vcpo.actor.model.models import Install, install_here
from verl_vcpo.actor.norms_settings import norms_in_words
from verl_vcpo.actor.vcpo_settings import VCPOSettings
from verl_vcpo.samplers.admission import slots_of_sampler

if TYPE_CHECKING:
    from rich.console import Console

SETTINGS = (
    "actor_rollout_ref.model.path",
    "data.train_files",
    "data.val_files",
    "run_dir",
    "async.lag",
    "async.on_deadline",
    "method",
    "vcpo.truncation",
    "vcpo.step_size_rule",
    "vcpo.ess_part",
    "vcpo.base_ess_ratio",
    "vcpo.baseline",
    "vcpo.opob_scope",
    "vcpo.norm_by_std",
    "vcpo.norms.how",
    "data.seed",
    "data.train_batch_size",
    "actor_rollout_ref.rollout.n",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.optim.lr_decay_style",
    "actor_rollout_ref.actor.optim.weight_decay",
    "actor_rollout_ref.actor.optim.clip_grad",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.entropy_coeff",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "algorithm.rollout_correction.bypass_mode",
    "actor_rollout_ref.rollout.agent.default_agent_loop",
    "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.top_p",
    "actor_rollout_ref.rollout.val_kwargs.n",
    "actor_rollout_ref.rollout.val_kwargs.temperature",
    "actor_rollout_ref.rollout.val_kwargs.top_p",
    "trainer.test_freq",
    "trainer.total_training_steps",
    "trainer.device",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "actor_rollout_ref.rollout.nnodes",
    "actor_rollout_ref.rollout.n_gpus_per_node",
)
"""The settings that a reader of a run asks for first; --print-config prints all. A report of runs shows the same."""

_LAYERS = {
    None: "the layers of Transformer Engine, where that is installed, else Megatron's own",
    Install.GPU: "Megatron's own layers (Transformer Engine is not installed)",
    Install.TRANSFORMER_ENGINE: "the layers of Transformer Engine",
}
"""Of a run on GPUs, by the installation of this machine."""


def place(layout: Layout) -> list[tuple[str, str]]:
    """(GPUs, what they do), in the order in which verl asks Ray for them: the trainer, then one sampler after another.

    A part of the trainer and a sampler are each placed on one node; Ray chooses the physical GPUs.
    """
    of_node, nodes = layout.trainer_gpus // layout.trainer_nodes, layout.trainer_nodes
    per_node = max(GPUS_PER_NODE, of_node)
    parts = [(of_node, f"trainer, part {i + 1}" if nodes > 1 else "trainer") for i in range(nodes)]
    for i in range(layout.samplers):
        before = range(0, layout.sampler_tp, per_node)
        parts += [(min(layout.sampler_tp - gpus, per_node), f"sampler {i + 1}") for gpus in before]
    used: list[int] = []
    rows = []
    for gpus, work in parts:
        node = next((i for i, n in enumerate(used) if n + gpus <= per_node), len(used))
        if node == len(used):
            used.append(0)
        first, last = used[node], used[node] + gpus - 1
        used[node] += gpus
        rows.append((f"node {node + 1}, GPU {first}" + (f"-{last}" if last > first else ""), work))
    return rows


def print_plan(config: DictConfig) -> None:
    """The settings that matter, and the GPU plan, as tables. The configuration is validated.

    Raises SettingError for a layout that cannot hold the model.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(width=110)
    settings = Table("setting", "value", title="What runs", title_justify="left")
    for name in SETTINGS:
        if name.startswith("vcpo.") and not config.vcpo.enable:
            continue
        value = f"{config['async'].lag:g}" if name == "async.lag" else str(OmegaConf.select(config, name))
        settings.add_row(name, f"{value}: {description(value)}" if name == "method" else value)
    console.print(settings)
    if config.trainer.device == "cpu":
        console.print("hardware=cpu: no GPU takes part.")
        _print_end(console, config)
        return
    layout, path = read_layout(config), config.actor_rollout_ref.model.path
    places = Table("GPU", "work", title=f"Who does what: {layout.total} GPUs", title_justify="left")
    for gpus, work in place(layout):
        split = f"TP {layout.tp} x PP {layout.pp} x CP {layout.cp} x DP {layout.dp}"
        places.add_row(gpus, f"{work}: {split}" if work.startswith("trainer") else f"{work}: TP {layout.sampler_tp}")
    console.print(places)
    shape = read_shape(path)
    if line := norms_line(config):  # read_shape has refused a config.json that is not JSON
        console.print(line)
    if model := needs_transformer_engine(path):  # check_trainable has refused it where that is known to be missing
        console.print(f"{model} needs Transformer Engine: scripts/{Install.TRANSFORMER_ENGINE}, on every node.")
    if shape is None:
        console.print(_not_estimated(path))
    else:
        check_shape(layout, shape)
        _print_memory(console, config, layout, shape)
    _print_end(console, config)


def norms_line(config: DictConfig) -> str | None:
    """Which layers and which way of measuring, and why; None for a method that needs no gradient norms."""
    vcpo = VCPOSettings.of(config.vcpo)
    if not vcpo.needs_gradient_norms:
        return None
    settings = config.actor_rollout_ref.actor.megatron.override_transformer_config
    asked, install = settings.get("transformer_impl") == "local", install_here("cuda")
    own = asked or install is Install.GPU
    layers = "Megatron's own layers (transformer_impl=local)" if asked else _LAYERS[install]
    experts, reason = is_mixture_of_experts(config), obstacle(config)
    line = norms_in_words(vcpo.norms.how, layers, reason, experts)
    checked = vcpo.packs_gradient_norms and not reason and (experts or not own)
    what = "its experts' settings and layers" if experts else "the installed version"
    return line + (f" The trainer checks {what} when it starts." if checked else "")


def _print_memory(console: "Console", config: DictConfig, layout: Layout, shape: ModelShape) -> None:
    from rich.table import Table

    check_memory(config, shape)
    gpu_gib = float(config.gpu_memory_gib)
    trainer, sampler = trainer_memory(config, layout, shape), sampler_memory(config, layout, shape, gpu_gib)
    columns = (trainer.backward, trainer.step, sampler)
    heads = ("GiB per GPU", "trainer: backward", "optimizer step", "sampler")
    memory = Table(*heads, title="Memory, at most", title_justify="left")
    for use in dict.fromkeys(use for column in columns for use in column):
        memory.add_row(use, *(f"{column[use]:.1f}" if use in column else "-" for column in columns))
    memory.add_row("sum", *(f"{sum(column.values()):.1f}" for column in columns), style="bold")
    console.print(memory)
    console.print(
        f"For {gpu_gib:.1f} GiB on each GPU (gpu_memory_gib) and {shape.parameters / 1e9:.2f} billion parameters.\n"
        f"{_of_cache(config, kv_tokens(layout, shape, sampler['KV cache']))}"
    )
    console.print(
        warning(config, shape)
        or f"It fits: the trainer needs {trainer.peak:.1f} GiB of a GPU at most, a sampler {sum(sampler.values()):.1f}."
    )


def _of_cache(config: DictConfig, tokens: int) -> str:
    """How many sequences a sampler's KV cache holds, and what becomes of the others."""
    whole, slots = tokens // longest_sequence(config), slots_of_sampler(config.actor_rollout_ref.rollout)
    line = f"A sampler's KV cache holds {tokens} tokens: {whole} sequences of full length at once. It runs {slots} "
    line += "(actor_rollout_ref.rollout.max_num_seqs)"
    if whole >= slots:
        return f"{line}."
    return f"{line}: no error if more are that long, but slower, as some are put off and computed again."


def _not_estimated(path: str) -> str:
    """Why there is no memory in the plan, and what a plan needs."""
    if (Path(path) / "config.json").is_file():
        return f"Memory is not estimated: {path} is a model of another kind than {', '.join(MODEL_TYPES)}."
    name = Path(path).name
    hub = path if OF_HUB.fullmatch(path) and not path.startswith("models/") else f"ORGANISATION/{name}"
    return (
        f"Memory is not estimated: there is no {path}/config.json, and that file alone would do:\n"
        f"hf download {hub} config.json --local-dir models/{name}, then actor_rollout_ref.model.path=models/{name}"
    )


def missing_here(config: DictConfig) -> list[str]:
    """What the launch would need of this machine, and does not find: files, and of a Ray of its own, GPUs."""
    named = [config.actor_rollout_ref.model.path]
    for files in (config.data.train_files, config.data.val_files):
        named += [files] if isinstance(files, str) else list(files or ())
    missing = [name for name in dict.fromkeys(named) if not Path(name).exists()]
    if config.trainer.device == "cuda" and cluster_address(config.ray_kwargs.ray_init) is None:
        import torch

        here, needed = torch.cuda.device_count(), read_layout(config).total
        missing += [f"{needed} GPUs ({here} here)"] if here < needed else []
    return missing


def _print_end(console: "Console", config: DictConfig) -> None:
    missing = missing_here(config)
    console.print(f"Not on this machine: {', '.join(missing)}." if missing else "All that it needs is on this machine.")
    console.print("DRY_RUN: nothing was started.")
