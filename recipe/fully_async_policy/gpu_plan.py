"""What a launch would do, without starting it: which GPU does what, and what fills its memory.

Memory per GPU of the trainer, for N parameters (TP: tensor, PP: pipeline, CP: context, DP: data parallel size):

    weights              2 N / (TP PP)              bf16
    gradients            4 N / (TP PP)              Megatron's buffer; verl reduces in fp32
    optimizer            12 N / (TP PP DP CP)       Adam's fp32 master weights and two moments, sharded
    second buffer        as much as the gradients with OPOB from packed sequences (vcpo.norms.keep=auto, gradients);
                         otherwise 0
    critic               weights, gradients and optimizer once more (method=a2c); its head is one column
    reference policy     weights once more, with a KL penalty
    activations          34 T h L / (TP PP) for T tokens of a micro-batch, hidden size h, L layers (Korthikanti et al.,
                         arXiv 2205.05198, with sequence parallelism and flash attention), or 2 T h L / (TP PP) with
                         full recomputation; and 6 T V / TP for the logits of V tokens

and per GPU of a sampler:

    weights              2 N / TP
    KV cache             what is left of gpu_memory_utilization; 4 L (kv heads / TP) (head size) bytes a token

The activations are those of a micro-batch in which every sequence has the full length: an upper estimate. RUNTIME_GIB
is set aside for CUDA, NCCL and working memory.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy.method import description
from recipe.fully_async_policy.norms_plan import norms_line
from recipe.fully_async_policy.validate import SettingError
from verl_vcpo.workers.config.vcpo import VCPOSettings

GIB = 2**30
GPU_MEMORY_GIB = 80.0
RUNTIME_GIB = 2.0
GPUS_PER_NODE = 8

# From the models' published config.json, for where the checkpoint is not on this machine.
KNOWN_SHAPES = {
    "Qwen2-1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False),
}

# What a reader of a run asks first; --print-config prints everything.
SETTINGS = (
    "actor_rollout_ref.model.path",
    "data.train_files",
    "data.val_files",
    "run_dir",
    "async.lag",
    "method",
    "vcpo.truncation",
    "vcpo.step_size_rule",
    "vcpo.ess_weights",
    "vcpo.base_ess_ratio",
    "vcpo.baseline",
    "vcpo.opob_scope",
    "vcpo.norm_by_std",
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
)


@dataclass(frozen=True)
class Shape:
    """A dense decoder with grouped-query attention and a gated MLP (Qwen2, Llama)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool
    qkv_bias: bool = True

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def per_layer(self) -> int:
        """Parameters of a layer."""
        kv = self.kv_heads * self.head_size
        attention = 2 * self.hidden**2 + 2 * self.hidden * kv + self.qkv_bias * (self.hidden + 2 * kv)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def embedding(self) -> int:
        """Parameters of one embedding table."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layers * self.per_layer + self.embedding * (1 if self.tied else 2) + self.hidden

    def stage(self, stages: int) -> float:
        """Parameters of the largest of so many pipeline stages."""
        if stages == 1:
            return self.parameters
        return self.layers / stages * self.per_layer + self.embedding + self.hidden


@dataclass(frozen=True)
class Layout:
    """Who has which GPUs."""

    trainer_gpus: int
    trainer_nodes: int
    tp: int
    pp: int
    cp: int
    sampler_gpus: int
    sampler_tp: int

    @property
    def dp(self) -> int:
        return self.trainer_gpus // (self.tp * self.pp * self.cp)

    @property
    def samplers(self) -> int:
        return self.sampler_gpus // self.sampler_tp

    @property
    def total(self) -> int:
        return self.trainer_gpus + self.sampler_gpus


def read_layout(config: DictConfig) -> Layout:
    megatron, rollout = config.actor_rollout_ref.actor.megatron, config.actor_rollout_ref.rollout
    return Layout(
        trainer_gpus=config.trainer.n_gpus_per_node * config.trainer.nnodes,
        trainer_nodes=config.trainer.nnodes,
        tp=megatron.tensor_model_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        cp=megatron.context_parallel_size,
        sampler_gpus=rollout.n_gpus_per_node * rollout.nnodes,
        sampler_tp=rollout.tensor_model_parallel_size,
    )


def read_shape(path: str) -> Shape | None:
    """The model's shape from its config.json, or by its name where that is not here; None: not known, or no such model.

    Raises SettingError for a config.json that cannot be read.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        known = KNOWN_SHAPES.get(Path(path).name)
        return Shape(*known) if known else None
    try:
        model: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise SettingError(f"actor_rollout_ref.model.path={path}: config.json is not JSON ({error})") from None
    if model.get("num_experts") or model.get("num_local_experts") or "intermediate_size" not in model:
        return None
    heads = model["num_attention_heads"]
    return Shape(
        hidden=model["hidden_size"],
        layers=model["num_hidden_layers"],
        heads=heads,
        kv_heads=model.get("num_key_value_heads") or heads,
        intermediate=model["intermediate_size"],
        vocabulary=model["vocab_size"],
        tied=bool(model.get("tie_word_embeddings")),
        qkv_bias=model.get("model_type") == "qwen2",
    )


