"""Advice names the side that holds the other up."""

import pytest

from verl_vcpo.trainer.ppo.v1.advice import Advisor


def said(steps: int, **line: float) -> list[str]:
    advisor = Advisor()
    default = {"trainer_idle_share": 0.1, "sampler_idle_share": 0.1, "step_s": 10.0, "vcpo/async/deadline_wait_s": 0.0}
    return [text for _ in range(steps) if (text := advisor.look_at(default | line))]


@pytest.mark.parametrize(
    "line, words",
    [
        ({"trainer_idle_share": 0.6}, "give the samplers more devices"),
        ({"sampler_idle_share": 0.6}, "give the trainer more devices"),
        ({"trainer_idle_share": 0.5, "vcpo/async/deadline_wait_s": 4.0}, "stragglers held the trainer up 40%"),
    ],
)
def test_it_names_the_side_and_what_to_change(line: dict[str, float], words: str) -> None:
    assert words in said(10, **line)[0]


def test_it_waits_until_it_lasts_and_does_not_repeat_itself_every_step() -> None:
    assert not said(9, trainer_idle_share=0.9)
    assert len(said(29, trainer_idle_share=0.9)) == 2
    assert not said(50), "a balanced run needs no advice"
