"""`Gate`: stands before all routes (an ASGI middleware): who may come in, how much, how often, how long.

Rules: a request that is refused is answered with the reason; one of a flood only after a pause, so that whoever asks in
a loop is slowed down. Bodies, requests at once, and the time of each are limited. No answer is kept by a browser, or
guessed at.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlencode

from starlette.requests import ClientDisconnect

from tidegate.protocol.failure_reasons import log_failure
from tidegate.web.security.access import COOKIE, Access, Refusal
from tidegate.web.security.flood import Buckets

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

LOGIN = "/ui/login"
QUERY_TOKEN = "token"
FAULT = "the server has failed to answer; its log says why"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server takes. `pause_s`: how long one of a flood waits for its refusal."""

    body_bytes: int = 16 * 1024
    at_once: int = 64
    a_second: float = 50.0
    burst: int = 100
    pause_s: float = 1.0
    time_s: float = 30.0


class BodyTooLargeError(Exception):
    """Somebody sends more than is taken. Raised where a route reads the body, which answers with 413."""


class Gate:
    """Before one application."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        limits: Limits,
        clock_s: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._app = app
        self._access = access
        self._limits = limits
        self._clock_s = clock_s
        self._wait = pause
        self._buckets = Buckets(limits.a_second, limits.burst)
        self._at_once = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await self._request(scope, receive, _with_headers(send))

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        if not self._buckets.take(client[0] if client else "", self._clock_s()):
            await self._wait(self._limits.pause_s)
            await _refuse(send, _flood("too many requests a second", self._limits.pause_s))
        elif self._at_once >= self._limits.at_once:
            await _refuse(send, _flood("too many requests at once", self._limits.pause_s))
        else:
            self._at_once += 1
            try:
                await self._let_in(scope, receive, send)
            finally:
                self._at_once -= 1

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if (refusal := self._access.refuse_host(headers)) is not None:
            await _refuse(send, refusal)
            return
        path: str = scope["path"]
        is_page = scope["method"] == "GET" and (path == "/" or path.startswith("/ui"))
        if is_page and (token := _query_token(scope)) is not None:
            await self._log_in(scope, send, token)
            return
        if path != LOGIN and (refusal := self._access.refuse(scope["method"], headers)) is not None:
            if is_page and refusal.status in (401, 403):
                await _answer(send, 303, b"", {"location": LOGIN})
            else:
                await _refuse(send, refusal)
            return
        await self._limited(scope, receive, send, headers)

    async def _log_in(self, scope: Scope, send: Send, token: str) -> None:
        """Somebody opens a link with the token: from then on the cookie has it, and no address shows it."""
        if not self._access.is_token(token):
            await _refuse(send, Refusal(403, "this is not the token of this server"))
            return
        rest = [pair for pair in _query(scope) if pair[0] != QUERY_TOKEN]
        # A path that begins with two slashes would name another host.
        to = "/" + quote(scope["path"].lstrip("/\\")) + (f"?{urlencode(rest)}" if rest else "")
        await _answer(send, 303, b"", {"location": to, "set-cookie": cookie(token)})

    async def _limited(self, scope: Scope, receive: Receive, send: Send, headers: Mapping[str, str]) -> None:
        limit, begun = self._limits.body_bytes, False
        if not scope["query_string"].isascii():
            await _refuse(send, Refusal(400, "the query has bytes that no address has: write them as %XX"))
            return
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:18]) > limit:
            await _refuse(send, _too_large(limit))
            return
        taken = 0

        async def take() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > limit:
                raise BodyTooLargeError(_too_large(limit).reason)
            return message

        async def tell(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            async with asyncio.timeout(self._limits.time_s):
                await self._app(scope, take, tell)
        except TimeoutError:
            if not begun:
                await _refuse(send, Refusal(408, f"the request has taken longer than {self._limits.time_s:g} s"))
        except ClientDisconnect:
            pass  # The client has gone while its body was read: there is no one to answer, and nothing is broken.
        except Exception as error:  # noqa: BLE001 (a fault of ours must not end the server, and is told as one)
            log_failure(log, f"{scope['method']} could not be answered", error)
            if not begun:
                await _refuse(send, Refusal(500, FAULT))


def cookie(token: str) -> str:
    """The header that has a browser keep the token for reading."""
    return f"{COOKIE}={token}; Path=/; HttpOnly; SameSite=Strict"


def error_body(reason: str) -> bytes:
    """A reason as Flink writes it."""
    return json.dumps({"errors": [reason]}).encode()


def _flood(reason: str, pause_s: float) -> Refusal:
    return Refusal(429, f"{reason}; ask again later", {"retry-after": str(max(1, round(pause_s)))})


def _too_large(limit: int) -> Refusal:
    return Refusal(413, f"a body may have {limit} bytes", {"connection": "close"})


def _query(scope: Scope) -> list[tuple[str, str]]:
    return parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)


def _query_token(scope: Scope) -> str | None:
    return next((value for name, value in _query(scope) if name == QUERY_TOKEN), None)


async def _refuse(send: Send, refusal: Refusal) -> None:
    await _answer(send, refusal.status, error_body(refusal.reason), dict(refusal.headers))


async def _answer(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    told = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in told.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _with_headers(send: Send) -> Send:
    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: list[Any] = list(message.get("headers", ()))
            present = {name.lower() for name, _ in headers}
            headers += [(name, value) for name, value in _ALWAYS if name not in present]
            message = {**message, "headers": headers}
        await send(message)

    return tell


_ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
)
