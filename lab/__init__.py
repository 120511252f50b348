"""Questions about VCPO, and the programs that answer them. Never installed; nothing of the product imports it.

    simulator/   VCPO at a lag in one process, without Ray, vLLM or Megatron
    stability/   which method is stable at which lag: runs, tables, figures
    baselines/   how much variance a baseline removes
    cost/        what a step with gradient norms costs (steps, layers, operations), and what asynchrony gains (overlap)
    long_responses   does the step follow the lag where sampler and trainer differ in arithmetic?

`python -m lab.NAME --help` says what a command measures and how long that takes.
"""
