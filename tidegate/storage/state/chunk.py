"""Encodes a piece of one state: an Arrow IPC stream with one batch, whose schema says which serializer wrote it.

The rows are typed, so whoever knows Arrow can read them. The serializer's version stands for what types and columns
mean. Files as a whole have a version of their own.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import pyarrow as pa

from tidegate.storage.errors import CodecError, CorruptionError
from tidegate.storage.files.store import Buffer

SERIALIZER_VERSION = 1
_SERIALIZER_KEY = b"tidegate.serializer"
_SERIALIZER = b"arrow/"
_WRITTEN_BYTES_MIN = 1 << 16
"""Fewer bytes are copied sooner than they are taken from many buffers."""
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""The end of an Arrow IPC stream."""

Compression: TypeAlias = Literal["lz4", "zstd"]
"""Codec of the buffers of a chunk; a reader finds it out by itself."""


def encode_chunk(rows: pa.RecordBatch, compression: Compression | None = None) -> tuple[Buffer, ...]:
    """Bytes of a chunk, in parts: those of its own rows alone, also where they are a slice."""
    stamp = {_SERIALIZER_KEY: _SERIALIZER + str(SERIALIZER_VERSION).encode()}
    stamped = rows.replace_schema_metadata({**(rows.schema.metadata or {}), **stamp})
    if (
        stamped.nbytes < _WRITTEN_BYTES_MIN
        and compression is None
        and not any(map(_has_dictionary, stamped.schema.types))
    ):
        # The parts of the stream as they are: it would grow as it is written, and be copied each time.
        return memoryview(stamped.schema.serialize()), memoryview(stamped.serialize()), _END
    written = _Written()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(pa.PythonFile(written, mode="w"), stamped.schema, options=options) as writer:
        writer.write_batch(stamped)
    return tuple(written.parts)


class _Written:
    """A file that keeps what Arrow writes: views of the rows' own memory, where nothing has to be copied."""

    closed = False

    def __init__(self) -> None:
        self.parts: list[Buffer] = []

    def write(self, part: Buffer) -> int:
        self.parts.append(memoryview(part))
        return len(part)

    def flush(self) -> None:
        """There is nothing to do."""

    def close(self) -> None:
        """There is nothing to do."""


def decode_chunk(data: Buffer, where: str) -> pa.RecordBatch:
    """Inverse of `encode_chunk`, over the memory of `data` where it is not compressed. `where` names it in errors.

    CodecError for what a newer serializer wrote, CorruptionError for what is no chunk.
    """
    try:
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            rows = reader.read_next_batch()
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise CorruptionError(f"{where} cannot be decoded: {error}") from error
    metadata = dict(rows.schema.metadata or {})
    name = metadata.pop(_SERIALIZER_KEY, b"")
    version = name.removeprefix(_SERIALIZER)
    if version == name or not version.isdigit():
        raise CorruptionError(f"{where} was written by no serializer of tidegate: {name!r}")
    if int(version) > SERIALIZER_VERSION:
        raise CodecError(
            f"{where} was written with version {int(version)} of the serializer; this tidegate reads up to "
            f"{SERIALIZER_VERSION}: restore with the tidegate that wrote it, or a newer one"
        )
    return rows.replace_schema_metadata(metadata or None)


def _has_dictionary(data_type: pa.DataType) -> bool:
    """Whether the stream has messages with dictionaries before the rows."""
    if isinstance(data_type, pa.BaseExtensionType):
        return _has_dictionary(data_type.storage_type)
    if pa.types.is_dictionary(data_type):
        return True
    return any(_has_dictionary(data_type.field(number).type) for number in range(data_type.num_fields))
