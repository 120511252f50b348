"""An hour of chaos: launches of one run, each with other settings, some faults, and one fault that ends the launch."""

import contextlib
import json
import os
import random
import shutil
import struct
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.reliability import chaos_faults as faults
from tests.reliability.chaos_assets import keep_disk, make_chaos_assets, small_disk
from tests.reliability.chaos_faults import Deck, Fault, NotPossible
from tests.reliability.chaos_launch import Launch, Sandbox, TooLate
from tests.reliability.chaos_reader import SAMPLES, lineage, newest_whole, read
from tests.reliability.chaos_reward import is_filtered
from tests.reliability.chaos_spoil import SPOILS
from tests.reliability.chaos_watch import LEDGER, Watch, left_over

DISK_MB = 400
SAVE_FREQ = 3
LAGS, BATCHES, RATES = (0, 1, 2, 3, 4), (2, 3, 4, 6), (1e-4, 3e-5, 1e-5)
START_S, STEP_S, END_S, CLEAN_S = 900.0, 300.0, 240.0, 60.0
"""The longest times of a launch's first step, a step after a fault, the end of a run, and the clean-up."""
_FAULTS = 4  # faults of a launch, before the one that ends the launch
_LAST_S = 240.0  # the time before the end at which the last launch begins at the latest
_FOR_EVER = 100_000
_DEBRIS = "Traceback (most recent call last)"


