"""`UpsertFormat`: the newest record of a key is its row, and a record without a value (a tombstone) deletes it.

`to_kafka` writes such topics from streams of changes and updates. Rules of the reader:

- A value has all columns, and the key of the record has the columns `keys`. Both must agree in these columns, because a
  tombstone has only the key.
- A key of one string or bytes column is the raw bytes. Any other key is a JSON object, with exactly the key columns.
- A record is decoded to a row version (`row_versions.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.connectors.formats.debezium_json import strange_members
from tidegate.connectors.formats.format import (
    DecodedRecords,
    Format,
    PayloadDecoder,
    PayloadUse,
    ReadFormat,
    WriteFormat,
    required_columns,
)
from tidegate.connectors.formats.json import JsonFormat
from tidegate.connectors.formats.json_decoder import JsonDecoder
from tidegate.connectors.formats.payload_block import Block
from tidegate.connectors.formats.row_versions import DELETE_ROW, ROW_KIND, UNCHANGED, UPSERT, version_schema
from tidegate.connectors.formats.text import not_utf8
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.user_values import value_text


@dataclass(frozen=True, slots=True)
class UpsertFormat(Format):
    """Compacted topics: each record inserts, replaces or deletes the row of its key. Values are JSON."""

    kind = "upsert"
    writes = "upserts"

    def for_reading(self, columns: pa.Schema | None, use: PayloadUse) -> ReadFormat:
        """Binds the format to the columns and the keys of a table. Raises ConfigurationError."""
        found = required_columns(columns, self.kind, use)
        missing = [name for name in use.keys if name not in found.names]
        if missing or not use.keys:
            raise ConfigurationError(
                f"{use.method}(format='upsert') needs keys=, names of columns of {use.part}=, as in keys=['id']; it "
                f"has {found.names}, and {'no key is given' if not use.keys else f'not {missing[0]!r}'}"
            )
        if ROW_KIND in found.names:
            raise ConfigurationError(
                f"{use.method}(format='upsert'): the name {ROW_KIND!r} is reserved; rename the column"
            )
        return UpsertRead(JsonFormat().for_reading(found, use), use.keys)

    def for_writing(self, columns: pa.Schema, use: PayloadUse) -> WriteFormat:
        """Binds the format of values to the columns of a sink. Records of deleted rows have no value."""
        return JsonFormat().for_writing(columns, use)


@dataclass(frozen=True, slots=True)
class UpsertRead(ReadFormat):
    """The upsert format bound to a table whose rows `keys` identify. `values`: the format of record values."""

    values: ReadFormat
    keys: tuple[str, ...]
    has_changes = True

    @property
    def schema(self) -> pa.Schema:
        """Returns the columns of decoded row versions."""
        return version_schema(self.values.schema)

    @property
    def has_registry(self) -> bool:
        """Returns True if each payload begins with the id of its schema in a registry."""
        return self.values.has_registry

    def decoder(self) -> PayloadDecoder:
        """Returns a decoder for one task."""
        return UpsertDecoder(self)


class UpsertDecoder(PayloadDecoder):
    """Decodes records of a compacted topic to row versions."""

    def __init__(self, form: UpsertRead) -> None:
        self._schema = form.schema
        self._values = form.values.decoder()
        columns = form.values.schema
        self._keys = pa.schema([columns.field(name).with_nullable(True) for name in form.keys])
        kind = self._keys.field(0).type
        text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        raw = text or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
        self._raw = kind if len(self._keys) == 1 and raw else None
        self._key_objects = None if self._raw is not None else JsonDecoder(self._keys)

    def decode(self, payloads: pa.Array) -> DecodedRecords:
        """Reports every record as bad, because it has no key."""
        return self.decode_records(payloads, None)

    def decode_records(self, values: pa.Array, keys: pa.Array | None) -> DecodedRecords:
        """Decodes each record to one row version."""
        keys = pa.nulls(len(values), pa.binary()) if keys is None else keys
        bad = dict.fromkeys(np.flatnonzero(keys.is_null()).tolist(), "the record has no key")
        present = np.flatnonzero(values.is_valid())
        found = self._values.decode(values.drop_null())
        for number, reason in found.bad.items():
            bad.setdefault(int(present[number]), reason)
        row_of = np.full(len(values), -1, dtype=np.int64)
        row_of[present[found.payload_of_rows(len(present))]] = np.arange(found.batch.num_rows)
        key_rows = self._parsed_keys(keys, bad)
        rows = found.batch.take(pa.array(row_of, mask=row_of < 0))
        self._compare_keys(rows, key_rows, row_of >= 0, bad)
        columns = [
            key_rows.column(name) if name in self._keys.names else rows.column(name) for name in rows.schema.names
        ]
        kinds = pa.array(np.where(row_of < 0, DELETE_ROW, UPSERT), pa.string())
        unchanged = pa.nulls(len(values), self._schema.field(UNCHANGED).type)
        batch = pa.RecordBatch.from_arrays([*columns, kinds, unchanged], schema=self._schema)
        numbers = np.arange(len(values), dtype=np.int64)
        if bad:
            good = ~np.isin(numbers, list(bad))
            batch = batch.filter(pa.array(good))
            numbers = numbers[good]
        return DecodedRecords(batch, bad, numbers)

    def close(self) -> None:
        """Closes the decoder of record values."""
        self._values.close()

    def _parsed_keys(self, keys: pa.Array, bad: dict[int, str]) -> pa.RecordBatch:
        """Decodes the keys of records to a row with the key columns for each. Rows of bad keys are null."""
        if self._raw is not None:
            try:
                column = keys.cast(self._raw)
            except pa.ArrowInvalid:
                good = keys.to_pylist()
                for number, key in enumerate(good):
                    if key is not None and (fault := not_utf8(key, "of the key")) is not None:
                        bad.setdefault(number, fault)
                        good[number] = None
                column = pa.array(good, pa.binary()).cast(self._raw)
            return pa.RecordBatch.from_arrays([column], schema=self._keys)
        assert self._key_objects is not None
        present = np.flatnonzero(keys.is_valid())
        given = Block.of(keys.drop_null())
        found = self._key_objects.records(given)
        for at, reason in found.bad.items():
            bad.setdefault(int(present[at]), f"the key of the record: {reason}")
        of_rows = found.payload_of_rows(len(given))
        wanted = set(self._keys.names)
        for at, names in strange_members(given, of_rows, wanted).items():
            reason = f"the key of the record has the columns {sorted(names)}, not {sorted(wanted)}"
            bad.setdefault(int(present[at]), reason)
        takes = np.full(len(keys), -1, dtype=np.int64)
        takes[present[of_rows]] = np.arange(len(of_rows))
        return found.batch.take(pa.array(takes, mask=takes < 0))

    def _compare_keys(
        self, rows: pa.RecordBatch, key_rows: pa.RecordBatch, has_value: NDArray[np.bool_], bad: dict[int, str]
    ) -> None:
        """Adds records to `bad` whose key has a null, or differs from the key columns in the value."""
        for name in self._keys.names:
            key = key_rows.column(name)
            for number in np.flatnonzero(key.is_null().to_numpy(zero_copy_only=False)).tolist():
                bad.setdefault(number, f"field {name!r} is null in the key of the record")
            own = rows.column(name)
            same = pc.fill_null(pc.equal(key, own), False).to_numpy(zero_copy_only=False)
            for number in np.flatnonzero(has_value & ~same).tolist():
                bad.setdefault(
                    number,
                    f"field {name!r} is {value_text(own[number].as_py())} in the value, and "
                    f"{value_text(key[number].as_py())} in the key of the record",
                )
