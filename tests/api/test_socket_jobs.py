"""Lines from a socket: until the other side closes, and only for those who accept that lines may be lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from local_jobs import NO_RESTART, config, local

import tidegate as tg


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Somebody who listens, on a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def serve(listener: socket.socket, *parts: bytes) -> threading.Thread:
    """Send parts to the first who connects, and close."""

    def send() -> None:
        connection, _ = listener.accept()
        with connection, suppress(ConnectionError):  # The job may have left by then.
            for part in parts:
                connection.sendall(part)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_lines_come_as_they_are_cut(listener: socket.socket, tmp_path: Path) -> None:
    """However they are sent; the last one may lack its end."""
    many = [f"line {number}" for number in range(2_000)]
    data = "\n".join(many).encode() + b"\n\r\n\xc3\xa4\nla"
    thread = serve(listener, data[:7], data[7:9_000], data[9_000:], b"st")
    with local(1) as env:
        lines = env.from_socket("127.0.0.1", listener.getsockname()[1], lossy=True).collect()
        job = env.execute("job", checkpoints=config(tmp_path), restart=NO_RESTART)
        assert job.wait("4min") == "finished"
    thread.join()
    assert lines.to_arrow()["value"].to_pylist() == [*many, "", "ä", "last"]


def test_a_line_without_an_end_is_an_error(listener: socket.socket, tmp_path: Path) -> None:
    """What is held is bounded."""
    thread = serve(listener, b"x" * 3_000_000)
    with local(1) as env:
        env.from_socket("127.0.0.1", listener.getsockname()[1], lossy=True).collect()
        job = env.execute("job", checkpoints=config(tmp_path), restart=NO_RESTART)
        with pytest.raises(tg.JobFailedError, match="over 1,048,576 bytes"):
            job.wait("4min")
    thread.join()


def test_it_has_to_be_said_that_lines_may_be_lost() -> None:
    """Nobody can read a socket twice."""
    with local(1) as env, pytest.raises(tg.ConfigurationError, match=r"cannot be read twice.*lossy=True"):
        env.from_socket("127.0.0.1", 1)
