"""The figures of scripts.bench.stability: `python -m scripts.bench.stability_figures CURVES --out DIR`.

predictors.png   accuracy, ESS ratio, KL and gradient norm: synchronous, TIS and VCPO at the largest lag (the paper's)
lags.png         VCPO's accuracy over the steps, a line per lag (the paper's)
methods.png      final accuracy of every method at every lag
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

from scripts.bench.stability.figures import draw_all


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", type=Path, help="curves.parquet, written by scripts.bench.stability")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/measurements/stability"), help="folder (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    if not arguments.curves.is_file():
        parser.error(f"{arguments.curves}: no such file; scripts.bench.stability writes it")
    for file in draw_all(pd.read_parquet(arguments.curves), arguments.out):
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
