"""`DebeziumFormat`: events of Debezium, in JSON, or in Avro with a schema registry. They become newest versions of rows
(`row_versions.py`), and are made of changes of rows.

Rules of the reader, `DebeziumDecoder`:

- An event has `op`, `before` and `after`. `op` "c", "u" and "r" (a row of a snapshot) give the row in `after`. "d"
  gives the keys in `before`, or in the key of the record. "t" is a truncated table. A record without a value, which
  follows a deletion, gives nothing.
- The key of a record has exactly the columns `keys`, with the values of the row. Then all events of a row are in one
  partition, in order.
- Numbers, times and bytes have the forms that Debezium gives them by default (`debezium_values.py`).
- A value that PostgreSQL did not write to its log, because it is large and did not change, is listed in `UNCHANGED`.
- All events of a batch are parsed at once, by `debezium_json.py` or `debezium_avro.py`.

A change that is written is one event: "c" without a row before it, "u" with both rows, "d" without a row after it. Keys
of records have the columns of the key. What is written is read back with the same columns.
"""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.connectors.formats.debezium_avro import (
    AvroEventEncoder,
    AvroEvents,
    AvroKeys,
    AvroTable,
    columns_of,
    event_schemas,
    written_schema,
)
from tidegate.connectors.formats.debezium_json import JsonEventEncoder, JsonEvents, JsonKeys
from tidegate.connectors.formats.debezium_values import Decimals, EventParser, from_wire, unwritable, written_type
from tidegate.connectors.formats.format import (
    DecodedRecords,
    Format,
    PayloadDecoder,
    PayloadEncoder,
    PayloadUse,
    ReadFormat,
    WriteFormat,
)
from tidegate.connectors.formats.json import check_json_types
from tidegate.connectors.formats.registry import SchemaRegistry, UnfitSchemaError, WrittenSchema
from tidegate.connectors.formats.row_versions import DELETE_ROW, ROW_KIND, TRUNCATE, UNCHANGED, UPSERT, version_schema
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.extras import need
from tidegate.storage.user_values import value_text

Truncates = Literal["fail", "apply"]
METADATA = {"op": pa.string(), "snapshot": pa.string(), "timestamp": pa.timestamp("ms", "UTC")}
"""Optional columns, called `debezium_op` and so on: the operation, whether the event is of a snapshot ("first", "true",
"last", "false" and others), and when the database made the change."""
_OPERATIONS = {"c": UPSERT, "u": UPSERT, "r": UPSERT, "d": DELETE_ROW, "t": TRUNCATE}
_DELETES, _TRUNCATES = 3, 4
"""Positions in `_OPERATIONS`."""
_NO_KEY = "the record has no key: the table needs a primary key, or the connector needs message.key.columns"
_TRUNCATED = (
    'the table was truncated. Delete its rows with from_kafka(format=tg.DebeziumFormat(truncates="apply")), or skip '
    'the event with bad_rows="skip"'
)


