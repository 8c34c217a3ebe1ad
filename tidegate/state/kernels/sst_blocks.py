"""The parts of a RocksDB SST file that have something of each row: its blocks, their checksums, and the filter.

`state_backends/rocksdb/bulk/sst_file.py` puts files together, and says what is in them. All numbers are little-endian.
A varint has seven bits in a byte, the lowest first, and the highest bit of each byte but the last is 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.hashing import hash_string
from tidegate.state.kernels.jit import kernel, load64, prefetch, store64

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
