"""Settings that are right each for itself and wrong together. A check gives each setting with what is wrong with it."""

import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from recipe.fully_async_policy.settings.effects import vcpo_of
from recipe.fully_async_policy.settings.errors import Found, all_that_is_wrong, choices, wrong
from recipe.fully_async_policy.settings.sampling import sampling
from recipe.tasks.rows import SINGLE_TURN
from verl_vcpo.common.truncated import Truncated
from verl_vcpo.loop.checkpoint import NAME
from verl_vcpo.loop.prompts.deadlines import OnDeadline
from verl_vcpo.samplers.kv_cache import KVCache

_ENDLESS = 100_000
"""`trainer.total_epochs` of vcpo_trainer.yaml: the number of steps decides."""
BACKENDS = ("nccl", "nixl", "mooncake", "kimi_ckpt_engine")
"""verl's ways of sending weights to samplers on devices of their own."""
CHANGES_ALONE = "delta_sharded"
"""verl's way of sending changed weights alone. A sampler that replaces a dead one would lack all others."""
_OWN_MODULES = ("verl_vcpo.cpu.weight_file", "verl_vcpo.weights.nccl", None)
_ATTENTION = {"auto": "111", "flash": "100", "fused": "010", "unfused": "001", "local": "000"}
"""For each attention_backend what Megatron wants of NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN."""
_NEEDS_PROBABILITIES = ("optimal_token_baseline", "tir_optimal_token_baseline")
_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_REPLAY = f"{_ACTOR}.megatron.router_replay.mode"


def check_consistency(config: DictConfig, *checks: Callable[[DictConfig], Found]) -> None:
    """Refuse what contradicts itself; of each setting say what is found first. `checks`: instead of all."""
    found: dict[str, str] = {}
    for setting, words in chain.from_iterable(check(config) for check in checks or _CHECKS):
        found.setdefault(setting, words)
    if found:
        raise all_that_is_wrong(wrong(config, setting, words) for setting, words in found.items())


def lag(config: DictConfig) -> Found:
    """A lag beyond the run's length, for the trainer; the lag simulator samples nothing ahead."""
    steps = config.trainer.total_training_steps
    if steps is not None and config["async"].lag > steps and not config.trainer.val_only:
        words = f"more than trainer.total_training_steps={steps}, so that batches are sampled which no step trains on"
        yield "async.lag", f"{words}; set it to {steps} or less, or train for more steps"


def lengths(config: DictConfig) -> Found:
    """Prompts and responses that are longer together than what the samplers take."""
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    rollout = config.actor_rollout_ref.rollout
    if rollout.max_model_len is not None and prompt + response > rollout.max_model_len:
        words = f"data.max_prompt_length={prompt} and data.max_response_length={response} together are"
        yield f"{_ROLLOUT}.max_model_len", f"{words} {prompt + response} tokens; raise it, or shorten one"
    for kind, length in (("prompt", prompt), ("response", response)):
        if rollout[f"{kind}_length"] != length:
            yield f"{_ROLLOUT}.{kind}_length", f"data.max_{kind}_length={length} decides; leave it out"


def _adapters(config: DictConfig) -> Found:
    """Adapters for samplers that begin with random weights."""
    lora, load_format = config.actor_rollout_ref.model.lora, config.actor_rollout_ref.rollout.load_format
    if lora.rank and not lora.merge and load_format.startswith("dummy"):
        words = f"with {_MODEL}.lora.merge=false samplers read all weights but the adapters from the model's folder"
        yield f"{_ROLLOUT}.load_format", f"{words}; set it to auto"


def _shares(config: DictConfig) -> Found:
    """Shares that do not belong to the training files, or whose order could not be drawn again."""
    data, setting = config.data, "data.shares"
    if data.shares is None:
        if data.levels is not None:
            yield "data.levels", "needs data.shares, the share of each task; of a single one give [1]"
        return
    names = list(data.train_files) if isinstance(data.train_files, ListConfig) else [data.train_files]
    if len(names) == 1:
        yield setting, "data.train_files is one file; leave it out, or give a list of files"
    if data.levels is not None:
        if sum(data.levels) != len(names):
            yield "data.levels", f"its sum has to be the number of data.train_files, {len(names)}: {', '.join(names)}"
        if len(data.levels) != len(data.shares):
            yield setting, f"give a share for each of the {len(data.levels)} tasks of data.levels"
    elif len(names) != len(data.shares):
        yield setting, f"give a share for each of the {len(names)} data.train_files, {', '.join(names)}"
    if data.shuffle and data.seed is None:
        yield setting, "needs data.seed, from which a resumed run draws the same order; give a number"
    if data.custom_cls.path:
        yield setting, f"data.custom_cls={data.custom_cls.path} reads the files itself; leave one out"


