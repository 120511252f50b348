"""A server of /run_code without any defence: what requests do to it shows that the checks can fail.

It runs programs as they come, four at a time, one connection of each of its few threads at a time, as its own user.
"""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

_THREADS = 4


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        stats = {"waiting_or_running": 0, "over_limit": 0, "warm": 0, "limits_whole_programs": False}
        self._answer(200, stats)

    def do_POST(self) -> None:
        if self.headers.get("Content-Length"):
            body = self.rfile.read(int(self.headers["Content-Length"]))
        else:
            body = b""
            while size := int(self.rfile.readline() or b"0", 16):
                body += self.rfile.read(size)
                self.rfile.readline()
        try:
            request = json.loads(body)
            self._answer(200, _run(request))
        except Exception as error:
            self._answer(500, {"detail": str(error), "input": body.decode(errors="replace")})

    do_PUT = do_POST

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def _run(request: dict[str, Any]) -> dict[str, Any]:
    command, start = [sys.executable, "-c", request["code"]], time.perf_counter()
    limit = float(request.get("run_timeout", 10))
    try:
        ended = subprocess.run(command, capture_output=True, text=True, input=request.get("stdin") or "", timeout=limit)
        code, out, errors = ended.returncode, ended.stdout, ended.stderr
    except subprocess.TimeoutExpired:
        code, out, errors = None, "", ""
    result = {"return_code": code, "stdout": out, "stderr": errors, "execution_time": time.perf_counter() - start}
    return {"status": "Failed" if code else "Success", "run_result": result}


class _Server(HTTPServer):
    request_queue_size = 1024
    pool = ThreadPoolExecutor(_THREADS)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.pool.submit(self._one, request, client_address)

    def _one(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError as error:
            print(f"a client went away: {error}", file=sys.stderr)
        finally:
            self.shutdown_request(request)


if __name__ == "__main__":
    _Server(("127.0.0.1", int(sys.argv[1])), _Handler).serve_forever()
