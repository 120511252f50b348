"""Training at an exact policy lag in one process: a small policy, minutes instead of GPU days."""
