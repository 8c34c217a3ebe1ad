"""Writes, reads and verifies the state of one subtask: as a file, or inlined in the handle when it is small.

    header                                  magic and version, padded to 64 bytes
    chunk, chunk, ...                       Arrow IPC streams, each padded to 64 bytes
    directory                               the sections: which operator and state each one is, and its chunks
    length and checksum of the directory
    checksum of all bytes before

Rules:

- States are encoded chunk by chunk while the file is written, so memory is bounded by a chunk, not by the state.
- A chunk is verified before it is decoded. A reader fetches only chunks that have rows of its key groups, adjacent
  chunks with one read, and may do so on several threads.
- States without rows are not stored, except union lists: a checkpoint must contain all of these, because it is refused
  while some of their subtasks have finished (FLIP-147).
- A chunk is an Arrow IPC stream with one batch, and its schema names the serializer that wrote it. The rows are typed,
  so any reader of Arrow can read them. The serializer's version covers the meaning of types and columns; the file
  format has a separate version.
- `verified_state` and `verified_native` yield bytes, a bounded number at a time, and raise at the end if a checksum
  does not match. `Store.write` therefore completes a file made of these bytes only if they are correct.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Literal, TypeAlias, cast

import pyarrow as pa
import xxhash

from tidegate.storage.checkpoints.metadata import NativeFile, SectionRef, StateHandle, StateKind
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import CodecError, CorruptionError, StorageError
from tidegate.storage.files.envelope import checksum_of, format_checksum
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import Buffer, Store, ViewedStore
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.snapshot import FrozenState, StateChunk, StateTable

_ADVICE = "; restore the file from a copy, or choose another checkpoint"
INLINE_BYTES_MAX = 20 * 1024
READ_BYTES_MAX = 16 * 1024 * 1024
"""Limit in bytes of adjacent chunks that are fetched with one read. A larger chunk is read alone."""

Wanted = Callable[[SectionRef], bool]


def write_state(
    store: Store,
    path: str,
    states: Sequence[tuple[OperatorUid, FrozenState]],
    *,
    inline_bytes_max: int = INLINE_BYTES_MAX,
    compression: Compression | None = None,
) -> StateHandle | None:
    """Stores the states of a subtask in the given order. Returns None if none of them has rows or is a union list.

    Up to `inline_bytes_max` bytes are inlined in the handle instead of written to a file. Raises StorageError, and
    CorruptionError if the rows of a chunk do not fit its key groups.
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
        raise StorageError(
            f"{path}: the store wrote {written_bytes} of {encoder.size_bytes} bytes of state; the state is "
            "incomplete, so this checkpoint fails. Check the storage"
        )
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
    """Reads the states of one operator that `wanted` selects, in the order of the sections, one table per chunk.

    With `key_groups`, tables of keyed state have only the rows of these groups, and chunks without such rows are
    neither read nor returned. The returned tables get the layer number `layer`. Up to `readers` threads fetch and
    decode; with 1 the caller's thread does. Every chunk is verified. Raises CorruptionError, NotFoundError, or
    CodecError if a newer tidegate wrote the state.
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
    """Yields the tables of `read_state` one by one. At most one read of the file for each reader is in memory.

    With several readers, the threads read ahead of the caller.
    """
    runs = _wanted_runs(store, handle, uid, key_groups, wanted)
    yield from _read_runs(store, handle, runs, layer, readers, ahead_max=readers)


def section_schema(store: Store, handle: StateHandle, section: SectionRef) -> pa.Schema | None:
    """Returns the columns of a stored state, from its first chunk (verified), or None if the state has no rows.

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
    """Encodes states into the bytes of a state file. The handle is available once all bytes have been consumed."""

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
    """A chunk of a state file to read, and the range of its rows that were requested."""

    section: SectionRef
    chunk: ChunkRef
    first_row: int
    end_row: int


