"""Programs that try to get out of the code sandbox, or to take more than they may; one module for each kind."""

from sandbox.attacks.programs.attack import FILES_MB, LIMIT_MB, PROCESSES, TIME_S, Attack, program
from sandbox.attacks.programs.calls import CALLS
from sandbox.attacks.programs.changes import CHANGES
from sandbox.attacks.programs.knowledge import KNOWLEDGE
from sandbox.attacks.programs.memory import MEMORY, TOO_MUCH_MB
from sandbox.attacks.programs.network import NETWORK
from sandbox.attacks.programs.rights import RIGHTS
from sandbox.attacks.programs.shares import SHARES
from sandbox.attacks.programs.time_limits import TIME_LIMITS
from sandbox.attacks.programs.warm import WARM

ATTACKS: list[Attack] = [*NETWORK, *KNOWLEDGE, *CHANGES, *RIGHTS, *CALLS, *TIME_LIMITS, *MEMORY, *SHARES, *WARM]

__all__ = ["ATTACKS", "FILES_MB", "LIMIT_MB", "PROCESSES", "TIME_S", "TOO_MUCH_MB", "Attack", "program"]
