"""Writes and reads the state of one subtask: as a file, or inlined in the handle when it is small.

The format is that of `directory.py`. Rules: states are encoded chunk by chunk while the file is being written, so
memory is bounded by a chunk, not by the state; a chunk is verified before it is decoded; a reader fetches only chunks
that have rows of its key groups, neighbours together, and may do so on several threads. States without rows leave
nothing behind, but for union lists: a checkpoint has to know all of these, because it is refused while some of their
subtasks have finished (FLIP-147).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa
import xxhash

from tidegate.storage.checkpoints.metadata import SectionRef, StateHandle, StateKind
from tidegate.storage.errors import CorruptionError, StorageError
from tidegate.storage.files.envelope import checksum_of, format_checksum
from tidegate.storage.files.store import Buffer, Store
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.chunk import Compression, decode_chunk, encode_chunk
from tidegate.storage.state.directory import (
    ALIGNMENT_BYTES,
    ChunkRef,
    StoredSection,
    check_groups,
    encode_digest,
    encode_directory,
    encode_header,
    read_directory,
    read_range,
    where_of,
)
from tidegate.storage.state.snapshot import FrozenState, StateChunk, StateTable

INLINE_BYTES_MAX = 20 * 1024
READ_BYTES_MAX = 16 * 1024 * 1024
"""Neighbouring chunks are fetched with one read up to so many bytes; a larger chunk alone."""

Wanted = Callable[[SectionRef], bool]


def write_state(
    store: Store,
    path: str,
    states: Sequence[tuple[OperatorUid, FrozenState]],
    *,
    inline_bytes_max: int = INLINE_BYTES_MAX,
    compression: Compression | None = None,
) -> StateHandle | None:
    """Store the states of a subtask, in that order; None where none of them has rows or is a union list.

    Up to `inline_bytes_max` bytes are not written but inlined in the handle. Raises StorageError; CorruptionError if
    the rows of a chunk do not fit its key groups.
    """
    encoder = _Encoder(states, compression)
    with closing(encoder.pieces()) as pieces:
        head: deque[Buffer] = deque()
        for piece in pieces:
            head.append(piece)
            if encoder.size_bytes > inline_bytes_max:
                break
        else:
            return encoder.handle(None, b"".join(head)) if head else None
        written_bytes = store.write(path, chain(_drained(head), pieces))
    if written_bytes != encoder.size_bytes:
        raise StorageError(f"{path}: the store wrote {written_bytes} of {encoder.size_bytes} bytes of state")
    return encoder.handle(path, None)


def read_state(
    store: Store,
    handle: StateHandle,
    uid: OperatorUid,
    key_groups: range | None = None,
    *,
    wanted: Wanted = lambda _: True,
    layer: int = 0,
    readers: int = 1,
) -> list[StateTable]:
    """The states of one operator that are `wanted`, in the order of the sections, a table a chunk, read by range.

    With `key_groups`, tables of keyed state hold only the rows of these groups, and chunks without any are neither read
    nor returned. `layer` is what the tables are marked with. Up to `readers` threads fetch and decode; with one it is
    the caller's. Every chunk is verified. Raises CorruptionError, NotFoundError, or CodecError if a newer
    tidegate wrote the state.
    """
    runs = _wanted_runs(store, handle, uid, key_groups, wanted)
    return list(_read_runs(store, handle, runs, layer, readers, ahead_max=len(runs)))


def iter_state(
    store: Store,
    handle: StateHandle,
    uid: OperatorUid,
    key_groups: range | None = None,
    *,
    wanted: Wanted = lambda _: True,
    layer: int = 0,
    readers: int = 1,
) -> Iterator[StateTable]:
    """`read_state` one table after the other: what is held meanwhile is a read of the file for each reader, and what
    came of it. With several of them reads are ahead of whoever takes the tables.
    """
    runs = _wanted_runs(store, handle, uid, key_groups, wanted)
    yield from _read_runs(store, handle, runs, layer, readers, ahead_max=readers)


def section_schema(store: Store, handle: StateHandle, section: SectionRef) -> pa.Schema | None:
    """The columns of a state in a handle, out of its first chunk, verified; None where it has no rows.

    Raises CorruptionError, NotFoundError, CodecError.
    """
    for stored in read_directory(store, handle):
        if stored.section == section and stored.chunks:
            chunk = stored.chunks[0]
            data = read_range(store, handle, chunk.offset, chunk.length_bytes)
            schema: pa.Schema = _decoded(store, handle, section, chunk, data).schema
            return schema
    return None


class _Encoder:
    """Encodes states into the bytes of a file, and knows the handle once all bytes have been taken."""

    def __init__(self, states: Sequence[tuple[OperatorUid, FrozenState]], compression: Compression | None) -> None:
        self._states = states
        self._compression = compression
        self._digest = xxhash.xxh3_64()
        self._sections: list[StoredSection] = []
        self._directory_bytes = 0
        self._done = False
        self.size_bytes = 0

    def pieces(self) -> Generator[Buffer]:
        for uid, state in self._states:
            chunks: list[ChunkRef] = []
            for chunk in state.chunks():
                if chunk.rows.num_rows == 0:
                    continue
                yield from self._header()
                encoded = encode_chunk(chunk.rows, self._compression)
                chunks.append(ref := self._ref(state, chunk, encoded))
                for part in encoded:
                    yield self._counted(part)
                # A chunk may be a slice of much more, which goes before the state takes memory for the next one.
                del chunk, encoded, part
                if padding := -ref.length_bytes % ALIGNMENT_BYTES:
                    yield self._counted(bytes(padding))
            if chunks or state.kind is StateKind.UNION:
                yield from self._header()
                self._sections.append(StoredSection(_section(uid, state, chunks, self.size_bytes), tuple(chunks)))
        if self._sections:
            yield from self._end()
        self._done = True

    def handle(self, path: str | None, inline: bytes | None) -> StateHandle:
        assert self._done, "a handle was asked for before all bytes were taken"
        sections = tuple(stored.section for stored in self._sections)
        checksum = format_checksum(self._digest.intdigest())
        return StateHandle(path, inline, self.size_bytes, checksum, sections, self._directory_bytes)

    def _header(self) -> Iterator[Buffer]:
        if self.size_bytes == 0:
            yield self._counted(encode_header())

    def _ref(self, state: FrozenState, chunk: StateChunk, encoded: Sequence[Buffer]) -> ChunkRef:
        rows = chunk.rows.num_rows
        check_groups(state.kind, chunk.first_group, chunk.group_rows, rows, f"state {state.state!r}")
        checksum, length_bytes = checksum_of(*encoded), sum(map(len, encoded))
        return ChunkRef(self.size_bytes, length_bytes, rows, checksum, chunk.first_group, chunk.group_rows)

    def _end(self) -> Iterator[Buffer]:
        start = self.size_bytes
        yield self._counted(encode_directory(tuple(self._sections)))
        digest = encode_digest(self._digest.intdigest())
        self.size_bytes += len(digest)
        self._directory_bytes = self.size_bytes - start
        yield digest

    def _counted(self, piece: Buffer) -> Buffer:
        self._digest.update(piece)
        self.size_bytes += len(piece)
        return piece


@dataclass(frozen=True, slots=True)
class _Part:
    """A chunk that is wanted, and which of its rows are."""

    section: SectionRef
    chunk: ChunkRef
    first_row: int
    end_row: int


def _section(uid: OperatorUid, state: FrozenState, chunks: Sequence[ChunkRef], end: int) -> SectionRef:
    """A state whose chunks are before `end`."""
    offset = chunks[0].offset if chunks else end
    return SectionRef(
        uid=uid,
        state=state.state,
        kind=state.kind,
        offset=offset,
        length_bytes=chunks[-1].offset + chunks[-1].length_bytes - offset if chunks else 0,
        rows=sum(chunk.rows for chunk in chunks),
        removed=state.removed,
    )


def _drained(head: deque[Buffer]) -> Iterator[Buffer]:
    while head:
        yield head.popleft()


def _rows_of(section: SectionRef, chunk: ChunkRef, key_groups: range | None) -> tuple[int, int]:
    if key_groups is None or section.kind is not StateKind.KEYED:
        return 0, chunk.rows
    return chunk.rows_of(key_groups)


def _wanted_runs(
    store: Store, handle: StateHandle, uid: OperatorUid, key_groups: range | None, wanted: Wanted
) -> list[Sequence[_Part]]:
    """The chunks that are wanted, those together that are fetched together; in the order of the file."""
    if not any(section.uid == uid and wanted(section) for section in handle.sections):
        return []
    parts = [
        _Part(stored.section, chunk, *rows)
        for stored in read_directory(store, handle)
        if stored.section.uid == uid and wanted(stored.section)
        for chunk in stored.chunks
        if (rows := _rows_of(stored.section, chunk, key_groups))[0] < rows[1]
    ]
    return list(_runs(parts))


def _read_runs(
    store: Store, handle: StateHandle, runs: Sequence[Sequence[_Part]], layer: int, readers: int, ahead_max: int
) -> Iterator[StateTable]:
    """The tables of all runs in order. With several readers up to `ahead_max` runs are read ahead."""
    if readers == 1 or len(runs) <= 1:
        for run in runs:
            yield from _tables_of(store, handle, run, layer)
        return
    with ThreadPoolExecutor(min(readers, len(runs)), "tidegate-restore") as pool:
        ahead: deque[Future[list[StateTable]]] = deque()
        try:
            for run in runs:
                ahead.append(pool.submit(_tables_of, store, handle, run, layer))
                if len(ahead) == ahead_max:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _runs(parts: Sequence[_Part]) -> Iterator[Sequence[_Part]]:
    """Chunks that lie side by side, up to `READ_BYTES_MAX`."""
    first = 0
    for following in range(1, len(parts) + 1):
        if following < len(parts):
            start, before, chunk = parts[first].chunk, parts[following - 1].chunk, parts[following].chunk
            gap_bytes = chunk.offset - before.offset - before.length_bytes
            run_bytes = chunk.offset + chunk.length_bytes - start.offset
            if 0 <= gap_bytes < ALIGNMENT_BYTES and run_bytes <= READ_BYTES_MAX:
                continue
        yield parts[first:following]
        first = following


def _tables_of(store: Store, handle: StateHandle, run: Sequence[_Part], layer: int) -> list[StateTable]:
    """The wanted rows of each chunk of a run, fetched with one read and verified."""
    start, last = run[0].chunk.offset, run[-1].chunk
    data = memoryview(read_range(store, handle, start, last.offset + last.length_bytes - start))
    tables = []
    for part in run:
        section, offset = part.section, part.chunk.offset - start
        rows = _decoded(store, handle, section, part.chunk, data[offset : offset + part.chunk.length_bytes])
        rows = rows.slice(part.first_row, part.end_row - part.first_row)
        tables.append(StateTable(section.state, section.kind, rows, section.removed, layer))
    return tables


def _decoded(store: Store, handle: StateHandle, section: SectionRef, chunk: ChunkRef, data: Buffer) -> pa.RecordBatch:
    where = f"state {section.state!r} of {section.uid!r} in {where_of(store, handle)}"
    if len(data) != chunk.length_bytes or checksum_of(data) != chunk.checksum:
        raise CorruptionError(f"{where} is damaged: its checksum does not match")
    rows = decode_chunk(data, where)
    if rows.num_rows != chunk.rows:
        raise CorruptionError(f"{where} has {rows.num_rows} rows in a chunk of {chunk.rows}")
    check_groups(section.kind, chunk.first_group, chunk.group_rows, chunk.rows, where)
    return rows