def _section(uid: OperatorUid, state: FrozenState, chunks: Sequence[ChunkRef], end: int) -> SectionRef:
    """Returns the section of a state with the given chunks. `end` is the offset of a section without chunks."""
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
    """Returns the chunks to read in file order, grouped into runs of adjacent chunks that are fetched with one read."""
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
    """Yields the tables of all runs of chunks in order. With several readers, up to `ahead_max` runs are read ahead."""
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
    """Groups adjacent chunks into runs of up to `READ_BYTES_MAX` bytes."""
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
    """Fetches a run of chunks with one read, verifies each chunk, and returns the requested rows of each as a table."""
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
        raise CorruptionError(f"{where} is damaged: its checksum does not match{_ADVICE}")
    rows = decode_chunk(data, where)
    if rows.num_rows != chunk.rows:
        raise CorruptionError(f"{where} is damaged: it has {rows.num_rows} rows in a chunk of {chunk.rows}{_ADVICE}")
    check_groups(section.kind, chunk.first_group, chunk.group_rows, chunk.rows, where)
    return rows


_PART_BYTES = 8 * 1024 * 1024


def verify_state(store: Store, handle: StateHandle) -> None:
    """Reads all bytes of a state handle, and checks size, checksum and directory.

    Raises CorruptionError for any difference, NotFoundError if the file is missing.
    """
    for _ in verified_state(store, handle):
        pass
    if handle.path is None:
        check_whole(memoryview(handle.inline or b""), where_of(store, handle))
    else:
        read_footer(store, handle.path, handle.size_bytes)
    read_directory(store, handle)


def verify_native(store: Store, file: NativeFile) -> None:
    """Reads all bytes of a backend's file, and checks size and checksum. Raises as `verify_state` does."""
    for _ in verified_native(store, file):
        pass


def verified_state(store: Store, handle: StateHandle, part_bytes: int = _PART_BYTES) -> Iterator[Buffer]:
    """Yields all bytes of a state handle, `part_bytes` at a time. Raises CorruptionError at the end if the checksum is
    wrong.

    Raises NotFoundError for a missing file.
    """
    where = where_of(store, handle)
    covered_bytes = handle.size_bytes - DIGEST_BYTES
    digest = xxhash.xxh3_64()
    position = 0
    tail = b""
    for data in _read_parts(store, handle, where, part_bytes):
        digest.update(data[: max(0, covered_bytes - position)])
        position += len(data)
        tail = (tail + bytes(data[-DIGEST_BYTES:]))[-DIGEST_BYTES:]
        yield data
    _check_digest(digest.intdigest(), handle.checksum, where)
    if tail != encode_digest(digest.intdigest()):
        raise CorruptionError(f"{where} is damaged: its last bytes are not its checksum{_ADVICE}")


def verified_native(store: Store, file: NativeFile, part_bytes: int = _PART_BYTES) -> Iterator[Buffer]:
    """Yields all bytes of a backend's file, `part_bytes` at a time.

    Raises CorruptionError at the end if the checksum is wrong.
    """
    where = join_url(store.url, file.path)
    digest = xxhash.xxh3_64()
    handle = StateHandle(file.path, None, file.size_bytes, file.checksum, ())
    for data in _read_parts(store, handle, where, part_bytes):
        digest.update(data)
        yield data
    _check_digest(digest.intdigest(), file.checksum, where)


def _read_parts(store: Store, handle: StateHandle, where: str, part_bytes: int) -> Iterator[memoryview]:
    """Yields all bytes of a state handle, `part_bytes` at a time. Raises CorruptionError if the size is wrong."""
    position = 0
    # One byte more than expected, to notice a file that has grown.
    while position <= handle.size_bytes:
        wanted = min(part_bytes, handle.size_bytes + 1 - position)
        data = memoryview(read_range(store, handle, position, wanted))
        position += len(data)
        yield data
        if len(data) < wanted:
            break
    if position != handle.size_bytes:
        raise CorruptionError(f"{where} is damaged: it should have {handle.size_bytes} bytes{_ADVICE}")


