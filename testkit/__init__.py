"""What tests and benchmarks share: small models, engines, trainer runs and sandbox servers. Imports neither of them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The folder that holds this package, `recipe` and `scripts`: where their commands are started."""
