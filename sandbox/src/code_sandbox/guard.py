"""A guard that refuses requests before their body is read, and drops them when their client hangs up."""

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 4 << 20
_SMALL_BYTES, _LARGE_BODIES_BYTES = 64 << 10, 64 << 20  # a small request is taken whatever the large ones hold
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class Guard:
    """A guard before the application (ASGI).

    Args:
        app: the application.
        token: the token that clients send as `Authorization: Bearer TOKEN`; None: the server is on loopback, and
            answers programs of this machine only, not the pages of a browser.
    """

    def __init__(self, app: App, token: str | None) -> None:
        self._app, self._token = app, token
        self._held = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refused = self._refusal(scope["path"], scope["method"], headers)
        if refused:
            await _answer(send, *refused)
            return
        body, held, room = bytearray(), 0, True
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                if room:
                    body += message.get("body", b"")
                large = max(0, len(body) - _SMALL_BYTES)
                if self._held - held + large > _LARGE_BODIES_BYTES:
                    # The rest of the body is read and dropped: a client that still sends does not see an early answer.
                    body, large, room = bytearray(), 0, False
                self._held, held = self._held - held + large, large
                if not message.get("more_body"):
                    break
            if room:
                await self._served(scope, bytes(body), receive, send)
            else:
                await _answer(send, 503, f"large requests, {_LARGE_BODIES_BYTES} bytes of them, are waiting")
        finally:
            self._held -= held

    def _refusal(self, path: str, method: str, headers: dict[str, str]) -> tuple[int, str] | None:
        """Return (status, reason) for a request that the application must not see, else None."""
        if self._token is None:
            if urlsplit("//" + headers.get("host", "")).hostname not in _LOCAL_NAMES or "origin" in headers:
                return 403, "this server has no token, and answers programs of this machine only"
        elif path != "/v1/ping" and not _same(headers.get("authorization", ""), f"Bearer {self._token}"):
            return 401, "send the server's token: Authorization: Bearer TOKEN (--token-file)"
        length = headers.get("content-length", "" if method == "POST" else "0")
        # With both headers the length is not that of the body.
        if not (length.isascii() and length.isdecimal()) or "transfer-encoding" in headers:
            return 411, "give a Content-Length, and no Transfer-Encoding"
        if int(length[:20]) > MAX_BODY_BYTES:
            return 413, f"the body is larger than {MAX_BODY_BYTES} bytes"
        return None

    async def _served(self, scope: MutableMapping[str, Any], body: bytes, receive: Receive, send: Send) -> None:
        """Let the application answer; cancel the answer if the client goes away before."""
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.create_task(_until_gone(receive))

        async def replay() -> Message:
            if whole:
                return whole.pop()
            await asyncio.shield(gone)
            return {"type": "http.disconnect"}

        answer = asyncio.ensure_future(self._app(scope, replay, send))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not answer.done():
                answer.cancel()
            await asyncio.wait({answer})
        if not answer.cancelled():
            answer.result()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _answer(send: Send, status: int, why: str) -> None:
    headers = [(b"content-type", b"application/json")]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"detail": why}).encode()})


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())