def _check_digest(digest: int, expected: str, where: str) -> None:
    found = format_checksum(digest)
    if found != expected:
        raise CorruptionError(f"{where} is damaged: its checksum is {found}, not {expected}{_ADVICE}")


STATE_VERSION = 2
# A multiple of Arrow's own alignment, so that a chunk of inlined bytes is used in place by any kernel.
ALIGNMENT_BYTES = 64
_MAGIC = b"TGSTATE\0"
_HEADER = struct.Struct("<8sI52x")
_FOOTER_SEAL = struct.Struct("<QQ")
_DIGEST = struct.Struct("<Q")
DIGEST_BYTES = _DIGEST.size
_TRAILER_BYTES = _FOOTER_SEAL.size + _DIGEST.size


@wire
@dataclass(frozen=True, slots=True)
class ChunkRef:
    """Locates a chunk of rows of one state in a state file.

    For keyed state `group_rows` has the prefix sums of rows per key group, from `first_group` on.
    """

    offset: int
    length_bytes: int
    rows: int
    checksum: str
    first_group: int = 0
    group_rows: tuple[int, ...] = ()

    def rows_of(self, key_groups: range) -> tuple[int, int]:
        """Returns the first row of the given key groups in the chunk, and the row after the last.

        Equal numbers mean no rows.
        """
        assert key_groups.step == 1
        start = max(key_groups.start, self.first_group) - self.first_group
        stop = min(key_groups.stop, self.first_group + len(self.group_rows) - 1) - self.first_group
        return (self.group_rows[start], self.group_rows[stop]) if start < stop else (0, 0)


@wire
@dataclass(frozen=True, slots=True)
class StoredSection:
    """One state of one operator in the directory, with its chunks in the order of their offsets."""

    section: SectionRef
    chunks: tuple[ChunkRef, ...]


def check_groups(kind: StateKind, first_group: int, group_rows: tuple[int, ...], rows: int, where: str) -> None:
    """Raises CorruptionError unless `group_rows` (prefix sums of rows per key group) fits a chunk of `rows` rows."""
    if kind is not StateKind.KEYED:
        fits = group_rows == ()
    else:
        ends = len(group_rows) >= 2 and group_rows[0] == 0 and group_rows[-1] == rows
        fits = ends and first_group >= 0 and all(a <= b for a, b in pairwise(group_rows))
    if not fits:
        raise CorruptionError(
            f"{where} is damaged: its rows per key group do not add up to {rows} rows of {kind.value} state{_ADVICE}"
        )


def encode_header() -> bytes:
    """Returns the header with which a state file begins."""
    return _HEADER.pack(_MAGIC, STATE_VERSION)


def encode_directory(sections: tuple[StoredSection, ...]) -> bytes:
    """Returns the encoded directory of a state file, with its length and checksum. The file's digest follows it."""
    footer = encode(sections)
    return footer + _FOOTER_SEAL.pack(len(footer), xxhash.xxh3_64_intdigest(footer))


def encode_digest(digest: int) -> bytes:
    """Returns the encoded checksum with which a state file ends."""
    return _DIGEST.pack(digest)


def read_range(store: Store, handle: StateHandle, offset: int, length_bytes: int) -> Buffer:
    """Returns a byte range of a state handle, or fewer bytes if it ends before.

    Copies nothing if the store allows that.
    """
    if handle.path is not None:
        # Equals `isinstance(store, ViewedStore)`, which takes fifty times as long.
        shows = hasattr(store, "view")
        view = cast(ViewedStore, store).view(handle.path, offset, length_bytes) if shows else None
        return view if view is not None else store.read(handle.path, offset, length_bytes)
    return memoryview(handle.inline or b"")[offset : offset + length_bytes]


def where_of(store: Store, handle: StateHandle) -> str:
    """Returns the URL of a state handle's file for errors."""
    return "inlined state" if handle.path is None else join_url(store.url, handle.path)


