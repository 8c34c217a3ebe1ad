"""`RowWriter`: writes many rows of one state into the database, as an SST file or by write batches.

Rules:
- Rows of a snapshot are gathered until they would fill three write buffers, which are half of the database's memory.
  Other rows are gathered until they would fill one. Each file of a snapshot covers all key groups, and a few files
  start a compaction whatever their size, so files should be few.
- A small number of rows is written to RocksDB's memory, where rows of several calls accumulate. The same applies to
  evicted rows up to half a write buffer. Rows of a snapshot always end in a file: RocksDB writes its memory to one if
  it has other rows, else the rows are written to a file here.
- A key occurs once among all rows of one writer.

`GatheredRows` sorts encoded rows into the key order of the database, a few key groups at a time. Each key begins with
its key group. The rows that are sorted and laid out together fit into the CPU cache, and no array is as large as all
rows. The kernel clears new memory of a process first, which took two fifths of a snapshot's time.

`sst_file` makes a file of sorted entries, which the database ingests as a whole (`RocksSession.ingest`). Entries in a
write batch become Python bytes, then nodes of a memtable, and then a file, which takes half a microsecond per row. Here
they stay in arrays, and a row takes a fifth of that. The file has RocksDB's block-based format in version 2, which all
releases read. RocksDB rewrites it in its current format when it compacts.

    blocks of entries | filter | properties | index | names of these three | footer

- Each part except the footer has a trailer: a byte for the compression (0 for none, 4 for LZ4), and the lower half of
  the XXH64 of the part and this byte.
- An entry is three varints (bytes shared with the previous key, length of the rest of the key with its suffix, length
  of the value), the rest of the key, the suffix (8 bytes, 1 for put and 0 for removed), and the value. A block ends
  with the positions of entries that have whole keys, and their number.
- The index has the last key of each block, and its position. The filter is a Bloom filter of whole keys.
- Because of the properties that begin with `rocksdb.external_sst_file`, the database gives all entries of the file one
  sequence number, greater than all before.
- All numbers are little-endian. A varint has seven bits per byte, the lowest first, and the highest bit is 1 in all
  bytes except the last.

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
"""The largest file of a snapshot, in write buffers."""
_BATCH_ROWS = 8_192
"""Rows per write batch. This many rows at a time become Python bytes."""
_SLICE_BYTES = 2 * 1024 * 1024
"""Keys and values are sorted in slices of about this size, but always whole key groups."""
_PUT, _REMOVED = 1, 0
_PLAIN, _LZ4 = b"\0", b"\4"
_XXH64 = b"\3"
_VERSION = 2
_MAGIC = 0x88E241B785F4CFF7
_HANDLES_BYTES = 40
_KEY_BITS = 10
"""Bits per key in the filter."""
_EXTERNAL_VERSION = 2
_ASCEND = "keys of an SST file must ascend, without duplicates"
_PIECE_BYTES = 256 * 1024
"""Blocks are compressed in pieces of this size, which stay in the CPU cache."""
_Entries: TypeAlias = Iterable[tuple[bytes, bytes]]
_Place: TypeAlias = tuple[bytes, int, int]
"""The last key of a block, its start, and its end without the trailer."""
SLACK_BYTES = 8
"""Keys and values are copied in words of 8 bytes, so the arrays have this many bytes after the last one."""
TRAILER_BYTES = 5
"""Bytes of a trailer: the compression, and a checksum of 4 bytes."""
SUFFIX_BYTES = 8
"""Number of bytes of a key's suffix: put or removed, and the sequence number, which is 0 here."""
ENTRY_BYTES_MAX = SUFFIX_BYTES + 15 + 4
"""The largest overhead of an entry over its key and value: suffix, three varints, and its position in the block."""
LINE_BYTES = 64
"""Size of a line of the filter, in bytes. All bits of a key are in one line."""
PROBES = 6
_RESTART = 16
"""One key in this many is stored whole. The keys between are stored as differences from the previous key."""
_AHEAD = 16
_BYTE, _WORD_BYTES = np.uint64(255), np.uint64(8)
_HASH_SEED, _HASH_FACTOR = np.uint32(0xBC9F1D34), np.uint32(0xC6A4A793)


