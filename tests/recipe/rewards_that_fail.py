"""Rewards of a user, each wrong in another way; and what a reward may return, by the row's ground truth."""

import os
import time
from collections.abc import Callable
from typing import Any

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
    "a dict within": (lambda: {"score": 1, "by": {"a": 1}}, "whose 'by' is {'a': 1}, of which * make it a number or"),
}
"""What a function returns, and what is said about it. `*` stands for any text."""

RIGHT: dict[str, tuple[Callable[[], Any], Any]] = {
    "float": (lambda: 0.5, 0.5),
    "bool": (lambda: True, 1.0),
    "NumPy's float": (lambda: _numpy().float32(0.5), 0.5),
    "NumPy's bool": (lambda: _numpy().bool_(True), 1.0),
    "array of one": (lambda: _numpy().array(0.5), 0.5),
    "tensor with a gradient": (lambda: _torch().tensor([0.5], requires_grad=True), 0.5),
    "dict with acc": (lambda: {"score": 1, "acc": True}, {"score": 1.0, "acc": 1.0}),
    "dict of NumPy's": (
        lambda: {"score": _numpy().float64(0.5), "acc": _numpy().bool_(False), "parts": _numpy().ones(2)},
        {"score": 0.5, "acc": 0.0, "parts": [1.0, 1.0]},
    ),
    "dict of torch's": (
        lambda: {"score": _torch().tensor(0.5), "form": _torch().tensor(1.0, requires_grad=True)},
        {"score": 0.5, "form": 1.0},
    ),
    "dict with texts": (
        lambda: {"score": 0.5, "pred": "42", "note": None, "steps": 3},
        {"score": 0.5, "pred": "42", "note": None, "steps": 3},
    ),
}
"""What a function returns, and what verl gets."""


def by_truth(ground_truth: str, **_: Any) -> Any:
    return {**WRONG, **RIGHT}[ground_truth][0]()