def read_directory(store: Store, handle: StateHandle) -> tuple[StoredSection, ...]:
    """Reads the directory of a state handle, and verifies it.

    Raises CorruptionError if the directory is damaged or does not match the handle, NotFoundError.
    """
    where = where_of(store, handle)
    start = handle.size_bytes - handle.directory_bytes
    end = read_range(store, handle, start, handle.directory_bytes) if start >= _HEADER.size else b""
    if len(end) != handle.directory_bytes or len(end) < _TRAILER_BYTES:
        raise CorruptionError(f"{where} is damaged: it should have {handle.size_bytes} bytes{_ADVICE}")
    found = _decode_directory(end[:-_TRAILER_BYTES], end[-_TRAILER_BYTES:], where)
    if tuple(stored.section for stored in found) != handle.sections:
        raise CorruptionError(
            f"{where} is damaged: it does not have the states that the checkpoint's metadata lists{_ADVICE}"
        )
    return found


def read_footer(store: Store, path: str, size_bytes: int | None = None) -> tuple[SectionRef, ...]:
    """Returns the sections of a state file. Without `size_bytes` the whole file is read, otherwise only its header and
    end.

    Raises CorruptionError, NotFoundError, or CodecError if another version of tidegate wrote the file.
    """
    where = join_url(store.url, path)
    if size_bytes is None:
        data = memoryview(store.read(path))
        return check_whole(data, where)
    trailer = store.read(path, max(0, size_bytes - _TRAILER_BYTES), _TRAILER_BYTES)
    if len(trailer) != _TRAILER_BYTES:
        raise CorruptionError(f"{where} is damaged: it should have {size_bytes} bytes{_ADVICE}")
    length, _ = _FOOTER_SEAL.unpack_from(trailer)
    start = size_bytes - _TRAILER_BYTES - length
    if start < _HEADER.size:
        raise CorruptionError(f"{where} is damaged: its directory would be longer than the file{_ADVICE}")
    _check_header(store.read(path, 0, _HEADER.size), where)
    return _sections(_decode_directory(store.read(path, start, length), trailer, where))


def check_whole(data: memoryview, where: str) -> tuple[SectionRef, ...]:
    """Verifies the bytes of a whole state file, and returns its sections. Raises as `read_footer` does."""
    if len(data) < _HEADER.size + _TRAILER_BYTES:
        raise CorruptionError(f"{where} is damaged: it is too short{_ADVICE}")
    (digest,) = _DIGEST.unpack(data[-_DIGEST.size :])
    if xxhash.xxh3_64_intdigest(data[: -_DIGEST.size]) != digest:
        raise CorruptionError(f"{where} is damaged: its checksum does not match{_ADVICE}")
    _check_header(data[: _HEADER.size], where)
    trailer = data[-_TRAILER_BYTES:]
    length, _ = _FOOTER_SEAL.unpack_from(trailer)
    start = max(0, len(data) - _TRAILER_BYTES - length)
    return _sections(_decode_directory(data[start:-_TRAILER_BYTES], trailer, where))


def _sections(stored: tuple[StoredSection, ...]) -> tuple[SectionRef, ...]:
    return tuple(each.section for each in stored)


def _check_header(header: Buffer, where: str) -> None:
    if len(header) < _HEADER.size:
        raise CorruptionError(f"{where} is damaged: it has no complete header{_ADVICE}")
    magic, version = _HEADER.unpack_from(header)
    if magic != _MAGIC:
        raise CorruptionError(f"{where} is damaged or not a state file: it starts with {magic!r}{_ADVICE}")
    if version != STATE_VERSION:
        raise CodecError(
            f"{where} has format version {version}, and this tidegate reads version {STATE_VERSION}: restore with the "
            "tidegate that wrote it"
        )