def _vcpos_update(config: DictConfig) -> Found:
    vcpo = vcpo_of(config)
    if vcpo.compares_samples_of_a_prompt and config.actor_rollout_ref.rollout.n < 2:
        words = f"vcpo.baseline={vcpo.baseline}, vcpo.norm_by_std={vcpo.norm_by_std} compare the samples of a prompt"
        yield f"{_ROLLOUT}.n", f"{words}; set n to 2 or more, or give method=vcpo_minibatch vcpo.norm_by_std=false"
    if vcpo.enable and config.algorithm.use_kl_in_reward:
        yield "algorithm.use_kl_in_reward", "VCPO's update uses raw rewards; set it to false, or another method"


def _truncated(config: DictConfig) -> Found:
    """A treatment of truncated responses that lacks a setting, or that the method's critic cannot have."""
    treatment, buffer = Truncated(config["async"].truncated), config["async"].overlong_buffer_len
    longest = config.data.max_response_length
    if treatment is Truncated.PENALTY and not 0 < (buffer or 0) <= longest:
        words = f"needs async.overlong_buffer_len, a number of tokens up to data.max_response_length={longest}"
        yield "async.truncated", words
    if treatment.leaves_out and config.critic.enable:
        yield "async.truncated", "a critic's loss divides by the tokens left, which may be none; use train or penalty"


def _samplers(config: DictConfig) -> Found:
    """What the samplers, their rewards, or the way of weights to them cannot be."""
    lagged, rollout = config["async"], config.actor_rollout_ref.rollout
    if lagged.on_deadline == OnDeadline.REISSUE and lagged.lag == 0:
        yield "async.on_deadline", "at async.lag=0 the trainer has nothing else to train on; use wait"
    if lagged.kv_cache == KVCache.KEEP and rollout.free_cache_engine:
        yield "async.kv_cache", f"{_ROLLOUT}.free_cache_engine=true frees the cache at every update; set it to false"
    if lagged.exact_lag and (lagged.lag != int(lagged.lag) or lagged.on_deadline != OnDeadline.WAIT):
        yield "async.exact_lag", "needs a whole async.lag and async.on_deadline=wait"
    if config.reward.custom_reward_function.path and config.reward.reward_manager.name == "remote":
        words = "a custom reward function has processes of its own already, which end at async.reward_timeout_s"
        yield "reward.reward_manager.name", f"{words}; use naive"
    if config.reward.reward_manager.name == "rate_limited":
        words = "gives a response the reward 0 where the function fails or is late"
        yield "reward.reward_manager.name", f"{words}; use naive, and limit requests in the function"
    ranks = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    if rollout.expert_parallel_size not in (1, ranks):
        words = f"a sampler spreads its experts over all of its {ranks} ranks (tensor and data parallel), or over none"
        yield f"{_ROLLOUT}.expert_parallel_size", f"{words}; set it to {ranks}, or leave it out"
    if rollout.max_num_seqs > rollout.max_num_batched_tokens:
        words = f"a sampler takes max_num_seqs={rollout.max_num_seqs} requests, each with a token at least"
        yield f"{_ROLLOUT}.max_num_batched_tokens", f"{words}; raise it, or lower that"
    allowed = ("weight_file",) if config.trainer.device == "cpu" else BACKENDS
    of_ours = rollout.checkpoint_engine.custom_backend_module in _OWN_MODULES  # another may register any name
    if of_ours and rollout.checkpoint_engine.backend not in allowed:
        words = "does not reach samplers with devices of their own here"
        if rollout.checkpoint_engine.backend == CHANGES_ALONE:
            words = "needs a vLLM with checkpoint patches, which 0.24 has not, and samplers that never die"
        yield f"{_ROLLOUT}.checkpoint_engine.backend", f"{words}; {choices(rollout.checkpoint_engine.backend, allowed)}"


