"""A method file with a policy loss of the user's own: found, tried once, and refused in one line where it is none."""

import copy
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo import core_algos

from recipe.fully_async_policy import main
from recipe.fully_async_policy.settings.errors import SettingError
from recipe.fully_async_policy.settings.own_code import check_own_loss
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


def of_weights(log_prob, rollout_is_weights, **more):
    return log_prob.mean() * (2 if rollout_is_weights else 1), {}


class NoText(Exception):
    def __str__(self):
        raise KeyError("none")


def silent(**more):
    raise NoText


def ends(**more):
    raise SystemExit(3)


def given(log_prob, *, loss="log_prob.mean()", metrics="{}", **more):
    import torch

    return eval(loss), eval(metrics)
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


def checked(actor: DictConfig, function: str, **settings: Any) -> str:
    """`policy_loss.loss_mode` after the check."""
    given = copy.deepcopy(actor)
    given.policy_loss.loss_mode = function
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
        ("loss.py:NoText", "has no signature; name a function"),
        ("loss.py:silent", "it raises NoText: (its __str__ raises KeyError), for made-up"),
        ("loss.py:ends", "it raises SystemExit: 3, for made-up"),
        ("loss.py:per_token", "it returned ([3, 3] of torch.float32, dict); return a tensor of one real number"),
        ("loss.py:detached", "its loss has no gradient; compute it from log_prob"),
        ("loss.py:raises", "it raises KeyError: 'advantagse', for made-up log-probs"),
    ],
)
def test_what_cannot_be_a_loss(actor: DictConfig, loss: str, expected: str) -> None:
    with pytest.raises(SettingError) as error:
        checked(actor, loss)
    assert str(error.value).startswith(f"{ACTOR}.policy_loss.loss_mode=") and expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("log_prob.mean() * float('nan')", "its loss is nan; make it finite for all log-probs and masks"),
        ("log_prob.mean() / 0", "its loss is -inf; make it finite"),
        ("log_prob.mean().to_sparse()", "it returned ([] of torch.float32, torch.sparse_coo on cpu, dict)"),
        ("log_prob.mean().to('meta')", "it returned ([] of torch.float32, torch.strided on meta, dict)"),
        ("((log_prob * (m := more['response_mask'])).sum(1) / m.sum(1)).mean()", "its loss is nan; make it finite"),
        ("(log_prob - more['old_log_prob']).abs().sqrt().sum()", "its gradient is not finite, for made-up"),
        ("log_prob.mean()[None]", "it returned ([1] of torch.float32, dict); return a tensor of one real number"),
        ("log_prob.mean().item()", "it returned (float, dict); return a tensor of one real number"),
        ("log_prob.long().sum()", "it returned ([] of torch.int64, dict); return a tensor of one real number"),
        ("log_prob.mean() * 1j", "it returned ([] of torch.complex64, dict); return a tensor of one real number"),
        ("torch.ones((), requires_grad=True) * 2", "its loss has no gradient; compute it from log_prob"),
        (
            "torch.where(log_prob < 0, log_prob, (log_prob * 0).sqrt()).mean()",
            "its gradient is not finite, for made-up",
        ),
        ("log_prob.exp_().mul_(2).add(log_prob.exp_()).mean()", "leaf Variable that requires grad is being used in an"),
    ],
)
def test_what_no_update_can_be_made_by(actor: DictConfig, loss: str, expected: str) -> None:
    with pytest.raises(SettingError) as error:
        checked(actor, "loss.py:given", loss=loss)
    assert expected in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (
            "{'a': log_prob.detach()}",
            "its metric 'a' is tensor([[-1.0...00, -1.1000]]) (Tensor); make it a number",
        ),
        ("{'a': float('nan')}", "its metric 'a' is nan, for made-up log-probs; make it finite where there are tokens"),
        ("{'a': torch.tensor(1.0) / 0}", "its metric 'a' is inf, for made-up log-probs"),
        ("{'a': '1.0'}", "its metric 'a' is '1.0' (str); make it a number"),
        ("{'a': None}", "its metric 'a' is None; make it a number"),
        ("{'a': {'b': 1}}", "its metric 'a' is {'b': 1}; make it a number"),
        ("{'a': [1.0]}", "its metric 'a' is [1.0] (list); make it a number"),
        ("{'a': 1j}", "its metric 'a' is 1j (complex); make it a number"),
        ("{7: 1.0}", "a metric has the name 7 (int); make it a text"),
        ("{'entropy': 1.0}", "its metric 'entropy' has the name of another one; rename it"),
        ("{'grad_norm': 1.0}", "its metric 'grad_norm' has the name of another one; rename it"),
        ("{'actor/vcpo/ess_ratio': 1.0}", "its metric 'actor/vcpo/ess_ratio' has the name of another one"),
        ("[1.0]", "it returned ([] of torch.float32, list); return a tensor of one real number"),
    ],
)
def test_what_no_metric_can_be(actor: DictConfig, metrics: str, expected: str) -> None:
    with pytest.raises(SettingError) as error:
        checked(actor, "loss.py:given", metrics=metrics)
    assert expected in str(error.value) and "\n" not in str(error.value)
    checked(actor, "loss.py:given", metrics="{'a': torch.ones(1), 'b': True, 'c': log_prob.mean()}")


def test_weights_that_the_run_passes_are_tried(actor: DictConfig) -> None:
    given = copy.deepcopy(actor)
    given.policy_loss.loss_mode = "loss.py:of_weights"
    check_own_loss(given, {"bypass_mode": True, "rollout_is": "token"})
    with pytest.raises(SettingError, match="it raises RuntimeError: Boolean value of Tensor"):
        check_own_loss(given, {"bypass_mode": False, "rollout_is": "token"})


def test_its_settings_are_its_keyword_only_parameters(actor: DictConfig) -> None:
    checked(actor, "loss.py:right", shift=-1.5)
    with pytest.raises(SettingError, match=r"stabilizer.shfit: policy_loss.loss_mode=.* has the settings shift only"):
        checked(actor, "loss.py:right", shfit=1)
    with pytest.raises(SettingError, match=r"stabilizer.log_prob: .* has no settings there"):
        checked(actor, "loss.py:one_number", log_prob=1)
