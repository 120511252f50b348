"""Baselines compared with the exact answer where there is one. Begin with `variance.py`."""