def _experts(config: DictConfig) -> Found:
    """A replay of the samplers' experts that lacks some, or that the critic's routers disturb; experts without one."""
    rollout = config.actor_rollout_ref.rollout
    replays = config.actor_rollout_ref.actor.megatron.router_replay.mode != "disabled"
    returned, setting = rollout.enable_rollout_routing_replay, f"{_ROLLOUT}.enable_rollout_routing_replay"
    if replays and not returned:
        yield setting, f"{_REPLAY}=R3 replays the experts that samplers return; set it to true"
    if returned and not replays and not rollout.moe_load_balance_metrics_interval:
        yield setting, f"nothing reads the experts; set it to false, or {_REPLAY}=R3"
    if replays and rollout.agent.default_agent_loop != SINGLE_TURN:
        yield _REPLAY, "the tokens of a tool have no experts; use it with responses of one turn"
    if returned and config.trainer.device == "cpu":
        yield setting, "vLLM's build for CPUs returns no experts; set it to false"
    if replays and config.critic.enable:
        yield _REPLAY, "the critic's routers would take the places of the actor's; use a method without a critic"


def _schedule(config: DictConfig) -> Found:
    trainer, warmup = config.trainer, config.actor_rollout_ref.actor.optim.lr_warmup_steps
    steps, mode = trainer.total_training_steps, trainer.resume_mode
    if steps is None and trainer.total_epochs == _ENDLESS:
        words = f"the run would last {_ENDLESS} epochs; give a number of steps, or trainer.total_epochs"
        yield "trainer.total_training_steps", words
    if mode == "resume_path" and not NAME.fullmatch(Path(str(trainer.resume_from_path)).name):
        words = "trainer.resume_mode=resume_path needs a checkpoint's folder, .../global_step_N"
        yield "trainer.resume_from_path", f"{words}; resume_mode=auto finds the newest"
    if trainer.resume_from_path and mode != "resume_path":
        words = f"has no effect with trainer.resume_mode={mode}; set that to resume_path"
        yield "trainer.resume_from_path", words
    if trainer.val_only and not trainer.val_before_train:
        words = "only validates before training, which trainer.val_before_train=false leaves out; set that to true"
        yield "trainer.val_only", words
    if config.actor_rollout_ref.actor.optim.optimizer == "adam" and config.actor_rollout_ref.actor.optim.lr > 1:
        words = "every step of Adam would change each weight by more than 1; give a learning rate such as 1e-6"
        yield f"{_ACTOR}.optim.lr", words
    if warmup and steps and warmup >= steps:
        words = f"the warm-up has to end before trainer.total_training_steps={steps}"
        yield f"{_ACTOR}.optim.lr_warmup_steps", f"{words}; lower it, or set it to 0 and lr_warmup_steps_ratio below 1"


def _attention(config: DictConfig) -> Found:
    """What Megatron refuses when a trainer's process builds the model."""
    name = f"{_ACTOR}.megatron.override_transformer_config.attention_backend"
    backend = config.actor_rollout_ref.actor.megatron.override_transformer_config.get("attention_backend") or "auto"
    if backend not in _ATTENTION:
        yield name, choices(backend, _ATTENTION)
        return
    for kernel, wanted in zip(("FLASH", "FUSED", "UNFUSED"), _ATTENTION[backend], strict=True):
        variable = f"NVTE_{kernel}_ATTN"
        if os.environ.get(variable, wanted) != wanted:
            words = f"Megatron refuses {variable}={os.environ[variable]} in the environment with the backend {backend}"
            yield name, f"{words}; unset {variable}, or set attention_backend to what you want"


def _recomputed(config: DictConfig) -> Found:
    """Activations that are computed again, without what Megatron needs to know of them."""
    name = f"{_ACTOR}.megatron.override_transformer_config"
    settings = config.actor_rollout_ref.actor.megatron.override_transformer_config
    method, number = settings.get("recompute_method"), settings.get("recompute_num_layers")
    if settings.get("recompute_granularity") == "full" and (method not in ("uniform", "block") or number is None):
        words = f"needs {name}.recompute_method=uniform and {name}.recompute_num_layers=1, or block and a number"
        yield f"{name}.recompute_granularity", words
    elif settings.get("recompute_granularity") == "selective" and number is not None:
        yield f"{name}.recompute_num_layers", "is of recompute_granularity=full; leave it out"


