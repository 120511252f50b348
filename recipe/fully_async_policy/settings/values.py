"""The settings that decide a run, each with its type: what verl's configuration accepts of them without a word."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import regex
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, ConfigDict, Field, ValidationError, create_model
from pydantic_core import PydanticCustomError

from recipe.fully_async_policy.settings.effects import LOSS_SETTINGS, without_effect
from recipe.fully_async_policy.settings.errors import (
    SettingError,
    all_that_is_wrong,
    choices,
    first_line,
    wrong,
)
from recipe.tasks.reasoning_gym import LAST_NUMBER, TAGGED
from verl_vcpo.actor.own_loss import is_own
from verl_vcpo.common.on_failure import OnFailure
from verl_vcpo.common.truncated import Truncated
from verl_vcpo.loop.prompts.deadlines import OnDeadline
from verl_vcpo.samplers.kv_cache import KVCache

TOOL_FORMATS = ("hermes", "gpt-oss", "qwen3_coder", "glm", "seed", "minimax", "kimi", "deepseek_v4", "gemma4")
"""How verl reads the calls of tools that a model writes."""


def _a(kind: Any, words: str, **limits: Any) -> tuple[Any, Any]:
    """A type, and what the user reads where a value is something else."""
    return kind, Field(description=words, **limits)


def _or_null(kind: tuple[Any, Any]) -> tuple[Any, Any]:
    return kind[0] | None, kind[1]


def _one_of(*allowed: Any, why: str = "", unless: Callable[[str], bool] | None = None) -> tuple[Any, Any]:
    """The type of these values alone, and of those texts that `unless` accepts.

    Args:
        why: the reason why others do not work, where the list of choices does not say it.
    """

    def check(value: Any) -> Any:
        equal = (value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed)
        if any(equal) or (unless and isinstance(value, str) and unless(value)):
            return value
        if unless and str(value).endswith(".py"):
            raise PydanticCustomError(
                "setting", "names no function of the file; give {value}:FUNCTION", {"value": value}
            )
        words = f"{why}; {choices(value, allowed)}" if why else choices(value, allowed)
        raise PydanticCustomError("setting", "{words}", {"words": words})

    return Annotated[Any, AfterValidator(check)], Field()


def _a_pattern(text: str) -> str:
    try:
        regex.compile(text)
    except regex.error as error:
        raise PydanticCustomError("setting", "no regular expression ({why})", {"why": str(error)}) from None
    return text


_FLAG = _a(bool, "give true or false")
_TEXT = _a(str, "give a name or a path", min_length=1)
_COUNT = _a(int, "give a whole number of at least 1", ge=1)
_WHOLE = _a(int, "give a whole number, 0 or more", ge=0)
_NOT_NEGATIVE = _a(float, "give a number, 0 or more", ge=0)
_SECONDS = _a(float, "give a number of seconds above 0", gt=0)
_SHARE = _a(float, "give a share above 0, at most 1", gt=0, le=1)
_ALL = _a(Annotated[int, Field(ge=1)] | Literal[-1], "give a whole number of at least 1, or -1 for all")
_NEVER = _a(Annotated[int, Field(ge=1)] | Literal[-1], "give a whole number of at least 1, or -1 for never")
_SHARES = _a(list[Annotated[float, Field(gt=0)]], "give a share above 0 of each train file, [0.7,0.3]", min_length=1)
_FILES = _a(str | list[str] | None, "give a file, or a list of files, [a.parquet,b.parquet]")
_BETA = Annotated[float, Field(ge=0, lt=1)]
_MEGATRON = _one_of("megatron", why="the lag-k trainer is built on Megatron alone")
_ALL_TOKENS = "the policy's log-probs are over all tokens"
_PENALTY = "a penalty is no part of the policy whose log-probs are trained on"
_ONE_SEED = "all samples of a prompt would be drawn from one seed; async.deterministic=true gives each its own"
_GREEDY = "the most likely token alone has no log-probs to weight"
_LEAST = f"vLLM samples at 0.01 or above, and {_GREEDY}; set it to 0.01 or more"
_UNFINISHED = "the folder would be taken for whole while its files are still being written"
_LENT = "lent GPUs have samplers without the limits of async.*; give rollout.n_gpus_per_node more of the GPUs instead"
_SCALED = "Megatron would scale the loss of float16, and gradient norms with it"
_UNTRIED = "no run of the lag-k trainer has had another"
_TEXT_ALONE = "the models that are trained read text alone"
_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_PARALLEL = f"{_ACTOR}.megatron"


def _each(kind: tuple[Any, Any], section: str, names: str) -> dict[str, tuple[Any, Any]]:
    return {f"{section}.{name}": kind for name in names.split()}


def _optimizer(section: str) -> dict[str, tuple[Any, Any]]:
    """The settings of a model that is trained, actor or critic."""
    betas = "give two numbers, 0 or more and below 1: [0.9,0.999]"
    share = "give a share of trainer.total_training_steps, 0 or more and below 1"
    steps = "give a whole number, or -1 for lr_warmup_steps_ratio"
    return {
        **_each(_NOT_NEGATIVE, f"{section}.optim", "lr min_lr weight_decay clip_grad"),
        f"{section}.optim.betas": _a(list[_BETA], betas, min_length=2, max_length=2),
        f"{section}.optim.lr_warmup_steps": _a(int | None, steps, ge=-1),
        f"{section}.optim.lr_warmup_steps_ratio": _a(float, share, ge=0, lt=1),
        f"{section}.optim.lr_decay_style": _one_of("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        f"{section}.checkpoint.async_save": _one_of(False, why=_UNFINISHED),
    }


TYPES: dict[str, Any] = {
    "model_engine": _MEGATRON,
    "run_dir": _TEXT,
    "samples_every": _a(int, "give a number of steps, 0 (never) or more", ge=0),
    "save_model": _FLAG,
    "save_weights": _FLAG,
    "gpu_memory_gib": _a(float, "give the GiB of one GPU", gt=0),
    # the lag-k trainer
    "async.lag": _a(float, "give a number of policy updates, 0 (synchronous) or more", ge=0),
    "async.on_deadline": _one_of(*OnDeadline),
    "async.on_failure": _one_of(*OnFailure),
    "async.max_skipped": _SHARE,
    "async.truncated": _one_of(*Truncated),
    "async.overlong_buffer_len": _or_null(_COUNT),
    "async.overlong_penalty_factor": _NOT_NEGATIVE,
    "async.kv_cache": _one_of(*KVCache),
    **_each(_SECONDS, "async", "sampler_timeout_s weight_update_timeout_s reward_timeout_s"),
    **_each(_SECONDS, "async", "tool_timeout_s trajectory_timeout_s"),
    **_each(_FLAG, "async", "deterministic exact_lag"),
    # the prompts
    "data.train_batch_size": _a(int, "give the prompts of an update, a whole number of at least 1", ge=1),
    **_each(_FILES, "data", "train_files val_files"),
    **_each(_COUNT, "data", "max_prompt_length max_response_length"),
    **_each(_or_null(_COUNT), "data", "val_batch_size filter_overlong_prompts_workers"),
    **_each(_ALL, "data", "train_max_samples val_max_samples"),
    **_each(_FLAG, "data", "shuffle filter_overlong_prompts"),
    "data.prompt_key": _TEXT,
    "data.seed": _or_null(_WHOLE),
    "data.dataloader_num_workers": _WHOLE,
    "data.shares": _or_null(_SHARES),
    "data.levels": _or_null(_a(list[Annotated[int, Field(ge=1)]], "give the number of files of each task, [3,1]")),
    "data.level_mark": _SHARE,
    "data.level_answers": _COUNT,
    "data.truncation": _one_of("error", "left", "right", "middle"),
    # the trainer's devices
    "actor_rollout_ref.hybrid_engine": _one_of(False, why="trainer and samplers have devices of their own"),
    f"{_ACTOR}.strategy": _MEGATRON,
    **_each(_COUNT, _ACTOR, "ppo_mini_batch_size ppo_epochs"),
    **_each(_NOT_NEGATIVE, _ACTOR, "kl_loss_coef clip_ratio"),
    **_each(_or_null(_NOT_NEGATIVE), _ACTOR, "clip_ratio_low clip_ratio_high"),
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": _or_null(_COUNT),
    f"{_ACTOR}.policy_loss.loss_mode": _one_of(*LOSS_SETTINGS, unless=is_own),
    **_each(_COUNT, _PARALLEL, "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size"),
    **_each(_COUNT, _PARALLEL, "expert_model_parallel_size"),
    **_each(_or_null(_COUNT), _PARALLEL, "virtual_pipeline_model_parallel_size expert_tensor_parallel_size"),
    f"{_PARALLEL}.vanilla_mbridge": _one_of(False, why="verl gives up the package mbridge, which is not installed"),
    f"{_PARALLEL}.router_replay.mode": _one_of("disabled", "R3", why="R2 needs a pass that a lag-k run leaves out"),
    f"{_PARALLEL}.dtype": _one_of("float32", "bfloat16", why=_SCALED),
    f"{_MODEL}.path": _a(str, "give the folder of a Hugging Face model", min_length=1),
    f"{_MODEL}.trust_remote_code": _FLAG,
    **_each(_a(None, "a run makes its own adapters", default=None), _MODEL, "lora_adapter_path lora.adapter_path"),
    f"{_MODEL}.lora_rank": _one_of(0, why=f"Megatron's adapters have the rank {_MODEL}.lora.rank"),
    f"{_MODEL}.lora.rank": _WHOLE,
    f"{_MODEL}.lora.alpha": _COUNT,
    f"{_MODEL}.lora.type": _one_of(
        "lora", why="Megatron-Bridge merges and exports no other adapters as they are trained"
    ),
    f"{_MODEL}.lora.target_modules": _or_null(_a(list[str], "give a list of names, [linear_qkv,linear_proj]")),
    f"{_MODEL}.lora.dropout": _one_of(0, why="the second forward of an update would drop other numbers than the first"),
    f"{_MODEL}.lora.merge": _FLAG,
    # the samplers, whose recorded log-probs must be those of the trainer's policy
    f"{_ROLLOUT}.name": _one_of("vllm", why="the samplers are vLLM's"),
    f"{_ROLLOUT}.mode": _one_of("async", why="the samplers are servers"),
    **_each(_COUNT, _ROLLOUT, "n nnodes n_gpus_per_node tensor_model_parallel_size max_num_seqs"),
    **_each(_COUNT, _ROLLOUT, "max_num_batched_tokens val_kwargs.n agent.num_workers"),
    f"{_ROLLOUT}.pipeline_model_parallel_size": _one_of(1, why="verl's samplers have no pipeline"),
    f"{_ROLLOUT}.max_model_len": _or_null(_COUNT),
    f"{_ROLLOUT}.temperature": _a(float, _LEAST, ge=0.01),
    f"{_ROLLOUT}.top_p": _one_of(1, why=_ALL_TOKENS),
    f"{_ROLLOUT}.top_k": _one_of(-1, 0, why=_ALL_TOKENS),
    f"{_ROLLOUT}.repetition_penalty": (_one_of(1, why=_PENALTY)[0], Field(default=None)),
    f"{_ROLLOUT}.do_sample": _one_of(True, why=_GREEDY),
    f"{_ROLLOUT}.full_determinism": _one_of(False, why=_ONE_SEED),
    f"{_ROLLOUT}.calculate_log_probs": _one_of(True, why="importance weights need the samplers' log-probs"),
    f"{_ROLLOUT}.dtype": _one_of("auto", "bfloat16", "float16", "float32"),
    **_each(_SHARE, _ROLLOUT, "gpu_memory_utilization val_kwargs.top_p"),
    f"{_ROLLOUT}.enable_rollout_routing_replay": _FLAG,
    f"{_ROLLOUT}.val_kwargs.temperature": _NOT_NEGATIVE,
    f"{_ROLLOUT}.val_kwargs.top_k": _ALL,
    **_each(_COUNT, f"{_ROLLOUT}.multi_turn", "max_parallel_calls max_tool_response_length"),
    **_each(_or_null(_COUNT), f"{_ROLLOUT}.multi_turn", "max_assistant_turns max_user_turns"),
    f"{_ROLLOUT}.multi_turn.tool_response_truncate_side": _one_of("left", "middle", "right"),
    f"{_ROLLOUT}.multi_turn.format": _one_of(*TOOL_FORMATS),
    # tool use: only +agent=simpletir has these
    "tool_use.sandbox_url": _a(str, "give a URL, like http://127.0.0.1:8080", default=None, pattern="^https?://"),
    "tool_use.sandbox_token_file": _a(str | None, "give a path", default=None),
    "tool_use.max_turns": _a(int, "give a whole number of at least 1", default=None, ge=1),
    "tool_use.max_observation_tokens": _a(int, "give a whole number of at least 16", default=None, ge=16),
    "tool_use.max_time_s": _a(float, "give a number of seconds above 0", default=None, gt=0),
    "tool_use.call_timeout_s": _a(float, "give a number of seconds above 0", default=None, gt=0),
    "tool_use.latency_median_s": _a(float, "give a number of seconds, 0 or more", default=None, ge=0),
    "tool_use.latency_sigma": _a(float, "give a number, 0 or more, at most 10", default=None, ge=0, le=10),
    "tool_use.drop_void_turns": _a(bool, "give true or false", default=None),
    "tool_use.answer_pattern": (Annotated[str, AfterValidator(_a_pattern)], Field(default=None)),
    # reasoning-gym: only +task=reasoning_gym has these
    "reasoning_gym.tasks": _a(
        dict[str, Annotated[float, Field(gt=0)]] | None,
        "give tasks, each with its share, '{gsm_symbolic: 2, countdown: 1}'",
        default=None,
        min_length=1,
    ),
    "reasoning_gym.difficulty": _a(
        dict[str, dict[str, Any]] | None, "give settings of a task, '{countdown: {max_numbers: 4}}'", default=None
    ),
    "reasoning_gym.seed": _a(int, "give a whole number, 0 or more", default=None, ge=0),
    **_each(_a(int, "give a whole number of at least 1", default=None, ge=1), "reasoning_gym", "train val"),
    "reasoning_gym.levels": _a(int, "give a number of levels; 0 for no curriculum", default=None, ge=0),
    "reasoning_gym.instruction": _a(str, "give text", default=None),
    "reasoning_gym.answer": (_one_of(TAGGED, LAST_NUMBER)[0], Field(default=None)),
    # what verl has, and no run here has shown to be right
    **_each(_one_of(False, why=_UNTRIED), _ACTOR, "qat.enable megatron.qat.enable megatron.use_dist_checkpointing"),
    **_each(_one_of(False, why=_UNTRIED), "skip", "rollout.enable rollout_tq.enable async_rollout.enable"),
    **_each(_one_of(None, why=_UNTRIED), _ROLLOUT, "quantization quantization_config_file"),
    f"{_ROLLOUT}.data_parallel_size": _one_of(1, why=f"{_ROLLOUT}.n_gpus_per_node makes more samplers"),
    f"{_ROLLOUT}.disaggregation.enabled": _one_of(False, why=_UNTRIED),
    **{f"data.{kind}_key": _one_of(f"{kind}s", None, why=_TEXT_ALONE) for kind in ("image", "video", "audio")},
    # the reward
    "reward.num_workers": _COUNT,
    "reward.reward_model.enable": _one_of(False, why="the lag-k trainer has no devices for a reward model"),
    # the run
    "trainer.v1.trainer_mode": _one_of("lag_k", why="verl's other trainers know no bound of the lag"),
    "trainer.v1.separate_async.parameter_sync_step": _one_of(1, why="samplers get new weights after every update"),
    "trainer.v1.separate_async.hybrid_rollout.enable_switch": _one_of(False, why=_LENT),
    **_each(_or_null(_COUNT), "trainer", "total_training_steps max_actor_ckpt_to_keep"),
    **_each(_COUNT, "trainer", "total_epochs n_gpus_per_node nnodes"),
    **_each(_NEVER, "trainer", "test_freq save_freq"),
    **_each(_FLAG, "trainer", "val_before_train val_only"),
    **_each(_TEXT, "trainer", "project_name experiment_name"),
    "trainer.resume_mode": _one_of("disable", "auto", "resume_path"),
    "trainer.device": _one_of("cpu", "cuda", "npu"),
    "ray_kwargs.ray_init.num_cpus": _a(int | None, "give a whole number of at least 1", default=None, ge=1),
    "ray_kwargs.ray_init.num_gpus": _a(int | None, "give a whole number, 0 or more", default=None, ge=0),
    **_optimizer(_ACTOR),
    **_optimizer("critic"),
}
"""Types beyond those of verl's dataclasses, which `names.py` compares with what a user gives."""
_Settings = create_model(
    "_Settings",
    __config__=ConfigDict(strict=True, allow_inf_nan=False),  # strict: a value is of its type already
    **TYPES,
)


