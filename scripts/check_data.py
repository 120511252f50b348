"""Check a file of rows for a task: `python -m scripts.check_data data/mine.parquet --task gsm8k`.

Columns, the length of every prompt in the model's chat template, and what the task's reward gives for every row's known
answer, in the forms that people write, and for a made-up response. Nothing is trained. Exit status 0, or 2 with one
line on stderr for what is wrong.
"""

import asyncio
import statistics
import sys
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tqdm import tqdm

from recipe.command_line import OneLineParser, run_command
from recipe.fully_async_policy import main as trainer
from recipe.tasks.numerals import read_number

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from recipe.fully_async_policy.settings.data import Sample
    from recipe.fully_async_policy.settings.data_file import DataFile

_AT_A_TIME = 64
_FORMS = ("\\boxed{%s}", "#### %s", "<answer>%s</answer>", "%s")
"""How responses give answers: a reward should score the ground truth highly in one of them."""
_Row = TypeVar("_Row")


class Scores(NamedTuple):
    """Of one row."""

    place: str
    data_source: Any
    gold: float | None
    """The best of the ground truth's forms; None: the ground truth is no answer, as Countdown's."""
    made_up: float
    silent: tuple[str, ...] = ()
    """Other ways of writing the ground truth that score nothing."""


def main(argv: list[str] | None = None) -> int:
    """Print what the file holds. Returns the exit code."""
    parser = OneLineParser(prog="check_data", description=__doc__)
    parser.add_argument("file", help="parquet, .jsonl or .json")
    parser.add_argument("--task", required=True, help="whose preset names the reward, the model and the lengths")
    trainer.add_config_dir(parser)
    parser.add_argument("overrides", nargs="*", metavar="setting=value", help="change the trainer's settings")
    args = parser.parse_intermixed_args(argv)

    from recipe.fully_async_policy.settings.data import check_file
    from recipe.fully_async_policy.settings.data_file import DataFile
    from recipe.fully_async_policy.settings.errors import SettingError, paths_that_fail
    from recipe.fully_async_policy.settings.own_files import located
    from recipe.fully_async_policy.settings.values import check_types

    try:
        with paths_that_fail():
            trainer.prepare_environment(args.overrides)
            overrides = [f"+task={args.task}", *args.overrides]
            config = trainer.compose(overrides, args.config_dir)
            with located(overrides, args.config_dir):
                check_types(config)
            file = DataFile("FILE", args.file)
            check_file(file, config)
            print(f"{args.file}: {file.count} rows; columns {', '.join(file.columns)}")
            print(describe_lengths(config, file))
            print(describe_scores(asyncio.run(scores_of(config, file))))
    except SettingError as error:
        print(f"check_data: {error}", file=sys.stderr)
        return 2
    return 0


def describe_lengths(config: "DictConfig", file: "DataFile") -> str:
    """One line on the prompts' lengths. Raises SettingError where the trainer would cut a prompt."""
    from recipe.fully_async_policy.settings.data import counted
    from recipe.fully_async_policy.settings.errors import SettingError
    from recipe.fully_async_policy.settings.model import read_tokenizer

    model, limit = config.actor_rollout_ref.model, config.data.max_prompt_length
    if not Path(model.path).is_dir():
        return f"prompts: not counted, {model.path} is not on this machine (actor_rollout_ref.model.path)"
    tokenizer, key = read_tokenizer(model), config.data.prompt_key
    prompts = (row[key] for row in file.rows(key))
    lengths = [length for some in _chunks(prompts) for length in counted(tokenizer, some, config)]
    too_long = [row for row, length in enumerate(lengths) if length > limit]
    if too_long and not config.data.filter_overlong_prompts:
        raise SettingError(
            f"data.max_prompt_length={limit}: {len(too_long)} prompts are longer, the first is row {too_long[0]} with "
            f"{lengths[too_long[0]]} tokens; raise it, or set data.filter_overlong_prompts=true"
        )
    left_out = f"; {len(too_long)} are longer than data.max_prompt_length={limit} and left out" if too_long else ""
    return f"prompts: {min(lengths)} to {max(lengths)} tokens, half above {statistics.median(lengths):g}{left_out}"