def _estimator(config: DictConfig) -> Found:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    import verl_vcpo.actor.policy_losses  # noqa: F401  # registers ours

    setting, estimator = "algorithm.adv_estimator", config.algorithm.adv_estimator
    if estimator not in ADV_ESTIMATOR_REGISTRY:
        yield setting, choices(estimator, ADV_ESTIMATOR_REGISTRY)
    if estimator in _NEEDS_PROBABILITIES:
        yield setting, "needs the policy's probabilities, which verl's V1 trainer does not pass to it; choose another"


def layout_of_devices(config: DictConfig) -> Found:
    """Numbers of devices that the model's parts cannot share."""
    megatron, rollout = config.actor_rollout_ref.actor.megatron, config.actor_rollout_ref.rollout
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    context = megatron.context_parallel_size
    devices, model = config.trainer.n_gpus_per_node * config.trainer.nnodes, tensor * pipeline * context
    expert_tensor = megatron.expert_tensor_parallel_size or tensor
    experts = megatron.expert_model_parallel_size * expert_tensor * pipeline
    if devices % model:
        words = f"{devices} devices (x nnodes) are no multiple of tensor x pipeline x context parallel size {model}"
        fix = f"give the trainer a multiple of {model} devices, or set tensor_model_parallel_size to a divisor of"
        yield "trainer.n_gpus_per_node", f"{words} ({_ACTOR}.megatron.*_parallel_size); {fix} {devices}"
    elif devices % experts:
        words = f"with expert_tensor_parallel_size={expert_tensor} (by default as tensor_model_parallel_size) and"
        fix = f"of which the trainer's {devices} are no multiple; lower one of them"
        setting = f"{_ACTOR}.megatron.expert_model_parallel_size"
        yield setting, f"{words} pipeline stages {experts} devices, {fix}"
    else:
        yield from _batches(config, devices // model)
    sampler_devices = rollout.n_gpus_per_node * rollout.nnodes
    if sampler_devices % rollout.tensor_model_parallel_size:
        words = f"does not divide the {sampler_devices} sampler devices (rollout.n_gpus_per_node x nnodes)"
        yield f"{_ROLLOUT}.tensor_model_parallel_size", f"{words}; make them a multiple of it"


def _batches(config: DictConfig, ranks: int) -> Found:
    """Batches, mini-batches and micro-batches that do not divide each other."""
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    batch, mini, micro = config.data.train_batch_size, actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu
    stages, virtual = actor.megatron.pipeline_model_parallel_size, actor.megatron.virtual_pipeline_model_parallel_size
    sequences = mini * n // ranks
    if batch % mini:
        words = f"does not divide data.train_batch_size={batch}; both are numbers of prompts"
        yield f"{_ACTOR}.ppo_mini_batch_size", words
    elif mini * n % ranks:
        words = f"(by default data.train_batch_size) times rollout.n={n} is {mini * n} sequences, not divisible by the"
        yield f"{_ACTOR}.ppo_mini_batch_size", f"{words} {ranks} data-parallel ranks; make it a multiple"
    elif not actor.use_dynamic_bsz and micro and sequences % micro:
        words = f"does not divide the {sequences} sequences of a rank (ppo_mini_batch_size x rollout.n / data parallel)"
        yield f"{_ACTOR}.ppo_micro_batch_size_per_gpu", words
    elif not actor.use_dynamic_bsz and micro and virtual and sequences // micro % stages:
        words = f"makes {sequences // micro} micro-batches, and virtual pipeline stages need a multiple of"
        yield f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{words} pipeline_model_parallel_size={stages}"


_CHECKS = (
    _shares,
    _adapters,
    _truncated,
    _samplers,
    sampling,
    _experts,
    _vcpos_update,
    lengths,
    _schedule,
    _attention,
    _estimator,
    layout_of_devices,
    _recomputed,
)
