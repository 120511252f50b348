"""Does the code sandbox hold? `python -m sandbox.attacks [--json]`.

Attacks: the programs of sandbox/attacks/programs and the requests of sandbox/attacks/requests.py against a
server, in each way to start it that this machine allows (sandbox/attacks/modes.py). An attack escapes if it gets
at what is not its own; it degrades if it takes more than its share: another program, the server or this machine is
worse off. Programs that harm nothing also run without a sandbox, where they have to succeed. Exit code 1 if anything
escaped or degraded.
"""

import argparse
import json
import sys
from typing import Any

from recipe.command_line import OneLineParser, run_command
from sandbox.attacks.modes import modes, not_here
from sandbox.attacks.programs import ATTACKS
from sandbox.attacks.requests import REQUESTS
from sandbox.attacks.trial import DEGRADED, ESCAPED, HELD, Trial, controls, run_attacks
from tests.kit.sandbox_server import NotStarted

_CANNOT_ISOLATE = 3


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    attacks = [attack for attack in ATTACKS if arguments.only in attack.name]
    requests = [request for request in REQUESTS if arguments.only in request.name]
    chosen = [mode for mode in modes() if arguments.mode in mode.name]
    if not attacks and not requests:
        parser.error(f"--only {arguments.only}: no such attack")
    if not chosen:
        parser.error(f"--mode {arguments.mode}: no such mode; choose from {', '.join(mode.name for mode in modes())}")
    missing = not_here() | {mode.name: "--mode" for mode in modes() if mode not in chosen}
    trials: list[Trial] = []
    for mode in chosen:
        try:
            trial = run_attacks(mode, attacks, requests)
        except NotStarted as error:
            if error.code != _CANNOT_ISOLATE:
                raise
            missing[mode.name] = error.text.strip().splitlines()[-1]
            continue
        if mode.bounded and "no control groups" in trial.isolation:
            missing[mode.name] = trial.isolation  # what was run is another mode
            continue
        trials.append(trial)
        _print_trial(trial, arguments.only != "")
    freely = {} if arguments.no_controls else controls(attacks)
    _print_controls(freely, len(attacks))
    for name, reason in missing.items():
        print(f"mode left out: {name}: {reason}")
    failed = any(trial.named(DEGRADED) + trial.named(ESCAPED) for trial in trials)
    counts = _counts(trials, missing, freely, len(attacks) + len(requests))
    tried = f"{counts['attacks']} attacks in {len(trials)} modes"
    print(f"{tried}: {counts['escaped']} escaped, {counts['degraded']} degraded")
    if arguments.json:
        print(json.dumps(counts))
    return int(failed or not trials)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m sandbox.attacks",
        description=__doc__,
    )
    parser.add_argument("--mode", default="", help="only modes whose name contains this")
    parser.add_argument("--only", default="", help="only attacks whose name contains this")
    parser.add_argument("--no-controls", action="store_true", help="do not run the attacks without a sandbox")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line, last")
    return parser


def _print_trial(trial: Trial, all_of_them: bool) -> None:
    held, left_out = len(trial.named(HELD)), len(trial.left_out)
    print(
        f"== {trial.mode} ({trial.isolation}): {held} held, {left_out} left out: they need a limit for whole programs"
    )
    for verdict in trial.verdicts:
        if verdict.outcome != HELD or all_of_them:
            print(f"{verdict.outcome.upper():>9}  {verdict.name}: {'; '.join(verdict.reasons)}")
            if all_of_them or verdict.answer:
                print(f"           {json.dumps(verdict.answer)[-600:]}")
    sys.stdout.flush()


def _print_controls(freely: dict[str, bool], attacks: int) -> None:
    succeed = sum(freely.values())
    print(f"without a sandbox: {len(freely)} of {attacks} harm nothing and were tried, {succeed} succeed")
    for name in [name for name, well in freely.items() if not well]:
        print(f"  cannot succeed on this machine: {name}")


def _counts(trials: list[Trial], missing: dict[str, str], freely: dict[str, bool], attacks: int) -> dict[str, Any]:
    of_modes = {
        trial.mode: {
            "isolation": trial.isolation,
            "attacks": len(trial.verdicts),
            "escaped": trial.named(ESCAPED),
            "degraded": trial.named(DEGRADED),
            "left_out": trial.left_out,
        }
        for trial in trials
    }
    return {
        "attacks": attacks,
        "escaped": sum(len(trial.named(ESCAPED)) for trial in trials),
        "degraded": sum(len(trial.named(DEGRADED)) for trial in trials),
        "modes": of_modes,
        "modes_left_out": missing,
        "succeed_without": sum(freely.values()),
        "tried_without": len(freely),
        "cannot_succeed_here": [name for name, well in freely.items() if not well],
    }


if __name__ == "__main__":
    run_command(main)
