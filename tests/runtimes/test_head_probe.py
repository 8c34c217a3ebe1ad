"""What is found at the address of a Ray cluster, before Ray itself connects."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from heads import ID, head

from tidegate.actors.ray import authentication as head_probe
from tidegate.actors.ray.authentication import Head, probe, refuse_ray_client
from tidegate.storage.errors import ConfigurationError


class Quiet(BaseHTTPRequestHandler):
    """Logs nothing."""

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def page() -> Iterator[str]:
    """The address of a server of HTTP."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_head_is_known_by_its_answer() -> None:
    """It names its cluster, or asks for a token."""
    with head(grpc.StatusCode.OK) as address:
        assert probe(address) == Head("open", ID)
    with head(grpc.StatusCode.UNAUTHENTICATED) as address:
        assert probe(address) == Head("asks for a token")


def test_what_is_no_head_is_refused(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another service of Ray, a page, nobody, and one that never answers: errors name the address and the cause."""
    with head(grpc.StatusCode.OK, method="Another") as address, pytest.raises(ConfigurationError) as refused:
        probe(address)
    assert f"Ray at {address}: another service listens there" in str(refused.value)
    with pytest.raises(ConfigurationError, match=f"Ray at {address}: connection refused"):
        probe(address)
    with pytest.raises(ConfigurationError, match=f"Ray at {page}: .*HTTP/2"):
        probe(page)
    monkeypatch.setattr(head_probe, "PROBE_TIMEOUT_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(ConfigurationError, match=r"no answer within 0\.2 s"),
    ):
        probe(f"127.0.0.1:{silent.getsockname()[1]}")


@pytest.mark.parametrize("address", ["auto", "local", "head", "head:", "head:http", "http://head:8265", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    """The error shows how an address is written."""
    with pytest.raises(ConfigurationError, match="as host:port, such as head:6379"):
        probe(address)


def test_with_tls_only_the_port_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe has no certificates."""
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert probe(address) == Head("unknown")
    with pytest.raises(ConfigurationError, match="Connection refused"):
        probe(address)


def test_an_address_of_ray_client_is_refused() -> None:
    """The error names the way that works."""
    with pytest.raises(ConfigurationError, match="`ray job submit`"):
        refuse_ray_client("ray://head:10001")
