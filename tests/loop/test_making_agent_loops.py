"""Agent loops are made as hydra makes them, without its copies."""

from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop import agent_loop as upstream

from verl_vcpo.samplers import agent_loop_class as agent_loop

TARGET = f"{__name__}.Recorded"


class Recorded:
    """Keeps what the constructor was given."""

    def __init__(self, **given: Any) -> None:
        self.given = given


class Server:
    """An argument of a class of its own."""


@pytest.mark.parametrize(
    "config",
    [
        {"_target_": TARGET},
        OmegaConf.create({"name": "mine", "_target_": TARGET, "max_turns": 3}),
        OmegaConf.create({"_target_": TARGET, "limits": {"turns": 3}}),
        {"_target_": TARGET, "_recursive_": False},
    ],
    ids=["a class", "settings", "nested settings", "an instruction to hydra"],
)
def test_the_same_as_hydra(config: Any) -> None:
    arguments = {"server_manager": Server(), "hf_model_type": "qwen2", "processor": None}
    ours, theirs = agent_loop.make(config, **arguments), hydra.utils.instantiate(config=config, **arguments)
    assert type(ours) is type(theirs) is Recorded
    assert ours.given.keys() == theirs.given.keys()
    assert {name: ours.given[name] for name in theirs.given} == theirs.given
    assert ours.given["server_manager"] is arguments["server_manager"]


def test_plain_settings_are_not_merged_by_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hydra.utils, "instantiate", lambda **_: pytest.fail("hydra was called"))
    monkeypatch.setattr(upstream, "hydra", upstream.hydra)  # what the next line replaces comes back after the test
    agent_loop.make_without_copies()
    assert isinstance(upstream.hydra.utils.instantiate(config={"_target_": TARGET}), Recorded)
