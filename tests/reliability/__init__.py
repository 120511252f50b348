"""Faults, schedules, chaos, scale and several nodes: `python -m tests.reliability.NAME --help`."""
