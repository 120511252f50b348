"""Rewards of a user, each wrong in another way; and what a reward may return, by the row's ground truth."""

import os
import time
from collections.abc import Callable
from typing import Any

import numpy

A_NUMBER = "return a finite number, or a dict with one as its 'score'"


def raises(solution_str: str, extra_info: dict[str, Any], **_: Any) -> float:
    print("a reward's own output")
    return extra_info["answer"]


def exits(**_: Any) -> float:
    os._exit(3)


def hangs(**_: Any) -> float:
    time.sleep(60)
    return 0.0


def of_another_library(completions: list[str], **_: Any) -> list[float]:
    return [0.0 for _ in completions]


no_function = 1.0


def _numpy() -> Any:
    import numpy

    return numpy


def _torch() -> Any:
    import torch

    return torch


async def _later() -> float:
    return 1.0


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, f"returned None, * {A_NUMBER}"),
    "text": (lambda: "0.5", f"returned '0.5' (str), * {A_NUMBER}"),
    "tuple": (lambda: (1.0, {}), f"returned (1.0, {{}}) (tuple), * {A_NUMBER}"),
    "coroutine": (_later, "returned <coroutine * (coroutine), * define it with async def"),
    "nan": (lambda: float("nan"), f"returned nan, * {A_NUMBER}"),
    "beyond a float32": (lambda: 1e39, f"returned 1e+39, * {A_NUMBER}"),
    "NumPy's nan": (lambda: _numpy().float32("nan"), f"returned np.float32(nan) (float32), * {A_NUMBER}"),
    "tensor": (lambda: _torch().ones(2), f"returned tensor([1., 1.]) (Tensor), * {A_NUMBER}"),
    "no score": (lambda: {"reward": 1.0}, f"returned {{'reward': 1.0}}, a dict without 'score', * {A_NUMBER}"),
    "score of nan": (lambda: {"score": float("nan"), "acc": 0}, f"a dict whose 'score' is nan, * {A_NUMBER}"),
    "score of text": (lambda: {"score": "1"}, f"returned a dict whose 'score' is '1' (str), * {A_NUMBER}"),
    "acc of text": (lambda: {"score": 1, "acc": "yes"}, "whose 'acc' is 'yes' (str), * make it 1 for a right"),
    "acc of nan": (lambda: {"score": 1, "acc": float("nan")}, "whose 'acc' is nan, * make it 1 for a right"),
    "acc of None": (lambda: {"score": 1, "acc": None}, "whose 'acc' is None, * make it 1 for a right"),
    "over_limit of text": (lambda: {"score": 1, "over_limit": "no"}, "whose 'over_limit' is 'no' (str), * make it 1"),
    "a dict within": (lambda: {"score": 1, "by": {"a": 1}}, "whose 'by' is {'a': 1}, of which * make it a number or"),
    "an empty dict": (lambda: {"score": 1, "by": {}}, "whose 'by' is {}, of which a validation can report no mean"),
    "a list": (lambda: {"score": 1, "parts": [1.0, 0.0]}, "whose 'parts' is [1.0, 0.0] (list), of which * make it"),
    "a tensor within": (lambda: {"score": 1, "parts": _torch().ones(2)}, "whose 'parts' is tensor([1., 1.]) (Tensor)"),
    "pred of a list": (lambda: {"score": 1, "pred": ["4", "2"]}, "whose 'pred' is ['4', '2'] (list), of which *"),
    "bytes": (lambda: {"score": 1, "note": b"1"}, "whose 'note' is b'1' (bytes), of which a validation can report"),
    "complex": (lambda: {"score": 1, "root": 1j}, "whose 'root' is 1j (complex), of which a validation can report"),
    "infinity": (lambda: {"score": 1, "ratio": float("inf")}, "whose 'ratio' is inf, * make it a finite number, or"),
    "verl's column": (lambda: {"score": 1, "reward": 1}, "returned a dict with 'reward', a name of verl's own, * ren"),
    "verl's key": (lambda: {"score": 1, "uid": "a"}, "returned a dict with 'uid', a name of verl's own, * rename it"),
    "no name": (lambda: {"score": 1, 7: 1.0}, "returned a dict with the key 7 (int), * make it a name"),
}
"""What a function returns, and what is said about it. `*` stands for any text."""

RIGHT: dict[str, tuple[Callable[[], Any], Any]] = {
    "float": (lambda: 0.5, {"score": 0.5, "acc": 0.5}),
    "bool": (lambda: True, {"score": 1.0, "acc": 1.0}),
    "NumPy's float": (lambda: _numpy().float32(0.5), {"score": 0.5, "acc": 0.5}),
    "NumPy's bool": (lambda: _numpy().bool_(True), {"score": 1.0, "acc": 1.0}),
    "array of one": (lambda: _numpy().array(0.5), {"score": 0.5, "acc": 0.5}),
    "tensor with a gradient": (lambda: _torch().tensor([0.5], requires_grad=True), {"score": 0.5, "acc": 0.5}),
    "dict with acc": (lambda: {"score": -1, "acc": False}, {"score": -1.0, "acc": 0.0}),
    "dict without acc": (lambda: {"score": 0.5}, {"score": 0.5, "acc": 0.5}),
    "dict of NumPy's": (
        lambda: {"score": _numpy().float64(0.5), "acc": _numpy().bool_(False), "turns": _numpy().int64(2)},
        {"score": 0.5, "acc": 0.0, "turns": 2.0},
    ),
    "dict of torch's": (
        lambda: {"score": _torch().tensor(0.5), "form": _torch().tensor(1.0, requires_grad=True)},
        {"score": 0.5, "acc": 0.5, "form": 1.0},
    ),
    "numbers and texts": (
        lambda: {"score": 0.5, "why": _numpy().str_("short"), "steps": 3, "right": True},
        {"score": 0.5, "acc": 0.5, "why": "short", "steps": 3.0, "right": 1.0},
    ),
    "no value": (lambda: {"score": 0.5, "note": None, "ratio": float("nan"), "pred": None}, {"score": 0.5, "acc": 0.5}),
    "a vote": (lambda: {"score": 0.5, "pred": 42.0}, {"score": 0.5, "acc": 0.5, "pred": "42"}),
    "a vote for zero": (lambda: {"score": 0.5, "pred": -0.0}, {"score": 0.5, "acc": 0.5, "pred": "0"}),
    "a long vote": (
        lambda: {"score": 0, "pred": numpy.int64(2**60 + 1)},
        {"score": 0.0, "acc": 0.0, "pred": f"{2**60 + 1}"},
    ),
    "half a surrogate pair": (lambda: {"score": 0, "pred": "\ud800"}, {"score": 0.0, "acc": 0.0, "pred": "\\ud800"}),
}
"""What a function returns, and what verl gets."""


def by_truth(ground_truth: str, **_: Any) -> Any:
    return {**WRONG, **RIGHT}[ground_truth][0]()
