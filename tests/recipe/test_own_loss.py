"""A method file with a policy loss of the user's own: found, tried once, and refused in one line where it is none."""

import copy
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo import core_algos

from recipe.fully_async_policy import main
from recipe.fully_async_policy.settings.errors import SettingError
from recipe.fully_async_policy.settings.method import check_own_loss
from tests.recipe.refused import ACTOR

METHOD = """# @package _global_
# A loss of one's own.
method: mine
vcpo:
  enable: false
actor_rollout_ref:
  actor:
    policy_loss:
      loss_mode: loss.py:right
    stabilizer:
      shift: 0.25
"""
LOSS = """
from verl.trainer.ppo.core_algos import agg_loss


def right(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, *, shift=0.5):
    losses = -log_prob * (advantages + shift)
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {"mine/shift": shift}


def needs_more(old_log_prob, log_prob, advantages, response_mask, *, eps, **more): ...


def one_number(log_prob, **more):
    return log_prob.mean()


def per_token(log_prob, **more):
    return log_prob, {}


def detached(log_prob, **more):
    return log_prob.detach().mean(), {}


def raises(log_prob, **more):
    return log_prob + more["advantagse"]
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that a relative path begins in, and losses that are registered for one test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", dict(core_algos.POLICY_LOSS_REGISTRY))
    (tmp_path / "loss.py").write_text(LOSS)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")


@pytest.fixture(scope="module")
def actor() -> DictConfig:
    """`actor_rollout_ref.actor` with method=none."""
    arguments = ["+task=countdown", "hardware=cpu", "method=none"]
    main.prepare_environment(arguments)
    return main.compose(arguments).actor_rollout_ref.actor


def checked(actor: DictConfig, loss: str, **settings: float) -> str:
    """`policy_loss.loss_mode` after the check."""
    given = copy.deepcopy(actor)
    given.policy_loss.loss_mode = loss
    OmegaConf.update(given, "stabilizer", settings, force_add=True)
    check_own_loss(given)
    return str(given.policy_loss.loss_mode)


def test_a_method_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").write_text(METHOD)
    arguments = ["+task=countdown", "hardware=cpu", "method=mine"]
    main.prepare_environment(arguments)
    config = main.compose(arguments, Path())
    main.check(config, files=False)
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == f"{tmp_path}/loss.py:right", (
        "the trainer may work in another folder"
    )
    config.vcpo.enable = True
    with pytest.raises(SettingError, match=r"loss.py:right: VCPO's update .* set vcpo.enable=false in the method's"):
        main.check(config, files=False)


def test_a_module_names_it(actor: DictConfig) -> None:
    assert checked(actor, "loss:right") == "loss:right"


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("none.py:right", "/none.py; give FILE.py:FUNCTION or MODULE:FUNCTION"),
        (
            "broken.py:right",
            "broken.py:right: it does not load: it raises ModuleNotFoundError: No module",
        ),
        ("loss.py:wrong", "there is no function wrong, but agg_loss, right, needs_more"),
        ("loss.py:needs_more", "missing a required argument: 'eps'; verl passes"),
        ("loss.py:one_number", "it returned a Tensor; return (loss, metrics)"),
        ("loss.py:per_token", "it returned ([2, 3], dict); return a tensor of one number"),
        ("loss.py:detached", "its loss has no gradient; compute it from log_prob"),
        ("loss.py:raises", "it raises KeyError: 'advantagse', for made-up log-probs"),
    ],
)
def test_what_cannot_be_a_loss(actor: DictConfig, loss: str, expected: str) -> None:
    with pytest.raises(SettingError) as error:
        checked(actor, loss)
    assert str(error.value).startswith(f"{ACTOR}.policy_loss.loss_mode=") and expected in str(error.value)
    assert "\n" not in str(error.value)


def test_its_settings_are_its_keyword_only_parameters(actor: DictConfig) -> None:
    checked(actor, "loss.py:right", shift=-1.5)
    with pytest.raises(SettingError, match=r"stabilizer.shfit: policy_loss.loss_mode=.* has the settings shift only"):
        checked(actor, "loss.py:right", shfit=1)
    with pytest.raises(SettingError, match=r"stabilizer.log_prob: .* has no settings there"):
        checked(actor, "loss.py:one_number", log_prob=1)
