"""Benchmarks: `python -m scripts.bench.NAME [--json]`; `--help` says what each measures and how long that takes.

A command's own file has its options and what it prints. What it measures with lies in the folder of its question:

    exactness/    baseline_estimates, baseline_variance, extreme_weights, layouts
    cost/         layer_overhead, overlap, step_overhead
    reliability/  faults, launch_scripts, nodes, scale, schedules, stabilizers
    forecasts/    planner
    stability/    stability, stability_real, stability_report
    sandbox/      sandbox, sandbox_calls
"""
