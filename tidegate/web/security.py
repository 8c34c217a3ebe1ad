"""The protection of a web server: access rules (`Access`), the gate before all routes (`Gate`), and connection limits.

Rules:

- A request that changes a job needs the token in the header `Authorization: Bearer ...`, which no other site can send.
- A server on loopback answers everyone who only reads. The header `Host` must contain a loopback host, so that another
  site cannot read by using the address of this machine for its own name.
- A server that other machines can reach needs the token for everything, in the header or, for reading, in the cookie.
- The answer to a refused request has the reason. If a client sends too many requests, it gets the answer after a pause,
  which slows down clients that repeat them in a loop. Body size, concurrent requests and the time for each are limited.
- A connection *waits* while its client still has to send something: the rest of its headers or body, or the next
  request. A client has `input_s` seconds to finish a request; single bytes do not extend this time. When too many
  connections wait, the one that has waited longest is closed, first of the same client, then of all. A browser sends
  its requests at once, so it is served even if another client holds hundreds of connections open.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, parse_qsl, quote, urlencode

import h11
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from tidegate.protocol.failures import log_failure
from tidegate.web.options import TOKEN_FILE, TOKEN_VARIABLE, digest_of, is_loopback

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


log = logging.getLogger(__name__)
LOGIN = "/ui/login"
QUERY_TOKEN = "token"
FAULT = "the server failed to answer; see its log"
COOKIE = "tidegate_rest_token"
READING = ("GET", "HEAD", "OPTIONS")
_CHALLENGE = {"www-authenticate": 'Bearer realm="tidegate"'}

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^][:/@\s]+))(?::[0-9]{1,5})?", re.ASCII)
"""Matches a host, optionally followed by a colon and a port (RFC 9110, section 7.2)."""

CLIENTS_MAX = 1_000

_ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
)

_LOGIN_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>tidegate</title></head>
<body>
<h1>tidegate</h1>
<p>{message}</p>
<form method="post"><label>Token <input name="token" type="password" autocomplete="current-password" autofocus></label>
<button>Open</button></form>
</body>
</html>
"""

_ASK = f"This server needs its token. You find it in {TOKEN_VARIABLE}, or else in ~/.tidegate/{TOKEN_FILE}."
_WRONG = "That is not the token of this server."
_LOGIN_HEADERS = {"content-security-policy": "default-src 'none'; form-action 'self'; frame-ancestors 'none'"}

_WAITS_IN = (h11.IDLE, h11.SEND_BODY)
"""The states of h11 in which the client has to send the next bytes."""


