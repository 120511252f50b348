"""The memory of each GPU. Formulas for N parameters on a GPU, T tokens of a micro-batch, hidden size h, vocabulary V.

Of the trainer (TP: tensor, CP: context, DP: data, EP: expert, ETP: expert-tensor parallel size):

    weights              2 N: bfloat16; a pipeline stage's parameters / TP, those of experts / (EP ETP)
    gradients            4 N: Megatron's buffer; verl reduces in float32
    optimizer            12 N / (DP CP): Adam's float32 weights and two moments; of experts / (their data-parallel size)
    second buffer        4 N, with vcpo.norms.how=packed and a dense model; small models have several, up to 2 GiB; with
                         optimizer_offload not while the optimizer steps
    critic               weights, gradients and optimizer once more (method=a2c)
    reference policy     weights once more, with a KL penalty
    activations          `layer_activations` of every layer, or with full recomputation 2 T h of each
    logits               8 T V / TP: float32 logits and float32 probabilities, which become the gradient. With
                         entropy 16 T V / TP. Or the activations of the recomputed layers, if those are more
    Adam's temporaries   8 bytes for each parameter of the largest matrix: torch's AdamW, one parameter at a time
    weight transfer      2 buckets (update_weights_bucket_megabytes), which cupy keeps on the trainer's first GPU

and of a sampler:

    weights              2 N / TP
    KV cache             what is left of gpu_memory_utilization; 4 L (kv heads / TP) (head size) bytes a token
    weight transfer      2 buckets to receive, 1 to hand to vLLM's process
    log-probs again      10 V for each of up to 1,024 tokens, of one sequence at a time (verl_vcpo/loop/questions.py)

The activations are those of a micro-batch in which every sequence has the full length: an upper estimate. RUNTIME_GIB
is set aside for CUDA, NCCL and working memory. tests/recipe/test_gpu_memory.py counts what Megatron keeps.
"""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from recipe.fully_async_policy.plan.model_shape import ModelShape
from recipe.fully_async_policy.settings.model import has_experts, read_config
from vcpo import OpobScope
from verl_vcpo.actor.norms_settings import SECOND_BUFFERS_BYTES, against_packing, against_packing_experts
from verl_vcpo.actor.vcpo_settings import VCPOSettings
from verl_vcpo.loop.questions import BYTES, asked_tokens

GIB = 2**30
RUNTIME_GIB = 2.0
LOGITS_BYTES, ENTROPY_BYTES = 8, 8
"""Per token and word of the vocabulary."""
SECOND_BUFFER = "second buffer (OPOB)"
_BY_LENGTH = ("activations", "logits", "recomputed layers")
"""Uses that grow with the lengths of the sequences."""


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
    ep: int = 1
    etp: int = 1
    vpp: int = 1

    @property
    def dp(self) -> int:
        return self.trainer_gpus // (self.tp * self.pp * self.cp)

    @property
    def expert_dp(self) -> int:
        """GPUs that share the optimizer's state of the same experts."""
        return self.trainer_gpus // (self.pp * self.ep * self.etp)

    @property
    def samplers(self) -> int:
        return self.sampler_gpus // self.sampler_tp

    @property
    def total(self) -> int:
        return self.trainer_gpus + self.sampler_gpus


@dataclass(frozen=True)
class TrainerMemory:
    """GiB per GPU of the trainer, by use, on the pipeline stage that needs most."""

    backward: dict[str, float]
    """While gradients are computed."""
    step: dict[str, float]
    """While the optimizer changes the weights."""

    @property
    def peak(self) -> float:
        """The larger sum."""
        return max(sum(self.backward.values()), sum(self.step.values()))

    @property
    def state(self) -> float:
        """What is needed however short the sequences are."""
        always = sum(gib for use, gib in self.backward.items() if use not in _BY_LENGTH)
        return max(always, sum(self.step.values()))


def read_layout(config: DictConfig) -> Layout:
    megatron, rollout = config.actor_rollout_ref.actor.megatron, config.actor_rollout_ref.rollout
    tp = megatron.tensor_model_parallel_size
    return Layout(
        trainer_gpus=config.trainer.n_gpus_per_node * config.trainer.nnodes,
        trainer_nodes=config.trainer.nnodes,
        tp=tp,
        pp=megatron.pipeline_model_parallel_size,
        cp=megatron.context_parallel_size,
        sampler_gpus=rollout.n_gpus_per_node * rollout.nnodes,
        sampler_tp=rollout.tensor_model_parallel_size,
        ep=megatron.expert_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size or tp,
        vpp=megatron.virtual_pipeline_model_parallel_size or 1,
    )


