"""Attacks by requests that are wrong, or come from whom the server should not serve."""

import dataclasses
import json
from typing import Any

from sandbox.attacks.client import RequestAttack, ask, body, exchange, head, ran
from sandbox.attacks.floods import FLOODS
from sandbox.attacks.health import Target
from sandbox.attacks.starts import STARTS
from tests.kit import ROOT

_SECRET = "an-echo-that-nobody-asked-for"
_DEEP = 100_000
WRONG: dict[str, bytes] = {
    "NaN as time": body(run_timeout=float("nan"), stdin=_SECRET),
    "a negative time": body(run_timeout=-1, stdin=_SECRET),
    "a time of 5000 digits": b'{"code": "print(1)", "stdin": "%s", "run_timeout": %s}'
    % (_SECRET.encode(), b"9" * 5000),
    "a lone surrogate in the program": b'{"code": "print(1) # \\ud800", "stdin": "%s"}' % _SECRET.encode(),
    "a lone surrogate in the input": b'{"code": "print(1)", "stdin": "%s \\udfff"}' % _SECRET.encode(),
    "deep lists": b"[" * _DEEP + b"]" * _DEEP,
    "no JSON": b"{",
    "an empty body": b"",
    "bytes that are not UTF-8": b'{"code": "\xff\xfe", "stdin": "%s"}' % _SECRET.encode(),
    "a program of 1 MiB of 4-byte characters": body(code="#" + "\U0001f600" * ((1 << 20) - 1)),
    "many keys": json.dumps({str(i): i for i in range(200_000)}).encode(),
    "files that climb": body(files={"../../../../tmp/escaped": "aGk="}),
    "a language that is a path": body(language="../../bin/sh"),
}
"""name -> body, none of which the server may run, and which must not make it fail."""


def _refused(content: bytes) -> Any:
    async def act(target: Target) -> str:
        status, text = await ask(target, content)
        if status == 0 or status >= 500:
            return f"DEGRADED: HTTP {status} {text[:200]!r}"
        if _SECRET.encode() in text or len(text) > 2000:
            return f"DEGRADED: it sends back what it got ({len(text)} bytes)"
        if ran(status, text):
            return f"DEGRADED: it was run: {text[:200]!r}"
        if status == 200 and json.loads(text).get("status") != "SandboxError":
            return f"DEGRADED: {text[:200]!r}"
        return ""

    return act


def _clamped(**fields: Any) -> Any:
    """A request that asks for more than there is, and gets no more."""

    async def act(target: Target) -> str:
        code = (
            "import resource, time\nprint(resource.getrlimit(resource.RLIMIT_AS)[0] >> 20, flush=True)\ntime.sleep(30)"
        )
        status, text = await ask(target, body(code=code, **fields))
        if status >= 500 or status == 0:
            return f"DEGRADED: HTTP {status}"
        if status != 200:
            return ""
        result = json.loads(text)["run_result"]
        if result["execution_time"] > 12 or not 0 < int(result["stdout"]) < 700:
            return f"DEGRADED: it got it: {result}"
        return ""

    return act


def _foreign(**headers: str) -> Any:
    """A page of another site: a browser sends its requests here."""

    async def act(target: Target) -> str:
        status, text = await ask(target, body(), **headers)
        return f"ESCAPED: a page of another site runs programs: {text[:100]!r}" if ran(status, text) else ""

    return act


def _smuggled(*parts: bytes) -> Any:
    """Bytes that a server and a proxy in front of it may read as different requests."""

    async def act(target: Target) -> str:
        status, text = await exchange(target, *parts, timeout_s=8)
        return f"DEGRADED: HTTP {status} {text[:100]!r}" if 200 <= status < 400 or status >= 500 else ""

    return act


async def _described(target: Target) -> str:
    for path in ("/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"):
        status, _text = await exchange(target, head(None, "GET", path), b"")
        if status == 200:
            return f"DEGRADED: {path} is open"
    return ""


async def _paths(target: Target) -> str:
    for path in (
        "/../../../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/static/..%2f..%2fetc/passwd",
    ):
        status, text = await exchange(target, head(None, "GET", path), b"")
        if status == 200 and b"root:" in text:
            return f"ESCAPED: {path} is served"
        if status >= 500:
            return f"DEGRADED: {path}: HTTP {status}"
    return ""