def _decode_directory(footer: Buffer, trailer: Buffer, where: str) -> tuple[StoredSection, ...]:
    length, digest = _FOOTER_SEAL.unpack_from(trailer)
    if len(footer) != length or xxhash.xxh3_64_intdigest(footer) != digest:
        raise CorruptionError(f"{where} is damaged: the checksum of its directory does not match{_ADVICE}")
    found = decode(bytes(footer))
    if not (isinstance(found, tuple) and all(isinstance(each, StoredSection) for each in found)):
        raise CorruptionError(f"{where} is damaged: its directory has another type{_ADVICE}")
    return found


SERIALIZER_VERSION = 1
_SERIALIZER_KEY = b"tidegate.serializer"
_SERIALIZER = b"arrow/"
_WRITTEN_BYTES_MIN = 1 << 16
"""Size in bytes below which encoded chunks are copied together, because that is faster than writing many buffers."""
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Bytes that end an Arrow IPC stream."""

Compression: TypeAlias = Literal["lz4", "zstd"]
"""Codec that compresses the buffers of a chunk. A reader detects the codec."""


def encode_chunk(rows: pa.RecordBatch, compression: Compression | None = None) -> tuple[Buffer, ...]:
    """Returns the bytes of a chunk as a sequence of buffers.

    If `rows` is a slice, only the rows of the slice are encoded.
    """
    stamp = {_SERIALIZER_KEY: _SERIALIZER + str(SERIALIZER_VERSION).encode()}
    stamped = rows.replace_schema_metadata({**(rows.schema.metadata or {}), **stamp})
    if (
        stamped.nbytes < _WRITTEN_BYTES_MIN
        and compression is None
        and not any(map(_has_dictionary, stamped.schema.types))
    ):
        # A stream would grow as it is written, and be copied each time. These are its parts.
        return memoryview(stamped.schema.serialize()), memoryview(stamped.serialize()), _END
    written = _Written()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(pa.PythonFile(written, mode="w"), stamped.schema, options=options) as writer:
        writer.write_batch(stamped)
    return tuple(written.parts)


class _Written:
    """A file object that collects the buffers that Arrow writes to it, without copying them."""

    closed = False

    def __init__(self) -> None:
        self.parts: list[Buffer] = []

    def write(self, part: Buffer) -> int:
        self.parts.append(memoryview(part))
        return len(part)

    def flush(self) -> None:
        """Does nothing, because the buffers are in memory."""

    def close(self) -> None:
        """Does nothing, because the buffers are in memory."""


def decode_chunk(data: Buffer, where: str) -> pa.RecordBatch:
    """Decodes a chunk that `encode_chunk` made. Uncompressed rows use the memory of `data`. `where` names the chunk in
    errors.

    Raises CodecError for a chunk of a newer serializer, CorruptionError for damaged bytes.
    """
    try:
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            rows = reader.read_next_batch()
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise CorruptionError(
            f"{where} cannot be decoded: {error}; restore the file from a copy, or choose another checkpoint"
        ) from error
    metadata = dict(rows.schema.metadata or {})
    name = metadata.pop(_SERIALIZER_KEY, b"")
    version = name.removeprefix(_SERIALIZER)
    if version == name or not version.isdigit():
        raise CorruptionError(
            f"{where} is damaged, or was not written by tidegate: its serializer is {name!r}{_ADVICE}"
        )
    if int(version) > SERIALIZER_VERSION:
        raise CodecError(
            f"{where} was written with version {int(version)} of the serializer; this tidegate reads up to "
            f"{SERIALIZER_VERSION}: restore with the tidegate that wrote it, or a newer one"
        )
    return rows.replace_schema_metadata(metadata or None)


def _has_dictionary(data_type: pa.DataType) -> bool:
    """Returns whether a type contains a dictionary, so that an Arrow stream has dictionary messages before the rows."""
    if isinstance(data_type, pa.BaseExtensionType):
        return _has_dictionary(data_type.storage_type)
    if pa.types.is_dictionary(data_type):
        return True
    return any(_has_dictionary(data_type.field(number).type) for number in range(data_type.num_fields))