@dataclass(frozen=True, slots=True)
class Access:
    """The access rules of one server. They only depend on the request. `digest` is the hash of its token."""

    digest: bytes
    open_to_others: bool

    def is_token(self, given: str) -> bool:
        return hmac.compare_digest(digest_of(given), self.digest)

    def refuse_host(self, headers: Mapping[str, str]) -> Refusal | None:
        """Returns why a server on loopback refuses a request for this host, or None if it answers.

        The rule applies to every path, including the login: a site that uses the address of this machine sends its own
        name. Header names are in lower case.
        """
        if self.open_to_others or is_loopback(host_of(headers.get("host", ""))):
            return None
        return Refusal(
            400, "this server answers only requests to a loopback host: use http://127.0.0.1:PORT, or a tunnel to it"
        )

    def refuse(self, method: str, headers: Mapping[str, str]) -> Refusal | None:
        """Returns why a request is not allowed, or None if it is.

        Header names are in lower case.
        """
        if method in READING and not self.open_to_others:
            return None
        given = _given(headers, cookie=method in READING)
        if given is None:
            return Refusal(
                401, "this request needs the token: send the header 'Authorization: Bearer TOKEN'", _CHALLENGE
            )
        return None if self.is_token(given) else Refusal(403, "this is not the token of this server")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The status and the reason with which a request is refused."""

    status: int
    reason: str
    headers: Mapping[str, str] = field(default_factory=dict)


def host_of(header: str) -> str:
    """Returns the host in the header `Host` without its port, or "" if the header is malformed."""
    found = _HOST.fullmatch(header)
    return "" if found is None else found[1] or found[2]


def _given(headers: Mapping[str, str], *, cookie: bool) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    if not cookie:
        return None
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return None if found is None else found.value


@dataclass(frozen=True, slots=True)
class Limits:
    """The request limits of a server. `pause_s`: how many seconds the answer to a request over the limit is delayed."""

    body_bytes: int = 16 * 1024
    at_once: int = 64
    a_second: float = 50.0
    burst: int = 100
    pause_s: float = 1.0
    time_s: float = 30.0


class BodyTooLargeError(Exception):
    """Raised if the body of a request is larger than the limit. The answer has status 413."""


class Gate:
    """An ASGI middleware before all routes of an application."""

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
        """Moves the token from an opened link to a cookie, so that it no longer appears in the URL."""
        if not self._access.is_token(token):
            await _refuse(send, Refusal(403, "this is not the token of this server"))
            return
        rest = [pair for pair in _query(scope) if pair[0] != QUERY_TOKEN]
        # A path that begins with two slashes would name another host.
        to = "/" + quote(scope["path"].lstrip("/\\")) + (f"?{urlencode(rest)}" if rest else "")
        await _answer(send, 303, b"", {"location": to, "set-cookie": cookie(token)})

    async def _limited(self, scope: Scope, receive: Receive, send: Send, headers: Mapping[str, str]) -> None:
        limit = self._limits.body_bytes
        begun = False
        if not scope["query_string"].isascii():
            await _refuse(send, Refusal(400, "the query has bytes that are not ASCII: write them as %XX"))
            return
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:18]) > limit:
            await _refuse(send, _too_large(limit))
            return
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise BodyTooLargeError(_too_large(limit).reason)
            return message

        async def send_noting_begin(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            async with asyncio.timeout(self._limits.time_s):
                await self._app(scope, receive_limited, send_noting_begin)
        except TimeoutError:
            if not begun:
                await _refuse(send, Refusal(408, f"the request took longer than {self._limits.time_s:g} s"))
        except ClientDisconnect:
            pass  # The client went away while its body was read. This is not a fault.
        except Exception as error:  # noqa: BLE001 (a fault must not end the server)
            log_failure(log, f"{scope['method']} could not be answered", error)
            if not begun:
                await _refuse(send, Refusal(500, FAULT))


def login_routes(access: Access) -> list[Route]:
    """Returns the routes of `/ui/login`, where a user enters the token in a browser."""

    async def show_form(request: Request) -> Response:
        return HTMLResponse(_LOGIN_PAGE.format(message=_ASK), headers=_LOGIN_HEADERS)

    async def check_form(request: Request) -> Response:
        form = parse_qs((await request.body()).decode("latin-1"), keep_blank_values=True)
        token = form.get("token", [""])[0].strip()
        if not access.is_token(token):
            return HTMLResponse(_LOGIN_PAGE.format(message=_WRONG), 403, headers=_LOGIN_HEADERS)
        return RedirectResponse("/", 303, headers={"set-cookie": cookie(token)})

    return [Route(LOGIN, show_form, methods=["GET"]), Route(LOGIN, check_form, methods=["POST"])]


def cookie(token: str) -> str:
    """Returns the header with which a browser stores the token for reading."""
    return f"{COOKIE}={token}; Path=/; HttpOnly; SameSite=Strict"


def error_body(reason: str) -> bytes:
    """Returns a JSON body with the reason, in the form of Flink's errors."""
    return json.dumps({"errors": [reason]}).encode()


def _flood(reason: str, pause_s: float) -> Refusal:
    return Refusal(429, f"{reason}; try again later", {"retry-after": str(max(1, round(pause_s)))})