@dataclass(frozen=True, slots=True)
class DebeziumFormat(Format):
    """Events of Debezium, with the options of the connector that writes them.

    - `registry`: a `SchemaRegistry`, or its address. Keys and values are Avro in its wire format then, as Confluent's
      AvroConverter writes them, and need `tidegate[avro]`. Without it they are JSON.
    - `decimals`: the connector's `decimal.handling.mode`.
    - `truncates`: "fail" fails the job when the table is truncated; "apply" deletes all rows, and requires one
      partition.
    - `metadata`: adds the columns `debezium_op`, `debezium_snapshot` and `debezium_timestamp`: some of "op", "snapshot"
      and "timestamp".
    - `unavailable`: the connector's `unavailable.value.placeholder`.

    Only `registry` and `decimals` apply to events that a job writes.

    Raises ConfigurationError for unknown values.

    Example:

        >>> tg.DebeziumFormat(truncates="apply").decimals
        'precise'
    """

    kind = "debezium"
    writes = "changes"

    decimals: Decimals = "precise"
    truncates: Truncates = "fail"
    metadata: tuple[str, ...] = ()
    unavailable: str = "__debezium_unavailable_value"
    registry: SchemaRegistry | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "registry", SchemaRegistry.of(self.registry))
        if isinstance(self.metadata, str):
            raise ConfigurationError(
                f"DebeziumFormat(metadata={self.metadata!r}): give a list of names, as in {[self.metadata]}"
            )
        object.__setattr__(self, "metadata", tuple(self.metadata))
        if not isinstance(self.unavailable, str) or not self.unavailable:
            raise ConfigurationError(
                f"DebeziumFormat(unavailable={self.unavailable!r}): give the connector's unavailable.value.placeholder"
                ", a str that is not empty"
            )
        for name, value, known in (
            ("decimals", self.decimals, get_args(Decimals)),
            ("truncates", self.truncates, get_args(Truncates)),
            *(("metadata", each, tuple(METADATA)) for each in self.metadata),
        ):
            if value not in known:
                raise ConfigurationError(
                    f"DebeziumFormat({name}=): {value!r} is not a choice; give one of {', '.join(known)}"
                )

    def metadata_fields(self) -> list[pa.Field]:
        """Returns the optional metadata columns that were requested."""
        return [pa.field(f"debezium_{name}", METADATA[name]) for name in self.metadata]

    @property
    def avro(self) -> SchemaRegistry | None:
        """Returns the schema registry of events in Avro, or None for JSON."""
        assert not isinstance(self.registry, str)
        return self.registry

    def for_reading(self, columns: pa.Schema | None, use: PayloadUse) -> ReadFormat:
        """Binds the format to the columns and the keys of a table. Without columns, the columns of the topic's newest
        schema are used.

        Raises ConfigurationError, RegistryError.
        """
        where = f"{use.method}(format='debezium')"
        newest = None
        if self.avro is not None:
            need(where, "avro")
            newest = event_schemas(self.avro, use)
            columns = columns_of(newest, self.decimals, where) if columns is None else columns
        if columns is None or not len(columns):
            raise ConfigurationError(f"{where} needs the columns of the table, as in value={{'id': int, 'name': str}}")
        found = DebeziumRead(columns, use.keys, self)
        found.decoder()
        if newest is not None:
            newest.check(self.table(columns, use.keys), where)
        return found

    def table(self, columns: pa.Schema, keys: tuple[str, ...]) -> AvroTable:
        """Returns the description of a table whose events are in Avro."""
        return AvroTable(columns, keys, self.decimals, has_source=bool(self.metadata))

    def for_writing(self, columns: pa.Schema, use: PayloadUse) -> WriteFormat:
        """Binds the format to the columns of a stream of changes or, for record keys, to its key columns.

        Raises ConfigurationError, RegistryError.
        """
        where = f"{use.method}(format='debezium')"
        for option in fields(self):
            if option.name not in ("decimals", "registry") and getattr(self, option.name) != option.default:
                raise ConfigurationError(
                    f"{use.method}(format=DebeziumFormat({option.name}=)): it applies to events that are read; remove "
                    f"{option.name}="
                )
        missing = [name for name in use.keys if name not in columns.names]
        if missing:
            raise ConfigurationError(
                f"{use.method}({use.part}=): an event has the key in its rows; add {missing[0]!r} to {use.part}="
            )
        for column in columns:
            if (unfit := unwritable(column.type, self.decimals, typed=self.avro is not None)) is not None:
                raise ConfigurationError(
                    f"{where}: column {column.name!r} is {column.type}; {unfit}. Convert it in a step before"
                )
        written = None
        if self.avro is None:
            wires = pa.schema([(each.name, written_type(each.type, self.decimals)) for each in columns])
            check_json_types(wires, use, self.kind)
        else:
            need(where, "avro")
            try:
                written = written_schema(self.avro, columns, self.decimals, use)
            except UnfitSchemaError as error:
                raise ConfigurationError(f"{where}: {error}") from error
            written.check()
        return DebeziumWrite(use.keys, self.decimals, use.part == "key", written)


@dataclass(frozen=True, slots=True)
class DebeziumRead(ReadFormat):
    """Debezium events bound to the columns and keys of a table."""

    columns: pa.Schema
    keys: tuple[str, ...]
    form: DebeziumFormat
    has_changes = True

    @property
    def schema(self) -> pa.Schema:
        """Returns the columns of decoded row versions."""
        return version_schema(pa.schema([*self.columns, *self.form.metadata_fields()]))

    @property
    def needs_one_partition(self) -> bool:
        """Returns whether the topic must have one partition.

        True if truncates are applied, because a truncate is not ordered relative to events of other partitions.
        """
        return self.form.truncates == "apply"

    @property
    def has_registry(self) -> bool:
        """Returns True if each payload begins with the id of its schema in a registry."""
        return self.form.avro is not None

    def decoder(self) -> PayloadDecoder:
        """Returns a decoder for one task."""
        return DebeziumDecoder(self.columns, self.keys, self.form)


