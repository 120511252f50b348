"""What tests and benchmarks share: models, engines, trainer runs, sandbox servers. Begin with `small_run.py`."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout: where their commands are started."""
