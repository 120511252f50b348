"""User ids for the programs of a server that root runs: two servers of a machine never give the same id.

The kernel counts processes by user id, and kills by user id: two programs with one id would share their limit.
"""

import contextlib
import socket

from code_sandbox.limits import IsolationError

# Nobody's: systemd keeps 61184 to 65519 for users that exist while a service runs, so no file belongs to them.
HOST_USERS = range(61184, 65520)
_BLOCK = 16


class UserIds:
    """The user ids that no other server of the machine gives to programs, claimed in blocks when they are needed.

    A claim is an abstract socket name: the kernel frees the name however the server ends, and all servers of one
    network namespace see the name.
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self._claims: list[socket.socket] = []

    def take(self) -> int:
        """Take a user id that no program has. Raises IsolationError if all are taken."""
        if not self._free:
            self._free = self._claim()
        return self._free.pop()

    def give_back(self, user: int) -> None:
        """Free `user` again, once all processes of its program have ended."""
        self._free.append(user)

    def close(self) -> None:
        """Leave all user ids to other servers."""
        self._free = []
        for claim in self._claims:
            claim.close()

    def _claim(self) -> list[int]:
        for first in HOST_USERS[::_BLOCK]:
            claim = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(OSError):
                claim.bind(f"\0vcpo-sandbox-users-{first}")
                self._claims.append(claim)
                return [user for user in range(first, first + _BLOCK) if user in HOST_USERS]
            claim.close()
        raise IsolationError(f"all {len(HOST_USERS)} user ids of programs are taken by the sandboxes of this machine")
