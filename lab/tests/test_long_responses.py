"""The command's truth is the truth, and its bounds hold."""

import json
import math
from dataclasses import replace

import pytest
import torch

from lab.long_responses import draw, main, measure
from lab.worlds import V, World, worlds

CASES = {f"{world.name}, {world.tokens}": world for world in worlds(batch=128)}
WITHIN = ("* one token at +3 in 5 %, 512", "* half is truncated and masked, 512", "* two kinds of sampler, 8192")


@pytest.mark.parametrize("world", [World("", 500), World("", 500, shared_lag=True), World("", 500, heavy=True)])
def test_the_parts_are_those_asked_for(world: World) -> None:
    drawn = draw(replace(world, batch=4000), 9, torch.Generator().manual_seed(0))
    assert drawn.variance.sum() / drawn.tokens.sum() == pytest.approx(math.log(2) / 500)
    variance = drawn.variance + V * drawn.tokens
    assert (drawn.log_weight + variance / 2).var() == pytest.approx(variance.mean().item(), rel=0.1)
    of_tokens = V + (0.0 if world.shared_lag else math.log(2) / 500)
    assert drawn.squares.sum() / drawn.tokens.sum() == pytest.approx(of_tokens, rel=0.1)


@pytest.mark.parametrize("case", [*WITHIN, "* one fresh token, then no answer, 8192", "normal, ESS ratio 0.3, 2048"])
def test_the_step_is_within_both_bounds(case: str) -> None:
    row = measure(CASES[case], runs=4)
    assert row.holds, row


def test_the_command_prints_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--only", "+3 in 5 %, v", "--runs", "1"]
    assert main([*small, "--json"]) == 0
    assert [row["holds"] for row in json.loads(capsys.readouterr().out)] == [True, True]
    assert main(small) == 0
    assert "told / right" in capsys.readouterr().out
