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

from tidegate.connectors.formats.text_options import UTF_8


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


def not_utf8(record: bytes, of: str) -> str | None:
    """Returns what is wrong with the bytes of a record as UTF-8, None for nothing. `of`: "of the row"."""
    try:
        record.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} {of}, 0x{record[error.start]:02x}, is not UTF-8"
    return None


def is_utf8(block: bytes) -> bool:
    """Whether all bytes are UTF-8."""
    if block.isascii():
        return True
    try:
        block.decode()
    except UnicodeDecodeError:
        return False
    return True


def utf8_faults(
    block: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64], encoding: str | None
) -> dict[int, str]:
    """Returns the records that are not UTF-8 by number, with the reasons.

    `encoding`: that of the file, which the reason names. None where none can be given.
    """
    if block.isascii() or is_utf8(block[: int(ends[-1]) if len(ends) else 0]):
        return {}
    found = {}
    for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        reason = not_utf8(block[start:end], "of the row")
        if reason is not None and encoding == UTF_8:
            reason = f'{reason}; give the encoding of the file, as in options={{"encoding": "ISO-8859-1"}}'
        elif reason is not None and encoding is not None:
            reason = f"a character is not {encoding}"
        if reason is not None:
            found[number] = reason
    return found
