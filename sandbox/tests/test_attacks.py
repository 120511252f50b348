"""Attacks on the code sandbox: nothing gets out of it, and nothing takes more than its share."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from sandbox.attacks.modes import modes, not_here
from sandbox.attacks.programs import ATTACKS
from sandbox.attacks.requests import REQUESTS
from sandbox.attacks.trial import DEGRADED, HELD, Trial, controls, run_attacks
from tests.kit.sandbox_server import Mode

# One of each kind, for the modes that are not this machine's first.
SAMPLE = (
    *("tcp to the loopback", "the server's environment: own", "a secret file", "write outside /tmp", "chroot"),
    *("sleep", "without input and output", "zombies", "clone: user namespace", "call: memfd_create"),
    *("slow down the user's processes", "files that the last program left", "warm: inherited descriptors"),
    *("request: the origin of another site", "flood: a body of 200 MB", "flood: 80 limits of 0.1 to 0.3 s"),
    *("start: without the token", "start: killed, and started again", "start: zombies of 40 programs"),
)
# Those that succeed without a sandbox wherever there is Python.
REAL = (
    *("tcp to the loopback", "the server's environment: own", "a secret file", "write outside /tmp", "sleep"),
    *("processes that the last program left", "call: pidfd_open"),
)

NAMES = {attack.name for attack in (*ATTACKS, *REQUESTS)}
TRIES = 3
"""At most so many times what degraded is tried again: what a sandbox lets through degrades each time."""


def worse(mode: Mode, trial: Trial) -> dict[str, list[str]]:
    """Attack -> what it did, of those that did not fail.

    A busy machine makes a neighbour late too: what degraded is tried again, without the others. What escaped is not.
    What degraded after many attacks at once, or at the end of the server, is of no single attack: all are tried again.
    """
    found = {verdict.name: verdict for verdict in trial.verdicts if verdict.outcome != HELD}
    tried = {verdict.name for verdict in trial.verdicts}
    for _ in range(TRIES):
        degraded = {name for name, verdict in found.items() if verdict.outcome == DEGRADED}
        if not degraded:
            break
        again = degraded if degraded <= NAMES else tried
        attacks, requests = ([a for a in all_of_them if a.name in again] for all_of_them in (ATTACKS, REQUESTS))
        verdicts = run_attacks(mode, attacks, requests, show=False).verdicts
        found = {name: verdict for name, verdict in found.items() if verdict.outcome != DEGRADED}
        found = {verdict.name: verdict for verdict in verdicts if verdict.outcome != HELD} | found
    return {name: verdict.reasons for name, verdict in found.items()}


def test_there_are_enough_attacks() -> None:
    names = [attack.name for attack in ATTACKS] + [request.name for request in REQUESTS]
    assert len(set(names)) == len(names) >= 130
    assert set(SAMPLE) | set(REAL) <= set(names)
    assert {mode.name for mode in modes()} | set(not_here())


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    """All attacks in this machine's first mode and, at the same time, the sample of attacks in each other mode."""
    attacks, requests = ([a for a in all_of_them if a.name in SAMPLE] for all_of_them in (ATTACKS, REQUESTS))
    with ThreadPoolExecutor(len(modes())) as pool:
        first = pool.submit(run_attacks, modes()[0], show=False)
        others = [pool.submit(run_attacks, mode, attacks, requests, show=False) for mode in modes()[1:]]
        return [trial.result() for trial in (first, *others)]


def test_nothing_escapes_or_degrades(trials: list[Trial]) -> None:
    assert worse(modes()[0], trials[0]) == {}
    assert len(trials[0].verdicts) + len(trials[0].left_out) >= len(ATTACKS) + len(REQUESTS)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start the server in these ways")
@pytest.mark.parametrize("number", range(1, len(modes())), ids=lambda number: modes()[number].name)
def test_the_other_ways_to_start_it(number: int, trials: list[Trial]) -> None:
    assert worse(modes()[number], trials[number]) == {}


def test_the_attacks_are_real() -> None:
    assert controls([a for a in ATTACKS if a.name in REAL], show=False) == dict.fromkeys(REAL, True)
