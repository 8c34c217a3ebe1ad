"""`SocketSource`: reads lines of text from a TCP connection, for demos (Spark's and Flink's socket source).

A socket cannot be read twice, so this source is not replayable. After a restore it connects again and reads only new
lines. Lines that were read after the last checkpoint are lost.

A line that is not UTF-8, or has more than LINE_BYTES_MAX bytes, is a bad row.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from tidegate.connectors.bad_rows import BadRows, BadRowsLog
from tidegate.connectors.formats.lines import LINE_SCHEMA
from tidegate.connectors.formats.text import not_utf8
from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.storage.errors import ConfigurationError

log = logging.getLogger(__name__)
CONNECT_S = 10.0
_BYTES = 256 * 1024
LINE_BYTES_MAX = 1024 * 1024
LETTER_BYTES_MAX = 64 * 1024
"""Limit of the bytes of a bad line in its dead letter."""
LETTERS = pa.schema([("raw", pa.binary()), ("address", pa.string()), ("line", pa.int64()), ("error", pa.string())])
"""Schema of the dead letters of a socket. `line` counts from 1 for each connection."""
_PLACE = "line {line} from {address}"


@dataclass(frozen=True, slots=True)
class SocketSource:
    """A source of the lines that a server at `host` and `port` sends.

    It ends when the server closes the connection. `bad_rows`: policy for lines that cannot be decoded.
    """

    host: str
    port: int
    bad_rows: BadRows = "fail"
    unbounded: Literal[True] = True

    @property
    def schema(self) -> pa.Schema:
        """Returns the only column, the line (as in Spark)."""
        return LINE_SCHEMA

    @property
    def bad_rows_schema(self) -> pa.Schema | None:
        """Returns the schema of the stream of dead letters, or None if there is no such stream."""
        return LETTERS if self.bad_rows == "side" else None

    def splits(self) -> Sequence[SourceSplit]:
        """Returns a single split, the connection."""
        return [SourceSplit(f"{self.host}:{self.port}", b"")]

    def reader(self) -> SourceReader:
        """Returns a reader with its own connection."""
        return _SocketReader(self)


class _SocketReader:
    def __init__(self, source: SocketSource) -> None:
        self._source = source
        self._address = f"{source.host}:{source.port}"
        self._connection: socket.socket | None = None
        self._rest = b""
        """The beginning of a line whose end has not arrived."""
        self._passes = False
        """True while the arriving bytes belong to a too long line that was already reported."""
        self._lines: list[bytes] = []
        self._line = 1
        """Number of the next line."""
        self._closed = False
        self._log = BadRowsLog(log)

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns lines that have arrived, without waiting.

        Raises OSError if there is no connection, ConfigurationError for a bad line if that fails the job.
        """
        if not self._lines and not self._closed:
            self._receive()
        lines = self._lines[:rows_max]
        self._lines = self._lines[rows_max:]
        at_end = self._closed and not self._lines
        if not lines:
            return ReadResult(None, offset, at_end)
        lines = [line.removesuffix(b"\r") for line in lines]
        faults = {number: fault for number, line in enumerate(lines) if (fault := _fault(line)) is not None}
        bad = self._letters(lines, faults) if faults else None
        texts = [line.decode() for number, line in enumerate(lines) if number not in faults]
        batch = pa.record_batch([pa.array(texts, pa.string())], schema=LINE_SCHEMA) if texts else None
        self._line += len(lines)
        return ReadResult(batch, offset + len(lines), at_end, bad=bad)

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _letters(self, lines: Sequence[bytes], faults: Mapping[int, str]) -> pa.RecordBatch:
        """Returns the dead letters of bad lines. Raises ConfigurationError if a bad line fails the job."""
        rows = [
            {
                "raw": lines[number][:LETTER_BYTES_MAX],
                "address": self._address,
                "line": self._line + number,
                "error": fault,
            }
            for number, fault in faults.items()
        ]
        if self._source.bad_rows == "fail":
            raise ConfigurationError(
                f"from_socket: {_PLACE.format(**rows[0])} cannot be read: {rows[0]['error']}. Skip such lines "
                'with from_socket(bad_rows="skip"), or read them as a stream with bad_rows="side"'
            )
        letters = pa.RecordBatch.from_pylist(rows, LETTERS)
        return self._log.add(letters, _PLACE)

    def _receive(self) -> None:
        if self._connection is None:
            self._connection = socket.create_connection((self._source.host, self._source.port), CONNECT_S)
            self._connection.setblocking(False)
        try:
            data = self._connection.recv(_BYTES)
        except BlockingIOError:
            return
        self._closed = not data
        if self._passes:
            _, found, data = data.partition(b"\n")
            if not found:
                return
            self._passes = False
        *lines, rest = (self._rest + data).split(b"\n")
        # A carriage return may be the last byte of a line that just fits.
        self._passes = len(rest) > LINE_BYTES_MAX + 1
        if rest and (self._closed or self._passes):
            lines = [*lines, rest]
            rest = b""
        self._lines = lines
        self._rest = rest


def _fault(line: bytes) -> str | None:
    if len(line) > LINE_BYTES_MAX:
        return f"the line has more than {LINE_BYTES_MAX:,} bytes"
    return not_utf8(line, "of the line")
