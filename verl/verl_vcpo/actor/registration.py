"""Which module registers our engines with verl's registry, by device (beside verl/workers/engine/base.py)."""

ENGINES_OF = {"cuda": "verl_vcpo.actor.bridge"}
"""Device name -> the module that a worker imports. `verl_vcpo.cpu` adds an entry for the CPU."""
