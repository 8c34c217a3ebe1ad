"""`RawFormat`: each payload is the value of one column, as bytes or as text in UTF-8.

A missing payload, as of a tombstone, is a null, in both directions. Text that is not UTF-8 is bad.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tidegate.connectors.formats.format import (
    DecodedRecords,
    EncodedRecords,
    Format,
    PayloadDecoder,
    PayloadEncoder,
    PayloadUse,
    ReadFormat,
    WriteFormat,
)
from tidegate.connectors.formats.text import not_utf8
from tidegate.storage.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class RawFormat(Format):
    """Payloads as one column of bytes, or with `text` of UTF-8 strings."""

    text: bool = False

    @property
    def kind(self) -> str:  # type: ignore[override]
        """Returns the name by which users select the format."""
        return "text" if self.text else "raw"

    def for_reading(self, columns: pa.Schema | None, use: PayloadUse) -> ReadFormat:
        """Binds the format to the column of a source. Its default name is the part of the record ("value" or "key")."""
        wanted = pa.string() if self.text else pa.binary()
        if columns is None:
            return RawRead(use.part, self.text, use.part)
        if len(columns) != 1 or columns[0].type != wanted:
            raise ConfigurationError(
                f"{use.method}(format={self.kind!r}): a {use.part} is one column of {wanted}; give "
                f"{use.part}={{'name': {'str' if self.text else 'bytes'}}}, or remove it"
            )
        return RawRead(columns.names[0], self.text, use.part, columns[0].nullable)

    def for_writing(self, columns: pa.Schema, use: PayloadUse) -> WriteFormat:
        """Binds the format to the column of a sink.

        Raises ConfigurationError unless there is one column of strings or bytes. With `text` only strings are allowed.
        """
        if len(columns) != 1:
            raise ConfigurationError(
                f"{use.method}(format={self.kind!r}): a {use.part} is the value of one column, and {use.part}= has "
                f"{len(columns)}: {columns.names}. Name one column"
            )
        kind = columns[0].type
        if not _is_text(kind) and (self.text or not _is_bytes(kind)):
            raise ConfigurationError(
                f"{use.method}({use.part}=): column {columns.names[0]!r} is {kind}; it must have "
                f"{'strings' if self.text else 'strings or bytes'}. Convert it in a step before, or give another format"
            )
        return RawWrite()


@dataclass(frozen=True, slots=True)
class RawRead(ReadFormat):
    """Decodes payloads as the column `name`. `part`: the part of a record that payloads are, for error texts."""

    name: str
    text: bool = False
    part: str = "value"
    nullable: bool = True

    @property
    def schema(self) -> pa.Schema:
        """Returns the columns of every decoded batch."""
        return pa.schema([pa.field(self.name, pa.string() if self.text else pa.binary(), self.nullable)])

    @property
    def single(self) -> bool:
        """Returns True, because a payload is one value."""
        return True

    def decoder(self) -> PayloadDecoder:
        """Returns a decoder for one task."""
        return _RawDecoder(self)


class _RawDecoder(PayloadDecoder):
    def __init__(self, form: RawRead) -> None:
        self._form = form

    def decode(self, payloads: pa.Array) -> DecodedRecords:
        return self.decode_with_nulls(payloads)

    def decode_with_nulls(self, payloads: pa.Array) -> DecodedRecords:
        form = self._form
        found = payloads
        bad: dict[int, str] = {}
        if form.text:
            try:
                found = found.cast(pa.string())
            except pa.ArrowInvalid:
                for number, payload in enumerate(payloads.to_pylist()):
                    if payload is not None and (fault := not_utf8(payload, f"of the {form.part}")) is not None:
                        bad[number] = fault
        if not form.nullable and found.null_count:
            missing = np.flatnonzero(payloads.is_null().to_numpy(zero_copy_only=False)).tolist()
            bad |= dict.fromkeys(missing, f"column {form.name!r} is not nullable, and has no value")
        if bad:
            good = np.delete(np.arange(len(payloads)), sorted(bad))
            found = payloads.take(pa.array(good)).cast(form.schema[0].type)
        return DecodedRecords(pa.RecordBatch.from_arrays([found], schema=form.schema), bad)


@dataclass(frozen=True, slots=True)
class RawWrite(WriteFormat):
    """Writes the values of the only column as payloads."""

    def encoder(self) -> PayloadEncoder:
        """Returns an encoder for one task."""
        return _RawEncoder()


class _RawEncoder(PayloadEncoder):
    def encode(self, batch: pa.RecordBatch, topic: str = "") -> EncodedRecords:
        return EncodedRecords(as_bytes(batch.column(0)))


def as_bytes(column: pa.Array) -> pa.Array:
    """Casts a column of strings or bytes to binary with 32-bit offsets."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = column.cast(pa.binary() if pa.types.is_string(column.type) else pa.large_binary())
    return column if column.type == pa.binary() else column.cast(pa.binary())


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    large = pa.types.is_large_binary(kind)
    return bool(pa.types.is_binary(kind) or large or pa.types.is_fixed_size_binary(kind))
