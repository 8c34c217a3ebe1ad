"""Clients that open connections and do not finish their requests, against a real server on loopback."""

from __future__ import annotations

import contextlib
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from waiting import until

from tidegate.web.jobs_in_process import LocalJobs
from tidegate.web.options import WebOptions, digest_of
from tidegate.web.security import ConnectionLimits
from tidegate.web.server import WebServer

ANSWER_S = 60.0
"""More than a busy machine needs for an answer."""
HEADERS = b"GET /jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n"
BODY = b"POST /ui/login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\ntoken="


@contextlib.contextmanager
def serving(limits: ConnectionLimits) -> Iterator[WebServer]:
    """A server without jobs."""
    server = WebServer(LocalJobs(), WebOptions(port=0), digest_of("a-token-of-the-tests"), limits)
    try:
        yield server
    finally:
        server.stop()


def connected(server: WebServer, sent: bytes) -> socket.socket:
    """A connection that has sent something."""
    where = urlsplit(server.url)
    connection = socket.create_connection((where.hostname, where.port), timeout=ANSWER_S)
    connection.sendall(sent)
    return connection


def is_answered(server: WebServer) -> bool:
    """Whether the server answers a whole request, and not that it has too many at once: then it is asked again."""
    try:
        with urllib.request.urlopen(f"{server.url}/jobs", timeout=ANSWER_S) as reply:
            return int(reply.status) == 200
    except urllib.error.HTTPError as refused:
        if refused.code != 429:
            raise
        return False


@pytest.mark.parametrize(
    ("sent", "count"), [(HEADERS, 300), (b"", 300), (BODY, 80)], ids=["headers", "nothing", "body"]
)
def test_unfinished_requests_shut_nobody_out(sent: bytes, count: int, caplog: pytest.LogCaptureFixture) -> None:
    """Many connections wait, for longer than this test runs, and a request is answered.

    A client that goes away is not reported as a fault. The requests with a body are fewer than a client may send at a
    time, and more than the server answers at once.
    """
    with serving(ConnectionLimits(input_s=600)) as server, contextlib.ExitStack() as open_ones:
        for _ in range(count):
            open_ones.enter_context(connected(server, sent))
        # Requests whose connections were closed are over when the server has come to that.
        until("an answer", lambda: is_answered(server))
    assert not [record for record in caplog.records if "could not be answered" in record.message]


def test_the_oldest_of_one_client_gives_way() -> None:
    """The first connection is closed when one more waits than a client may have; the second one is still served."""
    with (
        serving(ConnectionLimits(input_s=600, for_one_client=2)) as server,
        connected(server, HEADERS) as first,
        connected(server, HEADERS) as second,
        connected(server, HEADERS),
    ):
        with contextlib.suppress(ConnectionResetError):
            assert first.recv(1) == b""
        second.sendall(b"\r\n")
        assert second.recv(12) == b"HTTP/1.1 200"


def test_a_request_has_a_deadline() -> None:
    """It is closed without an answer, also where it began behind one that was answered."""
    with serving(ConnectionLimits(input_s=0.2)) as server, connected(server, HEADERS + b"\r\n" + HEADERS) as connection:
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65_536):
                received += part
        assert received.count(b"HTTP/1.1 200") == 1
