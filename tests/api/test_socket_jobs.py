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


@pytest.mark.parametrize(
    ("part", "named"),
    [(b"x" * 3_000_000, "has more than 1,048,576 bytes"), (b"a\nb\xff\n", "byte 1 of the line, 0xff, is not UTF-8")],
)
def test_a_line_that_cannot_be_read_fails_the_job(
    listener: socket.socket, tmp_path: Path, part: bytes, named: str
) -> None:
    """Also one without an end: what is held is bounded."""
    thread = serve(listener, part)
    with local(1) as env:
        env.from_socket("127.0.0.1", listener.getsockname()[1], lossy=True).collect()
        job = env.execute("job", checkpoints=config(tmp_path), restart=NO_RESTART)
        with pytest.raises(tg.JobFailedError, match=named):
            job.wait("4min")
    thread.join()


@pytest.mark.parametrize("cut", [1, 300_000, 2_000_000])
def test_bad_lines_are_a_stream(listener: socket.socket, tmp_path: Path, cut: int) -> None:
    """However they are cut: with their number and the reason. The lines around them come."""
    fits = b"y" * 1_048_576 + b"\r"
    data = b"\n".join([b"one", b"\xff", b"z" * 1_048_577, fits, b"z" * 2_500_000, b"two"])
    thread = serve(listener, data[:cut], data[cut:])
    with local(1) as env:
        port = listener.getsockname()[1]
        lines = env.from_socket("127.0.0.1", port, lossy=True, bad_rows="side")
        found, dead = lines.collect(), lines.bad_rows().collect()
        job = env.execute("job", checkpoints=config(tmp_path), restart=NO_RESTART)
        assert job.wait("4min") == "finished"
    thread.join()
    assert found.to_arrow()["value"].to_pylist() == ["one", fits[:-1].decode(), "two"]
    letters = dead.to_arrow().to_pylist()
    assert [(row["line"], row["address"], row["raw"][:2]) for row in letters] == [
        (2, f"127.0.0.1:{port}", b"\xff"),
        (3, f"127.0.0.1:{port}", b"zz"),
        (5, f"127.0.0.1:{port}", b"zz"),
    ]
    assert "not UTF-8" in letters[0]["error"]
    assert "more than 1,048,576 bytes" in letters[1]["error"]


def test_it_has_to_be_said_that_lines_may_be_lost() -> None:
    """Nobody can read a socket twice."""
    with local(1) as env, pytest.raises(tg.ConfigurationError, match=r"cannot be read twice.*lossy=True"):
        env.from_socket("127.0.0.1", 1)
