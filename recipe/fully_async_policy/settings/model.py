"""The model's folder: its configuration, weights and tokenizer, as far as they are on this machine."""

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from safetensors import SafetensorError, safe_open

from recipe.fully_async_policy.settings.errors import SettingError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SETTING = "actor_rollout_ref.model.path"
_FOLDER = "give a Hugging Face checkpoint's folder"
_INDEX = "model.safetensors.index.json"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.*", "*.tiktoken", "spiece.model", "tekken.json")
"""One of which a tokenizer of transformers has; without any, transformers makes an empty one."""
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def check_model(config: DictConfig) -> "PreTrainedTokenizerBase | None":
    """Refuse a folder from which no run could start. Returns its tokenizer; None of a model of the hub.

    Raises:
        SettingError: the first thing that is missing, broken, or too small for the run's lengths and layout.
    """
    tokenizer = check_sampled_model(config)
    if tokenizer is not None:
        folder = Path(config.actor_rollout_ref.model.path)
        ranks = config.actor_rollout_ref.actor.megatron.tensor_model_parallel_size
        _check_vocabulary(ranks, read_config(folder), folder)
    return tokenizer


def check_sampled_model(config: DictConfig) -> "PreTrainedTokenizerBase | None":
    """Refuse a folder from which no sampler could start. Returns its tokenizer; None of a model of the hub.

    Raises:
        SettingError: the first thing that is missing, broken, or too small for the run's lengths.
    """
    model = config.actor_rollout_ref.model
    folder = _folder(model.path)
    if folder is None:
        return None
    settings = read_config(folder)
    _check_weights(folder)
    _check_positions(config, settings)
    return read_tokenizer(model)


def _folder(path: str) -> Path | None:
    if Path(path).is_dir():
        return Path(path)
    hub_name = not path.startswith(("/", ".", "~")) and os.environ.get("HF_HUB_OFFLINE") != "1"
    if not hub_name:
        raise SettingError(f"{_SETTING}={path}: no such folder; {_FOLDER} (quickstart.sh makes a small one)")
    return None


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model's folder.

    Raises:
        SettingError: there is none, or it is no configuration of transformers.
    """
    file = folder / "config.json"
    try:
        settings = json.loads(file.read_text())
    except FileNotFoundError:
        raise SettingError(f"{_SETTING}={folder}: the folder has no config.json; {_FOLDER}") from None
    except (OSError, ValueError) as error:
        raise SettingError(
            f"{_SETTING}={folder}: config.json cannot be read ({first_line(error)}); {_FOLDER}"
        ) from None
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise SettingError(f"{_SETTING}={folder}: config.json names no model_type; {_FOLDER}")
    return settings


def _check_weights(folder: Path) -> None:
    if (folder / _INDEX).is_file():
        try:
            parts = set(json.loads((folder / _INDEX).read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise SettingError(f"{_SETTING}={folder}: {_INDEX} cannot be read ({first_line(error)})") from None
        missing = sorted(part for part in parts if not (folder / part).is_file())
        if missing:
            raise SettingError(
                f"{_SETTING}={folder}: {len(missing)} of {len(parts)} files of weights are missing, the first is "
                f"{missing[0]}; download the checkpoint again"
            )
    elif not any(file.stat().st_size for pattern in _WEIGHTS for file in folder.glob(pattern)):
        raise SettingError(f"{_SETTING}={folder}: the folder has no weights (*.safetensors); {_FOLDER}")
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy"):  # reads the header, and compares it with the file's size
                pass
        except (OSError, SafetensorError) as error:
            raise SettingError(
                f"{_SETTING}={folder}: {file.name} cannot be read ({first_line(error)}); get the checkpoint again"
            ) from None


def _check_positions(config: DictConfig, settings: dict[str, Any]) -> None:
    """Refuse lengths beyond the model's positions; of a model with scaled positions vLLM computes its own limit."""
    scaling = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        return
    most = settings.get("text_config", settings).get("max_position_embeddings")
    most = config.actor_rollout_ref.model.override_config.get("max_position_embeddings", most)
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    if not isinstance(most, int):
        return
    if prompt + response > most:
        name, length = max(("prompt", prompt), ("response", response), key=lambda pair: pair[1])
        raise SettingError(
            f"data.max_{name}_length={length}: with data.max_prompt_length={prompt}, data.max_response_length="
            f"{response} a sequence has {prompt + response} tokens, and the model has {most} positions "
            "(max_position_embeddings); shorten one"
        )
    longest = config.actor_rollout_ref.rollout.max_model_len
    if longest is not None and longest > most:
        raise SettingError(
            f"actor_rollout_ref.rollout.max_model_len={longest}: the model has {most} positions "
            f"(max_position_embeddings); set it to {most} or less"
        )


def _check_vocabulary(ranks: int, settings: dict[str, Any], folder: Path) -> None:
    """Refuse a vocabulary that the trainer's ranks cannot share.

    Padding it would not do: rows of the head that belong to no token would take probability from the others.
    """
    size = settings.get("vocab_size") or settings.get("text_config", {}).get("vocab_size")
    if isinstance(size, int) and size % ranks:
        raise SettingError(
            f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size={ranks}: does not divide the {size} tokens "
            f"of {folder}/config.json; set it to a divisor of {size}, such as {math.gcd(size, ranks)}"
        )


def read_tokenizer(model: DictConfig) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model's folder, with the chat template of the run.

    Args:
        model: the settings `actor_rollout_ref.model`.

    Raises:
        SettingError: there is none, or it has no chat template.
    """
    from transformers import AutoTokenizer

    setting, path = _SETTING, Path(model.path)
    if model.tokenizer_path:
        setting, path = "actor_rollout_ref.model.tokenizer_path", Path(model.tokenizer_path)
    if not model.trust_remote_code and not any(any(path.glob(name)) for name in _VOCABULARIES):
        raise SettingError(f"{setting}={path}: the folder has no tokenizer ({_VOCABULARIES[0]}); {_FOLDER}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:  # transformers raises many kinds for a folder without a tokenizer
        raise SettingError(f"{setting}={path}: no tokenizer ({first_line(error)}); {_FOLDER}") from None
    if model.custom_chat_template:
        tokenizer.chat_template = model.custom_chat_template
    if not tokenizer.chat_template:
        raise SettingError(
            f"{setting}={path}: the tokenizer has no chat template, and prompts are chat messages; give one by "
            "actor_rollout_ref.model.custom_chat_template"
        )
    return tokenizer
