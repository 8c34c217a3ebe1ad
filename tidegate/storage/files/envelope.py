"""Wraps small files in an envelope: magic, version, length and checksum in front of the payload.

The checksum covers the header too, so any flipped bit and any truncation is found before a byte is interpreted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import xxhash

from tidegate.storage.errors import CodecError, CorruptionError
from tidegate.storage.files.store import Buffer

_HEADER = struct.Struct("<8sIQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size


def checksum_of(*parts: Buffer) -> str:
    """Returns the checksum of the concatenated parts as it is stored in metadata: `xxh3:` and 16 hex digits."""
    return format_checksum(_digest(parts))


def format_checksum(digest: int) -> str:
    """Returns an xxh3 64-bit digest as text."""
    return f"xxh3:{digest:016x}"


def seal(magic: bytes, version: int, payload: Buffer) -> bytes:
    """Returns the content of a file: a header, then the payload.

    `magic` (up to 8 bytes) identifies the kind of file.
    """
    assert len(magic) <= 8
    header = _HEADER.pack(magic, version, memoryview(payload).nbytes)
    return b"".join((header, _CHECKSUM.pack(_digest((header, payload))), payload))


def unseal(magic: bytes, version: int, data: Buffer, where: str) -> memoryview:
    """Checks the header and the checksum of a file made by `seal`, and returns its payload. `where` names the file in
    errors.

    Raises CorruptionError for any damage, CodecError for an intact file of another version than `version`.
    """
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise CorruptionError(
            f"{where} is damaged: {len(view)} bytes are too few for a header; restore the file from a copy"
        )
    header = view[: _HEADER.size]
    found, written, length = _HEADER.unpack(header)
    (digest,) = _CHECKSUM.unpack(view[_HEADER.size : HEADER_BYTES])
    payload = view[HEADER_BYTES:]
    if found != magic.ljust(8, b"\0"):
        raise CorruptionError(
            f"{where} is damaged or another kind of file: it starts with {bytes(found)!r}; restore the file from a copy"
        )
    if length != len(payload):
        raise CorruptionError(
            f"{where} is damaged: it has {len(payload)} of {length} bytes; restore the file from a copy"
        )
    if digest != _digest((header, payload)):
        raise CorruptionError(f"{where} is damaged: its checksum does not match; restore the file from a copy")
    if written != version:
        raise CodecError(
            f"{where} has format version {written}, and this tidegate reads version {version}; read it with the "
            "tidegate that wrote it"
        )
    return payload


def _digest(parts: Iterable[Buffer]) -> int:
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()
