"""Everything that can be known to be wrong before a process starts. Each error names the setting and the fix."""

import json
import math
import os
from pathlib import Path

import pyarrow.parquet as pq
import requests
from omegaconf import DictConfig, ListConfig, OmegaConf

from recipe.tasks.tool_use.settings import ToolUseSettings
from verl_vcpo.trainer.ppo.v1.deadlines import OnDeadline
from verl_vcpo.workers.config.vcpo import VCPOSettings
from verl_vcpo.workers.rollout.kv_cache import KVCache

REQUIRED_COLUMNS = ("prompt", "data_source", "reward_model")


class SettingError(ValueError):
    """A setting is wrong. The message is one line: the setting, its value, and what to set instead."""


def validate(config: DictConfig, files: bool = True) -> None:
    """Check the composed configuration; `files=False`: all but the data, the model and the sandbox.

    Raises:
        SettingError: the first thing that is wrong.
    """
    _check_async(config)
    vcpo = _check_vcpo(config.vcpo)
    if files:
        _check_data(config)
        _check_model(config.actor_rollout_ref.model.path)
        _check_vocabulary(config.actor_rollout_ref)
    _check_adapters(config.actor_rollout_ref.model)
    _check_reward(config.reward, files)
    _check_groups(config, vcpo)
    _check_sampling(config.actor_rollout_ref.rollout)
    _check_layout(config)
    _check_schedule(config)
    _check_checkpoints(config)
    _check_estimator(config)
    if config.actor_rollout_ref.rollout.agent.default_agent_loop == "simpletir":
        settings = _check_tool_use(config, vcpo)
        if files:
            _check_sandbox(settings)
    if vcpo.enable and config.algorithm.use_kl_in_reward:
        raise SettingError(
            "algorithm.use_kl_in_reward=true: VCPO's update uses raw rewards; set it to false, or another method"
        )


def _check_async(config: DictConfig) -> None:
    settings = config["async"]
    lag = settings.lag
    if isinstance(lag, bool) or not isinstance(lag, int | float) or not 0 <= lag < math.inf:
        raise SettingError(f"async.lag={lag}: give a number of policy updates, 0 (synchronous) or more")
    for name, choices in (("on_deadline", OnDeadline), ("kv_cache", KVCache)):
        if settings[name] not in tuple(choices):
            raise SettingError(f"async.{name}={settings[name]}: choose one of {', '.join(choices)}")
    if settings.on_deadline == OnDeadline.REISSUE and lag == 0:
        raise SettingError(
            "async.on_deadline=reissue: at async.lag=0 the trainer has nothing else to train on; use wait"
        )
    if settings.kv_cache == KVCache.KEEP and config.actor_rollout_ref.rollout.free_cache_engine:
        raise SettingError(
            "async.kv_cache=keep: actor_rollout_ref.rollout.free_cache_engine=true frees the cache at every update; "
            "set it to false"
        )
    for name in ("sampler_timeout_s", "weight_update_timeout_s", "reward_timeout_s"):
        seconds = settings[name]
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise SettingError(f"async.{name}={seconds}: give a number of seconds above 0")
    for name in ("exact_lag", "deterministic"):
        if not isinstance(settings[name], bool):
            raise SettingError(f"async.{name}={settings[name]}: give true or false")
    if settings.exact_lag and (lag != int(lag) or settings.on_deadline != OnDeadline.WAIT):
        raise SettingError("async.exact_lag=true: needs a whole async.lag and async.on_deadline=wait")


def _check_vcpo(settings: DictConfig) -> VCPOSettings:
    try:
        return VCPOSettings.of(settings)
    except ValueError as error:
        raise SettingError(str(error)) from None


def _check_tool_use(config: DictConfig, vcpo: VCPOSettings) -> ToolUseSettings:
    if "tool_use" not in config:
        raise SettingError("actor_rollout_ref.rollout.agent.default_agent_loop=simpletir: add +agent=simpletir")
    try:
        settings = ToolUseSettings.of(config.tool_use)
    except ValueError as error:
        raise SettingError(str(error)) from None
    if settings.drop_void_turns and not vcpo.enable:
        raise SettingError(
            f"tool_use.drop_void_turns=true: the update of method={config.method} would count the rewards of void "
            "trajectories in its baseline; set it to false"
        )
    return settings


def _check_sandbox(settings: ToolUseSettings) -> None:
    url, token = settings.sandbox_url, settings.sandbox_token()
    try:
        requests.get(f"{url.rstrip('/')}/v1/ping", timeout=10).raise_for_status()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        refused = requests.get(f"{url.rstrip('/')}/stats", headers=headers, timeout=10).status_code == 401
    except requests.RequestException as error:
        raise SettingError(
            f"tool_use.sandbox_url={url}: no sandbox answers ({type(error).__name__}); start one with "
            "`python -m recipe.code_sandbox`"
        ) from None
    if refused:
        file = settings.sandbox_token_file
        raise SettingError(
            f"tool_use.sandbox_token_file={file}: the sandbox at {url} asks for another token; give its --token-file"
        )