def _too_large(limit: int) -> Refusal:
    return Refusal(413, f"the body is too large: up to {limit} bytes are accepted", {"connection": "close"})


def _query(scope: Scope) -> list[tuple[str, str]]:
    return parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)


def _query_token(scope: Scope) -> str | None:
    return next((value for name, value in _query(scope) if name == QUERY_TOKEN), None)


async def _refuse(send: Send, refusal: Refusal) -> None:
    await _answer(send, refusal.status, error_body(refusal.reason), dict(refusal.headers))


async def _answer(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    all_headers = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: list[Any] = list(message.get("headers", ()))
            present = {name.lower() for name, _ in headers}
            headers += [(name, value) for name, value in _ALWAYS if name not in present]
            message = {**message, "headers": headers}
        await send(message)

    return send_with_headers


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of connections that wait.

    `for_one_client` is smaller than the number of concurrent requests (`Limits`).
    """

    input_s: float = 10.0
    waiting: int = 128
    for_one_client: int = 32


class Buckets:
    """A token bucket for each client: `a_second` requests per second, and up to `burst` at once. The caller passes the
    time.

    The `clients_max` most recent clients are stored.
    """

    def __init__(self, a_second: float, burst: int, clients_max: int = CLIENTS_MAX) -> None:
        self._a_second = a_second
        self._burst = burst
        self._clients_max = clients_max
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, client: str, now_s: float) -> bool:
        """Counts a request of a client, and returns whether it is within the limits."""
        bucket = self._buckets.pop(client, None) or _Bucket(self._burst, now_s)
        self._buckets[client] = bucket
        while len(self._buckets) > self._clients_max:
            self._buckets.popitem(last=False)
        bucket.left = min(self._burst, bucket.left + max(0.0, now_s - bucket.at_s) * self._a_second)
        bucket.at_s = now_s
        if bucket.left < 1:
            return False
        bucket.left -= 1
        return True


@dataclass(slots=True)
class _Bucket:
    left: float
    at_s: float


class LimitedConnections:
    """The waiting connections of one server. An instance is a factory of protocols for uvicorn (`http=`)."""

    def __init__(self, limits: ConnectionLimits = ConnectionLimits()) -> None:
        self.limits = limits
        self._waiting: dict[_Connection, str] = {}  # Oldest first.
        self._of_clients: Counter[str] = Counter()

    def __call__(self, **arguments: Any) -> asyncio.Protocol:
        """Returns the protocol of a new connection. uvicorn passes its configuration and state."""
        return _Connection(self, **arguments)

    def add(self, connection: _Connection, client: str) -> None:
        """Adds a connection that starts to wait. Closes the oldest one if there are too many."""
        self._waiting[connection] = client
        self._of_clients[client] += 1
        if self._of_clients[client] > self.limits.for_one_client:
            self._close(next(each for each, owner in self._waiting.items() if owner == client))
        if len(self._waiting) > self.limits.waiting:
            self._close(next(iter(self._waiting)))

    def remove(self, connection: _Connection) -> None:
        """Removes a connection that no longer waits. Does nothing if it did not wait."""
        client = self._waiting.pop(connection, None)
        if client is not None:
            self._of_clients[client] -= 1
            if not self._of_clients[client]:
                del self._of_clients[client]

    def _close(self, connection: _Connection) -> None:
        self.remove(connection)
        connection.abort()


class _Connection(H11Protocol):
    """A connection that reports to its server when it starts and stops waiting."""

    def __init__(self, server: LimitedConnections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._server = server
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._update()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Closes the connection to the client immediately."""
        self._stop_waiting()
        self.transport.abort()

    def _update(self) -> None:
        waits = self.conn.their_state in _WAITS_IN and not self.transport.is_closing()
        if not waits:
            self._stop_waiting()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._server.limits.input_s, self.abort)
            self._server.add(self, self.client[0] if self.client else "")

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._server.remove(self)