class RowWriter:
    """Writes or removes rows in the database: as part of a pending snapshot, or after it (`PendingWrites`)."""

    def __init__(self, session: RocksSession, for_snapshot: bool) -> None:
        self._session = session
        self._for_snapshot = for_snapshot
        self._size_bytes_max = session.write_buffer_bytes * (_SNAPSHOT_BUFFERS if for_snapshot else 1)
        self._gathered = GatheredRows()

    def add(self, keys: Strings, values: Strings | None, first_group: int = 0, group_rows: Sequence[int] = ()) -> None:
        """Adds rows to write under these database keys. They are written at the latest in `finish`. Raises
        StorageError.

        If `values` is None, the keys are removed. One writer either writes or removes. `first_group` and `group_rows`
        describe rows that are sorted by key group, as in a `StateChunk`.
        """
        self._gathered.add(keys, values, first_group, group_rows)
        if self._gathered.size_bytes >= self._size_bytes_max:
            self.finish()

    def finish(self) -> None:
        """Writes all rows that `add` has not written yet. Raises StorageError."""
        if not self._gathered.rows:
            return
        makes_file = self._makes_file
        if not self._for_snapshot:
            if makes_file:
                self._session.settle()
            else:
                self._session.give_way(self._gathered.rows, self._gathered.size_bytes)
        if makes_file:
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
    """Rows (at least one) to write to a file, and the indices that sort their keys.

    Without values, the keys are removed. The byte arrays of keys and values have `SLACK_BYTES` extra bytes at the end.
    """

    keys: Strings
    values: Strings | None
    order: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one call of `add`. If they are sorted by key group, group `first + i` begins at row `starts[i]`."""

    keys: Strings
    values: Strings | None
    first: int
    starts: Sequence[int]

    def range_of(self, first: int, stop: int) -> tuple[int, int]:
        """Returns the start and end index of the rows whose key groups are from `first` to `stop` (exclusive)."""
        last = len(self.starts) - 1
        return self.starts[min(max(first - self.first, 0), last)], self.starts[min(max(stop - self.first, 0), last)]


class GatheredRows:
    """Collects rows, and returns them sorted by key, one slice after the other. Each key occurs once."""

    def __init__(self) -> None:
        self.rows = 0
        self.size_bytes = 0
        """Bytes of keys and values."""
        self._parts: list[_Part] = []
        self._by_group = True

    def add(self, keys: Strings, values: Strings | None, first_group: int, group_rows: Sequence[int]) -> None:
        """Adds rows. With `group_rows`, the rows are sorted by key group, as in a `StateChunk`. Otherwise they may have
        any order.
        """
        self._parts.append(_Part(keys, values, first_group, group_rows))
        self._by_group = self._by_group and len(group_rows) > 0
        self.rows += len(keys.offsets) - 1
        self.size_bytes += len(keys.data) + (0 if values is None else len(values.data))

    def slices(self) -> Iterator[Slice]:
        """Yields all rows in the key order of the database. The first step empties this object."""
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
    """Joins rows of several string columns without nulls, with `SLACK_BYTES` extra bytes at the end."""
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
    """Yields the bytes of an SST file of RocksDB with these rows. A slice without values writes removals.

    There must be at least one slice, and keys must ascend from slice to slice.
    """
    index: list[tuple[bytes, bytes]] = []
    hashes: list[NDArray[np.uint32]] = []
    size_bytes = removed = keys_bytes = values_bytes = 0
    for some in slices:
        keys, values = some.keys, some.values
        if values is None:
            values = Strings(np.zeros_like(keys.offsets), np.zeros(SLACK_BYTES, dtype=np.uint8), NO_MASK)
            removed += len(some.order)
        _check_order(index, keys, some.order)
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
    """The parts of an SST file after the data blocks: filter, properties and index. The data blocks take `size_bytes`
    bytes.
    """

    def __init__(self, size_bytes: int) -> None:
        self.done: list[bytes] = []
        self._size_bytes = size_bytes

    def add(self, content: bytes) -> bytes:
        """Adds a part of the file with its trailer. Returns its handle: position and length, encoded."""
        whole = np.frombuffer(content + _PLAIN, dtype=np.uint8)
        checksum = int(hash_string(whole, 0, len(whole), np.uint64(0))) & 0xFFFFFFFF
        handle = _varint(self._size_bytes) + _varint(len(content))
        self.done.append(content + _PLAIN + struct.pack("<I", checksum))
        self._size_bytes += len(content) + TRAILER_BYTES
        return handle


def _check_order(index: list[tuple[bytes, bytes]], keys: Strings, order: NDArray[np.int64]) -> None:
    """Asserts that the first key of a slice comes after the last key of the previous slice."""
    if index:
        first_key = keys.data[keys.offsets[order[0]] : keys.offsets[order[0] + 1]].tobytes()
        assert index[-1][0][:-SUFFIX_BYTES] < first_key, _ASCEND


def _pieces(
    keys: Strings, values: Strings, order: NDArray[np.int64], kind: int, block_bytes: int
) -> Iterator[tuple[bytearray, list[_Place]]]:
    """Yields compressed data blocks with their trailers, several joined in one bytearray. Also yields the last key and
    the position of each block.

    Blocks are compressed while they are in the CPU cache.
    """
    rows = len(order)
    suffix = struct.pack("<Q", kind)
    places = np.empty(min(rows, block_bytes), dtype=np.int64)
    # The last entry of a block begins before the block is full. Restart positions and their number take 4 bytes each.
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
    """Compresses blocks. Returns the bytes of all blocks with their trailers, and the start and the end of each block
    without its trailer.
    """
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
    """Returns the hash of each key for the Bloom filter of an SST file."""
    hashes = np.empty(len(keys.offsets) - 1, dtype=np.uint32)
    hash_keys(keys.offsets, keys.data, hashes)
    return hashes


def _filter(hashes: NDArray[np.uint32]) -> bytes:
    """Returns a Bloom filter, followed by its parameters. The filter has an odd number of cache lines."""
    lines = -(-len(hashes) * _KEY_BITS // (8 * LINE_BYTES)) | 1
    bits = np.zeros(lines * LINE_BYTES, dtype=np.uint8)
    fill_filter(hashes, lines, bits)
    return bits.tobytes() + struct.pack("<BI", PROBES, lines)


def _block(entries: _Entries) -> bytes:
    """Returns a block in which each entry has its whole key. Used for the small index and property blocks."""
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
    """Writes entries of one kind as blocks of about `block_bytes`, in the order of `order`, with room for trailers.

    The function begins with the row `order[first]`, and ends when `stops` is full or all rows are written. For each
    block, `stops` gets its end, and `lasts` the index of its last row in `order`. `places` is a work area. Returns the
    number of blocks, or -1 if keys do not ascend.
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
    """Writes the checksum after each block. The checksum covers the block and the byte after it, which names the
    compression.
    """
    for i in range(starts.shape[0]):
        checksum = hash_string(out, starts[i], stops[i] + 1, np.uint64(0))
        _put_fixed32(checksum, stops[i] + 1, out)


@kernel
def hash_keys(offsets: NDArray[np.int64], keys: NDArray[np.uint8], hashes: NDArray[np.uint32]) -> None:
    """Computes the hash of each key for the Bloom filter of an SST file."""
    for i in range(hashes.shape[0]):
        hashes[i] = _filter_hash(keys, offsets[i], offsets[i + 1])


@kernel
def fill_filter(hashes: NDArray[np.uint32], lines: int, out: NDArray[np.uint8]) -> None:
    """Sets the bits of all keys in a Bloom filter of `lines` cache lines, whose bits are all 0."""
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
    """Returns the length in bytes of the common prefix of two keys, at most `bytes_max`."""
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
    """Returns RocksDB's 32-bit hash of the bytes from `start` to `stop`. Bytes after the last whole word are treated as
    signed.
    """
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
