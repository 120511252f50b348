"""Commands that measure what a step costs (steps, layers), and a run (overhead)."""
