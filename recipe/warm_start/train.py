"""Teach a tiny model a task, badly: `python -m recipe.warm_start.train --out models/countdown-tiny`.

Supervised learning; RL can teach the rest. The result is an ordinary Hugging Face checkpoint.

Countdown: fresh random problems, none of them a validation problem. A response is right with probability
--correct-fraction and otherwise a random expression over the given numbers, so the model learns the format well and
the arithmetic only in part.

calculate: fresh random questions, each with a trace of the agent loop `simpletir`, which is right with that
probability. No sandbox is needed, so first programs are tested, not answers.

Any other task: `--data FILE --answers COLUMN`, rows in verl's schema with a column that holds the answer as the model
is to write it. --until ends the lesson at an accuracy, with --steps as the most; without it, --steps and
--correct-fraction decide how well the model learns. A wrong response is the answer of another row.
"""

import hashlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from pydantic import BaseModel, Field, ValidationError, model_validator
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from recipe.command_line import OneLineParser, run_command
from recipe.tasks.countdown.problems import Difficulty, ProblemKey, problem_key, random_expression, random_problem
from recipe.tasks.countdown.reward import compute_score
from recipe.warm_start.model import build_model, respond
from recipe.warm_start.progress import Progress
from recipe.warm_start.rows import AnsweredRows, Chat, load_answered_rows
from recipe.warm_start.tokenizer import prompt_text, response_text, train_tokenizer
from recipe.warm_start.tool_traces import Part, ToolTraces, load_tool_traces
from verl_vcpo.common.whole_file import try_folder, whole_folder

RECORD = "warm_start.json"
# Raise the version when a change of the code makes old checkpoints differ from new ones of the same settings.
RECIPE_VERSION = 1
THREADS = 2
_UNTIL = "stop when this fraction of drawn responses is right, as 0.3; --steps is then the most"
IGNORED = -100  # the label of positions without loss
CHECKED_ROWS = 128
"""The most held-out rows that the accuracy is measured on between steps, with one drawn response each."""
_WARM_UP_STEPS = 30
"""The steps of the warm-up with a goal, when the number of steps is not known before."""

Example = tuple[str | Chat, str | list[Part]]
"""A pair of the user's only message, or a chat, and the response, or a trace of a tool's use."""


class Settings(BaseModel):
    """The settings of the warm start. Raises ValidationError for one that is out of range.

    steps, batch_size: optimizer steps, and sequences in each step.
    learning_rate: AdamW's peak, after a linear warm-up over a twentieth of the steps; then a cosine down to a tenth.
    until: the fraction of right responses, drawn for held-out rows, at which the lesson ends, with `steps` as the
        most. The learning rate then stays at its peak, after a warm-up of 30 steps. None: all steps are made.
    correct_fraction: the probability that a taught response is right.
    samples: responses per problem drawn at temperature 1 for the report; 0 skips that part of the report.
    layers, heads: the model's size. A head is 32 wide; heads come in pairs.
    """

    steps: int = Field(600, ge=1)
    batch_size: int = Field(64, ge=1)
    learning_rate: float = Field(3e-3, gt=0, le=1)
    correct_fraction: float = Field(0.2, ge=0, le=1)
    samples: int = Field(16, ge=0)
    seed: int = 0
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=2, multiple_of=2)
    until: float | None = Field(None, gt=0, le=1, description=_UNTIL)

    @model_validator(mode="after")
    def _reachable(self) -> "Settings":
        if self.until is not None and self.until > self.correct_fraction:
            raise ValueError(
                f"until={self.until}: no more than correct_fraction={self.correct_fraction} of the answers taught are "
                "right; add --correct-fraction 1"
            )
        return self

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The settings that change the model."""
        return self.model_dump(exclude_none=True)


@dataclass(frozen=True)
class HeldOut:
    """The lesson of prepared Countdown data: the difficulty, and the validation problems."""

    difficulty: Difficulty
    prompts: list[str]
    truths: list[dict[str, Any]]
    most_tokens: None = None

    @property
    def keys(self) -> set[ProblemKey]:
        return {problem_key(truth["numbers"], truth["target"]) for truth in self.truths}

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The facts about the data that change the model."""
        digest = hashlib.sha256("\n".join(self.prompts).encode()).hexdigest()[:16]
        return {"difficulty": asdict(self.difficulty), "held_out": digest}

    def tokenizer(self, seed: int) -> PreTrainedTokenizerBase:
        """Train a tokenizer on problems of the difficulty."""
        return train_tokenizer(self.difficulty, seed)

    def examples(self, correct_fraction: float, rng: random.Random) -> Iterator[tuple[str, str]]:
        """Yield examples of problems that are not held out."""
        return examples(self.difficulty, self.keys, correct_fraction, rng)

    def solved(self, row: int, response: str) -> float:
        """Return 1 if the response solves the validation problem, else 0."""
        return compute_score("countdown", response, self.truths[row])["acc"]


Lesson = HeldOut | AnsweredRows | ToolTraces
"""The taught rows, and the held-out rows that the model is tested on."""


