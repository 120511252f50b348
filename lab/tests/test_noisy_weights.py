"""The right answer of lab.noisy_weights is right, and each kind of weights does what it is for."""

import json
import math
from pathlib import Path

import pytest
import torch

from lab.long_responses import RATIOS
from lab.noisy_weights import CORRELATION, OF_TOKENS, ORACLE, SIGNAL, WEIGHTS, _by_token, _shrunk, draw, main, measure

ALONE, TRUNCATED, SHRUNK, BY_TOKEN, BY_LENGTH, DECOUPLED = WEIGHTS


def test_exact_weights_have_the_right_answer() -> None:
    drawn = draw(512, 0.8, torch.Generator().manual_seed(0))
    right = SIGNAL + CORRELATION * math.sqrt(-math.log(0.8))
    for log_weight in (drawn.lag, drawn.log_weight):
        assert (log_weight.exp() * drawn.value).mean() == pytest.approx(right, abs=0.02)


def test_what_is_left_of_each_kind() -> None:
    fresh, stale = ({row.weights: row for row in measure(2048, ratio, batch=256)} for ratio in (1.0, 0.8))
    lost = CORRELATION * math.sqrt(-math.log(0.8))
    assert abs(fresh[SHRUNK].bias) < 0.01 and fresh[TRUNCATED].bias < -0.015
    for name in (ALONE, BY_TOKEN, BY_LENGTH):
        assert stale[name].bias == pytest.approx(-lost, abs=0.01), "no correction of the lag is left"
    assert abs(stale[DECOUPLED].bias) < 0.03 < abs(stale[SHRUNK].bias)
    assert stale[ORACLE].deviation == pytest.approx(1 / 16, rel=0.02) and abs(stale[ORACLE].bias) < 1e-9
    assert all(row.deviation > 0.99 * stale[ORACLE].deviation for row in stale.values())


def test_the_mean_of_shrunk_weights_is_1_and_tokens_agree_with_their_sum() -> None:
    drawn = draw(512, 0.8, torch.Generator().manual_seed(0))
    assert _shrunk(drawn).mean() == pytest.approx(1, abs=0.01)
    by_token = _by_token(drawn)
    assert len(by_token) == OF_TOKENS
    assert by_token.mean() == pytest.approx(1, abs=1e-3)


def test_the_command_prints_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tokens", "32", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["weights"] for row in rows} == {*WEIGHTS, ORACLE} and len(rows) == 4 * len({*WEIGHTS, ORACLE})
    assert main(["--tokens", "32"]) == 0
    assert "standard deviation" in capsys.readouterr().out


def test_the_page_has_the_commands_numbers() -> None:
    page = (Path(__file__).parents[2] / "docs/measurements/README.md").read_text()
    table = page[page.index("| weights | tokens |") :].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    kinds = [ALONE, *[TRUNCATED] * 3, *[SHRUNK] * 3, DECOUPLED, ORACLE]
    rows = [row for tokens in (512, 2048) for ratio in RATIOS for row in measure(tokens, ratio, batch=256)]
    found = {(row.tokens, row.ratio, row.weights): row for row in rows}
    for kind, (_, tokens, *told) in zip(kinds, cells, strict=True):
        for ratio, cell in zip(RATIOS, told, strict=True):
            row = found.get((2048 if tokens == "any" else int(tokens.replace(",", "")), ratio, kind))
            if row:  # those of 8,192 tokens take too long
                bias, deviation = map(float, cell.split(","))
                assert [bias, deviation] == pytest.approx([row.bias, row.deviation], abs=6e-3)
