"""The treatments of truncated responses in the simulator."""

import math
from dataclasses import replace

import pytest
import torch

from lab.simulator import main
from lab.simulator.simulator import Simulator
from lab.simulator.update import LossMethod
from verl_vcpo.common.truncated import Truncated

PENALTY = ("async.truncated=penalty", "async.overlong_buffer_len=3", "async.overlong_penalty_factor=2")


def rows(overrides: list[str], *more: str) -> list[dict[str, float]]:
    return Simulator(main.compose([*overrides, "trainer.total_training_steps=2", *more])).run()


@pytest.mark.parametrize("method", ["vcpo", "none"])
def test_what_each_treatment_changes(overrides: list[str], method: str) -> None:
    """The untrained policy hardly ever ends a response by itself."""
    runs = {how: rows(overrides, f"method={method}", f"async.truncated={how}") for how in ("train", "mask", "drop")}
    default, penalty = (rows(overrides, f"method={method}", *more) for more in ((), PENALTY))
    assert [row["grad_norm"] for row in default[1:]] == [row["grad_norm"] for row in runs["train"][1:]]
    first = {how: run[1] for how, run in runs.items()}
    share = first["train"]["vcpo/truncated/share"]
    assert 0 < share <= 1 and all(row["vcpo/truncated/share"] == share for row in (*first.values(), penalty[1]))
    assert all(row["reward"] == first["train"]["reward"] for row in first.values())
    lost = first["train"]["vcpo/truncated/reward"] - penalty[1]["vcpo/truncated/reward"]
    assert lost == pytest.approx(2.0), "at the limit the whole factor"
    assert first["train"]["reward"] - penalty[1]["reward"] >= 2.0 * share - 1e-9
    if method == "vcpo":
        name = "actor/vcpo/truncated/gradient_share"
        assert 0 < first["train"][name] <= 1 and first["mask"][name] == 0


def test_the_groups_that_verls_estimators_compare(overrides: list[str]) -> None:
    config = main.compose([*overrides, "method=none"])
    simulator = Simulator(config)
    simulator.roll_out(version=0)
    batch = replace(
        simulator.queue.popleft(),
        reward=torch.tensor([1.0, 0, 1, 0, 1, 1, 0, 0]).double(),
        truncated=torch.tensor([0, 0, 0, 1, 0, 1, 1, 1]).bool(),
    )

    def advantages(treatment: Truncated) -> list[float]:
        method = LossMethod(simulator.method._actor, config.algorithm, treatment)
        fields = method.prepare(simulator.policy, batch)
        assert fields["response_mask"].any(dim=1).equal(~fields["left_out"])
        update = method.update(simulator.policy, batch, fields, lag=0)
        assert update.gradient is not None and update.gradient.any()
        return fields["advantages"][:, 0].tolist()

    half, third = math.sqrt(3) / 2, 1 / math.sqrt(3)  # of 2 in 4, and of 2 in 3, by standard deviations with n - 1
    assert advantages(Truncated.TRAIN) == pytest.approx([half, -half, half, -half, half, half, -half, -half], rel=1e-4)
    assert advantages(Truncated.MASK) == pytest.approx([half, -half, half, 0, half, 0, 0, 0], rel=1e-4)
    assert advantages(Truncated.DROP) == pytest.approx([third, -2 * third, third, 0, 0, 0, 0, 0], rel=1e-4)
    everything = replace(batch, truncated=torch.ones(8).bool())
    method = LossMethod(simulator.method._actor, config.algorithm, Truncated.MASK)
    update = method.update(simulator.policy, everything, method.prepare(simulator.policy, everything), lag=0)
    assert update.gradient is not None and not update.gradient.any() and update.ess_ratio == 0
