"""How many GPUs, on which side, at which lag? `python -m lab.planner RUN... --gpus 32 [--lags 0,1,8]`.

Forecasts every split of the GPUs between trainer and samplers, at every lag: seconds per step, GPU hours, idle shares,
lag, what limits the speed and what one GPU more would gain. Calibrated on the folders of one or more runs; without a
run (--device), on a model's shape and a data sheet, which is a guess. Prints a table and a sentence that says what to
take, and writes plan.html into --out. docs/guide/sizing.md says how far to trust it.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from lab.planner import calibration, device, like, page
from lab.planner.answers import plan
from lab.planner.rates import PlanError, Rates
from recipe.command_line import OneLineParser, run_command

_LAGS, _STEPS = "0,1,2,4,8,16", 500
_SHARED = 2  # a run on CPU has one trainer and one sampler


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m lab.planner",
        description=__doc__,
    )
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="calibrate on this run's folder; the first gives the sizes"
    )
    parser.add_argument(
        "--gpus", type=int, help="split this number of GPUs between trainer and samplers (default: those of --like)"
    )
    parser.add_argument(
        "--lags", help=f"forecast these values of async.lag, with commas (default {_LAGS}, or that of --like)"
    )
    parser.add_argument("--batch", type=int, help="train on this number of prompts a step (default: the run's)")
    parser.add_argument("--samples", type=int, help="draw this number of responses to each prompt (default: the run's)")
    parser.add_argument(
        "--steps", type=int, help=f"plan a run of this number of steps (default {_STEPS}, or those of --like)"
    )
    parser.add_argument("--like", type=Path, metavar="SCRIPT", help="take layout and sizes of this launch script")
    parser.add_argument("--out", type=Path, default=Path(), help="write plan.html into this folder (default: here)")
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON line, last")
    guess = parser.add_argument_group("without a run: a guess from data sheets")
    guess.add_argument("--device", help=f"use the data sheet of this GPU: one of {', '.join(device.DEVICES)}")
    guess.add_argument(
        "--model", help="plan for this Hugging Face folder, or a name that is known (default: that of --like)"
    )
    guess.add_argument(
        "--prompt-tokens", type=float, default=200, help="take prompts to have this mean length (default 200)"
    )
    guess.add_argument("--response-tokens", type=float, help="take responses to have this mean length")
    guess.add_argument("--longest", type=float, help="cut responses at this length (default: 4 times the mean)")
    return parser


def _numbers(given: str) -> list[float]:
    try:
        lags = [float(lag) for lag in given.split(",")]
    except ValueError:
        lags = [-1.0]
    if min(lags) < 0 or not all(lag < float("inf") for lag in lags):
        raise PlanError(f"--lags {given}: give numbers of at least 0, with commas, as {_LAGS}")
    return lags


def _rates(arguments: argparse.Namespace, layout: like.LaunchLayout | None) -> Rates:
    for name in ("gpus", "batch", "samples", "steps"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise PlanError(f"--{name} {value}: give 1 or more")
    if arguments.runs and arguments.device:
        raise PlanError("--device: is for a plan without a run; leave it out, or the runs")
    rates = calibration.calibrate(arguments.runs) if arguments.runs else _guessed(arguments, layout)
    if layout:
        rates = layout.put_into(rates)
    work = rates.workload
    prompts, samples = arguments.batch or work.prompts, arguments.samples or work.samples
    return replace(rates, workload=replace(work, prompts=prompts, samples=samples))


def _guessed(arguments: argparse.Namespace, layout: like.LaunchLayout | None) -> Rates:
    from recipe.fully_async_policy.plan.model_shape import read_shape

    if not arguments.device:
        raise PlanError("give the folder of a run to calibrate on, or --device for a guess from a data sheet")
    model = arguments.model or (layout and layout.model)
    if not model or not arguments.response_tokens:
        raise PlanError("--device: also needs --model (or --like) and --response-tokens")
    shape = read_shape(model)
    if shape is None:
        raise PlanError(f"--model {model}: no config.json there, and no name that is known")
    longest = arguments.longest or 4 * arguments.response_tokens
    return device.guess(
        shape,
        arguments.device,
        batch=layout.batch if layout else arguments.batch or 32,
        samples=layout.samples if layout else arguments.samples or 16,
        prompt_tokens=arguments.prompt_tokens,
        response_tokens=arguments.response_tokens,
        longest=longest,
        trainer_unit=layout.trainer_unit if layout else 1,
        sampler_gpus=layout.gpus_of_sampler if layout else 1,
        slots=layout.slots if layout else 256,
    )


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 2 where what was given allows no forecast."""
    arguments = _parser().parse_args(argv)
    try:
        layout = like.of_script(arguments.like) if arguments.like else None
        rates = _rates(arguments, layout)
        lags = _numbers(arguments.lags or (f"{layout.lag:g}" if layout else _LAGS))
        split = (layout.trainer_gpus, layout.sampler_gpus) if layout and arguments.gpus is None else None
        if arguments.gpus is None and split is None:
            raise PlanError("--gpus: give the number of GPUs of trainer and samplers together, or --like SCRIPT")
        gpus = arguments.gpus or sum(split or ())
        if rates.cores and gpus > _SHARED:
            apart = "each GPU is as fast as the machine of the run, whose cores trainer and samplers shared"
            rates = replace(rates, cores=None, assumptions=[*rates.assumptions[:2], apart, rates.assumptions[-1]])
        found = plan(rates, gpus, lags, arguments.steps or (layout.steps if layout else _STEPS), only=split)
        arguments.out.mkdir(parents=True, exist_ok=True)
        page.write(found, arguments.out / "plan.html")
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or arguments.out}: {error.strerror}", file=sys.stderr)
        return 2
    page.show(found, arguments.out / "plan.html")
    if arguments.json:
        print(json.dumps(found.as_json()))
    return 0


if __name__ == "__main__":
    run_command(main)