def _check_data(config: DictConfig) -> None:
    for setting in ("train_files", "val_files"):
        files = config.data[setting]
        files = files if isinstance(files, list | ListConfig) else [files]
        rows = sum(_check_parquet(f"data.{setting}", file) for file in files)
        if setting == "train_files" and rows < config.data.train_batch_size:
            raise SettingError(
                f"data.train_batch_size={config.data.train_batch_size}: data.train_files has {rows} prompts, less than "
                "one batch; lower it, or give more data"
            )


def _check_parquet(setting: str, file: str | None) -> int:
    """Refuse a file that is no data set of verl's. Returns the number of its rows."""
    prepare = "make it with `python -m scripts.prepare_data` or point the setting at a parquet file"
    if not file or not Path(file).is_file():
        raise SettingError(f"{setting}={file}: no such file; {prepare}")
    try:
        parquet = pq.ParquetFile(file)
    except Exception as error:  # pyarrow raises many kinds for a file that is no parquet
        raise SettingError(f"{setting}={file}: not a readable parquet file ({_first_line(error)}); {prepare}") from None
    if parquet.metadata.num_rows == 0:
        raise SettingError(f"{setting}={file}: holds no rows; {prepare}")
    missing = [column for column in REQUIRED_COLUMNS if column not in parquet.schema_arrow.names]
    if missing:
        raise SettingError(
            f"{setting}={file}: column {missing[0]!r} is missing; verl needs {', '.join(REQUIRED_COLUMNS)}"
        )
    return parquet.metadata.num_rows


def _check_model(path: str | None) -> None:
    setting = f"actor_rollout_ref.model.path={path}"
    if path and Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise SettingError(f"{setting}: the folder has no config.json; give a Hugging Face checkpoint's folder")
        return
    hub_name = bool(path) and not str(path).startswith(("/", ".", "~")) and os.environ.get("HF_HUB_OFFLINE") != "1"
    if not hub_name:
        raise SettingError(
            f"{setting}: no such folder; give a Hugging Face checkpoint's folder (quickstart.sh makes a small one)"
        )


def _check_adapters(model: DictConfig) -> None:
    """Refuse LoRA: the trainer's bridge of weight names (mbridge) makes no adapters, and would train all weights."""
    given = {"lora_rank": 0, "lora.rank": 0, "lora_adapter_path": None, "lora.adapter_path": None}
    for name, nothing in given.items():
        if (value := OmegaConf.select(model, name)) != nothing:
            raise SettingError(
                f"actor_rollout_ref.model.{name}={value}: LoRA is not supported, all weights would be trained; set it "
                f"to {'null' if nothing is None else nothing}"
            )


def _check_vocabulary(roles: DictConfig) -> None:
    """Refuse a vocabulary that the trainer's ranks cannot share; of a model that is not on this machine it is unknown.

    Padding it would not do: rows of the head that belong to no token would take probability from the others.
    """
    file, ranks = Path(roles.model.path) / "config.json", roles.actor.megatron.tensor_model_parallel_size
    try:
        model = json.loads(file.read_text())
        size = model.get("vocab_size") or model.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError):
        return
    if isinstance(size, int) and size % ranks:
        raise SettingError(
            f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size={ranks}: does not divide the {size} tokens "
            f"of {file}; set it to a divisor of {size}, such as {math.gcd(size, ranks)}"
        )


def _check_reward(reward: DictConfig, files: bool) -> None:
    path = reward.custom_reward_function.path
    if not path:
        return
    if files and not str(path).startswith("pkg://") and not Path(str(path).removeprefix("file://")).is_file():
        raise SettingError(
            f"reward.custom_reward_function.path={path}: no such file; give a Python file, or pkg://package.module"
        )
    if reward.reward_manager.name == "remote":
        raise SettingError(
            "reward.reward_manager.name=remote: a custom reward function has processes of its own already, which end "
            "at async.reward_timeout_s; use naive"
        )


def _check_groups(config: DictConfig, vcpo: VCPOSettings) -> None:
    n = config.actor_rollout_ref.rollout.n
    if vcpo.compares_samples_of_a_prompt and n < 2:
        raise SettingError(
            f"actor_rollout_ref.rollout.n={n}: vcpo.baseline={vcpo.baseline}, vcpo.norm_by_std={vcpo.norm_by_std} "
            "compare the samples of a prompt; set n to 2 or more, or vcpo.baseline=none vcpo.norm_by_std=false"
        )


