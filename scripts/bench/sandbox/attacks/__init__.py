"""Programs that try to get out of the code sandbox, or to take more than they may; one module for each kind."""

from scripts.bench.sandbox.attacks.attack import FILES_MB, LIMIT_MB, PROCESSES, TIME_S, Attack, program
from scripts.bench.sandbox.attacks.calls import CALLS
from scripts.bench.sandbox.attacks.changes import CHANGES
from scripts.bench.sandbox.attacks.knowledge import KNOWLEDGE
from scripts.bench.sandbox.attacks.memory import MEMORY, TOO_MUCH_MB
from scripts.bench.sandbox.attacks.network import NETWORK
from scripts.bench.sandbox.attacks.rights import RIGHTS
from scripts.bench.sandbox.attacks.shares import SHARES
from scripts.bench.sandbox.attacks.time_limits import TIME_LIMITS
from scripts.bench.sandbox.attacks.warm import WARM

ATTACKS: list[Attack] = [*NETWORK, *KNOWLEDGE, *CHANGES, *RIGHTS, *CALLS, *TIME_LIMITS, *MEMORY, *SHARES, *WARM]

__all__ = ["ATTACKS", "FILES_MB", "LIMIT_MB", "PROCESSES", "TIME_S", "TOO_MUCH_MB", "Attack", "program"]
