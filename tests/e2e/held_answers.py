"""A sandbox whose answers can be held back, so that weight updates meet running programs however fast either is."""

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests

from tests.kit.sandbox_server import free_port

_LIMIT_S = 300.0
_CALLS, _CALLS_LIMIT_S = 3, 30.0


class HeldAnswers:
    """Passes requests on to the sandbox at `url`. While answers are held, no call returns.

    url: where it listens.
    """

    def __init__(self, sandbox_url: str) -> None:
        self._sandbox_url = sandbox_url
        self._calls, self._lock = 0, threading.Lock()
        self._free = threading.Event()
        self._free.set()
        self.url = ""

    def hold(self) -> None:
        """From now on no call returns."""
        self._free.clear()

    def let_go(self) -> None:
        """All calls return that have their answers, and all later ones."""
        self._free.set()

    def wait_for_calls(self, count: int, limit_s: float) -> None:
        """Until so many calls have not returned, or the limit is over."""
        deadline = time.monotonic() + limit_s
        while self._calls < count and time.monotonic() < deadline:
            time.sleep(0.05)

    def question(self, path: str) -> requests.Response:
        """The sandbox's answer, at once."""
        return requests.get(self._sandbox_url + path, timeout=_LIMIT_S)

    def call(self, path: str, content: bytes, content_type: str) -> requests.Response:
        """The sandbox's answer to a program, once it may be given."""
        with self._counted():
            headers = {"Content-Type": content_type}
            answer = requests.post(self._sandbox_url + path, data=content, headers=headers, timeout=_LIMIT_S)
            if not self._free.wait(_LIMIT_S):
                raise TimeoutError(f"answers were held for {_LIMIT_S:g} s")
            return answer

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1


@contextlib.contextmanager
def held_answers(sandbox_url: str) -> Iterator[HeldAnswers]:
    """Serves in threads of this process."""
    held = HeldAnswers(sandbox_url)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._give(held.question(self.path))

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            self._give(held.call(self.path, content, self.headers["Content-Type"]))

        def _give(self, answer: requests.Response) -> None:
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *args: object) -> None:
            """Nothing."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 256
        daemon_threads = True

    with Server(("127.0.0.1", free_port()), Handler) as server:
        held.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield held
        finally:
            held.let_go()
            server.shutdown()


@contextlib.contextmanager
def updates_meet_calls(held: HeldAnswers, steps: tuple[int, ...]) -> Iterator[None]:
    """In these steps no call returns between the choice of the step's batch, which needs none of them any more, and the
    end of the step's weight update, which waits for some calls."""
    from verl_vcpo.loop.trainer import LagKTrainer

    on_sample_end, on_step_end = LagKTrainer.on_sample_end, LagKTrainer.on_step_end

    def hold(trainer: LagKTrainer) -> None:
        on_sample_end(trainer)
        if trainer.global_steps in steps:
            held.hold()

    def update(trainer: LagKTrainer) -> None:
        if trainer.global_steps in steps:
            held.wait_for_calls(_CALLS, _CALLS_LIMIT_S)
        try:
            on_step_end(trainer)
        finally:
            held.let_go()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LagKTrainer, "on_sample_end", hold)
        patched.setattr(LagKTrainer, "on_step_end", update)
        yield
