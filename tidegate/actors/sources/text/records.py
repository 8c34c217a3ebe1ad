"""`Decoder`: what a text format makes of a block of bytes, and what came of it.

A decoder has no position and no memory of earlier blocks, besides what the first record of a file has told it. So what
it makes of a record depends on the record alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Decoded:
    """The records of a block. `bad`: numbers of bad ones and the reasons; `batch` has the others, in order."""

    batch: pa.RecordBatch
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    bad: dict[int, str] = field(default_factory=dict)
    consumed: int = 0
    """Where the first record begins that the block may not hold completely."""

    @property
    def records(self) -> int:
        """How many there are, the bad ones included."""
        return len(self.starts)


class Decoder(Protocol):
    """One text format, for one file."""

    @property
    def begun(self) -> bool:
        """Whether the head of the file was read, if it has one."""
        ...

    def begin(self, block: bytes, final: bool) -> int | None:
        """Read the head of the file: where the first record begins, or None if more bytes are needed.

        Raises ConfigurationError if the columns of the file are not those that are wanted.
        """
        ...

    def decode(self, block: bytes, final: bool, size_max: int) -> Decoded:
        """The records of a block, which begins where one does. Those over `size_max` bytes are bad."""
        ...

    def skip(self, block: bytes, state: NDArray[np.int64]) -> int:
        """Go on in a record that is too long: where the next one begins, or -1 if that is behind the block."""
        ...


def too_long(size_max: int) -> str:
    """The reason for a record of too many bytes."""
    return (
        f"the row has more than {size_max:,} bytes, the limit that max_row_size sets; raise it, "
        'as in from_files(max_row_size="64mb")'
    )


def not_utf8(record: bytes, encoding: str) -> str | None:
    """What is wrong with the bytes of a record as UTF-8; None for nothing."""
    try:
        record.decode()
    except UnicodeDecodeError as error:
        if encoding != "utf-8":
            return f"a character is not {encoding}"
        byte = record[error.start]
        return (
            f"byte {error.start} of the row, 0x{byte:02x}, is not UTF-8; give the encoding of the file, as in "
            'options={"encoding": "ISO-8859-1"}'
        )
    return None


def utf8_faults(block: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64], encoding: str) -> dict[int, str]:
    """The records that are not UTF-8, by number, and the reasons."""
    if block.isascii():
        return {}
    try:
        block[: int(ends[-1]) if len(ends) else 0].decode()
    except UnicodeDecodeError:
        found = {}
        for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            if (reason := not_utf8(block[start:end], encoding)) is not None:
                found[number] = reason
        return found
    return {}
