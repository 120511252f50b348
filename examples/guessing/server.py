"""A game server of the standard library: find a number from 1 to 15 in four guesses.

    python -m examples.guessing.server [--port PORT]     prints its address, and serves until Ctrl-C

    POST /reset {"id": "a", "seed": 7}     begins the episode `a`, and answers {}
    POST /step {"id": "a", "text": "8"}    makes a move: {"text": "higher", "done": false, "score": 0.0}

The answer to anything else is an error, also for an episode that this process has not begun.
"""

import argparse
import contextlib
import json
import random
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HIGHEST, GUESSES = 15, 4
_MOST_EPISODES = 100_000  # those that nobody ends, because their trajectories were stopped, are forgotten

Reply = dict[str, Any]


class Game:
    """The episodes under way."""

    def __init__(self) -> None:
        self.episodes: dict[str, tuple[int, int]] = {}
        """id -> (number, guesses left)"""

    def reset(self, id: str, seed: int) -> Reply:
        """Begin an episode. The same seed has the same number."""
        self.episodes[id] = random.Random(seed).randint(1, HIGHEST), GUESSES
        if len(self.episodes) > _MOST_EPISODES:
            self.episodes.pop(next(iter(self.episodes)))
        return {}

    def step(self, id: str, text: str) -> Reply:
        """Make a move. A text that is no number costs a guess too. Raises KeyError for an unknown episode."""
        number, left = self.episodes.pop(id)
        guess = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else None
        if guess == number or left == 1:
            return {"text": "right" if guess == number else "over", "done": True, "score": float(guess == number)}
        self.episodes[id] = number, left - 1
        words = "no number" if guess is None else "higher" if guess < number else "lower"
        return {"text": words, "done": False, "score": 0.0}


class GameServer(ThreadingHTTPServer):
    """A game with an address. Port 0: one that is free."""

    request_queue_size = 1024  # all trajectories of a batch may begin at once
    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.game, self.lock = Game(), threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error, unless the player has hung up: a trajectory that was stopped waits for no answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: GameServer

    def do_POST(self) -> None:
        game = self.server.game
        try:
            calls: dict[str, Callable[..., Reply]] = {"/reset": game.reset, "/step": game.step}
            arguments = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with self.server.lock:
                status, said = 200, calls[self.path](**arguments)
        except (KeyError, TypeError, ValueError) as error:
            status, said = 400, {"error": repr(error)}
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="default: one that is free")
    server = GameServer(parser.parse_args().port)
    print(server.url, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
