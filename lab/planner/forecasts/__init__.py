"""Forecasts of the planner beside runs that were measured. Begin with `runs.py`."""
