"""The page, served while runs go on: on loopback, below an address that only who started it knows."""

import hashlib
import json
import secrets
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from scripts.report import page, payload
from scripts.report.runs import RunError, read_run

_LOOPBACK = "127.0.0.1"


class Server(ThreadingHTTPServer):
    """Serves the page of `folders` at `url`, and what has become of the runs at `data.json` beside it.

    Other users of the machine reach the port too: they lack the random part of the address.

    Args:
        folders: of runs; one may have no step yet.
        port: 0 takes a free one.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, folders: list[Path], port: int = 0) -> None:
        self._folders = folders
        self.root = f"/{secrets.token_urlsafe(16)}/"
        super().__init__((_LOOPBACK, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{_LOOPBACK}:{self.server_address[1]}{self.root}"

    def look(self) -> dict[str, Any]:
        """The payload of the runs as they are now."""
        runs, waiting = [], []
        for folder in self._folders:
            try:
                runs.append(read_run(folder))
            except RunError as error:
                waiting.append(str(error))
        return payload.make(runs, tuple(waiting))


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path == self.server.root:
            self._answer(page.html(self.server.look(), live=True).encode(), "text/html; charset=utf-8")
        elif self.path == self.server.root + "data.json":
            self._answer(json.dumps(self.server.look(), allow_nan=False).encode(), "application/json")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, body: bytes, kind: str) -> None:
        tag = f'"{hashlib.sha256(body).hexdigest()}"'
        same = self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if same else HTTPStatus.OK)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        if not same:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not same:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a page that is followed asks every two seconds."""


def serve(folders: list[Path], port: int) -> int:
    """Serve until Ctrl-C. Returns the exit code."""
    missing = [folder for folder in folders if not folder.is_dir()]
    if missing:
        print(f"error: {missing[0]}: no such folder; give the folder (run_dir) of a run", file=sys.stderr)
        return 2
    try:
        server = Server(folders, port)
    except OSError as error:
        print(f"error: --port {port}: {error.strerror}", file=sys.stderr)
        return 2
    with server:
        print(f"{server.url}\nFollows {', '.join(map(str, folders))} until Ctrl-C.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
