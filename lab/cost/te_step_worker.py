"""A process of a case of `steps` on a CPU, on Transformer Engine's layers: tests/kit/te_on_cpu.py says what that is."""

from tests.kit import te_stack as te_stack  # isort: skip  # before anything else of the stack
from lab.cost.step_worker import run as run
