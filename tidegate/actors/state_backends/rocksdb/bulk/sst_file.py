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
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.actors.kernels.columns import NO_MASK, Strings
from tidegate.actors.kernels.hashing import hash_string
from tidegate.actors.kernels.sst_blocks import (
    ENTRY_BYTES_MAX,
    LINE_BYTES,
    PROBES,
    SLACK_BYTES,
    TRAILER_BYTES,
    fill_filter,
    lay_out,
    seal,
)

_PUT, _REMOVED = 1, 0
_PLAIN, _LZ4 = b"\0", b"\4"
_XXH64 = b"\3"
_VERSION = 2
_MAGIC = 0x88E241B785F4CFF7
_HANDLES_BYTES = 40
_KEY_BITS = 10
"""Of the filter, for each key."""
_EXTERNAL_VERSION = 2

Buffer: TypeAlias = bytes | memoryview
_Entries: TypeAlias = Iterable[tuple[bytes, bytes]]


def sst_file(keys: Strings, values: Strings | None, order: NDArray[np.int64], block_bytes: int) -> list[Buffer]:
    """The file, in parts. Entries are in `order`, in which keys ascend; without values they are removed.

    At least one entry; behind all keys, and behind all values, are `SLACK_BYTES` more.
    """
    rows = len(order)
    kind = _REMOVED if values is None else _PUT
    values = (
        Strings(np.zeros(rows + 1, dtype=np.int64), np.zeros(SLACK_BYTES, dtype=np.uint8), NO_MASK)
        if values is None
        else values
    )
    stops, lasts, blocks = _blocks(keys, values, order, kind, block_bytes)
    packed, starts, sealed = _compressed(blocks, stops)
    parts = _Parts(packed)
    suffix = struct.pack("<Q", kind)
    last_keys = [keys.data[keys.offsets[row] : keys.offsets[row + 1]].tobytes() + suffix for row in lasts.tolist()]
    places = [_varint(start) + _varint(stop - start) for start, stop in zip(starts, sealed, strict=True)]
    index = _block(zip(last_keys, places, strict=True))
    whole_filter = _filter(keys)
    properties = {
        b"rocksdb.block.based.table.index.type": struct.pack("<I", 0),
        b"rocksdb.comparator": b"leveldb.BytewiseComparator",
        b"rocksdb.data.size": _varint(len(packed)),
        b"rocksdb.deleted.keys": _varint(rows if kind == _REMOVED else 0),
        b"rocksdb.external_sst_file.global_seqno": bytes(8),
        b"rocksdb.external_sst_file.version": struct.pack("<I", _EXTERNAL_VERSION),
        b"rocksdb.filter.size": _varint(len(whole_filter)),
        b"rocksdb.index.size": _varint(len(index)),
        b"rocksdb.num.data.blocks": _varint(len(starts)),
        b"rocksdb.num.entries": _varint(rows),
        b"rocksdb.raw.key.size": _varint(int(keys.offsets[-1]) + 8 * rows),
        b"rocksdb.raw.value.size": _varint(int(values.offsets[-1])),
    }
    of_filter = parts.add(whole_filter)
    of_properties = parts.add(_block(sorted(properties.items())))
    of_index = parts.add(index)
    names = [(b"fullfilter.rocksdb.BuiltinBloomFilter", of_filter), (b"rocksdb.properties", of_properties)]
    of_names = parts.add(_block(names))
    handles = (of_names + of_index).ljust(_HANDLES_BYTES, b"\0")
    return [*parts.done, _XXH64 + handles + struct.pack("<IQ", _VERSION, _MAGIC)]


class _Parts:
    """What the file has so far."""

    def __init__(self, blocks: NDArray[np.uint8]) -> None:
        self.done: list[Buffer] = [blocks.data]
        self._size_bytes = len(blocks)

    def add(self, content: bytes) -> bytes:
        """Add a part with its trailer. Its handle: place and length."""
        whole = np.frombuffer(content + _PLAIN, dtype=np.uint8)
        checksum = int(hash_string(whole, 0, len(whole), np.uint64(0))) & 0xFFFFFFFF
        handle = _varint(self._size_bytes) + _varint(len(content))
        self.done.append(content + _PLAIN + struct.pack("<I", checksum))
        self._size_bytes += len(content) + TRAILER_BYTES
        return handle


def _blocks(
    keys: Strings, values: Strings, order: NDArray[np.int64], kind: int, block_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
    """Where each block stops, its last row, and all blocks with room for trailers."""
    rows = len(order)
    size_bytes = int(keys.offsets[-1] + values.offsets[-1]) + rows * ENTRY_BYTES_MAX
    blocks_max = min(rows, size_bytes // block_bytes + 1)
    out = np.empty(size_bytes + blocks_max * (TRAILER_BYTES + 4) + SLACK_BYTES, dtype=np.uint8)
    stops, lasts = np.empty(blocks_max, dtype=np.int64), np.empty(blocks_max, dtype=np.int64)
    places = np.empty(min(rows, block_bytes), dtype=np.int64)
    blocks = lay_out(
        order, keys.offsets, keys.data, values.offsets, values.data, kind, block_bytes, places, out, stops, lasts
    )
    assert blocks > 0, "keys of an SST file ascend, and none comes twice"
    return stops[:blocks], lasts[:blocks], out


def _compressed(blocks: NDArray[np.uint8], stops: NDArray[np.int64]) -> tuple[NDArray[np.uint8], list[int], list[int]]:
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
    whole = np.frombuffer(bytearray().join(parts), dtype=np.uint8)
    seal(np.array(starts, dtype=np.int64), np.array(sealed, dtype=np.int64), whole)
    return whole, starts, sealed


def _filter(keys: Strings) -> bytes:
    """A Bloom filter, and how it is to be read. The number of its lines is odd."""
    rows = len(keys.offsets) - 1
    lines = -(-rows * _KEY_BITS // (8 * LINE_BYTES)) | 1
    bits = np.zeros(lines * LINE_BYTES, dtype=np.uint8)
    fill_filter(keys.offsets, keys.data, lines, bits)
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
