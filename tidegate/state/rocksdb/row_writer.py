"""`RowWriter`: writes many rows of one state into the database, as an SST file or by write batches.

Rules:
- Rows of a snapshot are gathered until they would fill three write buffers, which are half of the database's memory,
  other rows until they would fill one. Each file of a snapshot covers all key groups, and some files start a compaction
  whatever their size, so there are few.
- Few rows go into RocksDB's memory, where rows of several calls come together. So do more rows that were evicted, up to
  half a write buffer. Rows of a snapshot become a file in any case: here, if nothing else waits in memory.
- A key occurs once among all rows that one writer gets.

`GatheredRows` sorts encoded rows into the order of the database, a few key groups at a time. The head of each key is
its key group. What is sorted and laid out at a time fits into the cache, and no array is as large as all rows: memory
that is new to a process is cleared first, which took two fifths of a snapshot's time.

`sst_file` makes a file of sorted entries, which the database takes as a whole (`RocksSession.ingest`). Entries in a
write batch become Python bytes, then nodes of a memtable, and then a file: half a microsecond per row. Here they stay
in arrays, and a row costs a fifth of that. The file has RocksDB's block-based format in version 2, which all releases
read; RocksDB rewrites it in its own way when it compacts.

    blocks of entries | filter | properties | index | names of these three | footer

- Each part but the footer has a trailer: 0 or 4 (compressed with LZ4), and the lower half of XXH64 of all that.
- An entry is three varints (bytes shared with the previous key, length of the rest of the key with its suffix, length
  of the value), the rest of the key, the suffix (1 put, 0 removed; in 8 bytes), and the value. A block ends with the
  positions of entries that have whole keys, and their number.
- The index has the last key of each block, and its position. The filter is a Bloom filter of whole keys.
- The database gives all entries of the file one number, greater than all before, because of the properties that begin
  with `rocksdb.external_sst_file`.
- All numbers are little-endian. A varint has seven bits per byte, the lowest first, and the highest bit of each byte
  but the last is 1.

Sources: RocksDB's `table/block_based/block_based_table_builder.cc`, `table/format.cc`, `util/bloom_impl.h`, and the
page "Rocksdb BlockBasedTable Format" of its wiki.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.kernels.columns import NO_MASK, Strings
from tidegate.state.kernels.hashing import hash_string
from tidegate.state.kernels.jit import kernel, load64, prefetch, store64
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.keys import order_of, string_pieces

_SNAPSHOT_BUFFERS = 3
"""So many write buffers are one file of a snapshot at most."""
_BATCH_ROWS = 8_192
"""Rows that are written with one batch. They become Python values, so many at a time."""
_SLICE_BYTES = 2 * 1024 * 1024
"""About so much of keys and values comes out at a time, but always whole key groups."""
_PUT, _REMOVED = 1, 0
_PLAIN, _LZ4 = b"\0", b"\4"
_XXH64 = b"\3"
_VERSION = 2
_MAGIC = 0x88E241B785F4CFF7
_HANDLES_BYTES = 40
_KEY_BITS = 10
"""Of the filter, for each key."""
_EXTERNAL_VERSION = 2
_ASCEND = "keys of an SST file ascend, and none comes twice"
_PIECE_BYTES = 256 * 1024
"""So much is laid out before it is compressed: as much as stays in the cache."""
_Entries: TypeAlias = Iterable[tuple[bytes, bytes]]
_Place: TypeAlias = tuple[bytes, int, int]
"""Of a block: its last key, where it starts, and where it stops without its trailer."""
SLACK_BYTES = 8
"""Keys and values are copied by words, so there must be so many bytes behind the last one."""
TRAILER_BYTES = 5
"""Behind each block: how it is compressed, and the checksum of both."""
SUFFIX_BYTES = 8
"""Behind each key: whether it is put or removed, and the number of the write, which is 0 here."""
ENTRY_BYTES_MAX = SUFFIX_BYTES + 15 + 4
"""What an entry takes beside its key and value: three lengths, and its place."""
LINE_BYTES = 64
"""A key has all its bits in one line of the filter."""
PROBES = 6
_RESTART = 16
"""So many keys in a row are told by how they differ from the one before."""
_AHEAD = 16
_BYTE, _WORD_BYTES = np.uint64(255), np.uint64(8)
_HASH_SEED, _HASH_FACTOR = np.uint32(0xBC9F1D34), np.uint32(0xC6A4A793)


class RowWriter:
    """Puts rows, or removes them. Who uses it sees to it that the database may be written to (`Unwritten`)."""

    def __init__(self, session: RocksSession, for_snapshot: bool) -> None:
        self._session = session
        self._for_snapshot = for_snapshot
        self._size_bytes_max = session.write_buffer_bytes * (_SNAPSHOT_BUFFERS if for_snapshot else 1)
        self._gathered = GatheredRows()

    def add(self, keys: Strings, values: Strings | None, first_group: int = 0, group_rows: Sequence[int] = ()) -> None:
        """Write rows under these database keys, soon: with `finish` at the latest. StorageError.

        One writer is given values each time, or never: then keys are removed. Rows that are sorted by key group say so,
        as a `StateChunk` does.
        """
        self._gathered.add(keys, values, first_group, group_rows)
        if self._gathered.size_bytes >= self._size_bytes_max:
            self.finish()

    def finish(self) -> None:
        """Write what was added. StorageError."""
        if not self._gathered.rows:
            return
        if self._makes_file:
            self._session.ingest(sst_file(self._gathered.slices(), self._session.block_bytes))
            return
        for some in self._gathered.slices():
            of_keys = string_pieces(some.keys, some.order, _BATCH_ROWS)
            of_values = repeat(None) if some.values is None else string_pieces(some.values, some.order, _BATCH_ROWS)
            for some_keys, some_values in zip(of_keys, of_values, strict=False):
                self._session.apply(some_keys, some_values)

    @property
    def _makes_file(self) -> bool:
        if self._gathered.rows < self._session.file_rows_min:
            return False
        fills = 2 * self._gathered.size_bytes >= self._session.write_buffer_bytes
        return fills or (self._for_snapshot and self._session.memory_is_empty)


@dataclass(frozen=True, slots=True)
class Slice:
    """Some rows, at least one, and the order of their keys; without values, keys to be removed.

    Behind all keys, and behind all values, are `SLACK_BYTES` more.
    """

    keys: Strings
    values: Strings | None
    order: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows as they came. If they are sorted by key group, those of group `first + i` begin at `starts[i]`."""

    keys: Strings
    values: Strings | None
    first: int
    starts: Sequence[int]

    def range_of(self, first: int, stop: int) -> tuple[int, int]:
        """Where the rows of the groups from `first` to before `stop` begin and end."""
        last = len(self.starts) - 1
        return self.starts[min(max(first - self.first, 0), last)], self.starts[min(max(stop - self.first, 0), last)]


