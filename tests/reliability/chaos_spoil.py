"""Damage to the files of a run that is not up, as by a power cut or a bad disk; each is noted for the reader."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

from tests.reliability.chaos_reader import damage, mark_of
from tests.reliability.chaos_watch import json_lines

SPOILT = "spoilt.jsonl"
HOW = ("cut", "NUL", "garbage")


def cut(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def _overwrite(file: Path, content: Callable[[int], bytes], rng: random.Random) -> None:
    """Overwrite a block of at most 4 KiB."""
    size = file.stat().st_size
    length = min(4096, max(1, size // 2))
    with open(file, "r+b") as opened:
        opened.seek(rng.randrange(size - length + 1))
        opened.write(content(length))


def _content(how: str, rng: random.Random) -> Callable[[int], bytes]:
    return (lambda length: b"\0" * length) if how == "NUL" else rng.randbytes


def spoil_lines(folder: Path, name: str, how: str, rng: random.Random) -> str:
    """Spoil a line of one of the run's files: cut the last line, or overwrite any line."""
    file = folder / "run" / name
    raw = file.read_bytes().split(b"\n") if file.is_file() else []
    if len(raw) < 2:
        return "nothing: the file has no line"
    if how == "cut":
        victim = len(raw) - 2
        content = b"\n".join([*raw[:victim], raw[victim][: len(raw[victim]) // 2]])
    else:
        victim = rng.randrange(len(raw) - 1)
        noise = _content(how, rng)(len(raw[victim])).replace(b"\n", b"\xff")
        content = b"\n".join([*raw[:victim], noise, *raw[victim + 1 :]])
    before = {line["step"] for line in json_lines(file)}
    steps = sorted({json.loads(raw[victim])["step"]} & before) if _readable(raw[victim]) else []
    file.write_bytes(content)
    _note(folder, name, steps, "")
    return f"line {victim + 1}, of step {steps}"


def _readable(raw: bytes) -> bool:
    try:
        return isinstance(json.loads(raw), dict)
    except ValueError:
        return False


def spoil_checkpoint(folder: Path, how: str, rng: random.Random) -> str:
    """Spoil one file of the newest checkpoint, if there is another whole checkpoint."""
    found = sorted((folder / "run" / "checkpoints").glob("global_step_*"), key=lambda path: int(path.name[12:]))
    whole = [checkpoint for checkpoint in found if not damage(checkpoint)]
    if len(whole) < 2:
        return f"nothing: {len(whole)} whole checkpoint(s)"
    newest = whole[-1]
    file = rng.choice(sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size))
    if how == "cut":
        cut(file, rng)
    else:
        _overwrite(file, _content(how, rng), rng)
    if not damage(newest):  # zeros over zeros
        cut(file, rng)
    _note(folder, newest.name, [], mark_of(newest))
    return f"{file.relative_to(folder / 'run')}"


def spoil_pointer(folder: Path, rng: random.Random) -> str:
    """Spoil verl's file that names the newest checkpoint."""
    (folder / "run" / "checkpoints" / "latest_checkpointed_iteration.txt").write_bytes(rng.randbytes(8))
    return "latest_checkpointed_iteration.txt"


Spoil = Callable[[Path, random.Random], str]


def _lines(name: str, how: str) -> Spoil:
    return lambda folder, rng: spoil_lines(folder, name, how, rng)


def _checkpoint(how: str) -> Spoil:
    return lambda folder, rng: spoil_checkpoint(folder, how, rng)


SPOILS: list[tuple[str, Spoil]] = [
    *((f"{name}: {how}", _lines(name, how)) for name in ("metrics.jsonl", "samples.jsonl") for how in HOW),
    *((f"newest checkpoint: {how}", _checkpoint(how)) for how in HOW),
    ("pointer to the newest checkpoint: garbage", spoil_pointer),
]


def _note(folder: Path, file: str, steps: list[int], mark: str) -> None:
    with open(folder / SPOILT, "a") as notes:
        notes.write(json.dumps({"file": file, "steps": steps, "mark": mark}) + "\n")
