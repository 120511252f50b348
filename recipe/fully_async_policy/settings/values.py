"""The settings that decide a run, each with its type: what verl's configuration accepts of them without a word."""

from typing import TYPE_CHECKING, Annotated, Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, ValidationError

from recipe.fully_async_policy.settings.effects import LOSS_SETTINGS
from recipe.fully_async_policy.settings.errors import SettingError, all_that_is_wrong, first_line, shown
from recipe.fully_async_policy.settings.types import (
    Count,
    Flag,
    NotNegative,
    Number,
    Positive,
    Seconds,
    Section,
    Share,
    Text,
    Whole,
    count_or,
    one_of,
    says,
)
from verl_vcpo.actor.own_loss import is_own
from verl_vcpo.loop.deadlines import OnDeadline
from verl_vcpo.samplers.kv_cache import KVCache

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

TOOL_FORMATS = ("hermes", "gpt-oss", "qwen3_coder", "glm", "seed", "minimax", "kimi", "deepseek_v4", "gemma4")
"""How verl reads the calls of tools that a model writes."""
_OWN_DEVICES = "trainer and samplers have devices of their own"
_NO_LORA = "LoRA is not supported, all weights would be trained"
_NO_BRIDGE = "no release of Megatron-Bridge can be installed beside verl"
_ALL_TOKENS = "the policy's log-probs are over all tokens"
_UNFINISHED = "the folder would be taken for whole while its files are still being written"


class Async(Section):
    """`async`: the lag-k trainer."""

    lag: Annotated[
        float, Field(ge=0, allow_inf_nan=False), says("give a number of policy updates, 0 (synchronous) or more")
    ]
    on_deadline: Annotated[str, one_of(*OnDeadline)]
    kv_cache: Annotated[str, one_of(*KVCache)]
    sampler_timeout_s: Seconds
    weight_update_timeout_s: Seconds
    reward_timeout_s: Seconds
    tool_timeout_s: Seconds
    trajectory_timeout_s: Seconds
    deterministic: Flag
    exact_lag: Flag


class Data(Section):
    """`data`: the prompts."""

    train_batch_size: Count
    max_prompt_length: Count
    max_response_length: Count
    train_max_samples: Annotated[int, count_or(-1, "for all")]
    val_batch_size: Count | None
    val_max_samples: Annotated[int, count_or(-1, "for all")]
    prompt_key: Text
    shuffle: Flag
    seed: Whole | None
    shares: (
        Annotated[list[Positive], Field(min_length=1), says("give a share above 0 of each train file, [0.7,0.3]")]
        | None
    )
    filter_overlong_prompts: Flag
    filter_overlong_prompts_workers: Count | None
    truncation: Annotated[str, one_of("error", "left", "right", "middle")]
    dataloader_num_workers: Whole


class Optim(Section):
    """`actor_rollout_ref.actor.optim`, `critic.optim`."""

    lr: NotNegative
    min_lr: NotNegative
    weight_decay: NotNegative
    betas: Annotated[
        list[Annotated[float, Field(ge=0, lt=1)]],
        Field(min_length=2, max_length=2),
        says("give two numbers, 0 or more and below 1: [0.9,0.999]"),
    ]
    clip_grad: NotNegative
    lr_warmup_steps: Annotated[int, Field(ge=-1), says("give a whole number, or -1 for lr_warmup_steps_ratio")] | None
    lr_warmup_steps_ratio: Annotated[
        float,
        Field(ge=0, lt=1),
        says("give a share of trainer.total_training_steps, 0 or more and below 1"),
    ]
    lr_decay_style: Annotated[str, one_of("constant", "linear", "cosine", "inverse-square-root", "WSD")]


class Megatron(Section):
    """`actor_rollout_ref.actor.megatron`: how the trainer's devices share the model."""

    tensor_model_parallel_size: Count
    pipeline_model_parallel_size: Count
    virtual_pipeline_model_parallel_size: Count | None
    context_parallel_size: Count
    expert_model_parallel_size: Count
    expert_tensor_parallel_size: Count | None
    sequence_parallel: Flag
    vanilla_mbridge: Annotated[bool, one_of(True, why=_NO_BRIDGE)]
    dtype: Annotated[str, one_of("float32", "bfloat16", "float16")]