class DebeziumDecoder(PayloadDecoder):
    """Decodes Debezium events of a table with these `columns`, which `keys` identify.

    Raises ConfigurationError for columns that cannot be decoded.
    """

    def __init__(self, columns: pa.Schema, keys: Sequence[str], form: DebeziumFormat) -> None:
        missing = [name for name in keys if name not in columns.names]
        if missing or not keys:
            raise ConfigurationError(
                f"format='debezium' needs keys=, names of columns of value=, as in keys=['id']; it has "
                f"{columns.names}, and {'no key is given' if not keys else f'not {missing[0]!r}'}"
            )
        taken = [name for name in columns.names if name in (ROW_KIND, *(f.name for f in form.metadata_fields()))]
        if taken:
            raise ConfigurationError(f"format='debezium': the name {taken[0]!r} is reserved; rename the column")
        self._columns = columns
        self._keys = tuple(keys)
        self._key_fields = pa.schema([each for each in columns if each.name in self._keys])
        self._form = form
        self.schema = version_schema(pa.schema([*columns, *form.metadata_fields()]))
        """The columns of all batches."""
        self._events: EventParser
        self._record_keys: EventParser
        if form.avro is None:
            self._events = JsonEvents(columns, self._keys, form.decimals, has_source=bool(form.metadata))
            self._record_keys = JsonKeys(self._key_fields, form.decimals)
        else:
            table = form.table(columns, self._keys)
            self._events = AvroEvents(table, form.avro)
            self._record_keys = AvroKeys(table, form.avro)
        self._placeholders = _Placeholders(form.unavailable)

    def decode(self, payloads: pa.Array) -> DecodedRecords:
        """Decodes events of records without keys. Only truncates are valid without a key."""
        return self.decode_records(payloads, None)

    def decode_records(self, values: pa.Array, keys: pa.Array | None) -> DecodedRecords:
        """Decodes events to row versions. `sources` of the result has the number of the record of each version."""
        keys = pa.nulls(len(values), pa.binary()) if keys is None else keys
        numbers = np.flatnonzero(values.is_valid())
        bad: dict[int, str] = {}
        found = self._events.parse(values.drop_null())
        for at, reason in found.bad.items():
            bad[int(numbers[at])] = reason
        events, numbers = found.rows, numbers[found.numbers]
        known = pc.index_in(events.column("op"), pa.array(list(_OPERATIONS)))
        operations = pc.fill_null(known, _TRUNCATES).to_numpy()
        deletes, truncates = operations == _DELETES, operations == _TRUNCATES
        upserts = ~(deletes | truncates)
        self._refuse_events(events, known, upserts, numbers, bad)
        images = dict(zip(self._columns.names, events.column("after").flatten(), strict=True))
        self._check_images(values, numbers, images, upserts, bad)
        self._take_keys(keys, numbers, events, images, deletes, truncates, bad)
        unchanged = self._take_unchanged(images, len(numbers))
        arrays = [self._value(images[field.name], field, numbers, bad, upserts) for field in self._columns]
        kinds = pa.array(list(_OPERATIONS.values())).take(pa.array(operations))
        batch = pa.RecordBatch.from_arrays([*arrays, *self._metadata(events), kinds, unchanged], schema=self.schema)
        if bad:
            good = ~np.isin(numbers, list(bad))
            batch, numbers = batch.filter(pa.array(good)), numbers[good]
        return DecodedRecords(batch, bad, numbers)

    def _refuse_events(
        self,
        events: pa.RecordBatch,
        operations: pa.Array,
        upserts: NDArray[np.bool_],
        numbers: NDArray[np.int64],
        bad: dict[int, str],
    ) -> None:
        """Adds events that cannot be applied to `bad`: with an unknown operation, without a row, or a truncate that is
        not allowed.
        """
        for row in np.flatnonzero(operations.is_null().to_numpy(zero_copy_only=False)).tolist():
            operation = events.column("op")[row].as_py()
            bad[int(numbers[row])] = f"field 'op' is {value_text(operation)}, which is not one of c, u, r, d and t"
        empty = upserts & events.column("after").is_null().to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(empty).tolist():
            operation = events.column("op")[row].as_py()
            bad[int(numbers[row])] = f"field 'after' is missing in an event with op {operation!r}"
        if self._form.truncates == "fail":
            for row in np.flatnonzero(pc.fill_null(pc.equal(operations, _TRUNCATES), False)).tolist():
                bad[int(numbers[row])] = _TRUNCATED

    def _check_images(
        self,
        values: pa.Array,
        numbers: NDArray[np.int64],
        images: Mapping[str, pa.Array],
        upserts: NDArray[np.bool_],
        bad: dict[int, str],
    ) -> None:
        """Adds events to `bad` whose row lacks a column of the table."""
        for name, column in images.items():
            if column.null_count <= len(column) - int(upserts.sum()):
                continue
            empty = numbers[upserts & column.is_null().to_numpy(zero_copy_only=False)]
            empty = empty[~np.isin(empty, list(bad))] if bad else empty
            for at in self._events.lacking(values.take(pa.array(empty)), name):
                bad[int(empty[at])] = (
                    f"field {name!r} is missing in 'after'; remove the column from value=, or rename it"
                )

    def _take_keys(
        self,
        keys: pa.Array,
        numbers: NDArray[np.int64],
        events: pa.RecordBatch,
        images: dict[str, pa.Array],
        deletes: NDArray[np.bool_],
        truncates: NDArray[np.bool_],
        bad: dict[int, str],
    ) -> None:
        """Writes the keys of deleted rows into `images` (the rows of the events), and checks that all keys equal the
        keys of their records.
        """
        rows = np.flatnonzero(~truncates & ~np.isin(numbers, list(bad)))
        keyed = keys.is_valid().to_numpy(zero_copy_only=False)[numbers[rows]]
        for row in rows[~keyed].tolist():
            bad[int(numbers[row])] = _NO_KEY
        rows = rows[keyed]
        parsed = self._record_keys.parse(keys.take(pa.array(numbers[rows])))
        faults = {int(rows[at]): reason for at, reason in parsed.bad.items()}
        found, rows = parsed.rows, rows[parsed.numbers]
        before = dict(zip(found.schema.names, events.column("before").flatten(), strict=True))
        for name in found.schema.names:
            key = found.column(name)
            own = images[name].take(pa.array(rows))
            deleted = deletes[rows]
            image = pc.if_else(pa.array(deleted), before[name].take(pa.array(rows)), own)
            image = pc.if_else(pa.array(deleted & image.is_null().to_numpy(zero_copy_only=False)), key, image)
            same = pc.fill_null(pc.equal(key, image), False).to_numpy(zero_copy_only=False)
            for at in np.flatnonzero(~same).tolist():
                faults.setdefault(
                    int(rows[at]),
                    f"field {name!r} is {value_text(image[at].as_py())} in the row, and "
                    f"{value_text(key[at].as_py())} in the key of the record",
                )
            filled = np.full(len(numbers), -1, dtype=np.int64)
            filled[rows] = np.arange(len(rows))
            taken = image.take(pa.array(filled, mask=filled < 0))
            images[name] = pc.if_else(pa.array(filled >= 0), taken, images[name])
        for row, reason in faults.items():
            bad.setdefault(int(numbers[row]), reason)

    def _take_unchanged(self, images: dict[str, pa.Array], rows: int) -> pa.Array:
        """Returns the names of the unchanged columns of each row, and sets their values to null in `images`."""
        listed: list[list[str] | None] = [None] * rows
        for name, column in images.items():
            found = [row for row in self._placeholders.candidates(column) if self._placeholders.is_in(column, row)]
            for row in found:
                listed[row] = [*(listed[row] or ()), name]
            if found:
                keep = np.ones(rows, dtype=np.bool_)
                keep[found] = False
                takes = np.arange(rows, dtype=np.int64)
                images[name] = column.take(pa.array(takes, mask=~keep))
        kind = self.schema.field(UNCHANGED).type
        return pa.array(listed, kind) if any(listed) else pa.nulls(rows, kind)

    def _value(
        self,
        column: pa.Array,
        field: pa.Field,
        numbers: NDArray[np.int64],
        bad: dict[int, str],
        upserts: NDArray[np.bool_],
    ) -> pa.Array:
        """Converts a parsed column to the type of `field`. A value that does not fit makes its event bad."""
        reasons: dict[int, str] = {}
        values = from_wire(column, field.type, reasons)
        for row, reason in reasons.items():
            bad.setdefault(int(numbers[row]), f"field {field.name!r}: {reason}")
        if not field.nullable and values.null_count:
            for row in np.flatnonzero(upserts & values.is_null().to_numpy(zero_copy_only=False)).tolist():
                bad.setdefault(int(numbers[row]), f"field {field.name!r} is not nullable, and has no value")
        return values

    def _metadata(self, events: pa.RecordBatch) -> list[pa.Array]:
        if not self._form.metadata:
            return []
        snapshot, at_ms = events.column("source").flatten()
        found = {"op": events.column("op"), "snapshot": snapshot, "timestamp": at_ms.cast(METADATA["timestamp"])}
        return [found[name] for name in self._form.metadata]