async def scores_of(config: "DictConfig", file: "DataFile") -> list[Scores]:
    """What the reward gives for every row. Raises SettingError where it gives nothing."""
    from recipe.fully_async_policy.settings.data import all_samples
    from recipe.fully_async_policy.settings.errors import SettingError
    from recipe.fully_async_policy.settings.own_code import MADE_UP, arguments, fix_of, reward_of
    from verl_vcpo.user_code.errors import UserCodeError
    from verl_vcpo.user_code.killable import Pool
    from verl_vcpo.user_code.reward_function import score_of

    pool = Pool(reward_of(config), quiet=True)

    async def score(sample: "Sample") -> Scores:
        try:
            truth = sample.ground_truth
            truth = truth[0] if isinstance(truth, list) and len(truth) == 1 else truth  # as verl's pages have it
            known = [form % truth for form in _FORMS] if isinstance(truth, str | int | float) else []
            made_up, *given = [score_of(await pool.call(arguments(sample, text))) for text in [MADE_UP, *known]]
            best, silent = max(given, default=None), []
            if best is not None and best > made_up:
                form = _FORMS[given.index(best)]
                for way, text in ways_of_writing(str(truth)).items():
                    if score_of(await pool.call(arguments(sample, form % text))) <= made_up:
                        silent.append(way)
        except UserCodeError as error:
            raise SettingError(f"{sample.place}: the reward {error.what}; {fix_of(error, sample)}") from None
        except ValueError as error:
            raise SettingError(f"{sample.place}: the reward {error}") from None
        return Scores(sample.place, sample.data_source, best, made_up, tuple(silent))

    found: list[Scores] = []
    try:
        for samples in tqdm(list(_chunks(all_samples(file))), desc="rewards", disable=None):
            found += await asyncio.gather(*map(score, samples))
    finally:
        pool.close()
    return found


def ways_of_writing(truth: str) -> dict[str, str]:
    """How people and models write the same answer: {in words: the text}, without the ground truth's own text."""
    ways = {"with a dot at its end": f"{truth}.", "in bold": f"**{truth}**", "between dollar signs": f"${truth}$"}
    number = read_number(truth.strip())
    if number is not None:
        value, decimal = number.value, Decimal(number.value.numerator) / number.value.denominator
        if value.denominator == 1 or Fraction(decimal) == value:
            exponent = decimal.adjusted()
            ways["as a plain decimal"] = f"{decimal:f}"
            ways["with commas"] = f"{decimal:,f}"
            ways["as a power of ten"] = f"{decimal.scaleb(-exponent):f} \\times 10^{{{exponent}}}"
        if value.denominator > 1:
            ways["as a fraction"] = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    return {way: text for way, text in ways.items() if text != truth}


def _chunks(rows: Iterator[_Row]) -> Iterator[list[_Row]]:
    while chunk := list(islice(rows, _AT_A_TIME)):
        yield chunk


def describe_scores(scores: list[Scores]) -> str:
    """One line for each data source. Raises SettingError where some known answers score, and others do not."""
    from recipe.fully_async_policy.settings.errors import SettingError

    lines = []
    for source in dict.fromkeys(row.data_source for row in scores):
        rows = [row for row in scores if row.data_source == source]
        made_up = statistics.mean(row.made_up for row in rows)
        known = [row.gold for row in rows if row.gold is not None]
        right = [row for row in rows if row.gold is not None and row.gold > row.made_up]
        line = f"{source!r}: {len(rows)} rows; a made-up response scores {made_up:.3g}"
        if not right:
            lines.append(f"{line}; no form of the ground truth that is known here scores more, so try one of your own")
            continue
        if len(right) < len(known):
            wrong = next(row for row in rows if row.gold is not None and row.gold <= row.made_up)
            raise SettingError(
                f"{wrong.place}: the known answer scores {wrong.gold:.3g}, as a made-up response does, and "
                f"{len(known) - len(right) - 1} other rows are like it; mend their ground truth"
            )
        lines.append(f"{line}, the known answer {statistics.mean(known):.3g} ({len(known)} rows)")
        for way in dict.fromkeys(way for row in rows for way in row.silent):
            silent = [row for row in rows if way in row.silent]
            lines.append(
                f"    {way}, {len(silent)} of {len(known)} known answers score nothing; first: {silent[0].place}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
