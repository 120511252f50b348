"""Advice names the side that holds the other up."""

import pytest

from scripts.report import payload
from verl_vcpo.report.advice import Advisor, ArithmeticWatch, BaselineWatch, CollapseWarner


def said(steps: int, *, lag: float = 8, shares_cores: bool = False, **line: float) -> list[str]:
    advisor = Advisor(lag, shares_cores)
    default = {"trainer_idle_share": 0.1, "sampler_idle_share": 0.1, "step_s": 10.0, "vcpo/async/deadline_wait_s": 0.0}
    return [text for _ in range(steps) if (text := advisor.look_at(default | line))]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"trainer_idle_share": 0.6}, "give the samplers more devices"),
        ({"sampler_idle_share": 0.6}, "give the trainer more devices"),
        ({"trainer_idle_share": 0.5, "vcpo/async/deadline_wait_s": 4.0}, "the last 10 steps: raise async.lag, shorten"),
        (
            {"vcpo/async/deadline_wait_s": 4.0, "tool_use/calls": 4, "tool_use/call_s": 12.0},
            "stragglers held the trainer up 40% of the time over the last 10 steps, and a tool's call took 3.0 s: "
            "raise async.lag, or, unless calls wait for tool_use.latency_median_s, give",
        ),
    ],
)
def test_it_names_the_side_and_what_to_change(line: dict[str, float], words: str) -> None:
    assert words in said(10, **line)[0]


def test_truncated_responses_that_become_more_are_said_once() -> None:
    advisor = Advisor(8, shares_cores=True)
    line = {"trainer_idle_share": 0.1, "sampler_idle_share": 0.1, "step_s": 10.0, "vcpo/async/deadline_wait_s": 0.0}
    shares = [0.3] * 10 + [0.1] * 10 + [0.15] * 30 + [0.3] * 30  # what falls at first, and rises a little, is no alarm
    said = [advisor.look_at(line | {"vcpo/truncated/share": share}) for share in shares]
    assert [i for i, text in enumerate(said) if text] == [53]
    assert said[53].startswith("truncated responses have risen from 10% to 21% of the batch: read some")


def test_it_waits_until_it_lasts_and_says_it_once() -> None:
    assert not said(9, trainer_idle_share=0.9)
    assert len(said(100, trainer_idle_share=0.9)) == 1
    assert not said(50), "a balanced run needs no advice"


def test_on_one_processor_there_is_no_device_to_move() -> None:
    assert not said(50, shares_cores=True, sampler_idle_share=0.6)
    assert not said(50, shares_cores=True, trainer_idle_share=0.6)
    stragglers = {"trainer_idle_share": 0.5, "vcpo/async/deadline_wait_s": 4.0}
    assert "shorten data.max_response_length" in said(50, shares_cores=True, **stragglers)[0]


@pytest.mark.parametrize("shares_cores", [True, False])
def test_a_synchronous_run_waits_whatever_its_devices_are(shares_cores: bool) -> None:
    waits = {"trainer_idle_share": 0.6, "sampler_idle_share": 0.4, "vcpo/async/deadline_wait_s": 5.0}
    assert ["async.lag=1 or more" in text for text in said(50, lag=0, shares_cores=shares_cores, **waits)] == [True]
    assert not said(50, lag=0, shares_cores=shares_cores, sampler_idle_share=0.6)


def parts(arithmetic: float | None, lag: float | None = 1.0) -> dict[str, float | None]:
    """What a step's line has of long responses whose whole ESS ratio is low."""
    names = ("actor/vcpo/ess/arithmetic", "actor/vcpo/ess/lag", "actor/vcpo/mismatch/rms")
    return {"ess_ratio": 0.1, "grad_norm": 1.0, "kl": 0.0} | dict(zip(names, (arithmetic, lag, 0.031), strict=True))


@pytest.mark.parametrize(("lag", "told"), [(1.0, 0), (0.2, 1), (None, 1)])
def test_the_alarm_takes_no_length_for_a_lag(lag: float | None, told: int) -> None:
    warner = CollapseWarner(scales_step_size=True)
    assert sum(warner.look_at(parts(0.1, lag))[1] is not None for _ in range(20)) == told


def test_the_first_step_that_knows_says_whether_arithmetic_alone_is_too_much() -> None:
    watch = ArithmeticWatch()
    assert watch.look_at(parts(None)) is None
    text = watch.look_at(parts(0.2))
    assert text is not None and "0.031 per token" in text and "0.20: with vcpo.ess_part=lag" in text
    assert watch.look_at(parts(0.2)) is None and ArithmeticWatch().look_at(parts(0.6)) is None


@pytest.mark.parametrize(("of_lr", "follows_lag", "told"), [(0.5, True, [16]), (1.0, True, []), (0.5, False, [])])
def test_it_is_said_once_that_arithmetic_is_too_little_known(of_lr: float, follows_lag: bool, told: list[int]) -> None:
    watch, line = ArithmeticWatch(follows_lag), {**parts(0.8), "lr_multiplier": of_lr}
    texts = [watch.look_at(line | {"actor/vcpo/mismatch/rms_error": 0.001 * step}) for step in range(1, 31)]
    said = {step: text for step, text in enumerate(texts, 1) if text}
    assert list(said) == told
    assert all("nearly that of vcpo.ess_part=whole" in text and "fresh" not in text for text in said.values())


@pytest.mark.parametrize(
    ("above", "told"),
    [((0.09, -0.03), 1), ((0.12, -0.1), 0), ((-0.05, -0.03), 0), ((1e-8, 1e-8), 0), ((None, None), 0)],
    ids=["above", "above by chance", "below", "rounding", "no baseline"],
)
def test_a_baseline_that_stays_above_the_mean_reward_is_said_once(above: tuple[float | None, ...], told: int) -> None:
    watch = BaselineWatch()
    lines = [{"step": s, "reward": 0.5, "baseline": above[s % 2] and 0.5 + above[s % 2]} for s in range(1, 61)]
    said = [watch.look_at(line) for line in lines]
    assert [step for step, text in enumerate(said, 1) if text] == [BaselineWatch.STEPS] * told
    assert all("by 0.03 over the last 20 steps" in text and "method=vcpo_capped" in text for text in said if text)
    of_report = [text.split(",")[0] for text in payload._warnings(lines)]
    assert of_report == ["the baseline is above the mean reward"] * told
