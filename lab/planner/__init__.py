"""Forecasts of a run's speed, cost and lag, for every split of GPUs between trainer and samplers."""