class GatheredRows:
    """Takes parts in, and gives slices out. Of all rows a key comes once."""

    def __init__(self) -> None:
        self.rows = 0
        self.size_bytes = 0
        """Of keys and values."""
        self._parts: list[_Part] = []
        self._by_group = True

    def add(self, keys: Strings, values: Strings | None, first_group: int, group_rows: Sequence[int]) -> None:
        """Add rows that are sorted by key group, as those of a `StateChunk`; with no `group_rows` in any order."""
        self._parts.append(_Part(keys, values, first_group, group_rows))
        self._by_group = self._by_group and len(group_rows) > 0
        self.rows += len(keys.offsets) - 1
        self.size_bytes += len(keys.data) + (0 if values is None else len(values.data))

    def slices(self) -> Iterator[Slice]:
        """All rows, in the order of the database. From the first one on, none is here."""
        parts, by_group, rows = self._parts, self._by_group, self.rows
        rows_min = max(1, rows * _SLICE_BYTES // max(1, self.size_bytes))
        self._parts, self._by_group, self.rows, self.size_bytes = [], True, 0, 0
        if not rows:
            return
        if not by_group:
            yield _slice([(part, 0, len(part.keys.offsets) - 1) for part in parts])
            return
        first = min(part.first for part in parts)
        counts = np.zeros(max(part.first + len(part.starts) - 1 for part in parts) - first, dtype=np.int64)
        for part in parts:
            counts[part.first - first : part.first - first + len(part.starts) - 1] += np.diff(part.starts)
        ends = np.cumsum(counts)
        group = done = 0
        while done < rows:
            stop = min(int(np.searchsorted(ends, done + rows_min)) + 1, len(ends))
            ranges = ((part, *part.range_of(first + group, first + stop)) for part in parts)
            yield _slice([(part, start, end) for part, start, end in ranges if start < end])
            group, done = stop, int(ends[stop - 1])


def _slice(ranges: Sequence[tuple[_Part, int, int]]) -> Slice:
    keys = _together([(part.keys, start, end) for part, start, end in ranges])
    values = [(part.values, start, end) for part, start, end in ranges if part.values is not None]
    return Slice(keys, _together(values) if values else None, order_of(keys))


def _together(ranges: Sequence[tuple[Strings, int, int]]) -> Strings:
    """Some rows each of columns without nulls."""
    bounds = [(int(strings.offsets[start]), int(strings.offsets[end])) for strings, start, end in ranges]
    data = np.empty(sum(stop - begin for begin, stop in bounds) + SLACK_BYTES, dtype=np.uint8)
    offsets = np.empty(sum(end - start for _, start, end in ranges) + 1, dtype=np.int64)
    offsets[0] = at = row = 0
    for (strings, start, end), (begin, stop) in zip(ranges, bounds, strict=True):
        data[at : at + stop - begin] = strings.data[begin:stop]
        np.add(strings.offsets[start + 1 : end + 1], at - begin, out=offsets[row + 1 : row + 1 + end - start])
        at, row = at + stop - begin, row + end - start
    return Strings(offsets, data, NO_MASK)


def sst_file(slices: Iterable[Slice], block_bytes: int) -> Iterator[bytes | bytearray]:
    """The file, in parts. Without values the entries of a slice are removed.

    At least one slice. Their keys ascend, and so do those of one slice after the other.
    """
    index: list[tuple[bytes, bytes]] = []
    hashes: list[NDArray[np.uint32]] = []
    size_bytes = removed = keys_bytes = values_bytes = 0
    for some in slices:
        keys, values = some.keys, some.values
        if values is None:
            values = Strings(np.zeros_like(keys.offsets), np.zeros(SLACK_BYTES, dtype=np.uint8), NO_MASK)
            removed += len(some.order)
        _see_to_order(index, keys, some.order)
        kind = _REMOVED if some.values is None else _PUT
        for piece, blocks in _pieces(keys, values, some.order, kind, block_bytes):
            index += ((key, _varint(size_bytes + start) + _varint(stop - start)) for key, start, stop in blocks)
            size_bytes += len(piece)
            yield piece
        hashes.append(_hashes(keys))
        keys_bytes, values_bytes = keys_bytes + int(keys.offsets[-1]), values_bytes + int(values.offsets[-1])
    rows = sum(map(len, hashes))
    whole_filter, whole_index = _filter(np.concatenate(hashes)), _block(index)
    properties = {
        b"rocksdb.block.based.table.index.type": struct.pack("<I", 0),
        b"rocksdb.comparator": b"leveldb.BytewiseComparator",
        b"rocksdb.data.size": _varint(size_bytes),
        b"rocksdb.deleted.keys": _varint(removed),
        b"rocksdb.external_sst_file.global_seqno": bytes(8),
        b"rocksdb.external_sst_file.version": struct.pack("<I", _EXTERNAL_VERSION),
        b"rocksdb.filter.size": _varint(len(whole_filter)),
        b"rocksdb.index.size": _varint(len(whole_index)),
        b"rocksdb.num.data.blocks": _varint(len(index)),
        b"rocksdb.num.entries": _varint(rows),
        b"rocksdb.raw.key.size": _varint(keys_bytes + SUFFIX_BYTES * rows),
        b"rocksdb.raw.value.size": _varint(values_bytes),
    }
    parts = _Parts(size_bytes)
    of_filter = parts.add(whole_filter)
    of_properties = parts.add(_block(sorted(properties.items())))
    of_index = parts.add(whole_index)
    names = [(b"fullfilter.rocksdb.BuiltinBloomFilter", of_filter), (b"rocksdb.properties", of_properties)]
    of_names = parts.add(_block(names))
    handles = (of_names + of_index).ljust(_HANDLES_BYTES, b"\0")
    yield from parts.done
    yield _XXH64 + handles + struct.pack("<IQ", _VERSION, _MAGIC)


class _Parts:
    """What follows the blocks of entries, which have so many bytes."""

    def __init__(self, size_bytes: int) -> None:
        self.done: list[bytes] = []
        self._size_bytes = size_bytes

    def add(self, content: bytes) -> bytes:
        """Add a part with its trailer. Its handle: place and length."""
        whole = np.frombuffer(content + _PLAIN, dtype=np.uint8)
        checksum = int(hash_string(whole, 0, len(whole), np.uint64(0))) & 0xFFFFFFFF
        handle = _varint(self._size_bytes) + _varint(len(content))
        self.done.append(content + _PLAIN + struct.pack("<I", checksum))
        self._size_bytes += len(content) + TRAILER_BYTES
        return handle


def _see_to_order(index: list[tuple[bytes, bytes]], keys: Strings, order: NDArray[np.int64]) -> None:
    """The first key of a slice comes behind the last one of the slice before."""
    if index:
        first_key = keys.data[keys.offsets[order[0]] : keys.offsets[order[0] + 1]].tobytes()
        assert index[-1][0][:-SUFFIX_BYTES] < first_key, _ASCEND


def _pieces(
    keys: Strings, values: Strings, order: NDArray[np.int64], kind: int, block_bytes: int
) -> Iterator[tuple[bytearray, list[_Place]]]:
    """All blocks, some at a time: compressed, with trailers; and of each its last key, and its place among them.

    What is laid out is compressed while it is in the cache.
    """
    rows = len(order)
    suffix = struct.pack("<Q", kind)
    places = np.empty(min(rows, block_bytes), dtype=np.int64)
    # A block's last entry begins before it is large enough. Each of its places takes 4 bytes, and so does their number.
    entry_bytes_max = int(np.diff(keys.offsets).max()) + int(np.diff(values.offsets).max()) + ENTRY_BYTES_MAX
    block_bytes_max = block_bytes + entry_bytes_max + 4 * len(places) + 4 + TRAILER_BYTES
    blocks_max = min(rows, max(1, _PIECE_BYTES // (block_bytes + entry_bytes_max)))
    out = np.empty(blocks_max * block_bytes_max + SLACK_BYTES, dtype=np.uint8)
    stops, lasts = np.empty(blocks_max, dtype=np.int64), np.empty(blocks_max, dtype=np.int64)
    first = 0
    while first < rows:
        blocks = lay_out(
            order,
            first,
            keys.offsets,
            keys.data,
            values.offsets,
            values.data,
            kind,
            block_bytes,
            places,
            out,
            stops,
            lasts,
        )
        assert blocks > 0, _ASCEND
        packed, starts, sealed = _compressed(out, stops[:blocks])
        last_rows = order[lasts[:blocks]]
        bounds = zip(keys.offsets[last_rows].tolist(), keys.offsets[last_rows + 1].tolist(), strict=True)
        last_keys = [keys.data[begin:end].tobytes() + suffix for begin, end in bounds]
        yield packed, [*zip(last_keys, starts, sealed, strict=True)]
        first = int(lasts[blocks - 1]) + 1


def _compressed(blocks: NDArray[np.uint8], stops: NDArray[np.int64]) -> tuple[bytearray, list[int], list[int]]:
    """All blocks compressed, with trailers, and where each starts and stops without its trailer."""
    codec, laid_out = pa.Codec("lz4_raw"), pa.py_buffer(blocks)
    parts: list[bytes] = []
    starts: list[int] = []
    sealed: list[int] = []
    start = at = 0
    for stop in stops.tolist():
        content = _varint(stop - start) + codec.compress(laid_out[start:stop], asbytes=True)
        parts += (content, _LZ4, bytes(TRAILER_BYTES - 1))
        starts.append(at)
        sealed.append(at + len(content))
        at += len(content) + TRAILER_BYTES
        start = stop + TRAILER_BYTES
    whole = bytearray().join(parts)
    seal(np.array(starts, dtype=np.int64), np.array(sealed, dtype=np.int64), np.frombuffer(whole, dtype=np.uint8))
    return whole, starts, sealed


def _hashes(keys: Strings) -> NDArray[np.uint32]:
    """Of each key, for the filter."""
    hashes = np.empty(len(keys.offsets) - 1, dtype=np.uint32)
    hash_keys(keys.offsets, keys.data, hashes)
    return hashes


def _filter(hashes: NDArray[np.uint32]) -> bytes:
    """A Bloom filter, and how it is to be read. The number of its lines is odd."""
    lines = -(-len(hashes) * _KEY_BITS // (8 * LINE_BYTES)) | 1
    bits = np.zeros(lines * LINE_BYTES, dtype=np.uint8)
    fill_filter(hashes, lines, bits)
    return bits.tobytes() + struct.pack("<BI", PROBES, lines)


def _block(entries: _Entries) -> bytes:
    """A block of few entries, each with its whole key."""
    parts: list[bytes] = []
    places: list[int] = []
    at = 0
    for key, value in entries:
        parts.append(_varint(0) + _varint(len(key)) + _varint(len(value)) + key + value)
        places.append(at)
        at += len(parts[-1])
    return b"".join(parts) + struct.pack(f"<{len(places)}II", *places, len(places))


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number >= 128:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


@kernel
def lay_out(
    order: NDArray[np.int64],
    first: int,
    key_offsets: NDArray[np.int64],
    keys: NDArray[np.uint8],
    value_offsets: NDArray[np.int64],
    values: NDArray[np.uint8],
    kind: int,
    block_bytes: int,
    places: NDArray[np.int64],
    out: NDArray[np.uint8],
    stops: NDArray[np.int64],
    lasts: NDArray[np.int64],
) -> int:
    """Write entries of one kind, in this order of rows, as blocks of about so many bytes, with room for trailers.

    It begins with the row at `first`, and ends where `stops` is full or no row is left. Of each block, `stops` gets
    where it stops, and `lasts` where its last row is in `order`. `places` is room to work in. Returns how many blocks
    there are, or -1 if keys do not ascend.
    """
    at, start, in_block, restarts, blocks = 0, 0, 0, 0, 0
    rows = order.shape[0]
    for i in range(first, rows):
        if i + _AHEAD < rows:
            prefetch(keys, key_offsets[order[i + _AHEAD]])
            prefetch(values, value_offsets[order[i + _AHEAD]])
        row = order[i]
        key, value = key_offsets[row], value_offsets[row]
        key_bytes, value_bytes = key_offsets[row + 1] - key, value_offsets[row + 1] - value
        shared = np.int64(0)
        if i > 0:
            former = key_offsets[order[i - 1]]
            former_bytes = key_offsets[order[i - 1] + 1] - former
            shared = _shared(keys, key, former, min(key_bytes, former_bytes))
            if shared == key_bytes or (shared < former_bytes and keys[key + shared] < keys[former + shared]):
                return -1
        if in_block % _RESTART == 0:
            shared = np.int64(0)
            places[restarts] = at - start
            restarts += 1
        at = _put_varint(shared, at, out)
        at = _put_varint(key_bytes - shared + SUFFIX_BYTES, at, out)
        at = _put_varint(value_bytes, at, out)
        for j in range(0, key_bytes - shared, 8):
            store64(out, at + j, load64(keys, key + shared + j))
        at += key_bytes - shared
        store64(out, at, np.uint64(kind))
        at += SUFFIX_BYTES
        for j in range(0, value_bytes, 8):
            store64(out, at + j, load64(values, value + j))
        at += value_bytes
        in_block += 1
        if at - start >= block_bytes or i == rows - 1:
            for j in range(restarts):
                at = _put_fixed32(np.uint64(places[j]), at, out)
            at = _put_fixed32(np.uint64(restarts), at, out)
            stops[blocks], lasts[blocks] = at, i
            blocks += 1
            if blocks == stops.shape[0]:
                break
            at += TRAILER_BYTES
            start, in_block, restarts = at, 0, 0
    return blocks


@kernel
def seal(starts: NDArray[np.int64], stops: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """Write the checksum of each block, and of the byte behind it that says how it is compressed, behind that."""
    for i in range(starts.shape[0]):
        checksum = hash_string(out, starts[i], stops[i] + 1, np.uint64(0))
        _put_fixed32(checksum, stops[i] + 1, out)


@kernel
def hash_keys(offsets: NDArray[np.int64], keys: NDArray[np.uint8], hashes: NDArray[np.uint32]) -> None:
    """The hash of each key, as the filter has it."""
    for i in range(hashes.shape[0]):
        hashes[i] = _filter_hash(keys, offsets[i], offsets[i + 1])


@kernel
def fill_filter(hashes: NDArray[np.uint32], lines: int, out: NDArray[np.uint8]) -> None:
    """Set the bits of all keys in the lines of a Bloom filter, all of which were 0."""
    for i in range(hashes.shape[0]):
        if i + _AHEAD < hashes.shape[0]:
            prefetch(out, np.int64(hashes[i + _AHEAD] % np.uint32(lines)) * LINE_BYTES)
        h = hashes[i]
        line = np.int64(h % np.uint32(lines)) * LINE_BYTES
        step = np.uint32((h >> np.uint32(17)) | (h << np.uint32(15)))
        for _ in range(PROBES):
            bit = np.int64(h & np.uint32(8 * LINE_BYTES - 1))
            out[line + (bit >> 3)] |= np.uint8(1 << (bit & 7))
            h = np.uint32(h + step)


@kernel
def _shared(keys: NDArray[np.uint8], one: np.int64, other: np.int64, bytes_max: np.int64) -> np.int64:
    """How many bytes two keys begin with alike."""
    shared = np.int64(0)
    while shared < bytes_max:
        differ = load64(keys, one + shared) ^ load64(keys, other + shared)
        if differ != 0:
            while differ & _BYTE == 0:
                differ >>= _WORD_BYTES
                shared += 1
            break
        shared += 8
    return min(shared, bytes_max)


@kernel
def _filter_hash(keys: NDArray[np.uint8], start: np.int64, stop: np.int64) -> np.uint32:
    """RocksDB's hash of 32 bits. Bytes behind the last whole word are signed."""
    h = np.uint32(_HASH_SEED ^ np.uint32(np.uint32(stop - start) * _HASH_FACTOR))
    at = start
    while at + 4 <= stop:
        word = np.uint32(keys[at]) | np.uint32(keys[at + 1]) << np.uint32(8)
        word |= np.uint32(keys[at + 2]) << np.uint32(16) | np.uint32(keys[at + 3]) << np.uint32(24)
        h = np.uint32(np.uint32(h + word) * _HASH_FACTOR)
        h ^= h >> np.uint32(16)
        at += 4
    if at < stop:
        for j in range(stop - at):
            h = np.uint32(h + np.uint32(np.int64(np.int8(keys[at + j])) << (8 * j)))
        h = np.uint32(h * _HASH_FACTOR)
        h ^= h >> np.uint32(24)
    return h


@kernel
def _put_varint(number: np.int64, at: int, out: NDArray[np.uint8]) -> int:
    while number >= 128:
        out[at] = np.uint8((number & 127) | 128)
        number >>= 7
        at += 1
    out[at] = np.uint8(number)
    return at + 1


@kernel
def _put_fixed32(number: np.uint64, at: int, out: NDArray[np.uint8]) -> int:
    for j in range(4):
        out[at + j] = np.uint8((number >> np.uint64(8 * j)) & _BYTE)
    return at + 4
