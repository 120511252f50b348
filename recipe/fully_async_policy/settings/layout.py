"""Sizes that have to divide each other: devices, batches, micro-batches."""

from omegaconf import DictConfig

from recipe.fully_async_policy.settings.errors import SettingError


def check_layout(config: DictConfig) -> None:
    """Refuse numbers of devices that the model's parts cannot share, and batches that the ranks cannot.

    Raises:
        SettingError: the first of them.
    """
    megatron, rollout = config.actor_rollout_ref.actor.megatron, config.actor_rollout_ref.rollout
    devices = config.trainer.n_gpus_per_node * config.trainer.nnodes
    model_parallel = (
        megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size
    )
    if devices % model_parallel:
        raise SettingError(
            f"trainer.n_gpus_per_node*nnodes={devices}: not divisible by tensor x pipeline x context parallel size "
            f"{model_parallel} (actor_rollout_ref.actor.megatron.*_parallel_size); give the trainer a multiple of "
            f"{model_parallel} devices, or set tensor_model_parallel_size to a divisor of {devices}"
        )
    expert_tensor = megatron.expert_tensor_parallel_size or megatron.tensor_model_parallel_size
    expert_parallel = megatron.expert_model_parallel_size * expert_tensor * megatron.pipeline_model_parallel_size
    if devices % expert_parallel:
        raise SettingError(
            f"actor_rollout_ref.actor.megatron.expert_model_parallel_size={megatron.expert_model_parallel_size}: with "
            f"expert_tensor_parallel_size={expert_tensor} (by default as tensor_model_parallel_size) and pipeline "
            f"stages {expert_parallel} devices, of which the trainer's {devices} are no multiple; lower one of them"
        )
    sampler_devices = rollout.n_gpus_per_node * rollout.nnodes
    if sampler_devices % rollout.tensor_model_parallel_size:
        raise SettingError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: does not "
            f"divide the {sampler_devices} sampler devices (rollout.n_gpus_per_node x nnodes); make "
            "them a multiple of it"
        )
    if rollout.max_num_seqs > rollout.max_num_batched_tokens:
        raise SettingError(
            f"actor_rollout_ref.rollout.max_num_batched_tokens={rollout.max_num_batched_tokens}: a sampler takes "
            f"max_num_seqs={rollout.max_num_seqs} requests, each with a token at least; raise it, or lower that"
        )
    _check_batches(config, devices // model_parallel)


def _check_batches(config: DictConfig, data_parallel: int) -> None:
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    batch, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    if batch % mini:
        raise SettingError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}: does not divide data.train_batch_size={batch}; both "
            "are numbers of prompts"
        )
    if mini * n % data_parallel:
        raise SettingError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} (by default data.train_batch_size): times "
            f"rollout.n={n} is {mini * n} sequences, not divisible by the {data_parallel} data-parallel ranks; "
            "make it a multiple"
        )
    sequences, micro = mini * n // data_parallel, actor.ppo_micro_batch_size_per_gpu
    if actor.use_dynamic_bsz:
        _check_tokens(config)
    if actor.use_dynamic_bsz or not micro:
        return
    if sequences % micro:
        raise SettingError(
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro}: does not divide the {sequences} "
            "sequences of a rank (actor.ppo_mini_batch_size x rollout.n / data parallel)"
        )
    stages = actor.megatron.pipeline_model_parallel_size
    if actor.megatron.virtual_pipeline_model_parallel_size and sequences // micro % stages:
        raise SettingError(
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro}: makes {sequences // micro} micro-batches, "
            f"and virtual pipeline stages need a multiple of pipeline_model_parallel_size={stages}"
        )


def _check_tokens(config: DictConfig) -> None:
    """verl ends a run at the first sequence that is longer than a micro-batch may be."""
    actor, ranks = config.actor_rollout_ref.actor, config.actor_rollout_ref.actor.megatron.context_parallel_size
    longest = config.data.max_prompt_length + config.data.max_response_length
    if actor.ppo_max_token_len_per_gpu * ranks < longest:
        raise SettingError(
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={actor.ppo_max_token_len_per_gpu}: a sequence of full "
            f"length has {longest} tokens (data.max_prompt_length + data.max_response_length); raise it to "
            f"{-(-longest // ranks)}"
        )
