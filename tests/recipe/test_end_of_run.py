"""What a run writes at its end is refused before the start, where it could not be written or would replace a file."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from recipe.fully_async_policy.settings.validate import SettingError, validate
from tests.common.test_model_files import FORMS
from tests.recipe.refused import MODEL, composed, run

pytestmark = pytest.mark.usefixtures("nothing_starts")


def test_settings_of_generation_that_can_be_read(good: dict[str, str]) -> None:
    file = Path(good[f"{MODEL}.path"], "generation_config.json")
    config = composed(good)
    for form in FORMS:
        file.write_text(json.dumps(form))
        validate(config)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "generation_config.json cannot be read (It looks like the config file at"),
        ("[]", "generation_config.json cannot be read ("),
        ('{"max_new_tokens": -1}', "generation_config.json cannot be read (`max_new_tokens` must be greater than 0"),
        ('{"num_return_sequences": 2}', "generation_config.json cannot be read (Greedy methods"),
        ('{"eos_token_id": "2"}', "generation_config.json: eos_token_id is '2', and has to be a token's number, or a"),
        ('{"eos_token_id": [1, null]}', "generation_config.json: eos_token_id is [1, None], and has to be"),
    ],
)
def test_settings_of_generation_that_cannot(
    good: dict[str, str], capsys: pytest.CaptureFixture[str], text: str, expected: str
) -> None:
    file = Path(good[f"{MODEL}.path"], "generation_config.json")
    file.write_text(text)
    line = run(good, capsys)
    assert f"{MODEL}.path={file.parent}: {expected}" in line and line.endswith("; mend the file, or remove it")


def test_a_file_that_is_a_lost_link(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(good[f"{MODEL}.path"], "LICENSE")
    file.symlink_to("nowhere")
    assert f"{file} cannot be read; the trained model gets a copy" in run(good, capsys)


def test_a_model_that_the_trained_one_would_replace(good: dict[str, str], tmp_path: Path) -> None:
    inside = tmp_path / "run" / "model"
    inside.mkdir(parents=True)
    validate(composed(good))
    (inside / "mine.txt").touch()
    first = {f"{MODEL}.path": str(shutil.copytree(good[f"{MODEL}.path"], inside / "first"))}
    for given in (good, {**good, **first}):
        with pytest.raises(SettingError, match=f"the trained model would replace {inside}; give another folder"):
            validate(composed(given))
    validate(composed({**good, **first, "save_model": "false"}))


@pytest.mark.parametrize(
    ("settings", "free", "needs"),
    [
        ({}, 3, 4),  # the model: one parameter, in float32
        ({"save_model": "false"}, 0, None),
        ({"save_model": "false", "trainer.save_freq": "50"}, 31, 32),  # two checkpoints, with Adam's 12 bytes
        ({"save_weights": "true", "trainer.save_freq": "40"}, 63, 64),
        ({"trainer.save_freq": "1", "trainer.max_actor_ckpt_to_keep": "2"}, 51, 52),
        ({"trainer.save_freq": "1", "trainer.resume_mode": "auto"}, 19, 20),
        ({"trainer.save_freq": "50", "actor_rollout_ref.actor.megatron.dtype": "bfloat16"}, 29, 30),
        ({"trainer.save_freq": "50", f"{MODEL}.lora.rank": "8"}, 11, 12),
        ({"ray_kwargs.ray_init.address": "10.0.0.1:6379", "trainer.save_freq": "1"}, 0, None),
    ],
)
def test_a_disk_that_is_too_small(
    good: dict[str, str], monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], free: int, needs: int | None
) -> None:
    config = composed({**good, **settings})
    usage = namedtuple("usage", "total free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, free))
    if needs is None:
        validate(config)
        return
    with pytest.raises(SettingError, match=rf"=.*/run.*: the run writes {needs / 1e9:.3g} GB there at the least, and"):
        validate(config)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, free + 1))
    validate(config)
