"""User ids of programs: the sandboxes of a machine have different ones."""

import subprocess
import sys

import pytest

from code_sandbox import user_ids
from code_sandbox.limits import IsolationError
from code_sandbox.user_ids import HOST_USERS, UserIds


def test_two_servers_never_have_the_same() -> None:
    ours, others = UserIds(), UserIds()
    taken = [ids.take() for _ in range(100) for ids in (ours, others)]
    assert len(set(taken)) == len(taken) and set(taken) <= set(HOST_USERS)
    ours.give_back(taken[0])
    assert ours.take() == taken[0]
    ours.close()
    others.close()


def test_a_server_that_is_killed_gives_its_own_back(monkeypatch: pytest.MonkeyPatch) -> None:
    first = 2 * 10**6  # no other test's
    monkeypatch.setattr(user_ids, "HOST_USERS", range(first, first + 100))
    code = (
        f"from code_sandbox import user_ids; user_ids.HOST_USERS = range({first}, {first + 100})\n"
        "ids = user_ids.UserIds(); print(ids.take(), flush=True); input()"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout
    its = int(server.stdout.readline())
    beside, afterwards = UserIds(), UserIds()
    assert beside.take() != its
    server.kill()
    server.communicate(timeout=60)
    assert afterwards.take() == its
    beside.close()
    afterwards.close()


def test_it_says_when_there_are_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_ids, "HOST_USERS", range(10**6, 10**6 + 20))
    ids = UserIds()
    assert len({ids.take() for _ in range(20)}) == 20
    with pytest.raises(IsolationError, match="all 20 user ids"):
        ids.take()
    ids.close()
