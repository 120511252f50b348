"""Curves made by hand."""

import pandas as pd


def curve(accuracies: list[float], ess: float = 0.8, low_from: int | None = None, **run: object) -> pd.DataFrame:
    """A run evaluated every ten steps; its ESS ratio is 0.01 from step `low_from` on."""
    steps = 10 * (len(accuracies) - 1)
    rows = [{"step": 0, "val_accuracy": accuracies[0]}]
    for step in range(1, steps + 1):
        low = low_from is not None and step >= low_from
        row = {"step": step, "ess_ratio": 0.01 if low else ess, "grad_norm": 1.0, "kl": 0.001, "finite": 1.0}
        rows.append(row | ({"val_accuracy": accuracies[step // 10]} if step % 10 == 0 else {}))
    return pd.DataFrame(rows).assign(**({"method": "tis_seq", "lag": 32, "seed": 1, "lr": 1e-3} | run))