async def _methods(target: Target) -> str:
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "X" * 200):
        status, text = await exchange(target, head(len(body()), method), body(), timeout_s=10)
        if ran(status, text) or status >= 500:
            return f"DEGRADED: {method}: HTTP {status} {text[:100]!r}"
    return ""


def _answered(content: bytes) -> Any:
    """What may be run or refused, but not make the server fail."""

    async def act(target: Target) -> str:
        status, _ = await ask(target, content)
        return f"DEGRADED: HTTP {status}" if status >= 500 or status == 0 else ""

    return act


async def _upgrade(target: Target) -> str:
    more = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec_WebSocket_Version": "13"}
    status, _ = await exchange(
        target, head(None, "GET", "/run_code", Sec_WebSocket_Key="eA==", **more), b"", timeout_s=10
    )
    return f"DEGRADED: HTTP {status}" if status == 101 or status >= 500 else ""


async def _told_paths(target: Target) -> str:
    """What the server says when something is wrong must not say where it is on this machine."""
    for content in (b"{", body(language="c"), body(files={"a": "b"}), body(code=1), b'{"code": "\xff"}'):
        _, text = await ask(target, content)
        if str(ROOT).encode() in text or b"Traceback" in text:
            return f"DEGRADED: it names its place: {text[:200]!r}"
    return ""


_TWICE = b'{"code": "print(1)", "code": "print(6 * 7)", "language": "c", "language": "python"}'
_LENGTH = len(body())
_BOTH = head(_LENGTH, Transfer_Encoding="chunked")
_TWO = head(_LENGTH).replace(b"Content-Length:", b"Content-Length: 5\r\nContent-Length:")
_CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (_LENGTH, body())

_WRONG_ONES = [
    *[RequestAttack(f"request: {name}", _refused(content)) for name, content in WRONG.items()],
    RequestAttack("request: duplicate keys", _answered(_TWICE)),
    RequestAttack("request: UTF-16", _answered(body().decode().encode("utf-16"))),
    RequestAttack("request: a time of 1e308", _clamped(run_timeout=1e308)),
    RequestAttack("request: memory of 10^30 MB", _clamped(memory_limit_MB=10**30)),
    RequestAttack("request: the host of another site", _foreign(host="evil.example")),
    RequestAttack("request: a host that only looks local", _foreign(host="localhost.evil.example")),
    RequestAttack("request: no host", _foreign(host="")),
    RequestAttack("request: the origin of another site", _foreign(Origin="http://evil.example")),
    RequestAttack(
        "request: a form's text of another site", _foreign(Origin="http://a.example", Content_Type="text/plain")
    ),
    RequestAttack("request: text/plain", _foreign(Content_Type="text/plain")),
    RequestAttack("request: a body in chunks", _smuggled(head(None, Transfer_Encoding="chunked"), _CHUNKED)),
    RequestAttack("request: two ways of a length", _smuggled(_BOTH, _CHUNKED)),
    RequestAttack("request: two lengths", _smuggled(_TWO, body())),
    RequestAttack("request: a length with a sign", _smuggled(head(None, Content_Length=f"+{_LENGTH}"), body())),
    RequestAttack("request: a negative length", _smuggled(head(None, Content_Length="-1"), body())),
    RequestAttack("request: a length of 5000 digits", _smuggled(head(None, Content_Length="9" * 5000), body())),
    RequestAttack("request: no length", _smuggled(head(None), body())),
    RequestAttack("request: 10,000 headers", _smuggled(head(0, **{f"x{i}": "y" for i in range(10_000)}), b"")),
    RequestAttack("request: a header of 1 MB", _smuggled(head(_LENGTH, x="y" * 1_000_000), body())),
    RequestAttack("request: no HTTP", _smuggled(b"\x16\x03\x01" + bytes(range(256)) * 40, b"\r\n\r\n")),
    RequestAttack("request: what describes the server", _described),
    RequestAttack("request: paths that climb", _paths),
    RequestAttack("request: other methods", _methods),
    RequestAttack("request: an upgrade", _upgrade),
    RequestAttack("request: where the server is", _told_paths),
]
REQUESTS = [*[dataclasses.replace(request, light=True) for request in _WRONG_ONES], *FLOODS, *STARTS]
