"""The model: its folder, as far as that is on this machine, and whether the trainer can build it here."""

import json
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from safetensors import SafetensorError, safe_open

from recipe.fully_async_policy.settings.errors import SettingError, first_line, wrong
from verl_vcpo.actor.model.models import MODELS, NOT_BUILT, Install, install_here, trained_with
from verl_vcpo.actor.model.rotary import kind_of, lost_scaling
from verl_vcpo.common import model_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SETTING = "actor_rollout_ref.model.path"
OF_HUB = re.compile(r"\w[\w.-]*/[\w.-]+")
"""The form of a model's name on the hub, as of a folder's path of two parts."""
_FOLDER = "give a Hugging Face checkpoint's folder"
INDEX = "model.safetensors.index.json"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.*", "*.tiktoken", "spiece.model", "tekken.json")
"""One of which a tokenizer of transformers has; without any, transformers makes an empty one."""
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_BIASES = ("attention_bias", "mlp_bias")
_OF_ATTENTION = ("linear_qkv", "linear_proj")
"""Megatron's names of the linear layers of attention; the last part of a pattern that matches them alone."""


def check_model(config: DictConfig) -> "PreTrainedTokenizerBase":
    """Refuse a folder from which no sampler could start, or no trained model be written. Returns its tokenizer.

    A model that is given by its name of the hub is downloaded, and its folder takes the name's place.
    """
    model = config.actor_rollout_ref.model
    if not Path(model.path).is_dir():
        model.path = _downloaded(config, model.path)
    folder = Path(model.path)
    settings = read_config(folder)
    if why := missing_weights(folder):
        raise _wrong(folder, f"{why}; {_FOLDER}, or get the checkpoint again")
    _check_positions(config, settings)
    _check_generation(folder)
    tokenizer = read_tokenizer(model)
    try:
        model_files.read(model, type(tokenizer).vocab_files_names.values())
    except OSError as error:
        raise _wrong(folder, f"{error.filename or error} cannot be read; the trained model gets a copy") from None
    return tokenizer


def _check_generation(folder: Path) -> None:
    """Refuse settings of generation that transformers or vLLM cannot read, or of which they would lose the ends."""
    from transformers import GenerationConfig

    name, fix = model_files.GENERATION, "mend the file, or remove it"
    if not os.path.lexists(folder / name):
        return
    try:
        ends = GenerationConfig.from_pretrained(str(folder), local_files_only=True).eos_token_id
    except Exception as error:  # transformers raises many kinds
        raise _wrong(folder, f"{name} cannot be read ({first_line(error)}); {fix}") from None
    several = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if any(type(end) is not int for end in several):
        raise _wrong(folder, f"{name}: eos_token_id is {ends!r}, and has to be a token's number, or a list; {fix}")


def _downloaded(config: DictConfig, name: str) -> str:
    """The folder of a model of the hub, which is downloaded where it has not been."""
    if not OF_HUB.fullmatch(name) or name.startswith("models/") or Path(name).parent.is_dir():
        made = "`bash scripts/quickstart.sh` makes a small one, `bash scripts/smollm2.sh` gets a pretrained one"
        raise wrong(config, _SETTING, f"no such folder; {_FOLDER} ({made})")
    fix = f"no such folder; get it where there is a network: `hf download {name} --local-dir {name.split('/')[1]}`"
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise wrong(config, _SETTING, f"{fix}, or set HF_HUB_OFFLINE=0 in the environment to have it downloaded")
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(name))
    except Exception as error:  # of the network, of the hub, of the disk
        raise wrong(config, _SETTING, f"{fix} ({first_line(error)})") from None


