"""The files beside the weights in a Hugging Face folder, which a trained model takes over from the first model.

transformers does not write all that it reads: it refuses some settings of generation, turns a tokenizer into its own
format, and leaves out custom code and licenses. So the files are copied.
"""

import json
import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

CONFIG, GENERATION = "config.json", "generation_config.json"
_TEMPLATE = "chat_template.jinja"
_OTHER_TEMPLATES = ("additional_chat_templates/*.jinja", "chat_template.json")
_OF_MODEL = (CONFIG, GENERATION, "*.py", "LICENSE*", "NOTICE*")
_OF_TOKENIZER = (
    *("tokenizer*", "*token*.json", "vocab*", "merges*", "*.model", "*.tiktoken", "tekken.json"),
    *(_TEMPLATE, *_OTHER_TEMPLATES, "*processor_config.json", "*.py"),
)


def read(model: Any, vocabulary: Iterable[str] = ()) -> dict[str, bytes]:
    """Return the content of each file, by its path in the trained model's folder.

    All are those of the first model, byte for byte, but for what the run's settings change: of config.json
    `override_config` and the layers for multi-token prediction, which are not trained; and the chat template.

    Args:
        model: verl's HFModelConfig, or the settings of one.
        vocabulary: names of files that the tokenizer has besides the usual ones.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: config.json is no JSON.
    """
    files = _matching(Path(model.hf_config_path or model.path), _OF_MODEL)
    files |= _matching(Path(model.tokenizer_path or model.path), (*_OF_TOKENIZER, *map(os.path.normpath, vocabulary)))
    if CONFIG not in files:
        raise FileNotFoundError(f"no {CONFIG} in {model.hf_config_path or model.path}")
    files[CONFIG] = _as_trained(files[CONFIG], model)
    if model.custom_chat_template:
        files = {name: content for name, content in files.items() if not _matches(name, _OTHER_TEMPLATES)}
        files[_TEMPLATE] = model.custom_chat_template.encode()
    return files


def write(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files into a folder, by their paths there. Raises OSError."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _matching(folder: Path, patterns: Iterable[str]) -> dict[str, bytes]:
    """Return files of a folder. Raises OSError for a link to nowhere, which `glob` would leave out."""
    there = (*folder.iterdir(), *folder.glob("additional_chat_templates/*.jinja"))
    found = {str(file.relative_to(folder)): file for file in there if not file.is_dir()}
    return {name: file.read_bytes() for name, file in sorted(found.items()) if _matches(name, patterns)}


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _as_trained(content: bytes, model: Any) -> bytes:
    """Return a config.json with what verl's HFModelConfig changes in the model that is trained."""
    first = json.loads(content)
    given = model.override_config
    given = OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given
    given = dict(given.get("model_config", given))
    given.pop("attn_implementation", None)  # an argument of transformers' loader
    trained = _merged(first, given)
    if not model.mtp.enable and first.get("num_nextn_predict_layers"):
        trained["num_nextn_predict_layers"] = 0
    return content if trained == first else (json.dumps(trained, indent=2) + "\n").encode()


def _merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` with `changes`, section by section."""
    below = {
        name: _merged(settings[name], value) if isinstance(value, Mapping) and name in settings else value
        for name, value in changes.items()
    }
    return {**settings, **below}