def check_shape(layout: Layout, shape: Shape) -> None:
    """Whether the model can be split so. Raises SettingError with a size that works."""
    for setting, tp in (
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", layout.tp),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", layout.sampler_tp),
    ):
        fits = [n for n in range(1, tp) if shape.heads % n == 0 and shape.kv_heads % n == 0]
        if shape.heads % tp or (shape.kv_heads % tp and tp % shape.kv_heads):
            raise SettingError(
                f"{setting}={tp}: does not divide the model's {shape.heads} attention heads ({shape.kv_heads} of keys "
                f"and values); set it to {fits[-1] if fits else 1}"
            )
    if shape.layers % layout.pp:
        raise SettingError(
            f"actor_rollout_ref.actor.megatron.pipeline_model_parallel_size={layout.pp}: does not divide the model's "
            f"{shape.layers} layers; set it to a divisor"
        )


def trainer_memory(config: DictConfig, layout: Layout, shape: Shape) -> dict[str, float]:
    """GiB per GPU of the trainer, by use."""
    actor = config.actor_rollout_ref.actor
    share = shape.stage(layout.pp) / layout.tp
    length = config.data.max_prompt_length + config.data.max_response_length
    fixed = (actor.ppo_micro_batch_size_per_gpu or 1) * length
    tokens = (actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else fixed) / layout.cp
    recomputed = actor.megatron.override_transformer_config.get("recompute_granularity") == "full"
    sharded = layout.dp * layout.cp if actor.megatron.use_distributed_optimizer else 1
    split = layout.tp if actor.megatron.sequence_parallel else 1
    activations = (2 if recomputed else 34) * tokens * shape.hidden * shape.layers / (split * layout.pp)
    weights, gradients, optimizer = (size * share / GIB for size in (2, 4, 12 / sharded))
    others = {
        "critic": weights + gradients + optimizer if config.critic.enable else 0.0,
        "reference policy": weights if actor.use_kl_loss or config.algorithm.use_kl_in_reward else 0.0,
    }
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "second buffer (OPOB)": gradients if VCPOSettings.of(config.vcpo).may_fill_a_second_buffer else 0.0,
        **{use: gib for use, gib in others.items() if gib},
        "activations, at most": (activations + 6 * tokens * shape.vocabulary / layout.tp) / GIB,
        "CUDA, NCCL": RUNTIME_GIB,
    }


def sampler_memory(config: DictConfig, layout: Layout, shape: Shape, gpu_gib: float) -> dict[str, float]:
    """GiB per GPU of a sampler, by use."""
    weights = 2 * shape.parameters / layout.sampler_tp / GIB
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    return {"weights": weights, "CUDA, NCCL": RUNTIME_GIB, "KV cache": share * gpu_gib - weights - RUNTIME_GIB}