def _check_sampling(rollout: DictConfig) -> None:
    """Refuse what makes recorded log-probs others than those that the trainer's policy would have; not validation's."""
    t, mode = rollout.temperature, rollout.logprobs_mode
    refused = None
    if not 0 < t < math.inf:
        refused = f"temperature={t}: the most likely token alone has no log-probs to weight; set it above 0"
    elif rollout.top_p != 1:
        refused = f"top_p={rollout.top_p}: the policy's log-probs are over all tokens; set it to 1"
    elif rollout.top_k not in (-1, 0):
        refused = f"top_k={rollout.top_k}: the policy's log-probs are over all tokens; set it to -1"
    elif not rollout.calculate_log_probs:
        refused = "calculate_log_probs=false: importance weights need the samplers' log-probs; set it to true"
    elif mode != "processed_logprobs" and (mode != "raw_logprobs" or t != 1):
        refused = f"logprobs_mode={mode}: not of the distribution sampled at temperature={t}; set it to "
        refused += "processed_logprobs"
    if refused:
        raise SettingError(f"actor_rollout_ref.rollout.{refused}")


def _check_layout(config: DictConfig) -> None:
    megatron, rollout = config.actor_rollout_ref.actor.megatron, config.actor_rollout_ref.rollout
    _check_sizes(config)
    devices = config.trainer.n_gpus_per_node * config.trainer.nnodes
    model_parallel = (
        megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size
    )
    if devices % model_parallel or not devices:
        raise SettingError(
            f"trainer.n_gpus_per_node*nnodes={devices}: not divisible by tensor x pipeline x context parallel size "
            f"{model_parallel} (actor_rollout_ref.actor.megatron.*_parallel_size); give the trainer a multiple of "
            f"{model_parallel} devices, or set tensor_model_parallel_size to a divisor of {max(devices, 1)}"
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
    if sampler_devices % rollout.tensor_model_parallel_size or not sampler_devices:
        raise SettingError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: does not "
            f"divide the {sampler_devices} sampler devices (rollout.n_gpus_per_node x nnodes); make "
            "them a multiple of it"
        )
    _check_batches(config, devices // model_parallel)


def _check_sizes(config: DictConfig) -> None:
    """Refuse sizes of a layout that are no whole numbers above 0; null where verl has a default for it."""
    megatron = "actor_rollout_ref.actor.megatron"
    optional = tuple(f"{megatron}.{name}_parallel_size" for name in ("expert_tensor", "virtual_pipeline_model"))
    given = tuple(f"{megatron}.{name}_parallel_size" for name in ("context", "expert_model"))
    given += tuple(f"{megatron}.{name}_model_parallel_size" for name in ("tensor", "pipeline"))
    given += tuple(f"actor_rollout_ref.rollout.{name}" for name in ("tensor_model_parallel_size", "n_gpus_per_node"))
    given += ("actor_rollout_ref.rollout.nnodes", "trainer.n_gpus_per_node", "trainer.nnodes")
    for name in given + optional:
        size = OmegaConf.select(config, name)
        if size is None and name in optional:
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise SettingError(f"{name}={size}: give a whole number of at least 1")


def _check_batches(config: DictConfig, data_parallel: int) -> None:
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    batch, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    if mini < 1 or batch % mini:
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


def _check_schedule(config: DictConfig) -> None:
    steps, optim = config.trainer.total_training_steps, config.actor_rollout_ref.actor.optim
    if optim.lr_warmup_steps and steps and optim.lr_warmup_steps >= steps:
        raise SettingError(
            f"actor_rollout_ref.actor.optim.lr_warmup_steps={optim.lr_warmup_steps}: the warm-up has to end before "
            f"trainer.total_training_steps={steps}; lower it, or set it to 0 and lr_warmup_steps_ratio below 1"
        )
    if not 0 <= optim.lr_warmup_steps_ratio < 1:
        raise SettingError(
            f"actor_rollout_ref.actor.optim.lr_warmup_steps_ratio={optim.lr_warmup_steps_ratio}: give a share of "
            "trainer.total_training_steps, 0 or more and below 1"
        )


def _check_checkpoints(config: DictConfig) -> None:
    for role in ("actor_rollout_ref.actor", "critic"):
        if OmegaConf.select(config, f"{role}.checkpoint.async_save"):
            raise SettingError(
                f"{role}.checkpoint.async_save=true: the folder would be taken for whole while its files are still "
                "being written; set it to false"
            )


def _check_estimator(config: DictConfig) -> None:
    estimator, bypass = config.algorithm.adv_estimator, config.algorithm.rollout_correction.bypass_mode
    measured = config.actor_rollout_ref.actor.calculate_sum_pi_squared and not bypass
    if estimator in ("optimal_token_baseline", "tir_optimal_token_baseline") and not measured:
        raise SettingError(
            f"algorithm.adv_estimator={estimator}: needs the policy's probabilities before the update; set "
            "actor_rollout_ref.actor.calculate_sum_pi_squared=true, algorithm.rollout_correction.bypass_mode=false"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