def layer_activations(
    shape: ModelShape, *, tp: int = 1, split: int = 1, etp: int = 1, fused: bool | None = None
) -> float:
    """Bytes per token that one layer keeps for its backward.

    Args:
        shape: the model's.
        tp: tensor-parallel size.
        split: over how many GPUs the tokens between attention and MLP are spread: `tp` with sequence parallelism.
        etp: tensor-parallel size of the experts.
        fused: `bias_activation_fusion`; None: as Megatron-Bridge sets it.
    """
    h, q, kv, heads = shape.hidden, shape.queries, shape.keys, shape.heads
    norms = 4 * 2 * h + 2 * 4  # inputs and outputs of two norms, and float32 per row
    attention = 2 * (q + 2 * kv) + 2 * 2 * q + 4 * heads  # q, k, v; outputs, and those repacked; float32 per head
    if shape.qk_norms:
        attention += 2 * q + 2 * (q + 2 * kv) + 4 * (heads + shape.kv_heads)
    rotary = 4 * 2 * shape.head_size + 24  # sines and cosines for queries and keys; places of the packed tokens
    if fused is None:
        fused = shape.fused_activation
    gated = 2 * (2 + 1 + (0 if fused else 2))  # of a linear layer's two halves, their product; unfused, its two factors
    if shape.experts is None:
        return norms / split + (attention + gated * shape.intermediate) / tp + rotary
    experts = shape.experts
    weighted = gated + (0 if fused else 2)  # unfused, the product before it is weighted by the router
    visits = experts.per_token * (2 * h * etp + weighted * experts.intermediate + 12) + 8 * experts.number
    return (norms + visits) / split + (attention + gated * experts.shared) / tp + rotary


def trainer_memory(config: DictConfig, layout: Layout, shape: ModelShape) -> TrainerMemory:
    """GiB per GPU of the trainer: of the first or the last pipeline stage, whichever needs more."""
    ends = [(True, True)] if layout.pp == 1 else [(True, False), (False, True)]
    return max((_stage_memory(config, layout, shape, *end) for end in ends), key=lambda memory: memory.peak)


def _stage_memory(config: DictConfig, layout: Layout, shape: ModelShape, first: bool, last: bool) -> TrainerMemory:
    actor = config.actor_rollout_ref.actor
    layers = shape.layers / layout.pp
    tables = 1 if first and last and shape.tied else first + last
    dense = (layers * shape.dense_parameters + tables * shape.embedding + last * shape.hidden) / layout.tp
    experts = layers * shape.expert_parameters / (layout.ep * layout.etp)
    sharded = actor.megatron.use_distributed_optimizer
    weights, rank = 2 * (dense + experts), config.actor_rollout_ref.model.lora.rank

    def trained(dense: float, experts: float) -> tuple[float, float]:
        """Bytes of gradients, and of the optimizer."""
        ranks, expert_ranks = (layout.dp * layout.cp, layout.expert_dp) if sharded else (1, 1)
        return 4 * (dense + experts), 12 * (dense / ranks + experts / expert_ranks)

    gradients, optimizer = trained(dense, experts)
    critic = weights + gradients + optimizer
    if rank:
        adapters = layers * shape.adapter_parameters(rank) / layout.tp
        weights += 2 * adapters
        gradients, optimizer = trained(adapters, 0)
    state: dict[str, float] = {"weights": weights, "gradients": gradients}
    state |= _second_buffer(config, layout, shape, gradients)
    if config.critic.enable:
        state["critic"] = critic
    if (actor.use_kl_loss or config.algorithm.use_kl_in_reward) and not rank:  # adapters are left out for it
        state["reference policy"] = weights
    state["weight transfer"] = 2 * _bucket(config)
    state["CUDA, NCCL"] = RUNTIME_GIB * GIB
    moved = actor.megatron.optimizer_offload
    backward = state | ({} if moved else {"optimizer": optimizer}) | _activations(config, layout, shape, last)
    step = {use: size for use, size in state.items() if not (moved and use == SECOND_BUFFER)}
    widest = shape.queries + 2 * shape.keys if shape.experts else 2 * shape.intermediate
    largest = rank * widest if rank else shape.largest_matrix
    step |= {"optimizer": optimizer, "Adam's temporaries": 8 * largest / layout.tp}
    return TrainerMemory(_in_gib(backward), _in_gib(step))


def _in_gib(sizes: dict[str, float]) -> dict[str, float]:
    return {use: size / GIB for use, size in sizes.items()}


def _bucket(config: DictConfig) -> int:
    return int(config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes) << 20


