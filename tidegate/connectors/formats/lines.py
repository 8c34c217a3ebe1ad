"""`LineDecoder`: decodes each line of text to a row with the column `value`, as Spark's `text` format does."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.connectors.formats.text import Decoded, Misfit, TextOptions, too_long, utf8_faults
from tidegate.state.kernels.text_scan import NOTHING, CsvRecords, csv_column
from tidegate.storage.errors import ConfigurationError

LINE_SCHEMA = pa.schema([("value", pa.string())])
_NEWLINE = 10
_RETURN = 13


class LineDecoder:
    """Decodes lines of text, which end with `\\n`, `\\r\\n` or `\\r`."""

    begun = True

    def __init__(self, schema: pa.Schema, options: TextOptions) -> None:
        strange = [field for field in schema if not field.equals(LINE_SCHEMA[0])]
        if strange:
            raise ConfigurationError(
                f"column {strange[0].name!r} ({strange[0].type}): the text format has one column, value, of strings; "
                "name one column, value, of type str"
            )
        self._schema = schema
        self._options = options

    def begin(self, block: bytes, final: bool) -> int | None:
        """Returns 0, because text has no header."""
        return 0

    def decode(self, block: bytes, final: bool, size_max: int) -> Decoded:
        """Returns the complete lines of a block, including empty lines."""
        data = np.frombuffer(block, dtype=np.uint8)
        starts, ends, consumed = _lines(data, final)
        bad = utf8_faults(block, starts, ends, self._options.encoding)
        bad |= {int(number): too_long(size_max) for number in np.flatnonzero(ends - starts > size_max)}
        good = np.array([n for n in range(len(starts)) if n not in bad], dtype=np.int64) if bad else None
        numbers = np.arange(len(starts), dtype=np.int64) if good is None else good
        texts = _texts(data, starts, ends, numbers)
        batch = pa.RecordBatch.from_arrays([texts], schema=LINE_SCHEMA).select(self._schema.names)
        return Decoded(batch, starts, ends, bad, consumed)

    def misfit(self, record: bytes) -> Misfit | None:
        """Returns None, because any text fits the column."""
        return None

    def skip(self, block: bytes, state: NDArray[np.int64]) -> int:
        """Skips the rest of a line that is too long. `state` is 1 if a `\\r` ended the previous block."""
        if state[0]:
            state[0] = 0
            return 1 if block[:1] == b"\n" else 0
        found = [at for at in (block.find(b"\n"), block.find(b"\r")) if at >= 0]
        if not found:
            return -1
        at = min(found)
        if block[at : at + 1] == b"\r":
            if at + 1 == len(block):
                state[0] = 1
                return -1
            at += block[at + 1 : at + 2] == b"\n"
        return at + 1


def _lines(data: NDArray[np.uint8], final: bool) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Returns the starts and ends of complete lines, and the start of the first line that may be incomplete."""
    breaks = np.flatnonzero((data == _NEWLINE) | (data == _RETURN)).astype(np.int64)
    # A line feed right after a carriage return does not end another line.
    second = np.zeros(len(breaks), dtype=np.bool_)
    second[1:] = (data[breaks[1:]] == _NEWLINE) & (data[breaks[:-1]] == _RETURN) & (np.diff(breaks) == 1)
    ends = breaks[~second]
    paired = np.append(second[1:], False)[~second]
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends + 1 + paired])
    if not final and len(data) and data[-1] == _RETURN:
        # The line feed may follow.
        return starts[: len(ends) - 1], ends[:-1], int(starts[len(ends) - 1])
    if final and starts[-1] < len(data):
        return starts, np.append(ends, len(data)), len(data)
    return starts[:-1], ends, int(starts[-1])


def _texts(
    data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64], numbers: NDArray[np.int64]
) -> pa.Array:
    """Returns the lines with these numbers as strings.

    The kernel receives them as quoted values, because an empty quoted value is not null.
    """
    quoted = np.ones(len(starts), dtype=np.uint8)
    nothing = np.zeros(0, dtype=np.int64)
    lines = CsvRecords(nothing, nothing, nothing, nothing, starts, ends, quoted, 0)
    offsets, out, _ = csv_column(data, lines, numbers, NOTHING, NOTHING, b"", b"")
    return pa.Array.from_buffers(pa.string(), len(numbers), [None, pa.py_buffer(offsets), pa.py_buffer(out)])
