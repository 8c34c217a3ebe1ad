"""`KeyColumns`: the keys of a key space in slot order, append-only. `FrozenKeys`: the same at the time of a freeze.

They lie in Arrow chunks, as they came. Rules:

- A chunk never changes, so to freeze is to take references.
- Chunks are merged when eight or more follow one another none of which is more than twice as long as a later one. So
  keys that come in batches of one size are copied once in eight times as many, and there are few chunks.
- Chunks of a certain size are merged no further.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.columnar.restore_threads import PIECE_BYTES
from tidegate.state.common.page_memory import PAGE_MEMORY
from tidegate.state.kernels.partition import Places, placed
from tidegate.storage.schemas.one_batch import together

CHUNKS_MERGED = 8
"""So many chunks of about one size become one."""

_CHUNK_ROWS_MAX = 1 << 20
_CHUNK_BYTES_MAX = 1 << 28


class KeyColumns:
    """Keys in slot order, append-only."""

    __slots__ = ("_bytes", "_chunks", "_frozen", "rows", "schema")

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.rows = 0
        self._chunks: list[pa.RecordBatch] = []
        self._bytes: list[int] = []
        """The size of each chunk."""
        self._frozen: FrozenKeys | None = None
        """What the last freeze gave, if no keys have come since."""

    def append(self, keys: pa.RecordBatch) -> None:
        """Add keys, for the next slots.

        `keys` must own its buffers: a slice would keep its whole parent alive.
        """
        assert keys.schema.equals(self.schema), f"keys of {keys.schema} in a state of {self.schema}"
        self._frozen = None
        self._chunks.append(keys)
        self._bytes.append(keys.nbytes)
        self.rows += keys.num_rows
        while (count := self._mergeable()) > 1:
            self._chunks[-count:] = [pa.concat_batches(self._chunks[-count:])]
            self._bytes[-count:] = [self._chunks[-1].nbytes]

    @property
    def size_bytes(self) -> int:
        """Bytes of all columns."""
        return sum(self._bytes)

    def pieces(self) -> Iterator[pa.RecordBatch]:
        """All keys in slot order, in batches of at most `PIECE_BYTES`, or of one larger chunk."""
        piece: list[pa.RecordBatch] = []
        for chunk in self._chunks:
            if piece and sum(each.nbytes for each in piece) + chunk.nbytes > PIECE_BYTES:
                yield pa.concat_batches(piece)
                piece = []
            piece.append(chunk)
        if piece:
            yield pa.concat_batches(piece)

    def freeze(self) -> FrozenKeys:
        """All keys in slot order."""
        if self._frozen is None:
            bounds = np.cumsum([0, *(chunk.num_rows for chunk in self._chunks)])
            self._frozen = FrozenKeys(self.schema, tuple(self._chunks), bounds)
        return self._frozen

    def _mergeable(self) -> int:
        """How many of the last chunks are to become one; 1: none."""
        count = rows = size_bytes = longest = 0
        for chunk, chunk_bytes in zip(reversed(self._chunks), reversed(self._bytes), strict=True):
            if count and chunk.num_rows > 2 * longest:
                break
            if rows + chunk.num_rows > _CHUNK_ROWS_MAX or size_bytes + chunk_bytes > _CHUNK_BYTES_MAX:
                if 2 * rows > _CHUNK_ROWS_MAX or 2 * size_bytes > _CHUNK_BYTES_MAX:
                    return count  # These are nearly as long as a chunk may be.
                break
            count += 1
            rows, size_bytes, longest = rows + chunk.num_rows, size_bytes + chunk_bytes, max(longest, chunk.num_rows)
        return count if count >= CHUNKS_MERGED else 1


@dataclass(frozen=True, slots=True)
class FrozenKeys:
    """The keys at the time of a freeze: chunks, and the first slot of each."""

    schema: pa.Schema
    chunks: tuple[pa.RecordBatch, ...]
    bounds: NDArray[np.int64]

    def take(self, slots: NDArray[np.int32], names: Sequence[str] | None = None) -> pa.RecordBatch:
        """Keys of these slots, in their order: all columns, or those that are named."""
        if bool(np.all(slots[1:] > slots[:-1])):
            return self._put_together(self._ascending(slots, names), names)
        of_chunk = self.chunks_of(slots).astype(np.uint16)
        order = np.argsort(of_chunk, kind="stable")
        edges = np.searchsorted(of_chunk[order], np.arange(len(self.bounds)))
        grouped = self._put_together(self._parts(slots[order], edges, names), names)
        if edges[of_chunk[0]] == 0 and edges[of_chunk[0] + 1] == len(slots):
            return grouped  # They lie in one chunk.
        back = np.empty(len(order), dtype=np.int32)
        back[order] = np.arange(len(order), dtype=np.int32)
        return grouped.take(pa.array(back))

    def row_bytes(self) -> NDArray[np.int64]:
        """About how many bytes the columns of a slot take, in each chunk."""
        return np.array([chunk.nbytes // max(1, chunk.num_rows) for chunk in self.chunks], dtype=np.int64)

    def chunks_of(self, slots: NDArray[np.int32]) -> NDArray[np.intp]:
        """The chunk of each of these slots."""
        return np.searchsorted(self.bounds[1:], slots, side="right")

    def placed(self, slots: NDArray[np.int32], places: Places) -> pa.RecordBatch:
        """Keys of these ascending slots, at least one, each at its place."""
        return placed(self._ascending(slots, None), places, PAGE_MEMORY.buffer)

    def _ascending(self, slots: NDArray[np.int32], names: Sequence[str] | None) -> list[pa.RecordBatch]:
        """Keys of ascending slots, those of each chunk together. No copy of a run."""
        edges = np.searchsorted(slots, self.bounds.astype(np.int32)).tolist()  # of one type: `slots` is not copied
        found = []
        for chunk, first, start, stop in zip(self.chunks, self.bounds.tolist(), edges, edges[1:], strict=False):
            if stop == start:
                continue
            named = chunk if names is None else chunk.select(list(names))
            begin = int(slots[start]) - first
            is_run = int(slots[stop - 1]) - first - begin == stop - start - 1
            rows = None if is_run else pa.array(slots[start:stop] - np.int32(first))
            found.append(named.slice(begin, stop - start) if rows is None else named.take(rows))
        return found

    def _parts(
        self, slots: NDArray[np.int32], edges: NDArray[np.intp], names: Sequence[str] | None
    ) -> list[pa.RecordBatch]:
        """Keys of slots that come chunk by chunk: those of chunk i are `slots[edges[i]:edges[i + 1]]`."""
        return [
            _picked(chunk if names is None else chunk.select(list(names)), slots[start:stop] - first)
            for chunk, first, start, stop in zip(self.chunks, self.bounds[:-1], edges[:-1], edges[1:], strict=True)
            if stop > start
        ]

    def _put_together(self, parts: Sequence[pa.RecordBatch], names: Sequence[str] | None) -> pa.RecordBatch:
        if parts:
            return together(parts, f"keyed state with the columns {', '.join(self.schema.names)}")
        schema = self.schema if names is None else pa.schema([self.schema.field(name) for name in names])
        return pa.RecordBatch.from_pylist([], schema)


def _picked(chunk: pa.RecordBatch, rows: NDArray[np.int64]) -> pa.RecordBatch:
    """Rows of a chunk. A slice if they are consecutive."""
    if int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool(np.all(rows[1:] > rows[:-1])):
        return chunk.slice(int(rows[0]), len(rows))
    return chunk.take(pa.array(rows))
