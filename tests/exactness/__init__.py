"""One result on every layout: `python -m tests.exactness.layouts`, `python -m tests.exactness.extreme_weights`."""
