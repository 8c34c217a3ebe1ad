"""The frame of a state file, format version 2: header, directory and trailer, and how damage to them is found.

    header   magic, version, zeros up to 64 bytes
    chunks   pieces of the states, one after the other (`chunk.py`), each at a multiple of 64 bytes
    footer   the directory: the codec's bytes of a tuple of StoredSection
    trailer  length and checksum of the footer, checksum of all bytes before it

The directory alone says where the rows of which key groups lie, and has a checksum for each chunk: a reader fetches the
end of the file, then the chunks that it needs, and trusts no byte that it has not verified. It also makes a file
readable without `_metadata`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import xxhash

from tidegate.storage.checkpoints.metadata import SectionRef, StateHandle, StateKind
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import CodecError, CorruptionError
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import Buffer, Store, ViewedStore

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
    """A piece of one state; of keyed state `group_rows` are the prefix sums of the key groups from `first_group` on."""

    offset: int
    length_bytes: int
    rows: int
    checksum: str
    first_group: int = 0
    group_rows: tuple[int, ...] = ()

    def rows_of(self, key_groups: range) -> tuple[int, int]:
        """The first row of some key groups, and the one after the last; equal where there is none."""
        assert key_groups.step == 1
        start = max(key_groups.start, self.first_group) - self.first_group
        stop = min(key_groups.stop, self.first_group + len(self.group_rows) - 1) - self.first_group
        return (self.group_rows[start], self.group_rows[stop]) if start < stop else (0, 0)


@wire
@dataclass(frozen=True, slots=True)
class StoredSection:
    """One state of one operator, and its chunks in the order of their bytes."""

    section: SectionRef
    chunks: tuple[ChunkRef, ...]


def check_groups(kind: StateKind, first_group: int, group_rows: tuple[int, ...], rows: int, where: str) -> None:
    """Raise CorruptionError unless the prefix sums of the key groups fit a chunk of so many rows."""
    if kind is not StateKind.KEYED:
        fits = group_rows == ()
    else:
        ends = len(group_rows) >= 2 and group_rows[0] == 0 and group_rows[-1] == rows
        fits = ends and first_group >= 0 and all(a <= b for a, b in pairwise(group_rows))
    if not fits:
        raise CorruptionError(f"{where}: group_rows are no prefix sums of {rows} rows of {kind.value} state")


def encode_header() -> bytes:
    """The first bytes of a file."""
    return _HEADER.pack(_MAGIC, STATE_VERSION)


def encode_directory(sections: tuple[StoredSection, ...]) -> bytes:
    """The footer, with length and checksum. The digest of all bytes (`encode_digest`) follows it."""
    footer = encode(sections)
    return footer + _FOOTER_SEAL.pack(len(footer), xxhash.xxh3_64_intdigest(footer))


def encode_digest(digest: int) -> bytes:
    """The last bytes of a file."""
    return _DIGEST.pack(digest)


def read_range(store: Store, handle: StateHandle, offset: int, length_bytes: int) -> Buffer:
    """Some bytes of a handle, where they lie if the store can show them; fewer where it ends before."""
    if handle.path is not None:
        # What `isinstance(store, ViewedStore)` would say, which takes fifty times as long.
        shows = hasattr(store, "view")
        view = cast(ViewedStore, store).view(handle.path, offset, length_bytes) if shows else None
        return view if view is not None else store.read(handle.path, offset, length_bytes)
    return memoryview(handle.inline or b"")[offset : offset + length_bytes]


def where_of(store: Store, handle: StateHandle) -> str:
    """What a handle is called in errors."""
    return "inlined state" if handle.path is None else join_url(store.url, handle.path)


def read_directory(store: Store, handle: StateHandle) -> tuple[StoredSection, ...]:
    """The directory of a handle, read by range and verified.

    CorruptionError if it is damaged or not what the handle says, NotFoundError.
    """
    where = where_of(store, handle)
    start = handle.size_bytes - handle.directory_bytes
    end = read_range(store, handle, start, handle.directory_bytes) if start >= _HEADER.size else b""
    if len(end) != handle.directory_bytes or len(end) < _TRAILER_BYTES:
        raise CorruptionError(f"{where} is damaged: it should have {handle.size_bytes} bytes")
    found = _decode_directory(end[:-_TRAILER_BYTES], end[-_TRAILER_BYTES:], where)
    if tuple(stored.section for stored in found) != handle.sections:
        raise CorruptionError(f"{where} holds other states than the checkpoint's metadata says")
    return found


def read_footer(store: Store, path: str, size_bytes: int | None = None) -> tuple[SectionRef, ...]:
    """The states in a state file. Without `size_bytes` the whole file is read, with it only both ends.

    Raises CorruptionError, NotFoundError, or CodecError if another version of tidegate wrote the file.
    """
    where = join_url(store.url, path)
    if size_bytes is None:
        data = memoryview(store.read(path))
        return check_whole(data, where)
    trailer = store.read(path, max(0, size_bytes - _TRAILER_BYTES), _TRAILER_BYTES)
    if len(trailer) != _TRAILER_BYTES:
        raise CorruptionError(f"{where} is damaged: it should have {size_bytes} bytes")
    length, _ = _FOOTER_SEAL.unpack_from(trailer)
    start = size_bytes - _TRAILER_BYTES - length
    if start < _HEADER.size:
        raise CorruptionError(f"{where} is damaged: its directory would be longer than the file")
    _check_header(store.read(path, 0, _HEADER.size), where)
    return _sections(_decode_directory(store.read(path, start, length), trailer, where))


def check_whole(data: memoryview, where: str) -> tuple[SectionRef, ...]:
    """The states in the bytes of a whole file, all of which are verified. Errors as of `read_footer`."""
    if len(data) < _HEADER.size + _TRAILER_BYTES:
        raise CorruptionError(f"{where} is damaged: it is too short")
    (digest,) = _DIGEST.unpack(data[-_DIGEST.size :])
    if xxhash.xxh3_64_intdigest(data[: -_DIGEST.size]) != digest:
        raise CorruptionError(f"{where} is damaged: its checksum does not match")
    _check_header(data[: _HEADER.size], where)
    trailer = data[-_TRAILER_BYTES:]
    length, _ = _FOOTER_SEAL.unpack_from(trailer)
    start = max(0, len(data) - _TRAILER_BYTES - length)
    return _sections(_decode_directory(data[start:-_TRAILER_BYTES], trailer, where))


def _sections(stored: tuple[StoredSection, ...]) -> tuple[SectionRef, ...]:
    return tuple(each.section for each in stored)


def _check_header(header: Buffer, where: str) -> None:
    if len(header) < _HEADER.size:
        raise CorruptionError(f"{where} is damaged: it has no complete header")
    magic, version = _HEADER.unpack_from(header)
    if magic != _MAGIC:
        raise CorruptionError(f"{where} is damaged or no state file: it starts with {magic!r}")
    if version > STATE_VERSION:
        raise CodecError(f"{where} has format version {version}; this tidegate reads {STATE_VERSION}")
    if version < STATE_VERSION:
        raise CodecError(
            f"{where} was written by an older tidegate (format version {version}; this one reads {STATE_VERSION})"
        )


def _decode_directory(footer: Buffer, trailer: Buffer, where: str) -> tuple[StoredSection, ...]:
    length, digest = _FOOTER_SEAL.unpack_from(trailer)
    if len(footer) != length or xxhash.xxh3_64_intdigest(footer) != digest:
        raise CorruptionError(f"{where} is damaged: the checksum of its directory does not match")
    found = decode(bytes(footer))
    if not (isinstance(found, tuple) and all(isinstance(each, StoredSection) for each in found)):
        raise CorruptionError(f"{where}: its directory is none")
    return found
