"""A proxy of the tests' own in front of a real S3 server, on loopback: it counts what goes through, and breaks it.

A `Fault` says which requests it is for, how many of them, and what happens to each. Everything else is passed on as it
is, `Host` header included, so that signatures stay right. Nothing here waits for ever: a delayed answer waits for the
test to release it, or for the proxy to be stopped, and every socket has a timeout.
"""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import unquote, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from seaweed import S3Server

SOCKET_TIMEOUT_S = 30.0
_RESET = struct.pack("ii", 1, 0)
_HOP_HEADERS = ("connection", "transfer-encoding", "content-length", "keep-alive")

Action = Literal["busy", "delay", "cut answer", "cut request", "lose answer", "strip condition"]


@dataclass(frozen=True, slots=True)
class Request:
    """One request that has arrived: `path` is `bucket/key`, `query` as it was sent."""

    method: str
    path: str
    query: str
    body_bytes: int
    answer_bytes: int = 0
    status: int = 0


Matches = Callable[[Request], bool]


def any_request(_: Request) -> bool:
    """Matches everything."""
    return True


@dataclass(slots=True)
class Fault:
    """What happens to the next `times` requests that match.

    - busy: 503 SlowDown, and the server never sees the request
    - delay: the answer of the server is held back until `release` is set
    - cut answer: half of the answer's body, then a reset
    - cut request: half of the request's body is taken, then a reset; the server never sees it
    - lose answer: the server does what it was asked, then a reset instead of its answer
    - strip condition: passed on, signed anew, without `If-None-Match`: so does a server that does not know it
    """

    action: Action
    times: int = 1
    matches: Matches = any_request
    release: threading.Event = field(default_factory=threading.Event)
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released once for each request that the fault has met."""


class S3Proxy:
    """What a test sees of a running proxy."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._requests: list[Request] = []
        self.stopped = threading.Event()

    def inject(self, action: Action, times: int = 1, matches: Matches = any_request) -> Fault:
        """Have something happen to the next requests that match."""
        fault = Fault(action, times, matches)
        with self._lock:
            self._faults.append(fault)
        return fault

    def requests(self, method: str | None = None, prefix: str = "") -> list[Request]:
        """The requests so far with this method, and a path that starts so."""
        with self._lock:
            return [r for r in self._requests if method in (None, r.method) and r.path.startswith(prefix)]

    def forget(self) -> None:
        """Count from here on."""
        with self._lock:
            self._requests.clear()

    def record(self, request: Request) -> None:
        """Called for each request once its answer is known."""
        with self._lock:
            self._requests.append(request)

    def fault_for(self, request: Request) -> Fault | None:
        """The first fault that is for a request, used up by one."""
        with self._lock:
            for fault in self._faults:
                if fault.times > 0 and fault.matches(request):
                    fault.times -= 1
                    fault.arrived.release()
                    return fault
        return None

    def stop(self) -> None:
        """Let everything go that is held back."""
        self.stopped.set()
        with self._lock:
            for fault in self._faults:
                fault.release.set()


@contextmanager
def run_proxy(server: S3Server) -> Iterator[S3Proxy]:
    """A proxy in front of a server until the block ends."""
    upstream = server

    class Handler(_Handler):
        s3_server = upstream

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    listening.block_on_close = False
    proxy = Handler.proxy = S3Proxy(f"http://127.0.0.1:{listening.server_address[1]}")
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield proxy
    finally:
        proxy.stop()
        listening.shutdown()
        thread.join()
        listening.server_close()


class _Handler(BaseHTTPRequestHandler):
    proxy: S3Proxy
    s3_server: S3Server
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_TIMEOUT_S

    def answer(self) -> None:
        split = urlsplit(self.path)
        size = int(self.headers.get("Content-Length") or 0)
        request = Request(self.command, unquote(split.path).lstrip("/"), split.query, size)
        fault = self.proxy.fault_for(request)
        action = None if fault is None else fault.action
        if action == "cut request":
            self.rfile.read(size // 2)
            self.proxy.record(request)
            self._reset()
            return
        body = self.rfile.read(size)
        if action == "busy":
            self._send(request, 503, [], b"<Error><Code>SlowDown</Code><Message>injected</Message></Error>")
            return
        if action == "strip condition":
            self._strip_condition(split.path, body)
        status, headers, data = self._forward(body)
        if action == "lose answer":
            self.proxy.record(request)
            self._reset()
        elif action == "cut answer":
            self._send(request, status, headers, data, sent=len(data) // 2)
            self._reset()
        else:
            if fault is not None and action == "delay":
                fault.release.wait(SOCKET_TIMEOUT_S)
            with suppress(OSError):
                self._send(request, status, headers, data)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer

    def _strip_condition(self, path: str, body: bytes) -> None:
        kept = {n: v for n, v in self.headers.items() if n.lower().startswith("x-amz-") and n.lower() != "x-amz-date"}
        request = AWSRequest(self.command, f"http://{self.headers['Host']}{path}", kept, body)
        request.context["payload_signing_enabled"] = True
        options = self.s3_server.options
        credentials = Credentials(str(options["key"]), str(options["secret"]))
        S3SigV4Auth(credentials, "s3", "us-east-1").add_auth(request)
        for name in ("If-None-Match", *request.headers):
            del self.headers[name]
        for name, value in request.headers.items():
            self.headers[name] = value

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = urlsplit(self.s3_server.endpoint_url)
        connection = http.client.HTTPConnection(upstream.netloc, timeout=SOCKET_TIMEOUT_S)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            data = answer.read()
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
            headers = [(n, v) for n, v in answer.getheaders() if n.lower() not in _HOP_HEADERS]
            if length is not None and answer.status != 204:
                headers.append(("Content-Length", length))
            return answer.status, headers, data
        finally:
            connection.close()

    def _send(
        self, request: Request, status: int, headers: list[tuple[str, str]], data: bytes, sent: int | None = None
    ) -> None:
        answered = Request(request.method, request.path, request.query, request.body_bytes, len(data), status)
        self.proxy.record(answered)
        self.send_response_only(status)
        for name, value in headers or [("Content-Length", str(len(data)))]:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:sent])

    def _reset(self) -> None:
        """Close so that the other side sees a reset, not an end."""
        with suppress(OSError):
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.connection.shutdown(socket.SHUT_RD)
        self.close_connection = True
        # The server would say goodbye politely first.
        with suppress(OSError):
            self.connection.close()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: requests are kept, and stderr belongs to the test run."""

    def finish(self) -> None:
        with suppress(OSError, ValueError):
            super().finish()
