"""An SST file of many sorted entries, for a database to take in as a whole (`RocksSession.ingest`).

Entries that go through a write batch become Python's bytes, then nodes of a memtable, and then a file: half a
microsecond a row. Here they stay in arrays, and a row costs a fifth of that. The file is of RocksDB's block-based
format in version 2, which all its releases read; what RocksDB makes of it in a compaction is its own.

    blocks of entries | filter | properties | index | names of these three | footer

- Each part but the footer has a trailer: 0 or 4 (compressed with LZ4), and the lower half of XXH64 of all that.
- An entry is three varints (how much of the key is as in the entry before, how long the rest of it is with its suffix,
  how long the value is), the rest of the key, the suffix (1 put, 0 removed; in 8 bytes), and the value. A block ends
  with the places of entries that have whole keys, and their number.
- The index has the last key of each block, and its place. The filter is a Bloom filter of whole keys.
- A database that takes the file in gives all its entries one number, greater than all before: the properties that
  begin with `rocksdb.external_sst_file` ask for it.

The same is in RocksDB's sources: `table/block_based/block_based_table_builder.cc`, `table/format.cc`,
`util/bloom_impl.h`, and in its wiki under "Rocksdb BlockBasedTable Format".
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.kernels.columns import NO_MASK, Strings
from tidegate.state.kernels.hashing import hash_string
from tidegate.state.kernels.sst_blocks import (
    ENTRY_BYTES_MAX,
    LINE_BYTES,
    PROBES,
    SLACK_BYTES,
    SUFFIX_BYTES,
    TRAILER_BYTES,
    fill_filter,
    hash_keys,
    lay_out,
    seal,
)
from tidegate.state.rocksdb.gathered_rows import Slice

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
