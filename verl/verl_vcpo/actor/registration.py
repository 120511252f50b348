"""The module that registers our engines with verl, for each device (beside verl/workers/engine/base.py)."""

ENGINES_OF = {"cuda": "verl_vcpo.actor.megatron_actor"}
"""The module that a worker imports, by device name. `verl_vcpo.cpu` adds an entry for the CPU."""