class _Placeholders:
    """The values that Debezium writes in place of an unchanged large value, which PostgreSQL does not write to its log.

    Each has the type of its column (`UnchangedToastedPlaceholder` of Debezium's connector for PostgreSQL):

    - A string is the text, or for bytes that are written as text (`binary.handling.mode`) its Base64 or hex digits. An
      hstore is an object with the text as its only member and value.
    - An array of strings or bytes has the text as its only element. An array of UUIDs has the UUID of the text.
    - An array of numbers or dates has an element for each byte of the text. So have arrays of decimals, which are bytes
      or objects in an event. An array of booleans has no placeholder.
    """

    def __init__(self, text: str) -> None:
        data = text.encode()
        base64_texts = {base64.b64encode(data).decode(), base64.urlsafe_b64encode(data).decode()}
        version_3 = bytearray(hashlib.md5(data, usedforsecurity=False).digest())
        version_3[6] = version_3[6] & 0x0F | 0x30
        version_3[8] = version_3[8] & 0x3F | 0x80
        named = str(uuid.UUID(bytes=bytes(version_3)))
        hstore = json.dumps({text: text}, separators=(",", ":"), ensure_ascii=False)
        self._single: frozenset[object] = frozenset({text, data, data.hex(), hstore, *base64_texts})
        self._elements: frozenset[object] = self._single | {named}
        self._numbers = list(data)
        self._bytes = [bytes([each]) for each in data]
        self._objects = [{"scale": 0, "value": each} for each in self._bytes]

    def candidates(self, column: pa.Array) -> list[int]:
        """Returns the rows of a column that may have a placeholder. Most columns have none."""
        kind = column.type
        if pa.types.is_dictionary(kind):
            return self.candidates(column.cast(kind.value_type))
        if pa.types.is_map(kind):
            rows = np.flatnonzero(_counts(column) == 1)
            return _rows_among(column.take(pa.array(rows)).keys, rows, self._single)
        if not pa.types.is_list(kind):
            return _rows_among(column, np.arange(len(column)), self._single) if _is_text(kind) else []
        if pa.types.is_boolean(kind.value_type):
            return []
        counts = _counts(column)
        found = np.flatnonzero(counts == len(self._numbers)).tolist()
        if not _is_text(kind.value_type):
            return found
        rows = np.flatnonzero(counts == 1)
        elements = column.take(pa.array(rows)).flatten()
        return sorted({*found, *_rows_among(elements, rows, self._elements)})

    def is_in(self, column: pa.Array, row: int) -> bool:
        """Returns whether the value in a row is a placeholder."""
        value = column[row].as_py()
        if pa.types.is_map(column.type):
            return value is not None and len(value) == 1 and {*value[0]} <= self._single
        if not isinstance(value, list):
            return value in self._single
        if _is_text(column.type.value_type) and len(value) == 1:
            return value[0] in self._elements
        return value in (self._numbers, self._bytes, self._objects)