def load_held_out(data: Path) -> HeldOut | ToolTraces:
    """Read the data of scripts.prepare_data. Raises ValueError if it is missing or of another task."""
    if data.is_file():
        raise ValueError(f"data={data}: is a file of rows; give --answers COLUMN, the column of what is taught")
    if not (data / "meta.json").is_file():
        raise ValueError(
            f"data={data} has no meta.json: first run `vcpo data TASK --out {data}`, TASK being countdown or calculate"
        )
    meta = json.loads((data / "meta.json").read_text(encoding="utf-8"))
    if meta["task"] == "calculate":
        return load_tool_traces(data)
    if meta["task"] != "countdown":
        raise ValueError(f"data={data} holds task {meta['task']!r}: give --answers, or data of countdown or calculate")
    rows = pd.read_parquet(data / "val.parquet")
    truths = [
        {"target": int(model["ground_truth"]["target"]), "numbers": [int(n) for n in model["ground_truth"]["numbers"]]}
        for model in rows["reward_model"]
    ]
    return HeldOut(Difficulty(**meta["difficulty"]), [row[0]["content"] for row in rows["prompt"]], truths)


def examples(
    difficulty: Difficulty, held_out: set[ProblemKey], correct_fraction: float, rng: random.Random
) -> Iterator[tuple[str, str]]:
    """Yield (user message, response) pairs of random problems that are not held out, without end."""
    while True:
        problem = random_problem(difficulty, rng)
        if problem is None or problem.key in held_out:
            continue
        right = rng.random() < correct_fraction
        expression = problem.solution if right else random_expression(problem.numbers, difficulty.operators, rng)
        yield problem.prompt, response_text(expression)


def make_batch(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens, labels), both (len(pairs), longest), padded on the right; labels are IGNORED outside responses.

    Padding follows all real tokens, so with causal attention no mask is needed.
    """
    prompts = tokenizer([prompt_text(tokenizer, message) for message, _ in pairs])["input_ids"]
    responses = [_labelled(tokenizer, response) for _, response in pairs]
    longest = max(len(prompt) + len(response) for prompt, (response, _) in zip(prompts, responses, strict=True))
    tokens = torch.full((len(pairs), longest), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), longest), IGNORED)
    for row, (prompt, (response, taught)) in enumerate(zip(prompts, responses, strict=True)):
        start, end = len(prompt), len(prompt) + len(response)
        tokens[row, :end] = torch.tensor(prompt + response)
        labels[row, start:end] = torch.tensor(taught)
    return tokens, labels


def _labelled(tokenizer: PreTrainedTokenizerBase, response: str | list[Part]) -> tuple[list[int], list[int]]:
    """Return the tokens of a response with its end, and their labels. The parts of a trace are encoded one by one."""
    parts = [Part(response)] if isinstance(response, str) else response
    encoded = tokenizer([*(part.text for part in parts), tokenizer.eos_token])["input_ids"]
    taught = [*(part.taught for part in parts), True]
    labels = (ids if keep else [IGNORED] * len(ids) for ids, keep in zip(encoded, taught, strict=True))
    return [token for ids in encoded for token in ids], [label for ids in labels for label in ids]


def fit(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    stream: Iterator[Example],
    settings: Settings,
    check: Callable[[], float],
) -> list[float]:
    """Train in place; return each step's loss (nats per response token).

    Args:
        check: a function that measures the accuracy of `model`, 0 to 1; it may change the model's mode only.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = _schedule(optimizer, settings)
    progress = Progress(settings.steps, settings.until, check)
    ended = False
    while not ended:
        model.train()
        tokens, labels = make_batch(tokenizer, [next(stream) for _ in range(settings.batch_size)])
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        ended = progress.reached(loss.item())
    return progress.losses


def _schedule(optimizer: torch.optim.Optimizer, settings: Settings) -> torch.optim.lr_scheduler.LRScheduler:
    part = _twentieth(settings.steps) if settings.until is None else _WARM_UP_STEPS
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / part, total_iters=part)
    if settings.until is not None:
        return warm_up
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, max(1, settings.steps - part), eta_min=settings.learning_rate / 10
    )
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [part])