class Hour:
    """All launches of one seed. Every file is in `folder` (chaos_reader.py names the files).

    Args:
        folder: a folder that does not exist yet.
        seed: the seed of all draws.
        minutes: the time after which the last launch begins, at lag 0, which drains the prompts in flight.
        tell: called with a line for each event.
    """

    def __init__(self, folder: Path, seed: int, minutes: float, tell: Callable[[str], None]) -> None:
        self.folder, self.seed, self.tell = folder, seed, tell
        self.mark = uuid.uuid4().hex
        make_chaos_assets(folder / "assets")
        self.start = time.monotonic()
        self.until = self.start + 60 * minutes - _LAST_S
        (folder / "marks").mkdir()
        (folder / "clock").write_bytes(struct.pack("d", 0.0))
        self.has_disk = small_disk(folder / "run", DISK_MB)
        self.temporary = Path(tempfile.mkdtemp(prefix="vc-", dir="/tmp"))  # short: a socket's path has 107 characters
        self.sandbox = Sandbox(folder / "sandbox.log")
        self.watch = Watch(folder, folder / "run" / "metrics.jsonl", self.mark)
        self.decks = {
            name: Deck(things, f"{seed}/{name}")
            for name, things in (
                ("goes on", faults.GOES_ON),
                ("ends", faults.ENDS),
                ("start", faults.AT_START),
                ("spoils", SPOILS),
            )
        }

    def run(self) -> None:
        """Make all launches, then the last one. Remove everything of the hour but its folder, however the hour ends."""
        number = 0
        try:
            while time.monotonic() < self.until:
                number += 1
                self._launch(number)
            self._last(number + 1)
        finally:
            self.watch.stop()
            self.sandbox.stop()
            keep_disk(self.folder / "run")
            shutil.rmtree(self.temporary, ignore_errors=True)
            shutil.rmtree(self.folder / "assets", ignore_errors=True)

    def _settings(self, lag: int, batch: int, rate: float, steps: int) -> list[str]:
        assets = self.folder / "assets"
        reward = "reward.custom_reward_function"
        return [
            "+task=countdown",
            "method=vcpo",
            "+agent=simpletir",
            f"tool_use.sandbox_url={self.sandbox.url}",
            "tool_use.max_turns=3",
            f"data.train_files={assets}/data/train.parquet",
            f"data.val_files={assets}/data/val.parquet",
            "data.shuffle=false",
            "data.max_response_length=128",
            f"data.train_batch_size={batch}",
            f"actor_rollout_ref.model.path={assets}/model",
            f"actor_rollout_ref.actor.optim.lr={rate}",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={SAMPLES}",
            f"actor_rollout_ref.rollout.n={SAMPLES}",
            "actor_rollout_ref.rollout.max_model_len=224",
            "actor_rollout_ref.rollout.n_gpus_per_node=2",
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=256",
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.metric=reward",
            f"{reward}.path=pkg://tests.reliability.chaos_reward",
            f"{reward}.name=compute_score",
            f"+{reward}.reward_kwargs.folder={self.folder}",
            f"+{reward}.reward_kwargs.marks={self.folder / 'marks'}",
            f"run_dir={self.folder / 'run'}",
            f"trainer.save_freq={SAVE_FREQ}",
            "trainer.max_actor_ckpt_to_keep=3",
            f"trainer.total_training_steps={steps}",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            "trainer.resume_mode=auto",
            "samples_every=2",
            f"async.lag={lag}",
            *(f"{name}={limit}" for name, limit in faults.LIMITS.items()),
        ]

    def _launch(self, number: int) -> None:
        rng = random.Random(f"{self.seed}/{number}")
        lag, batch, rate = rng.choice(LAGS), rng.choice(BATCHES), rng.choice(RATES)
        chosen = [self.decks["goes on"].deal() for _ in range(_FAULTS)]
        at_start = number > 1 and rng.random() < 0.1
        last: Fault = self.decks["start" if at_start else "ends"].deal()
        if number > 1:
            self._spoil(number, rng)
        self._note("launch", number, "", f"lag {lag}, batch {batch}, learning rate {rate:g}")
        launch, begun = self._start(number, lag, batch, rate, _FOR_EVER)
        first = begun["from"] or 0
        try:
            if at_start:
                time.sleep(rng.uniform(1, 30))
            else:
                started = self._waited(launch, number, lambda: self._made(number) > first, START_S, "the first step")
                if started and number == 1:  # only a run with checkpoints can be resumed
                    two = 2 * SAVE_FREQ
                    self._waited(launch, number, lambda: self._made(1) > two, START_S, f"step {two + 1}")
                for fault in chosen:
                    time.sleep(rng.uniform(0, 4))
                    if not launch.alive():
                        break
                    self._goes_on(launch, number, fault, rng)
            time.sleep(rng.uniform(0, 4))
            if launch.alive():
                self._ends(launch, number, last, rng)
        except BaseException:
            launch.kill()
            raise
        finally:
            self._after(launch, number, begun)

    def _start(self, number: int, lag: int, batch: int, rate: float, steps: int) -> tuple[Launch, dict[str, Any]]:
        begun = {"launch": number, "lag": lag, "batch": batch, "from": newest_whole(self.folder / "run")}
        self.watch.begin(number, begun["from"])
        disk = self.folder / "run" if self.has_disk else None
        settings = self._settings(lag, batch, rate, steps)
        return Launch(self.folder, number, self.mark, settings, disk, self.temporary, self.sandbox), begun

    def _made(self, number: int) -> int:
        """Return the newest step of this launch."""
        return self.watch.last_step if self.watch.last_launch == number else 0

    def _waited(self, launch: Launch, number: int, there: Callable[[], bool], limit_s: float, what: str) -> bool:
        """Call `Launch.wait`, and note a wait that is too long, or an early end."""
        try:
            if launch.wait(there, limit_s, what):
                return True
        except TooLate as error:
            self._note(what, number, "", str(error), "waits above their limit")
            launch.kill()
            return False
        self._note(what, number, "", f"ended before: {launch.output[-600:]!r}", "not as the table says")
        return False

    def _goes_on(self, launch: Launch, number: int, fault: Fault, rng: random.Random) -> None:
        said, before = len(launch.output), self._made(number)
        try:
            target = fault.does(launch, rng)
        except (NotPossible, psutil.Error) as error:  # psutil.Error: the chosen process has ended
            return self._note(fault.name, number, "", f"not tried: {error}")
        reached = max(before, self._made(number)) + 2

        def there() -> bool:
            return self._made(number) >= reached and fault.says in launch.output[said:]

        try:
            if not launch.wait(there, STEP_S, f"step {reached}, and {fault.says!r}"):
                words = f"the run ended with code {launch.driver.wait()}: {launch.output[-600:]!r}"
                return self._note(fault.name, number, target, words, "not as the table says")
        except TooLate as error:
            launch.kill()
            return self._note(fault.name, number, target, str(error), "waits above their limit")
        self._note(fault.name, number, target, f"went on to step {self._made(number)}")
        return None

    def _ends(self, launch: Launch, number: int, fault: Fault, rng: random.Random) -> None:
        try:
            target = fault.does(launch, rng)
            code = launch.end(END_S)
        except (NotPossible, psutil.Error) as error:
            launch.driver.terminate()
            return self._note(fault.name, number, "", f"not tried, but SIGTERM: {error}")
        except TooLate as error:
            launch.kill()
            return self._note(fault.name, number, "", str(error), "waits above their limit")
        begun = time.monotonic()  # where the launcher is killed, what cleans up says it
        while fault.says not in launch.output and time.monotonic() < begun + CLEAN_S:
            time.sleep(0.5)
        words = f"ended with code {code}"
        wrong = code != fault.code or fault.says not in launch.output or _DEBRIS in launch.output
        if wrong:
            words += (
                f", where {fault.code} and {fault.says!r} without a traceback were to come: {launch.output[-900:]!r}"
            )
        self._note(fault.name, number, target, words, "not as the table says" if wrong else None)
        return None

    def _after(self, launch: Launch, number: int, begun: dict[str, Any]) -> None:
        """Wait for the end of a launch, note its words and what is left of it, and remove that."""
        if launch.alive():
            try:
                launch.end(END_S)
            except TooLate as error:
                self._note("end", number, "", str(error), "waits above their limit")
                launch.kill()
        self.watch.copy_lines()
        (self.folder / "run" / "filler").unlink(missing_ok=True)
        left = left_over(self.watch, self.mark, self.temporary, CLEAN_S)
        for process in left["processes"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process.split()[0]), 9)
        for name in (*left["shared memory"], *left["semaphores"]):
            Path("/dev/shm", name).unlink(missing_ok=True)
        if any(line["violation"] for line in read(self.folder / "faults.jsonl") if line["launch"] == number):
            for logs in self.temporary.rglob("session_[0-9]*/logs"):
                shutil.copytree(logs, self.folder / f"ray-logs-{number}", ignore_dangling_symlinks=True)
        for path in self.temporary.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.watch.forget()
        begun |= {"code": launch.driver.wait(), "said": launch.resumed_from, "words": launch.output[-600:]}
        self._append("launches.jsonl", begun)
        self._append("left.jsonl", {"launch": number, **left})
        there = {name: len(found) for name, found in left.items() if found}
        if number == 1 and begun["code"] == 2:
            raise RuntimeError(f"the first launch was refused: {launch.output[-600:]}")
        self.tell(f"{self._time()} launch {number} is over: code {begun['code']}, left {there or 'nothing'}")

    def _spoil(self, number: int, rng: random.Random) -> None:
        for _ in range(rng.choice((0, 1, 2))):
            name, spoil = self.decks["spoils"].deal()
            self._note(name, number, spoil(self.folder, rng), "spoilt")

    def _last(self, number: int) -> None:
        """Make the last launch, at lag 0, until no prompt can be in flight; its end is an ordinary one."""
        rng = random.Random(f"{self.seed}/{number}")
        steps = lineage(read(self.folder / LEDGER))
        first, batch = newest_whole(self.folder / "run") or 0, max(BATCHES)
        trained = {row for step, line in steps.items() if step <= first for row in line["rows"]}
        holes = sum(row not in trained and not is_filtered(row) for row in range(max(trained, default=0)))
        launch, begun = self._start(number, 0, batch, rng.choice(RATES), first + holes // batch + 4)
        try:
            self._waited(launch, number, lambda: self._made(number) > first, START_S, "the first step")
            code = launch.end(START_S + STEP_S)
            wrong = code != 0
            self._note("none", number, "", f"ended with code {code}", "not as the table says" if wrong else None)
        except TooLate as error:
            self._note("none", number, "", str(error), "waits above their limit")
            launch.kill()
        except BaseException:
            launch.kill()
            raise
        finally:
            self._after(launch, number, begun)

    def _note(self, fault: str, number: int, target: str, outcome: str, violation: str | None = None) -> None:
        at = round(time.monotonic() - self.start, 1)
        line = {"at": at, "launch": number, "step": self.watch.last_step, "fault": fault, "target": target}
        self._append("faults.jsonl", line | {"outcome": outcome, "violation": violation})
        mistake = f"  VIOLATION ({violation})" if violation else ""
        of = f", {target}" if target else ""
        self.tell(f"{self._time()} launch {number}, step {self.watch.last_step}: {fault}{of}: {outcome[:200]}{mistake}")

    def _time(self) -> str:
        seconds = int(time.monotonic() - self.start)
        return f"{seconds // 60:02d}:{seconds % 60:02d}"

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with open(self.folder / name, "a") as file:
            file.write(json.dumps(line) + "\n")
