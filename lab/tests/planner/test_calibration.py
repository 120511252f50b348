"""Rates are found again in the metrics of a run that had them."""

from pathlib import Path

import numpy as np
import pytest

from lab.planner.calibration import calibrate, draws
from lab.planner.processors import Processors
from lab.planner.rates import PlanError, SharedCores
from lab.tests.planner.made_up import run_folder
from verl_vcpo.report.processor_meter import CORES, Role


def test_the_rates_of_a_run_are_found(tmp_path: Path) -> None:
    rates = calibrate([run_folder(tmp_path / "run")])
    assert (rates.trainer.fixed_s, rates.trainer.token_s) == pytest.approx((1.0, 0.002))
    assert (rates.trainer.gpus, rates.trainer.unit, rates.trainer.exponent) == (2, 2, 1.0)
    assert (rates.sampler.iteration_s, rates.sampler.request_s) == pytest.approx((0.01, 0.001))
    assert rates.sampler.prefill_s == pytest.approx(0.0001) and rates.sampler.slots == 16
    assert (rates.sync_s, rates.start_s, rates.between_s) == pytest.approx((0.5, 30.25, 0.25))
    assert rates.cores is None
    work = rates.workload
    assert (work.prompts, work.samples, work.reward_s) == (4, 2, 0.5)
    assert work.lengths.mean() == 75 and work.outside_s.mean() == 0.5
    assert work.tokens == pytest.approx(800 + 40, rel=0.02)
    assert max(rates.fits.values()) < 1e-6


@pytest.mark.parametrize(("waits", "way_s"), [({"0": 8}, 0.8), ({"0": 4, "9": 4}, 0.4)])
def test_requests_of_a_batch_are_on_their_way_together(tmp_path: Path, waits: dict[str, int], way_s: float) -> None:
    """In 0.8 s of a step the sampler has requests and its engine none: in one go, or in two where some come later."""
    rates = calibrate([run_folder(tmp_path / "run", outside_s=waits)])
    assert rates.call_s == pytest.approx(way_s, rel=0.15)


def test_two_runs_give_the_scaling_of_the_trainer(tmp_path: Path) -> None:
    rates = calibrate([run_folder(tmp_path / "few", gpus=2), run_folder(tmp_path / "many", gpus=8, exponent=0.7)])
    assert rates.trainer.exponent == pytest.approx(0.7, abs=0.01)
    assert "GPUs ** 0.70, fitted to the runs" in rates.assumptions[0]


def test_what_the_parts_take_of_shared_cores(tmp_path: Path) -> None:
    """The agent loops take 0.4 s for 8 responses, with 0.2 s of the others. What a wait takes goes to looking."""
    rates = calibrate([run_folder(tmp_path / "run", device="cpu")])
    trainer_s = rates.trainer.fixed_s + rates.trainer.token_s * 840 + rates.between_s
    assert rates.agent_s == pytest.approx(0.05) and rates.cores
    assert (rates.cores.count, rates.cores.sampler, rates.cores.agents) == pytest.approx((4, 1.25, 1.5))
    assert rates.cores.looking == pytest.approx(0.35)
    assert rates.cores.trainer == pytest.approx(2 / trainer_s, rel=0.01)
    with pytest.raises(PlanError, match="engines_s is 0: part of the run was on another machine"):
        calibrate([run_folder(tmp_path / "apart", device="cpu", **{Role.ENGINES: 0.0})])
    with pytest.raises(PlanError, match="no vcpo/processor/cores"):
        calibrate([run_folder(tmp_path / "old", device="cpu", **{"vcpo/processor/cores": None})])


def test_an_engine_that_waited_for_a_core_is_faster_on_one_of_its_own(tmp_path: Path) -> None:
    """It took 1 s of the processors in the 2 s in which it had requests; its server took 0.5 s."""
    rates = calibrate([run_folder(tmp_path / "run", device="cpu", **{Role.ENGINES: 1.0})])
    assert (rates.sampler.iteration_s, rates.sampler.request_s) == pytest.approx((0.005, 0.0005))
    assert rates.sampler.prefill_s == pytest.approx(0.00005)
    assert rates.cores and rates.cores.sampler == pytest.approx(1.5)


def test_where_all_waits_are_alike_what_they_take_is_the_steps() -> None:
    took = dict.fromkeys(Role, 1.0) | {CORES: 2, "step_s": 4.0, "trainer_idle_share": 0.5}
    assert Processors([took] * 4).shared(trainer_s=2.0, busy_s=0.5) == SharedCores(2, 0.5, 0, 3, 2)


def test_the_engines_of_a_sampler_are_counted(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    config = (run / "config.yaml").read_text().replace("data_parallel_size: 1", "data_parallel_size: 2")
    (run / "config.yaml").write_text(config)
    sampler = calibrate([run]).sampler
    assert (sampler.slots, sampler.engines, sampler.gpus) == (32, 2, 2)
    # iterations of both are recorded, in turn: as many requests take an engine twice as long
    assert sampler.seconds(16) == pytest.approx(2 * (0.01 + 8 * 0.001))


def test_histograms_become_draws() -> None:
    assert draws([{"1": 2}, {"1": 1, "0.5": 1}]).tolist() == [0.5, 1, 1, 1]
    many = draws([{"1": 90_000, "2": 10_000}])
    assert len(many) <= 4096 and np.mean(many == 2) == pytest.approx(0.1, abs=0.001)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sampler_decode": None}, "no sampler_decode"),
        ({"response_lengths": None}, "no response_lengths"),
        ({"sampler_decode": {}}, "no iteration without a prompt"),
    ],
)
def test_what_the_metrics_lack_is_named(tmp_path: Path, changed: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        calibrate([run_folder(tmp_path / "run", **changed)])


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no metrics\.jsonl"):
        calibrate([tmp_path])
    run = run_folder(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:5]))
    with pytest.raises(PlanError, match="5 steps; a calibration needs 6"):
        calibrate([run])
    (run / "metrics.jsonl").write_text("no JSON\n")
    with pytest.raises(PlanError, match="0 steps; a calibration needs 6"):
        calibrate([run])
    (run / "metrics.jsonl").write_text("no JSON\n".join(lines))
    assert calibrate([run]).trainer
    (run / "config.yaml").write_text("a: [")
    with pytest.raises(PlanError, match="not the files of a run"):
        calibrate([run])
