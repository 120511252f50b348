"""Measure how often a model solves a task's validation problems: pass@1, and pass@k from several samples of each.

    python -m recipe.evaluate MODEL --task NAME [--samples K] [--json FILE] [setting=value ...]
    python -m recipe.evaluate --follow RUN [--samples K] [setting=value ...]

MODEL is a Hugging Face folder or a checkpoint of a run. Problems, prompts, sampling and rewards are those of the
task's preset, and settings the trainer's own: data.val_files=..., data.max_response_length=... With several samples
and a preset that validates greedily, responses are sampled as in training.

--follow evaluates each model that a run writes (save_weights=true, save_model=true) as it appears, as the run itself
would: with trainer.test_freq=-1 the trainer spends no time on that. Results go to RUN/evaluations, and `vcpo report`
shows them. On GPUs, CUDA_VISIBLE_DEVICES gives the command devices that the run does not have.
"""

import argparse
import json
import logging
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe.command_line import OneLineParser, run_command
from recipe.evaluate.estimates import Answer, Interval, interval, pass_at, powers_of_two
from recipe.evaluate.settings import deciding, of_run, of_task, on_cpu
from recipe.export import ExportError, weights_of
from recipe.fully_async_policy import main as trainer
from recipe.fully_async_policy.launch.next_steps import one_line
from recipe.fully_async_policy.launch.ray_access import LOOPBACK
from verl_vcpo.common.whole_file import try_file, write_whole

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True)
class Result:
    """The result on the problems of one data source, or on all problems."""

    problems: int
    score: float
    """The mean reward."""
    pass_at: dict[int, Interval]
    """The share of solved problems for each k; empty if the reward does not say which answers are correct."""