def longest_sequence(config: DictConfig) -> int:
    """Tokens of prompt and response together, at most."""
    return int(config.data.max_prompt_length + config.data.max_response_length)


def _tokens(config: DictConfig, layout: Layout) -> float:
    """Tokens of a GPU's micro-batch, if all sequences have the full length."""
    actor, one = config.actor_rollout_ref.actor, longest_sequence(config) / layout.cp
    if actor.use_dynamic_bsz:
        return max(actor.ppo_max_token_len_per_gpu, one)
    return (actor.ppo_micro_batch_size_per_gpu or 1) * one


def _activations(config: DictConfig, layout: Layout, shape: ModelShape, last: bool) -> dict[str, float]:
    """Bytes on a pipeline stage that holds the head (`last`), or else the most micro-batches."""
    actor, tokens = config.actor_rollout_ref.actor, _tokens(config, layout)
    settings = actor.megatron.override_transformer_config
    split = layout.tp if actor.megatron.sequence_parallel else 1
    fused = settings.get("bias_activation_fusion")
    layer = layer_activations(shape, tp=layout.tp, split=split, etp=layout.etp, fused=fused)
    layers, in_flight = shape.layers / layout.pp, 1.0
    if not last:
        in_flight = layout.pp + (layout.pp - 1) / layout.vpp if layout.vpp > 1 else layout.pp
    together = 0.0  # layers that are recomputed at a time
    saved = layers * layer
    if settings.get("recompute_granularity") == "full":
        number, boundary = settings.get("recompute_num_layers") or 1, 2 * shape.hidden / split
        if settings.get("recompute_method") == "block":
            some = min(layers, number * layout.vpp)
            together, saved = 1.0, some * boundary + (layers - some) * layer
        else:
            together, saved = min(number, layers), layers / number * boundary
    use = {"activations": tokens * (in_flight * saved + last * 4 * shape.hidden / split)}
    recomputed = tokens * together * layer
    entropy = actor.calculate_entropy or actor.entropy_coeff != 0
    per_word = LOGITS_BYTES + (ENTROPY_BYTES if entropy else 0)
    logits = tokens * per_word * shape.vocabulary / layout.tp if last else 0.0
    if logits >= recomputed:
        return use | ({"logits": logits} if last else {})
    return use | {"recomputed layers": recomputed}


def is_mixture_of_experts(config: DictConfig) -> bool:
    """True where the model's config.json is here, and is that of a mixture of experts."""
    folder = Path(config.actor_rollout_ref.model.path)
    return (folder / "config.json").is_file() and has_experts(read_config(folder))


def obstacle(config: DictConfig) -> str | None:
    """Why norms cannot be packed, as far as settings and config.json tell; None if nothing is known against it."""
    settings = config.actor_rollout_ref.actor.megatron.override_transformer_config
    return against_packing(settings.get) or (
        against_packing_experts(settings.get) if is_mixture_of_experts(config) else None
    )


def _second_buffer(config: DictConfig, layout: Layout, shape: ModelShape, gradients: float) -> dict[str, float]:
    """Bytes in which a packed backward keeps sums until the baselines are known."""
    vcpo, actor = VCPOSettings.of(config.vcpo), config.actor_rollout_ref.actor
    whole = vcpo.opob_scope is OpobScope.MINIBATCH
    if not vcpo.fits_two_sums or shape.experts or obstacle(config) or (layout.vpp > 1 and not whole):
        return {}
    groups = 1.0 if whole else actor.ppo_mini_batch_size / layout.dp
    return {SECOND_BUFFER: gradients * max(1, min(groups, SECOND_BUFFERS_BYTES // gradients))}


def sampler_memory(config: DictConfig, layout: Layout, shape: ModelShape, gpu_gib: float) -> dict[str, float]:
    """GiB per GPU of a sampler, by use."""
    weights = 2 * shape.parameters / layout.sampler_tp / GIB
    cache = config.actor_rollout_ref.rollout.gpu_memory_utilization * gpu_gib - weights - RUNTIME_GIB
    transfer = 3 * _bucket(config) / GIB
    use = {"weights": weights, "KV cache": cache, "weight transfer": transfer, "CUDA, NCCL": RUNTIME_GIB}
    again = BYTES * asked_tokens(config) * shape.vocabulary / GIB
    return use | ({"log-probs again": again} if again else {})


def kv_tokens(layout: Layout, shape: ModelShape, kv_gib: float) -> int:
    """How many tokens a sampler's KV cache holds (bf16; a head of keys and values is at least on one GPU)."""
    per_token = 4 * shape.layers * max(1, shape.kv_heads / layout.sampler_tp) * shape.head_size
    return int(kv_gib * GIB / per_token)
