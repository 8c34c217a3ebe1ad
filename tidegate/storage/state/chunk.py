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
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""The end of an Arrow IPC stream."""

Compression: TypeAlias = Literal["lz4", "zstd"]
"""Codec of the buffers of a chunk; a reader finds it out by itself."""


def encode_chunk(rows: pa.RecordBatch, compression: Compression | None = None) -> tuple[Buffer, ...]:
    """Bytes of a chunk, in parts: those of its own rows alone, also where they are a slice."""
    stamp = {_SERIALIZER_KEY: _SERIALIZER + str(SERIALIZER_VERSION).encode()}
    stamped = rows.replace_schema_metadata({**(rows.schema.metadata or {}), **stamp})
    if compression is None and not any(_has_dictionary(field.type) for field in stamped.schema):
        # The parts of the stream as they are: it would grow as it is written, and be copied each time.
        return memoryview(stamped.schema.serialize()), memoryview(stamped.serialize()), _END
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, stamped.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(stamped)
    return (memoryview(sink.getvalue()),)


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
