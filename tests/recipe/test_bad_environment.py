"""Variables of the environment that a run cannot have end before a process starts, as bad settings do."""

import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.enums import AttnBackend

from recipe.fully_async_policy.settings.validate import validate
from recipe.fully_async_policy.settings.variables import check_variables
from tests.recipe.refused import MEGATRON, composed, run

pytestmark = pytest.mark.usefixtures("nothing_starts")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "W&B has no key: run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"),
        ({"WANDB_API_KEY": "short"}, "WANDB_API_KEY invalid: API key must have 40+ characters, has 5."),
        ({"WANDB_MODE": "of"}, "WANDB_MODE=of: Input should be 'online', 'offline'"),
        ({"WANDB_MODE": "offline"}, None),
        ({"WANDB_API_KEY": "0" * 40}, None),
    ],
)
def test_wandb_needs_a_key_unless_it_is_offline(
    good: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    expected: str | None,
) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name, value in {**variables, "HOME": str(tmp_path), "NETRC": f"{tmp_path}/netrc"}.items():
        monkeypatch.setenv(name, value)
    if expected is None:
        validate(composed({**good, "trainer.logger": "[wandb]"}))
    else:
        assert f"trainer.logger=wandb: {expected}" in run(good, capsys, "trainer.logger=[wandb]")


@pytest.mark.parametrize("value", "01")
@pytest.mark.parametrize("kernel", ["FLASH", "FUSED", "UNFUSED"])
def test_a_choice_of_attention_that_is_in_the_environment_too(
    good: dict[str, str], capsys: pytest.CaptureFixture[str], kernel: str, value: str
) -> None:
    """Refused where Megatron refuses, which says so only in a trainer's process that has started."""
    given, setting = {f"NVTE_{kernel}_ATTN": value}, f"{MEGATRON}.override_transformer_config.attention_backend"
    for backend in AttnBackend:
        model = SimpleNamespace(config=SimpleNamespace(attention_backend=backend, flash_attention_version=None))
        try:
            with patch.dict(os.environ, given):
                LanguageModule._set_attention_backend(model)
        except AssertionError:
            with patch.dict(os.environ, given):
                said = run({**good, setting: backend.name}, capsys)
            assert f"{setting}={backend.name}: Megatron refuses NVTE_{kernel}_ATTN={value} in the env" in said
        else:
            config = composed({**good, setting: backend.name})
            with patch.dict(os.environ, given):
                validate(config, files=False)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("OMP_NUM_THREADS", "0", "give a whole number, 1 or more, or unset it"),
        ("OMP_NUM_THREADS", "", "give a whole number"),
        ("OMP_NUM_THREADS", "two", "give a whole number"),
        ("MKL_NUM_THREADS", "-1", "give a whole number"),
        ("VLLM_PORT", "eighty", "give the number of a port, or unset it"),
        ("RAY_ADDRESS", "garbage", "is no address of a Ray cluster; give HOST:PORT, or leave it out"),
        ("RAY_ADDRESS", "10.0.0.1", "is no address of a Ray cluster"),
        ("RAY_ADDRESS", "10.0.0.1:70000", "is no address of a Ray cluster"),
        ("RAY_ADDRESS", "ray://10.0.0.1:10001", "is no address of a Ray cluster"),
        ("RAY_ADDRESS", "tcp://10.0.0.1:6379", "is no address of a Ray cluster"),
        ("RAY_ADDRESS", "127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1 (unavailable); mend the address"),
    ],
)
def test_environment_variables(
    variable: str,
    value: str,
    words: str,
    good: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv(variable, value)
    (line,) = run(good, capsys).splitlines()
    assert value in line and words in line


@pytest.mark.parametrize("value", ["4", "4,2", " 2"])
def test_threads_as_openmp_takes_them(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    check_variables()