def check_sections(config: DictConfig) -> None:
    """Refuse a value in the place of a section, which the checks of its settings could not read."""
    for section in dict.fromkeys(name.rpartition(".")[0] for name in TYPES if "." in name):
        value = OmegaConf.select(config, section, default=_ABSENT)
        if value is not _ABSENT and not isinstance(value, DictConfig):
            raise wrong(config, section, f"is a section of settings, and no value; give its settings, {section}.NAME")


def check_types(config: DictConfig, beginning: str | tuple[str, ...] = "") -> None:
    """Refuse values that their settings cannot have, in the order of the table; `beginning`: of names that begin so.

    Not those of a setting without an effect: `check_overrides` refuses it, whatever its value.
    """
    given = {}
    for name in TYPES:
        try:
            value = OmegaConf.select(config, name, default=_ABSENT)
        except OmegaConfBaseException as error:
            raise SettingError(f"{name}: {first_line(error)}") from None
        if value is not _ABSENT:
            given[name] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    try:
        _Settings.model_validate(given)
    except ValidationError as refused:
        found = [(str(error["loc"][0]), error["msg"]) for error in refused.errors()]
        read = [
            (name, words) for name, words in found if name.startswith(beginning) and not without_effect(config, name)
        ]
        errors = [_refused(config, name, words) for name, words in read]
        of_engine = [error for error in errors if str(error).startswith("model_engine=")]
        if errors:
            raise all_that_is_wrong(of_engine or errors) from None  # another engine has other settings


_ABSENT = object()


def _refused(config: DictConfig, name: str, words: str) -> SettingError:
    """Why a setting is wrong: its section or itself is missing; or its value, by the type or else by `words`."""
    parts = name.split(".")
    for section in (".".join(parts[:depth]) for depth in range(1, len(parts) + 1)):
        if OmegaConf.select(config, section, default=_ABSENT) is _ABSENT:
            return SettingError(f"{section}: is missing; leave ~{section} out, or give it a value")
    value = OmegaConf.select(config, name)
    if TYPES[name] is _TEXT and type(value) in (int, float, bool):
        return wrong(config, name, f"is not read as text; quote it: '{name}=\"...\"'")
    return wrong(config, name, TYPES[name][1].description or words)