def main(argv: list[str] | None = None) -> int:
    """Evaluate a model. Return the exit code: 2 for a wrong argument, 1 for a failed evaluation."""
    parser = OneLineParser(prog="python -m recipe.evaluate", description=__doc__)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="Hugging Face folder, or global_step_N of a run")
    parser.add_argument("--task", metavar="NAME", help="preset: countdown, gsm8k, math, ...")
    parser.add_argument("--settings-of", type=Path, metavar="RUN", help="instead of --task: as this run evaluates")
    parser.add_argument("--follow", type=Path, metavar="RUN", help="evaluate each model of a run as it appears")
    parser.add_argument(
        "--samples", type=int, metavar="K", help="draw this number of responses to each problem (default: the preset's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result, and every answer, to FILE")
    trainer.add_config_dir(parser)
    parser.add_argument("overrides", nargs="*", metavar="setting=value", help="change the trainer's settings")
    args = parser.parse_intermixed_args(argv)
    if args.follow:
        return _follow(parser, args)
    if args.settings_of and args.config_dir:
        parser.error("--config-dir: is for --task; the settings of a run are all in its folder")
    if args.model is None or bool(args.task) == bool(args.settings_of):
        parser.error("give MODEL and --task NAME, or --follow RUN")

    from recipe.fully_async_policy.settings.errors import SettingError

    try:
        trainer.prepare_environment([*args.overrides, *(["hardware=cpu"] if on_cpu(args.settings_of) else [])])
        os.environ.update({name: os.environ.get(name, value) for name, value in LOOPBACK.items()})  # vLLM's gloo, NCCL
        from recipe.fully_async_policy.settings.own_files import located

        config = composed(args)
        with located([f"+task={args.task}"] * bool(args.task) + args.overrides, args.config_dir):
            check(config, args.json)
    except (SettingError, ExportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    logging.getLogger("vllm").setLevel(logging.ERROR)  # where verl has given vLLM's lines to the root logger
    from recipe.evaluate.sampling import answers_of

    sampling = config.actor_rollout_ref.rollout.val_kwargs
    try:
        answers = answers_of(config, sampling.n, sampling.temperature, sampling.top_p, sampling.top_k)
    except Exception as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    results = measured(answers, sampling.n)
    how = f"{sampling.n} samples of each, temperature {sampling.temperature:g}, top_p {sampling.top_p:g}"
    problems = args.task or f"as {args.settings_of}"
    print(f"{args.model}, {problems} ({config.data.val_files}), {how}")
    print(table(results))
    if args.json:
        about = {"model": args.model, "task": problems, "sampling": how, "settings": deciding(config)}
        write(args.json, about, results, answers)
    return 0


def _follow(parser: OneLineParser, args: argparse.Namespace) -> int:
    for name in ("task", "settings_of", "json", "config_dir"):
        if getattr(args, name):
            parser.error(f"--{name.replace('_', '-')}: --follow has it from the run; leave it out")
    overrides = [*([args.model] if args.model else []), *args.overrides]
    if paths := [given for given in overrides if "=" not in given]:
        parser.error(f"{paths[0]}: --follow evaluates the models of {args.follow}; leave it out")
    from recipe.evaluate.follow import follow

    return follow(args.follow, args.samples, overrides)


def composed(args: argparse.Namespace) -> "DictConfig":
    """Compose the configuration for the model of these arguments.

    Raises:
        ExportError: there is no model.
        SettingError: a wrong setting, or a task with tools.
    """
    model = Path(args.model)
    folder = model if (model / "config.json").is_file() else weights_of(model)
    if args.task:
        config = of_task(args.task, folder, args.samples, args.overrides, args.config_dir)
    else:
        config = of_run(args.settings_of, args.samples, args.overrides)
    config.actor_rollout_ref.model.path = str(folder)  # not an override: a folder's name may need quotes there
    return config


def check(config: "DictConfig", json_file: Path | None) -> None:
    """Refuse settings, files, rewards and models with which an evaluation would fail after its start."""
    from recipe.fully_async_policy.settings.consistency import check_consistency, lengths
    from recipe.fully_async_policy.settings.data import check_lengths, check_rows
    from recipe.fully_async_policy.settings.model import check_model
    from recipe.fully_async_policy.settings.own_code import check_reward
    from recipe.fully_async_policy.settings.reasoning_gym import make_files
    from recipe.fully_async_policy.settings.validate import SettingError
    from recipe.fully_async_policy.settings.values import check_types

    if json_file and (json_file.is_dir() or not _can_be_written(json_file)):
        raise SettingError(f"--json {json_file}: cannot be written; give a file in a folder that is there")
    check_types(config)
    check_consistency(config, lengths)
    make_files(config)
    files, samples = check_rows(config, "val_files")
    if tokenizer := check_model(config):
        check_lengths(config, files, tokenizer)
    check_reward(config, list(samples.values()))


def _can_be_written(file: Path) -> bool:
    try:
        try_file(file)
    except OSError:
        return False
    return True


def measured(answers: list[Answer], samples: int) -> dict[str, Result]:
    """Return the result of each data source, and of `all` if there are several."""
    sources = sorted({answer.data_source for answer in answers})
    of_source = {source: [a for a in answers if a.data_source == source] for source in sources}
    if len(sources) > 1:
        of_source["all"] = answers
    return {source: _result(of_one, samples) for source, of_one in of_source.items()}


def _result(answers: list[Answer], samples: int) -> Result:
    correct: dict[int, float] = {}
    for answer in answers:
        correct[answer.problem] = correct.get(answer.problem, 0.0) + answer.correct
    score = sum(answer.score for answer in answers) / len(answers)
    if any(answer.correct not in (0.0, 1.0) for answer in answers):
        return Result(len(correct), score, {})
    shares = {k: [pass_at(k, samples, int(c)) for c in correct.values()] for k in powers_of_two(samples)}
    return Result(len(correct), score, {k: interval(of_k, samples) for k, of_k in shares.items()})


def table(results: dict[str, Result]) -> str:
    """Return a table with one line for each data source and k."""
    lines = [f"{'':20} {'problems':>8} {'':>9} {'estimate':>9}   95% interval (Wilson)"]
    for source, result in results.items():
        start = f"{source:20} {result.problems:>8}"
        if not result.pass_at:
            lines.append(f"{start} {'score':>9} {result.score:>9.3f}   none: the reward has no acc of 0 or 1")
        for k, share in result.pass_at.items():
            shown = f"{share.estimate:>9.1%}   {share.low:.1%} to {share.high:.1%}"
            lines.append(f"{start} {f'pass@{k}':>9} {shown}")
    return "\n".join(lines)


def write(file: Path, about: dict[str, Any], results: dict[str, Result], answers: list[Answer]) -> None:
    """Write the results and every answer as JSON."""
    content = {
        **about,
        "results": {source: asdict(result) for source, result in results.items()},
        "answers": [asdict(answer) for answer in answers],
    }
    write_whole(file, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
