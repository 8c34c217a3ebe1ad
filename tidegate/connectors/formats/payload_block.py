"""`Block`: payloads as places in one byte array, from which decoders read without a Python object per payload."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.kernels.byte_strings import join


@dataclass(frozen=True, slots=True)
class Lines:
    """Payloads joined with a line feed between two of them. `ascii`: whether they have only ASCII characters."""

    data: NDArray[np.uint8]
    ascii: bool

    def is_utf8(self) -> bool:
        """Returns whether each payload is valid UTF-8."""
        if self.ascii:
            return True
        # No character of several bytes contains a line feed, so the payloads are valid if the whole is.
        offsets = pa.py_buffer(np.array([0, len(self.data)], dtype=np.int64))
        whole = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(self.data)])
        try:
            whole.cast(pa.large_string())
        except pa.ArrowInvalid:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Block:
    """Several payloads in one byte array, each from `starts[i]` to `ends[i]`."""

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @staticmethod
    def of(payloads: pa.Array) -> Block:
        """Returns the payloads of a binary array, which has no nulls. They share its memory."""
        if not len(payloads):
            return Block(np.zeros(0, dtype=np.uint8), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        _, offset_buffer, buffer = payloads.buffers()
        offsets = np.frombuffer(offset_buffer, dtype=np.int32, count=len(payloads) + 1, offset=4 * payloads.offset)
        # Arrow may have no data for payloads that are all empty.
        data = np.frombuffer(buffer if buffer is not None and buffer.size else b"", dtype=np.uint8)
        ends = offsets.astype(np.int64)
        return Block(data, ends[:-1], ends[1:])

    def __len__(self) -> int:
        return len(self.starts)

    def only(self, numbers: NDArray[np.int64]) -> Block:
        """Returns the payloads with these indices."""
        return Block(self.data, self.starts[numbers], self.ends[numbers])

    def array(self) -> pa.Array:
        """Copies the payloads to a binary array."""
        offsets = np.zeros(len(self) + 1, dtype=np.int32)
        np.cumsum(self.ends - self.starts, out=offsets[1:])
        data, _ = join(self.data, self.starts, self.ends)
        return pa.Array.from_buffers(pa.binary(), len(self), [None, pa.py_buffer(offsets), pa.py_buffer(data)])

    def lines(self) -> Lines:
        """Copies the payloads to lines."""
        return Lines(*join(self.data, self.starts, self.ends, b"\n"))
