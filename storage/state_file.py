"""The container of one subtask's state, format version 1.

    header   magic, version, zeros up to 64 bytes
    section  one Arrow IPC stream with one batch a state, each starting at a multiple of 64 bytes
    footer   the directory: the codec's bytes of the tuple of SectionRef
    trailer  length and checksum of the footer, checksum of all bytes before it

The same bytes are a file, or lie inlined in the handle when they are few. Every section has a checksum of its
own, so that a part can be read and trusted alone; the footer makes a file readable without `_metadata`.
Sections are encoded one at a time while the file is being written: no second copy of the whole state is made.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise

import pyarrow as pa
import xxhash

from tidegate.storage.codec import decode, encode
from tidegate.storage.envelope import checksum_of, format_checksum
from tidegate.storage.errors import CodecError, ConfigurationError, CorruptionError
from tidegate.storage.filesystem import join_url
from tidegate.storage.ids import OperatorUid
from tidegate.storage.metadata import SectionRef, StateHandle, StateKind
from tidegate.storage.state import StateTable
from tidegate.storage.store import Buffer, Store

INLINE_BYTES_MAX = 20 * 1024
STATE_VERSION = 1
_MAGIC = b"TGSTATE\0"
# A multiple of Arrow's own alignment, so that a section of inlined bytes is used in place by any kernel.
_ALIGNMENT_BYTES = 64
_HEADER = struct.Struct("<8sI52x")
_FOOTER_SEAL = struct.Struct("<QQ")
_DIGEST = struct.Struct("<Q")
_TRAILER_BYTES = _FOOTER_SEAL.size + _DIGEST.size
_VERIFY_BYTES = 8 * 1024 * 1024


def write_state(
    store: Store,
    path: str,
    tables: Sequence[tuple[OperatorUid, StateTable]],
    *,
    inline_bytes_max: int = INLINE_BYTES_MAX,
) -> StateHandle | None:
    """Store the tables of a subtask; None when there are none.

    Up to `inline_bytes_max` bytes are not written but inlined in the handle. Raises StorageError.
    """
    if not tables:
        return None
    encoder = _Encoder(tables)
    chunks = encoder.chunks()
    head: deque[Buffer] = deque()
    for chunk in chunks:
        head.append(chunk)
        if encoder.size_bytes > inline_bytes_max:
            break
    else:
        return encoder.handle(None, b"".join(head))
    written_bytes = store.write(path, chain(_drained(head), chunks))
    assert written_bytes == encoder.size_bytes
    return encoder.handle(path, None)


def read_state(
    store: Store,
    handle: StateHandle,
    uid: OperatorUid,
    key_groups: range | None = None,
    *,
    wanted: Callable[[SectionRef], bool] = lambda _: True,
) -> list[StateTable]:
    """The tables of one operator that are `wanted`, in the order of the sections, read by range and verified.

    With `key_groups`, keyed tables hold only the rows of these groups (`key_group_rows` keeps its full length
    and counts from the first row returned), and a keyed table without any such row is neither read nor
    returned. Raises CorruptionError, NotFoundError, or ConfigurationError for groups beyond the state's max
    parallelism.
    """
    tables = []
    for section in handle.sections:
        if section.uid != uid or not wanted(section):
            continue
        if key_groups is None or section.kind is not StateKind.KEYED:
            tables.append(_read_section(store, handle, section))
            continue
        first, end = _rows_of(section, key_groups)
        if first < end:
            tables.append(_cut(_read_section(store, handle, section), first, end))
    return tables


def verify_state(store: Store, handle: StateHandle) -> None:
    """Read all bytes of a handle and compare size, checksum and directory.

    Raises CorruptionError for any difference, NotFoundError if the file is gone.
    """
    where = _where(store, handle)
    for _ in verified_chunks(store, handle):
        pass
    if handle.path is None:
        footer = _footer_of(memoryview(handle.inline or b""), where)
    else:
        footer = read_footer(store, handle.path, handle.size_bytes)
    if footer != handle.sections:
        raise CorruptionError(f"{where} holds other states than the checkpoint's metadata says")


def verified_chunks(store: Store, handle: StateHandle) -> Iterator[Buffer]:
    """All bytes of a handle, a bounded number at a time, verified at the end.

    A file that is written from them therefore never appears unless it is whole: `Store.write` fails with what is raised
    here. Raises CorruptionError, NotFoundError.
    """
    where = _where(store, handle)
    covered_bytes = handle.size_bytes - _DIGEST.size
    digest = xxhash.xxh3_64()
    position = 0
    tail = b""
    # One byte more than there should be, to notice a file that has grown.
    while position <= handle.size_bytes:
        wanted = min(_VERIFY_BYTES, handle.size_bytes + 1 - position)
        data = memoryview(_read_range(store, handle, position, wanted))
        digest.update(data[: max(0, covered_bytes - position)])
        position += len(data)
        tail = (tail + bytes(data[-_DIGEST.size :]))[-_DIGEST.size :]
        yield data
        if len(data) < wanted:
            break
    if position != handle.size_bytes:
        raise CorruptionError(f"{where} is damaged: it should have {handle.size_bytes} bytes")
    found = format_checksum(digest.intdigest())
    if found != handle.checksum or tail != _DIGEST.pack(digest.intdigest()):
        raise CorruptionError(f"{where} is damaged: its checksum is {found}, not {handle.checksum}")


def read_footer(store: Store, path: str, size_bytes: int | None = None) -> tuple[SectionRef, ...]:
    """The directory of a state file. Without `size_bytes` the whole file is read, with it only the end.

    Raises CorruptionError, NotFoundError, or CodecError if a newer tidegate wrote the file.
    """
    where = join_url(store.url, path)
    if size_bytes is None:
        return _footer_of(memoryview(store.read(path)), where)
    seal = store.read(path, max(0, size_bytes - _TRAILER_BYTES), _TRAILER_BYTES)
    if len(seal) != _TRAILER_BYTES:
        raise CorruptionError(f"{where} is damaged: it should have {size_bytes} bytes")
    length, _ = _FOOTER_SEAL.unpack_from(seal)
    start = size_bytes - _TRAILER_BYTES - length
    if start < _HEADER.size:
        raise CorruptionError(f"{where} is damaged: its directory would be longer than the file")
    _check_header(store.read(path, 0, _HEADER.size), where)
    return _decode_footer(store.read(path, start, length), seal, where)


class _Encoder:
    """Encodes tables into chunks, and knows the handle once all chunks have been taken."""

    def __init__(self, tables: Sequence[tuple[OperatorUid, StateTable]]) -> None:
        self._tables = tables
        self._digest = xxhash.xxh3_64()
        self._sections: list[SectionRef] = []
        self._done = False
        self.size_bytes = 0

    def chunks(self) -> Iterator[Buffer]:
        yield self._counted(_HEADER.pack(_MAGIC, STATE_VERSION))
        for uid, table in self._tables:
            section = _encode_table(table)
            self._sections.append(
                SectionRef(
                    uid=uid,
                    state=table.state,
                    kind=table.kind,
                    offset=self.size_bytes,
                    length_bytes=len(section),
                    rows=table.rows.num_rows,
                    checksum=checksum_of(section),
                    key_group_rows=table.key_group_rows,
                )
            )
            yield self._counted(section)
            if padding := -len(section) % _ALIGNMENT_BYTES:
                yield self._counted(bytes(padding))
        footer = encode(tuple(self._sections))
        yield self._counted(footer + _FOOTER_SEAL.pack(len(footer), xxhash.xxh3_64_intdigest(footer)))
        trailer = _DIGEST.pack(self._digest.intdigest())
        self.size_bytes += len(trailer)
        self._done = True
        yield trailer

    def handle(self, path: str | None, inline: bytes | None) -> StateHandle:
        assert self._done, "a handle was asked for before all bytes were taken"
        checksum = format_checksum(self._digest.intdigest())
        return StateHandle(path, inline, self.size_bytes, checksum, tuple(self._sections))

    def _counted(self, chunk: Buffer) -> Buffer:
        self._digest.update(chunk)
        self.size_bytes += len(chunk)
        return chunk


def _drained(head: deque[Buffer]) -> Iterator[Buffer]:
    while head:
        yield head.popleft()


def _encode_table(table: StateTable) -> memoryview:
    if table.kind is StateKind.KEYED:
        _check_prefix_sums(table.key_group_rows, table.rows.num_rows, f"state {table.state!r}")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.rows.schema) as writer:
        writer.write_batch(table.rows)
    return memoryview(sink.getvalue())


def _read_section(store: Store, handle: StateHandle, section: SectionRef) -> StateTable:
    where = f"state {section.state!r} of {section.uid!r} in {_where(store, handle)}"
    data = _read_range(store, handle, section.offset, section.length_bytes)
    if len(data) != section.length_bytes or checksum_of(data) != section.checksum:
        raise CorruptionError(f"{where} is damaged: its checksum does not match")
    try:
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            rows = reader.read_next_batch()
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise CorruptionError(f"{where} cannot be decoded: {error}") from error
    if rows.num_rows != section.rows:
        raise CorruptionError(f"{where} has {rows.num_rows} rows, not {section.rows}")
    if section.kind is StateKind.KEYED:
        _check_prefix_sums(section.key_group_rows, section.rows, where)
    return StateTable(section.state, section.kind, rows, section.key_group_rows)


def _rows_of(section: SectionRef, key_groups: range) -> tuple[int, int]:
    assert key_groups.step == 1
    sums = section.key_group_rows
    if key_groups.start < 0 or key_groups.stop >= len(sums):
        raise ConfigurationError(
            f"state {section.state!r} of {section.uid!r} was written with max parallelism {len(sums) - 1}; "
            f"key groups {key_groups.start}..{key_groups.stop - 1} were asked for. "
            "Keep the max parallelism of the job that wrote the checkpoint"
        )
    return sums[key_groups.start], sums[key_groups.stop]


def _cut(table: StateTable, first: int, end: int) -> StateTable:
    rebased = tuple(min(max(row, first), end) - first for row in table.key_group_rows)
    return StateTable(table.state, table.kind, table.rows.slice(first, end - first), rebased)


def _check_prefix_sums(sums: tuple[int, ...], rows: int, where: str) -> None:
    ordered = all(a <= b for a, b in pairwise(sums))
    if len(sums) < 2 or sums[0] != 0 or sums[-1] != rows or not ordered:
        raise CorruptionError(f"{where}: key_group_rows are no prefix sums of {rows} rows")


def _read_range(store: Store, handle: StateHandle, offset: int, length: int) -> Buffer:
    if handle.path is not None:
        return store.read(handle.path, offset, length)
    return memoryview(handle.inline or b"")[offset : offset + length]


def _where(store: Store, handle: StateHandle) -> str:
    return "inlined state" if handle.path is None else join_url(store.url, handle.path)


def _check_header(header: Buffer, where: str) -> None:
    if len(header) < _HEADER.size:
        raise CorruptionError(f"{where} is damaged: it has no complete header")
    magic, version = _HEADER.unpack_from(header)
    if magic != _MAGIC:
        raise CorruptionError(f"{where} is damaged or no state file: it starts with {magic!r}")
    if version > STATE_VERSION:
        raise CodecError(f"{where} has format version {version}; this tidegate reads up to {STATE_VERSION}")


def _footer_of(data: memoryview, where: str) -> tuple[SectionRef, ...]:
    if len(data) < _HEADER.size + _TRAILER_BYTES:
        raise CorruptionError(f"{where} is damaged: it is too short")
    (digest,) = _DIGEST.unpack(data[-_DIGEST.size :])
    if xxhash.xxh3_64_intdigest(data[: -_DIGEST.size]) != digest:
        raise CorruptionError(f"{where} is damaged: its checksum does not match")
    _check_header(data[: _HEADER.size], where)
    seal = data[-_TRAILER_BYTES:]
    length, _ = _FOOTER_SEAL.unpack_from(seal)
    return _decode_footer(data[len(data) - _TRAILER_BYTES - length : -_TRAILER_BYTES], seal, where)


def _decode_footer(footer: Buffer, seal: Buffer, where: str) -> tuple[SectionRef, ...]:
    length, digest = _FOOTER_SEAL.unpack_from(seal)
    if len(footer) != length or xxhash.xxh3_64_intdigest(footer) != digest:
        raise CorruptionError(f"{where} is damaged: the checksum of its directory does not match")
    sections = decode(bytes(footer))
    if not (isinstance(sections, tuple) and all(isinstance(section, SectionRef) for section in sections)):
        raise CorruptionError(f"{where}: its directory is none")
    return sections