class Checkpoint(Section):
    """`actor_rollout_ref.actor.checkpoint`, `critic.checkpoint`."""

    async_save: Annotated[bool, one_of(False, why=_UNFINISHED)]


class PolicyLoss(Section):
    """`actor_rollout_ref.actor.policy_loss`."""

    loss_mode: Annotated[str, one_of(*LOSS_SETTINGS, unless=is_own)]


class Actor(Section):
    """`actor_rollout_ref.actor`: the trainer."""

    strategy: Annotated[str, one_of("megatron", why="the lag-k trainer is built on Megatron alone")]
    ppo_mini_batch_size: Count
    ppo_micro_batch_size_per_gpu: Count | None
    ppo_epochs: Count
    use_dynamic_bsz: Flag
    use_kl_loss: Flag
    kl_loss_coef: NotNegative
    entropy_coeff: Number
    clip_ratio: NotNegative
    clip_ratio_low: NotNegative | None
    clip_ratio_high: NotNegative | None
    policy_loss: PolicyLoss
    optim: Optim
    megatron: Megatron
    checkpoint: Checkpoint


class Lora(Section):
    """`actor_rollout_ref.model.lora`."""

    rank: Annotated[int, one_of(0, why=_NO_LORA)]
    adapter_path: Annotated[Any, one_of(None, why=_NO_LORA)] = None


class Model(Section):
    """`actor_rollout_ref.model`. LoRA: the trainer's bridge of weight names (mbridge) makes no adapters."""

    path: Annotated[str, Field(min_length=1), says("give the folder of a Hugging Face model")]
    trust_remote_code: Flag
    lora_rank: Annotated[int, one_of(0, why=_NO_LORA)]
    lora_adapter_path: Annotated[Any, one_of(None, why=_NO_LORA)]
    lora: Lora


class ValidationSampling(Section):
    """`actor_rollout_ref.rollout.val_kwargs`."""

    n: Count
    temperature: NotNegative
    top_p: Share
    top_k: Annotated[int, Field(ge=-1), says("give a whole number of at least 1, or -1 for all")]
    do_sample: Flag


class AgentLoops(Section):
    """`actor_rollout_ref.rollout.agent`."""

    num_workers: Count


class MultiTurn(Section):
    """`actor_rollout_ref.rollout.multi_turn`: verl's loop with tools."""

    max_assistant_turns: Count | None
    max_user_turns: Count | None
    max_parallel_calls: Count
    max_tool_response_length: Count
    tool_response_truncate_side: Annotated[str, one_of("left", "middle", "right")]
    format: Annotated[str, one_of(*TOOL_FORMATS)]


class Rollout(Section):
    """`actor_rollout_ref.rollout`: the samplers. Recorded log-probs must be those of the trainer's policy."""

    name: Annotated[str, one_of("vllm", why="the samplers are vLLM's")]
    mode: Annotated[str, one_of("async", why="the samplers are servers")]
    n: Count
    nnodes: Count
    n_gpus_per_node: Count
    tensor_model_parallel_size: Count
    temperature: Annotated[
        float,
        Field(gt=0, allow_inf_nan=False),
        says("the most likely token alone has no log-probs to weight; set it above 0"),
    ]
    top_p: Annotated[float, one_of(1, why=_ALL_TOKENS)]
    top_k: Annotated[int, one_of(-1, 0, why=_ALL_TOKENS)]
    calculate_log_probs: Annotated[bool, one_of(True, why="importance weights need the samplers' log-probs")]
    gpu_memory_utilization: Share
    max_model_len: Count | None
    max_num_seqs: Count
    max_num_batched_tokens: Count
    enforce_eager: Flag
    free_cache_engine: Flag
    val_kwargs: ValidationSampling
    dtype: Annotated[str, one_of("auto", "bfloat16", "float16", "float32")]
    agent: AgentLoops
    multi_turn: MultiTurn


class Roles(Section):
    """`actor_rollout_ref`."""

    hybrid_engine: Annotated[bool, one_of(False, why=_OWN_DEVICES)]
    actor: Actor
    model: Model
    rollout: Rollout


class RewardModel(Section):
    """`reward.reward_model`."""

    enable: Annotated[bool, one_of(False, why="the lag-k trainer has no devices for a reward model")]


