"""`SocketSource`: lines of text from a TCP connection, for demos (Spark's and Flink's socket source).

It breaks the rule of sources: nobody can read a socket twice. After a restore it connects again and takes what comes
from then on. Lines that were read and are in no checkpoint are lost. Whoever makes one has to accept that.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from tidegate.actors.sources.source import ReadResult, SourceReader, SourceSplit
from tidegate.storage.errors import ConfigurationError

CONNECT_S = 10.0
_BYTES = 256 * 1024
LINE_BYTES_MAX = 1024 * 1024


@dataclass(frozen=True, slots=True)
class SocketSource:
    """Lines that somebody who listens at `host` and `port` sends; it ends when they close the connection."""

    host: str
    port: int
    unbounded: Literal[True] = True

    @property
    def schema(self) -> pa.Schema:
        """Spark's: a line."""
        return pa.schema([("value", pa.string())])

    def splits(self) -> Sequence[SourceSplit]:
        """One connection."""
        return [SourceSplit(f"{self.host}:{self.port}", b"")]

    def reader(self) -> SourceReader:
        """A reader with a connection of its own."""
        return _SocketReader(self)


class _SocketReader:
    def __init__(self, source: SocketSource) -> None:
        self._source = source
        self._connection: socket.socket | None = None
        self._rest = b""
        """The begin of a line whose end has not come yet."""
        self._lines: list[bytes] = []
        self._closed = False

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Lines that have come, without waiting. OSError without a connection, ConfigurationError for a long line."""
        if not self._lines and not self._closed:
            self._receive()
        lines, self._lines = self._lines[:rows_max], self._lines[rows_max:]
        at_end = self._closed and not self._lines
        if not lines:
            return ReadResult(None, offset, at_end)
        text = [line.removesuffix(b"\r").decode("utf-8", "replace") for line in lines]
        return ReadResult(pa.record_batch([text], schema=self._source.schema), offset + len(lines), at_end)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _receive(self) -> None:
        if self._connection is None:
            self._connection = socket.create_connection((self._source.host, self._source.port), CONNECT_S)
            self._connection.setblocking(False)
        try:
            data = self._connection.recv(_BYTES)
        except BlockingIOError:
            return
        self._closed = not data
        *self._lines, self._rest = (self._rest + data).split(b"\n")
        if self._closed and self._rest:
            self._lines, self._rest = [self._rest], b""
        if len(self._rest) > LINE_BYTES_MAX:
            raise ConfigurationError(
                f"from_socket: a line from {self._source.host}:{self._source.port} has over {LINE_BYTES_MAX:,} bytes"
            )
