"""Questions about VCPO, and the programs that answer them. Never installed; nothing of the product imports it.

    simulator/   VCPO at a lag in one process, without Ray, vLLM or Megatron
    stability/   which method is stable at which lag: runs, tables, figures
    baselines/   which constant baseline has the least variance
    cost/        what a step with gradient norms costs (steps), its layers (layers), and a whole run (overhead)
    paper_tables/    the paper's tables with the real stack: is VCPO as accurate as synchronous training, in less time?
    long_responses   does the step follow the lag where sampler and trainer differ in arithmetic?

A question that is answered and that nobody asks again leaves. Its page keeps the numbers, and names a commit that has
the program.
`python -m lab.NAME --help` says what a command measures and how long that takes.
"""
