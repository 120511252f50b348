"""Which module registers our engines with verl's registry, by device (beside verl/workers/engine/base.py)."""

ENGINES_OF = {"cuda": "verl_vcpo.workers.engine.megatron.bridge"}
"""Device name -> module to import in a worker. The engines for other devices add themselves."""
