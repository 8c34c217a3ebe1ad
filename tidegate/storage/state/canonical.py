"""The canonical form of keyed state: the same bytes for the same rows, whichever backend held them.

Rules: rows are sorted by key group, then by the bytes of the key (`tidegate/storage/rocksdb/keys.py` says which);
entries of a
map are sorted by the bytes of the map key; a chunk ends at the first row with which it has `CHUNK_ROWS` rows or
`CHUNK_BYTES` bytes, wherever the backend has cut. Arrays are those of `canonical_array`. So a savepoint can be compared
byte by byte with that of another backend, and a state that is larger than memory is written a chunk at a time.

Whoever makes the `FrozenState` sorts the rows: only a backend knows how to do that within its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.storage.errors import CorruptionError
from tidegate.storage.state.canonical_arrays import canonical_array, row_bytes
from tidegate.storage.state.snapshot import FrozenChanged, StateChunk

CHUNK_ROWS = 16_384
CHUNK_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FrozenCanonical(FrozenChanged):
    """A `FrozenState` of keyed rows in canonical form; `frozen` gives them sorted."""

    def chunks(self) -> Iterator[StateChunk]:
        """The rows, cut anew."""
        return canonical_chunks(self.frozen.chunks())


def canonical_chunks(chunks: Iterable[StateChunk]) -> Iterator[StateChunk]:
    """Sorted rows in chunks that depend on the rows alone. CorruptionError where key groups do not ascend."""
    held: list[_Piece] = []
    rows = size_bytes = 0
    for chunk in chunks:
        left = _Piece.of(chunk)
        while len(left.groups):
            ends_bytes = size_bytes + np.cumsum(left.sizes)
            full_at = int(np.searchsorted(ends_bytes, CHUNK_BYTES)) + 1
            count = min(full_at, CHUNK_ROWS - rows, len(left.groups))
            taken, left = left.cut(count)
            held.append(taken)
            rows, size_bytes = rows + count, int(ends_bytes[count - 1])
            if rows == CHUNK_ROWS or size_bytes >= CHUNK_BYTES:
                yield _joined(held)
                held, rows, size_bytes = [], 0, 0
    if held:
        yield _joined(held)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows, the key group of each, and about how many bytes it has."""

    rows: pa.RecordBatch
    groups: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @staticmethod
    def of(chunk: StateChunk) -> _Piece:
        ends = np.asarray(chunk.group_rows, dtype=np.int64)
        counts = ends[1:] - ends[:-1]
        groups = np.repeat(chunk.first_group + np.arange(len(counts)), counts)
        rows = _canonical(chunk.rows)
        sizes = sum((row_bytes(column) for column in rows.columns), start=np.zeros(rows.num_rows, dtype=np.int64))
        return _Piece(rows, groups, sizes)

    def cut(self, count: int) -> tuple[_Piece, _Piece]:
        first = _Piece(self.rows.slice(0, count), self.groups[:count], self.sizes[:count])
        return first, _Piece(self.rows.slice(count), self.groups[count:], self.sizes[count:])


def _joined(pieces: Sequence[_Piece]) -> StateChunk:
    groups = np.concatenate([piece.groups for piece in pieces])
    if np.any(groups[1:] < groups[:-1]):
        raise CorruptionError("rows of a canonical snapshot do not come in the order of their key groups")
    rows = _canonical(pa.concat_batches([piece.rows for piece in pieces]))
    first, last = int(groups[0]), int(groups[-1])
    starts = np.searchsorted(groups, np.arange(first, last + 2))
    return StateChunk(rows, first, tuple(starts.tolist()))


def _canonical(rows: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(map(canonical_array, rows.columns)), schema=rows.schema)
