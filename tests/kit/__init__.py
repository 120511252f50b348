"""The kit that tests and benchmarks share: models, engines, trainer runs, servers. Begin with `small_run.py`."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout, in which commands are started."""