def _wrong(folder: Path, words: str) -> SettingError:
    return SettingError(f"{_SETTING}={folder}: {words}")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model's folder. Refuses a folder without one."""
    try:
        settings = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise _wrong(folder, f"the folder has no config.json; {_FOLDER}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _wrong(folder, f"config.json cannot be read ({first_line(error)}); {_FOLDER}") from None
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise _wrong(folder, f"config.json names no model_type; {_FOLDER}")
    for name in ("text_config", "rope_scaling", "rope_parameters"):
        if not isinstance(settings.get(name), dict | None):
            raise _wrong(folder, f"config.json has {name}={settings[name]!r:.40}, which is no object; {_FOLDER}")
    return settings


def has_experts(model: dict[str, Any]) -> bool:
    """Return True for the config.json of a mixture of experts."""
    return any(model.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def missing_weights(folder: Path) -> str | None:
    """Say which weights a model's folder lacks, or which file of weights cannot be read; None: all are there."""
    place: dict[str, str] = {}
    if (folder / INDEX).is_file():
        try:
            place = dict(json.loads((folder / INDEX).read_text())["weight_map"])
            parts = set(place.values())
            if others := [part for part in parts if not isinstance(part, str)]:
                raise TypeError(f"{others[0]} is no file's name")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return f"{INDEX} cannot be read ({first_line(error)})"
        if missing := sorted(part for part in parts if not (folder / part).is_file()):
            return f"{len(missing)} of {len(parts)} files of weights are missing, the first is {missing[0]}"
    elif not any(file.is_file() and file.stat().st_size for pattern in _WEIGHTS for file in folder.glob(pattern)):
        return "the folder has no weights (*.safetensors)"
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as tensors:  # compares the header with the file's size
                names = set(tensors.keys())
        except (OSError, SafetensorError) as error:
            return f"{file.name} cannot be read ({first_line(error)})"
        if lost := sorted(name for name, part in place.items() if part == file.name and name not in names):
            return f"{file.name} lacks {len(lost)} of its weights, the first is {lost[0]}"
    return None


def parameters(folder: Path) -> int | None:
    """The number of the parameters in a model's folder; None: not known."""
    index = folder / INDEX
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
    if not all((folder / name).is_file() for name in names):
        return None
    total = 0
    for name in names:
        with safe_open(folder / name, framework="numpy") as tensors:
            total += sum(math.prod(part.get_shape()) for part in map(tensors.get_slice, tensors.keys()))
    return total


def _check_positions(config: DictConfig, settings: dict[str, Any]) -> None:
    """Refuse lengths beyond the model's positions; of a model with scaled positions vLLM computes its own limit."""
    scaling = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    most = (settings.get("text_config") or settings).get("max_position_embeddings")
    most = config.actor_rollout_ref.model.override_config.get("max_position_embeddings", most)
    if scaling.get("rope_type", scaling.get("type", "default")) != "default" or not isinstance(most, int):
        return
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    has = f"the model has {most} positions (max_position_embeddings)"
    if prompt + response > most:
        both = f"data.max_prompt_length={prompt}, data.max_response_length={response}"
        words = f"with {both} a sequence has {prompt + response} tokens, and {has}; shorten one"
        raise wrong(config, f"data.max_{'prompt' if prompt >= response else 'response'}_length", words)
    if (config.actor_rollout_ref.rollout.max_model_len or 0) > most:
        raise wrong(config, "actor_rollout_ref.rollout.max_model_len", f"{has}; set it to {most} or less")


def read_tokenizer(model: DictConfig) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model's folder, with the chat template of the run. Refuses a folder that lacks one of them."""
    from transformers import AutoTokenizer

    path = Path(model.tokenizer_path or model.path)
    given = f"{'actor_rollout_ref.model.tokenizer_path' if model.tokenizer_path else _SETTING}={path}"
    if not model.trust_remote_code and not any(any(path.glob(name)) for name in _VOCABULARIES):
        raise SettingError(f"{given}: the folder has no tokenizer ({_VOCABULARIES[0]}); {_FOLDER}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:  # transformers raises many kinds for a folder without a tokenizer
        raise SettingError(f"{given}: no tokenizer ({first_line(error)}); {_FOLDER}") from None
    if model.custom_chat_template:
        tokenizer.chat_template = model.custom_chat_template
    if not tokenizer.chat_template:
        words = "the tokenizer has no chat template, and prompts are chat messages; give one by"
        raise SettingError(f"{given}: {words} actor_rollout_ref.model.custom_chat_template")
    return tokenizer


def check_trainable(config: DictConfig) -> None:
    """Refuse a model that the trainer cannot build here, or of which it would build another; none of the hub."""
    paths = {"actor_rollout_ref.model.path": config.actor_rollout_ref.model.path}
    if config.critic.enable:
        paths["critic.model.path"] = config.critic.model.path
    for setting, path in paths.items():
        if path and (Path(path) / "config.json").is_file():
            model = read_config(Path(path))
            if why := _obstacle(model, install_here(config.trainer.device)):
                raise SettingError(f"{setting}={path}: {why}")
            _check_vocabulary(config, path, model)
            of_actor = setting.startswith("actor_rollout_ref.")
            if of_actor and has_experts(model):
                _check_adapters(config, model)
            if of_actor and not has_experts(model) and config.actor_rollout_ref.rollout.enable_rollout_routing_replay:
                words = f"{path} is no mixture of experts; leave it out"
                raise wrong(config, "actor_rollout_ref.rollout.enable_rollout_routing_replay", words)


def _check_adapters(config: DictConfig, model: dict[str, Any]) -> None:
    """Refuse a mixture's adapters but those of grouped-query attention, merged for the samplers.

    Megatron-Bridge gives the experts of a rank one adapter, so the adapters of experts depend on the layout. With
    tensor parallelism it computes adapters of latent attention's lower projections from other tokens.
    """
    lora, setting = config.actor_rollout_ref.model.lora, "actor_rollout_ref.model.lora"
    if not lora.rank:
        return
    if model.get("kv_lora_rank"):
        raise wrong(config, f"{setting}.rank", "adapters of latent attention are not supported; set it to 0")
    if not lora.merge:
        words = "vLLM would hold an adapter for every expert of a mixture, and none is trained; set it to true"
        raise wrong(config, f"{setting}.merge", words)
    names = lora.target_modules or ["every layer"]
    if any("|" in name or name.split(".")[-1] not in _OF_ATTENTION for name in names):
        words = f"a mixture of experts has adapters of attention alone; set it to [{','.join(_OF_ATTENTION)}]"
        raise wrong(config, f"{setting}.target_modules", words)


def _check_vocabulary(config: DictConfig, path: str, model: dict[str, Any]) -> None:
    """Refuse a vocabulary that the trainer's ranks cannot share.

    Padding it would not do: rows of the head that belong to no token would take probability from the others.
    """
    setting = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
    size = model.get("vocab_size") or model.get("text_config", {}).get("vocab_size")
    if isinstance(size, int) and size % (ranks := config.actor_rollout_ref.actor.megatron.tensor_model_parallel_size):
        words = f"does not divide the {size} tokens of {path}/config.json; set it to a divisor of {size}"
        raise wrong(config, setting, f"{words}, such as {math.gcd(size, ranks)}")


def needs_transformer_engine(path: str) -> str | None:
    """The name of the model in this folder, if an installation without Transformer Engine cannot train it."""
    if not (Path(path) / "config.json").is_file():
        return None
    model = MODELS.get(read_config(Path(path))["model_type"])
    return model.name if model and Install.GPU not in model.installs else None


def _obstacle(config: dict[str, Any], install: Install | None) -> str | None:
    """Why an installation cannot train a model, and what to do. `install=None`: that for GPUs which trains most."""
    kind = config["model_type"]
    trained, model = trained_with(install or Install.TRANSFORMER_ENGINE), MODELS.get(kind)
    instead = f"take a model of type {', '.join(sorted(trained))}"
    if model is None:
        why = NOT_BUILT.get(kind, "no test has trained one, so the trainer might compute something else")
        return f"model_type={kind} is not supported: {why}; {instead}"
    if kind not in trained:
        cure = f"install it (scripts/{Install.TRANSFORMER_ENGINE}), or " if install is Install.GPU else ""
        return f"model_type={kind} needs Transformer Engine, which is not installed here; {cure}{instead}"
    if config.get("quantization_config"):
        return (
            "its weights are quantized (quantization_config in its config.json), and those that the trainer makes are "
            "not, so that no sampler could load them; take the model without quantization"
        )
    positions = config.get("rope_parameters") or config.get("rope_scaling") or {}
    of_layers = [part for part in positions.values() if isinstance(part, dict)] or [positions]
    if other := next((found for found in map(kind_of, of_layers) if found not in model.positions), None):
        return (
            f"the trainer has no rotary positions of type {other} for model_type={kind}, and would "
            f"compute other log-probs than the samplers; take a model with {' or '.join(model.positions)}"
        )
    if lost := lost_scaling(positions):
        return lost
    if config.get("topk_method") == "group_limited_greedy":
        return f"Megatron limits groups of experts by another rule than its topk_method; {instead}"
    left_out = [name for name in _BIASES if config.get(name) and not (model.has_biases and name == "attention_bias")]
    if left_out:
        return f"the trainer would leave out the biases that {left_out[0]}=true in its config.json adds; {instead}"
    return None