class Reward(Section):
    """`reward`."""

    num_workers: Count
    reward_model: RewardModel


class Critic(Section):
    """`critic`."""

    optim: Optim
    checkpoint: Checkpoint


class SeparateAsync(Section):
    """`trainer.v1.separate_async`."""

    parameter_sync_step: Annotated[int, one_of(1, why="samplers get new weights after every update")]


class V1(Section):
    """`trainer.v1`."""

    trainer_mode: Annotated[str, one_of("lag_k", why="verl's other trainers know no bound of the lag")]
    separate_async: SeparateAsync


class Trainer(Section):
    """`trainer`."""

    total_training_steps: Count | None
    total_epochs: Count
    test_freq: Annotated[int, count_or(-1, "for never")]
    save_freq: Annotated[int, count_or(-1, "for never")]
    val_before_train: Flag
    val_only: Flag
    resume_mode: Annotated[str, one_of("disable", "auto", "resume_path")]
    n_gpus_per_node: Count
    nnodes: Count
    device: Annotated[str, one_of("cpu", "cuda", "npu")]
    project_name: Text
    experiment_name: Text
    max_actor_ckpt_to_keep: Count | None
    v1: V1


class RayInit(Section):
    """`ray_kwargs.ray_init`: of a Ray that the run starts."""

    num_cpus: Count | None = None
    num_gpus: Whole | None = None


class RayArguments(Section):
    """`ray_kwargs`."""

    ray_init: RayInit


class Settings(Section):
    """The whole configuration, as far as it is typed here."""

    model_engine: Annotated[str, one_of("megatron", why="the lag-k trainer is built on Megatron alone")]
    run_dir: Text
    samples_every: Annotated[int, Field(ge=0), says("give a number of steps, 0 (never) or more")]
    save_model: Flag
    save_weights: Flag
    gpu_memory_gib: Annotated[float, Field(gt=0), says("give the GiB of one GPU")]
    async_: Async = Field(alias="async")
    data: Data
    actor_rollout_ref: Roles
    critic: Critic
    reward: Reward
    trainer: Trainer
    ray_kwargs: RayArguments


def check_types(config: DictConfig) -> None:
    """Refuse values that their settings cannot have.

    Raises:
        SettingError: a line for each of them, in the order of the classes above.
    """
    try:
        Settings.model_validate(_read(config, Settings))
    except ValidationError as wrong:
        errors = [_refused(error) for error in wrong.errors(include_url=False)]
        of_engine = [error for error in errors if str(error).startswith("model_engine=")]
        raise all_that_is_wrong(of_engine or errors) from None  # another engine has other settings


def is_typed(name: str) -> bool:
    """Whether `check_types` knows the setting."""
    section: Any = Settings
    for part in name.split("."):
        fields = {field.alias or n: field.annotation for n, field in getattr(section, "model_fields", {}).items()}
        if part not in fields:
            return False
        section = fields[part]
    return True


def _refused(error: "ErrorDetails") -> SettingError:
    place = [str(part) for part in error["loc"] if isinstance(part, str) and not part.startswith("function-")]
    return SettingError(_message(place, error["type"], error["input"], error["msg"]))


def _message(place: list[str], kind: str, given: Any, words: str) -> str:
    name = ".".join(place)
    if kind == "missing":
        return f"{name}: is missing; leave ~{name} out, or give it a value"
    if kind in ("model_type", "model_attributes_type"):
        return f"{name}={shown(given)}: is a section of settings; give {name}.NAME=value"
    return f"{name}={shown(given)}: {words}"


def _read(section: DictConfig, model: type[Section], above: str = "") -> dict[str, Any]:
    """The values of those settings of a section that `model` knows."""
    known = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    values = {}
    for name, below in known.items():
        if name not in section:
            continue
        try:
            value = section[name]
        except OmegaConfBaseException as error:
            raise SettingError(f"{above}{name}: {first_line(error)}") from None
        if isinstance(value, DictConfig) and isinstance(below, type) and issubclass(below, Section):
            value = _read(value, below, f"{above}{name}.")
        elif isinstance(value, DictConfig | ListConfig):
            value = OmegaConf.to_container(value)
        values[name] = value
    return values