def _counts(column: pa.Array) -> NDArray[np.int64]:
    """Returns the number of elements of each list or map, 0 for a null."""
    lists = column.cast(pa.list_(column.type.field(0))) if pa.types.is_map(column.type) else column
    found: NDArray[np.int64] = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    return found


def _rows_among(values: pa.Array, rows: NDArray[np.int64], wanted: frozenset[object]) -> list[int]:
    """Returns the rows whose string or bytes are among the values `wanted`. `rows` has the row of each value."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    is_string = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
    among = pa.array([each for each in wanted if isinstance(each, str if is_string else bytes)], values.type)
    # Almost all values have another size, which costs much less than a comparison of large values.
    sizes = pc.is_in(pc.binary_length(values), pc.binary_length(among)).to_numpy(zero_copy_only=False)
    places = np.flatnonzero(sizes)
    equal = pc.is_in(values.take(pa.array(places)), among).to_numpy(zero_copy_only=False)
    found: list[int] = rows[places[equal]].tolist()
    return found


def _is_text(kind: pa.DataType) -> bool:
    """Returns whether a type has strings or bytes, also in a dictionary."""
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(text or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


@dataclass(frozen=True, slots=True)
class DebeziumWrite(WriteFormat):
    """Debezium events bound to the columns of a sink, whose rows `keys` identify.

    `is_key`: the payloads are the keys of the records. `written`: the Avro schema, or None for JSON.
    """

    keys: tuple[str, ...]
    decimals: Decimals
    is_key: bool
    written: WrittenSchema | None = None
    writes_changes = True

    def encoder(self) -> PayloadEncoder:
        """Returns an encoder for one task."""
        if self.written is None:
            return JsonEventEncoder(self.keys, self.decimals, is_key=self.is_key)
        return AvroEventEncoder(self.keys, self.decimals, self.written, is_key=self.is_key)