def _twentieth(steps: int) -> int:
    return max(1, steps // 20)


def drawn_accuracy(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, data: Lesson) -> float:
    """Return the fraction of right responses, one drawn for each of CHECKED_ROWS; torch's random state stays."""
    prompts = [prompt_text(tokenizer, message) for message in data.prompts[:CHECKED_ROWS]]
    with torch.random.fork_rng(devices=[]):
        responses = respond(model, tokenizer, prompts, sample=True, most_tokens=data.most_tokens)
    return sum(data.solved(row, text) for row, text in enumerate(responses)) / len(prompts)


def evaluate(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, data: Lesson, samples: int
) -> dict[str, float]:
    """Return the fractions of held-out rows solved by the greedy response and, if samples > 0, by sampled responses."""
    prompts = [prompt_text(tokenizer, message) for message in data.prompts]
    greedy = respond(model, tokenizer, prompts, sample=False, most_tokens=data.most_tokens)
    report = {"accuracy": sum(data.solved(row, text) for row, text in enumerate(greedy)) / len(greedy)}
    if samples > 0:
        repeated = [prompt for prompt in prompts for _ in range(samples)]
        responses = respond(model, tokenizer, repeated, sample=True, most_tokens=data.most_tokens)
        solved = torch.tensor([data.solved(i // samples, text) for i, text in enumerate(responses)]).view(-1, samples)
        report["sampled_accuracy"] = solved.mean().item()
        report[f"pass_at_{samples}"] = solved.amax(dim=1).mean().item()
    return report


def save(out: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, record: dict[str, Any]) -> None:
    """Write the checkpoint: `out` is whole or as it was. Replaces an earlier warm start."""
    transformers_logging.disable_progress_bar()
    with whole_folder(out) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def cached_record(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the record of a checkpoint made with these very settings, or None if `out` must be (re)made.

    Raises ValueError if `out` holds something else, which must not be overwritten.
    """
    if not out.exists():
        return None
    if not (out / RECORD).is_file():
        if out.is_dir() and not any(out.iterdir()):
            return None
        raise ValueError(f"out={out} exists and is no warm start: choose another --out, or remove it")
    record = json.loads((out / RECORD).read_text(encoding="utf-8"))
    return record if record.get("settings") == settings else None


def run(lesson: Lesson, out: Path, settings: Settings) -> None:
    """Make the checkpoint, or reuse an equal one. Raises ValueError for a wrong setting."""
    started = time.perf_counter()
    fingerprint = {"recipe_version": RECIPE_VERSION, **settings.fingerprint, **lesson.fingerprint}
    try:
        record = cached_record(out, fingerprint)
        if record is None:
            try_folder(out)
    except OSError as error:
        raise ValueError(f"out={out} cannot be written ({error.strerror}): choose another --out") from None
    if record is not None:
        print(f"Reusing {out}: it was made with the same settings.")
    else:
        torch.set_num_threads(min(THREADS, torch.get_num_threads()))  # OMP_NUM_THREADS may ask for fewer
        torch.manual_seed(settings.seed)
        tokenizer = lesson.tokenizer(settings.seed)
        model = build_model(tokenizer, settings.layers, settings.heads)
        pairs = lesson.examples(settings.correct_fraction, random.Random(f"warm start/{settings.seed}"))
        losses = fit(model, tokenizer, pairs, settings, lambda: drawn_accuracy(model, tokenizer, lesson))
        last = losses[-_twentieth(len(losses)) :]
        results = {"steps_made": len(losses), "loss": sum(last) / len(last)}
        results |= evaluate(model, tokenizer, lesson, settings.samples)
        seconds = round(time.perf_counter() - started, 1)
        record = {"settings": fingerprint, "problems": len(lesson.prompts), **results, "seconds": seconds}
        save(out, model, tokenizer, record)
    report(record, settings, "First programs that are right" if isinstance(lesson, ToolTraces) else "Accuracy")


def report(record: dict[str, Any], settings: Settings, measured: str = "Accuracy") -> None:
    """Print the accuracy, or what was `measured`, and on stderr a warning if it is 0 or below the goal."""
    greedy, drawn = record["accuracy"], record.get("sampled_accuracy")
    said = f"{measured} before RL: {greedy:.1%} greedy (always the likeliest token)"
    if drawn is not None:
        said += f", {drawn:.1%} drawn (each token by its probability, as RL samples)"
    print(f"{said}; {record['problems']} held-out problems")
    best = max(greedy, drawn or 0.0)
    longer = f"teach longer (--until {settings.until or 0.3} --steps {10 * settings.steps})"
    if best == 0:
        print(
            "warm_start: warning: no response is right. RL learns nothing from this model, as all rewards of a prompt "
            f"are equal: {longer}, make the model larger (--layers, --heads), or shorten the answers",
            file=sys.stderr,
        )
    elif settings.until is not None and best < settings.until:
        print(f"warm_start: warning: {settings.steps} steps were too few for --until: {longer}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="warm_start", description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=Path("data/countdown"), help="what prepare_data wrote; with --answers: a file"
    )
    parser.add_argument("--answers", metavar="COLUMN", help="of --data; of a nested column: reward_model.ground_truth")
    parser.add_argument(
        "--out", type=Path, help="checkpoint folder (default: models/FOLDER-tiny, after that of --data)"
    )
    for name, field in Settings.model_fields.items():
        kind = float if field.default is None else type(field.default)
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=kind, default=field.default, help=field.description or "default: %(default)s")
    args = vars(parser.parse_args(argv))
    data, answers, out = args.pop("data"), args.pop("answers"), args.pop("out")
    folder: Path = data.parent if answers else data
    try:
        lesson: Lesson = load_answered_rows(data, answers) if answers else load_held_out(data)
        run(lesson, out or Path("models") / f"{folder.resolve().name}-tiny", Settings(**args))
    except ValidationError as error:
        wrong = error.errors()[0]
        name = f"{wrong['loc'][0]}={wrong['input']}: " if wrong["loc"] else ""
        print(f"warm_start: {name}{wrong['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"warm_start: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    run_command(main)