def kv_tokens(layout: Layout, shape: Shape, kv_gib: float) -> int:
    """How many tokens a sampler's KV cache holds (bf16; a head of keys and values is at least on one GPU)."""
    per_token = 4 * shape.layers * max(1, shape.kv_heads / layout.sampler_tp) * shape.head_size
    return int(kv_gib * GIB / per_token)


def check_memory(trainer: dict[str, float], sampler: dict[str, float], tokens: int, length: int, gpu: float) -> None:
    """Refuse what cannot start whatever the sequences' lengths are. Raises SettingError with the fix."""
    state = sum(gib for use, gib in trainer.items() if not use.startswith("activations"))
    if state > gpu:
        raise SettingError(
            f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size: weights, gradients and optimizer need "
            f"{state:.0f} GiB on each trainer GPU, which has {gpu:.0f}; raise it, or trainer.n_gpus_per_node"
        )
    if tokens < length:
        raise SettingError(
            f"actor_rollout_ref.rollout.gpu_memory_utilization: leaves {max(0.0, sampler['KV cache']):.1f} GiB for the "
            f"KV cache, less than one sequence of {length} tokens; raise it, or rollout.tensor_model_parallel_size"
        )


def place(layout: Layout) -> list[tuple[str, str]]:
    """(GPUs, what they do), in the order in which verl asks Ray for them: the trainer, then one sampler after another.

    A part of the trainer and a sampler are each placed on one node; Ray chooses the physical GPUs.
    """
    per_node = max(GPUS_PER_NODE, layout.trainer_gpus // layout.trainer_nodes)
    parts = [
        (layout.trainer_gpus // layout.trainer_nodes, f"trainer, part {i + 1}") for i in range(layout.trainer_nodes)
    ]
    if layout.trainer_nodes == 1:
        parts = [(layout.trainer_gpus, "trainer")]
    for i in range(layout.samplers):
        left = layout.sampler_tp
        while left > 0:
            parts.append((min(left, per_node), f"sampler {i + 1}"))
            left -= per_node
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


def print_plan(config: DictConfig, gpu_gib: float = GPU_MEMORY_GIB) -> None:
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
        value = str(OmegaConf.select(config, name))
        settings.add_row(name, f"{value}: {description(value)}" if name == "method" else value)
    console.print(settings)
    if config.trainer.device == "cpu":
        console.print("hardware=cpu: no GPU takes part. DRY_RUN: nothing was started.")
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
    if shape is None:
        console.print(f"Memory is not estimated: {path} has no config.json here, or is no dense model.")
        return
    check_shape(layout, shape)
    trainer, sampler = trainer_memory(config, layout, shape), sampler_memory(config, layout, shape, gpu_gib)
    tokens = kv_tokens(layout, shape, sampler["KV cache"])
    length = config.data.max_prompt_length + config.data.max_response_length
    check_memory(trainer, sampler, tokens, length, gpu_gib)
    memory = Table("GiB per GPU", "trainer", "sampler", title="Memory, estimated", title_justify="left")
    for use in dict.fromkeys([*trainer, *sampler]):
        memory.add_row(use, *(f"{side[use]:.1f}" if use in side else "-" for side in (trainer, sampler)))
    memory.add_row("sum", f"{sum(trainer.values()):.1f}", f"{sum(sampler.values()):.1f}", style="bold")
    console.print(memory)
    console.print(
        f"For {gpu_gib:.0f} GiB on each GPU (--gpu-memory) and {shape.parameters / 1e9:.2f} billion parameters.\n"
        f"A sampler's KV cache holds {tokens} tokens: {tokens // length} sequences of full length at once."
    )
    if sum(trainer.values()) > gpu_gib:
        console.print(
            "Micro-batches of full length may not fit: lower actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu."
        )
    console.print("DRY_RUN: nothing was started.")
