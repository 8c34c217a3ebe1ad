"""`DebeziumFormat`: reads Debezium events in JSON as new versions of rows (`changes.py`), and writes changes of rows as
such events.

Rules of the reader, `DebeziumDecoder`:

- An event is an object with `op`, `before` and `after`, alone or as the `payload` next to its `schema`, as Kafka
  Connect's JsonConverter writes it with `schemas.enable`.
- `op` "c", "u" and "r" (a row of a snapshot) give the row in `after`. "d" gives the keys in `before`, or in the key of
  the record. "t" is a truncated table. A record without a value (a tombstone after a deletion) is ignored.
- The key of a record has exactly the columns `keys`, with the values of the row. Then all events of a row are in one
  partition, in order.
- Numbers, times and bytes are encoded as Debezium does it by default (`WIRE_TYPES` below). A schema in the event is
  compared with the columns: scale and unit must be equal, and no column may be missing. Without a schema they cannot be
  compared, except that a missing column is found in each event.
- A value that PostgreSQL did not write to its log, because it is large and did not change, is listed in `UNCHANGED`.
- All events of a batch are parsed by Arrow at once.

Rules of the writer, `DebeziumEncoder`:

- A change is written as one event: "c" without an old row, "u" with both rows, "d" without a new row. Keys of records
  are objects with the columns of the key. There are no schemas in the events.
- Values are encoded as Debezium does by default, so events are read back with the same columns.
- A row with a value that no event can hold, such as NaN, is bad. If the row is the old row of a change, the event has
  only the keys of this row, as from a table without `REPLICA IDENTITY FULL`.

| column | in the event |
| --- | --- |
| decimal | Base64 of a big-endian integer, to be divided by 10**scale; a string or a number with `decimals=` |
| date | days since 1970 |
| timestamp without a zone, time, duration | an integer in the unit of the type |
| timestamp with a zone | an ISO 8601 string |
| binary | Base64 |
| everything else | as in JSON (`json.py`) |
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pa_json
from numpy.typing import NDArray

from tidegate.connectors.formats.changes import DELETE_ROW, ROW_KIND, TRUNCATE, UNCHANGED, UPSERT, version_schema
from tidegate.connectors.formats.format import (
    DecodedRecords,
    EncodedRecords,
    Format,
    PayloadDecoder,
    PayloadEncoder,
    PayloadUse,
    ReadFormat,
    RowChanges,
    WriteFormat,
    good_payloads,
)
from tidegate.connectors.formats.json import JsonDecoder
from tidegate.connectors.formats.json_format import check_json_types, json_objects, json_texts
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.user_values import value_text

Decimals = Literal["precise", "string", "double"]
Truncates = Literal["fail", "apply"]
METADATA = {"op": pa.string(), "snapshot": pa.string(), "timestamp": pa.timestamp("ms", "UTC")}
"""Optional columns, called `debezium_op` and so on: the operation, whether the event is of a snapshot ("first", "true",
"last", "false" and others), and when the database made the change."""
_SOURCE = pa.struct([("snapshot", pa.string()), ("ts_ms", pa.int64())])
_OPERATIONS = {"c": UPSERT, "u": UPSERT, "r": UPSERT, "d": DELETE_ROW, "t": TRUNCATE}
_DELETES, _TRUNCATES = 3, 4
"""Positions in `_OPERATIONS`."""
_DECIMAL_BYTES = 16
_NO_EVENT = (
    "field 'op' is missing: this is not an event of Debezium with its envelope. Read rows that were unwrapped "
    "(ExtractNewRecordState) as JSON"
)
_NO_KEY = "the record has no key: the table needs a primary key, or the connector needs message.key.columns"
_TRUNCATED = (
    'the table was truncated. Delete its rows with from_kafka(format=tg.DebeziumFormat(truncates="apply")), or skip '
    'the event with bad_rows="skip"'
)


@dataclass(frozen=True, slots=True)
class DebeziumFormat(Format):
    """Events of Debezium in JSON, with the options of the connector that writes them.

    - `decimals`: the connector's `decimal.handling.mode`.
    - `truncates`: "fail" fails the job when the table is truncated; "apply" deletes all rows, and requires one
      partition.
    - `metadata`: adds the columns `debezium_op`, `debezium_snapshot` and `debezium_timestamp`: some of "op", "snapshot"
      and "timestamp".
    - `unavailable`: the connector's `unavailable.value.placeholder`.

    Only `decimals` applies to events that a job writes.

    Raises ConfigurationError for unknown values.

    Example:

        >>> tg.DebeziumFormat(truncates="apply").decimals
        'precise'
    """

    kind = "debezium"

    decimals: Decimals = "precise"
    truncates: Truncates = "fail"
    metadata: tuple[str, ...] = ()
    unavailable: str = "__debezium_unavailable_value"

    def __post_init__(self) -> None:
        object.__setattr__(self, "metadata", tuple(self.metadata))
        for name, value, known in (
            ("decimals", self.decimals, get_args(Decimals)),
            ("truncates", self.truncates, get_args(Truncates)),
            *(("metadata", each, tuple(METADATA)) for each in self.metadata),
        ):
            if value not in known:
                raise ConfigurationError(f"DebeziumFormat({name}=): {value!r} is not one of {', '.join(known)}")

    def metadata_fields(self) -> list[pa.Field]:
        """Returns the optional metadata columns that were requested."""
        return [pa.field(f"debezium_{name}", METADATA[name]) for name in self.metadata]

    def for_reading(self, columns: pa.Schema | None, use: PayloadUse) -> ReadFormat:
        """Binds the format to the columns and the keys of a table. Raises ConfigurationError."""
        if columns is None or not len(columns):
            raise ConfigurationError(
                f"{use.method}(format='debezium') needs the columns of the table, as in "
                "value={'id': int, 'name': str}"
            )
        found = DebeziumRead(columns, use.keys, self)
        found.decoder()
        return found

    def for_writing(self, columns: pa.Schema, use: PayloadUse) -> WriteFormat:
        """Binds the format to the columns of a changelog stream, or to its keys. Raises ConfigurationError."""
        for option in fields(self):
            if option.name != "decimals" and getattr(self, option.name) != option.default:
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
            if (unfit := _unwritable(column.type, self.decimals)) is not None:
                raise ConfigurationError(
                    f"{use.method}(format='debezium'): column {column.name!r} is {column.type}; {unfit}. Convert it in "
                    "a step before"
                )
        wires = pa.schema([(each.name, _written_type(each.type, self.decimals)) for each in columns])
        check_json_types(wires, use, self.kind)
        return DebeziumWrite(use.keys, self.decimals, is_key=use.part == "key")


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
        """Returns True if truncates are applied: a truncate is not ordered relative to events of other partitions."""
        return self.form.truncates == "apply"

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
        self._form = form
        self.schema = version_schema(pa.schema([*columns, *form.metadata_fields()]))
        """The columns of all batches."""
        wires = [pa.field(each.name, _wire_type(each.type, form.decimals)) for each in columns]
        of_keys = [each for each in wires if each.name in self._keys]
        event = [
            pa.field("op", pa.string()),
            pa.field("before", pa.struct(of_keys)),
            pa.field("after", pa.struct(wires)),
            *([pa.field("source", _SOURCE)] if form.metadata else []),
        ]
        self._events = _Parser(pa.schema(event))
        self._record_keys = _Parser(pa.schema(of_keys))
        self._checked: dict[bytes, str | None] = {}
        self._placeholders = _placeholders(form.unavailable)

    def decode(self, payloads: Sequence[bytes]) -> DecodedRecords:
        """Decodes events of records without keys. Only truncates are valid without a key."""
        return self.decode_records(payloads, [None] * len(payloads))

    def decode_records(self, values: Sequence[bytes | None], keys: Sequence[bytes | None]) -> DecodedRecords:
        """Decodes events to row versions. `sources` of the result has the number of the record of each version."""
        numbers = np.array([number for number, value in enumerate(values) if value is not None], dtype=np.int64)
        bad: dict[int, str] = {}
        found = self._events.parse([values[number] or b"" for number in numbers])
        for at, reason in found.bad.items():
            bad[int(numbers[at])] = reason
        for at in found.strangers.tolist():
            bad[int(numbers[at])] = _NO_EVENT
        events, numbers = found.rows, numbers[found.numbers]
        known = pc.index_in(events.column("op"), pa.array(list(_OPERATIONS)))
        operations = pc.fill_null(known, _TRUNCATES).to_numpy()
        deletes, truncates = operations == _DELETES, operations == _TRUNCATES
        upserts = ~(deletes | truncates)
        self._refuse_events(events, known, upserts, numbers, bad)
        if found.any_schema:
            for number in numbers.tolist():
                fault = self._schema_fault(values[number] or b"")
                if fault is not None:
                    bad.setdefault(number, fault)
        images = dict(zip(self._columns.names, events.column("after").flatten(), strict=True))
        self._check_images(values, numbers, images, upserts, bad)
        self._take_keys(keys, numbers, events, images, deletes, truncates, bad)
        unchanged = self._take_unchanged(values, numbers, images)
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
        """Adds events that cannot be applied to `bad`: an unknown operation, a missing row, or a refused truncate."""
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

    def _schema_fault(self, record: bytes) -> str | None:
        """Returns how the schema in an event differs from the columns, or None.

        Each distinct schema is compared once.
        """
        head, found, _ = record.partition(b',"payload":')
        if not found or not head.startswith(b'{"schema":'):
            described = json.loads(record).get("schema")
            return None if described is None else _difference(described, self._columns, self._form.decimals)
        if head not in self._checked:
            if len(self._checked) >= _SCHEMAS_MAX:
                self._checked.clear()
            try:
                described = json.loads(head + b"}")["schema"]
            except ValueError:
                described = json.loads(record).get("schema")
            self._checked[head] = _difference(described, self._columns, self._form.decimals) if described else None
        return self._checked[head]

    def _check_images(
        self,
        values: Sequence[bytes | None],
        numbers: NDArray[np.int64],
        images: Mapping[str, pa.Array],
        upserts: NDArray[np.bool_],
        bad: dict[int, str],
    ) -> None:
        """Adds events that lack a column in `after` to `bad`. A column with the value null is not missing."""
        for name, column in images.items():
            if column.null_count <= len(column) - int(upserts.sum()):
                continue
            written = json.dumps(name).encode() + b":null"
            empty = np.flatnonzero(upserts & column.is_null().to_numpy(zero_copy_only=False))
            for row in empty.tolist():
                number = int(numbers[row])
                record = values[number] or b""
                if number not in bad and written not in record and name not in _row_of(record):
                    bad[number] = f"field {name!r} is missing in 'after'; remove the column from value=, or rename it"

    def _take_keys(
        self,
        keys: Sequence[bytes | None],
        numbers: NDArray[np.int64],
        events: pa.RecordBatch,
        images: dict[str, pa.Array],
        deletes: NDArray[np.bool_],
        truncates: NDArray[np.bool_],
        bad: dict[int, str],
    ) -> None:
        """Writes the keys of deleted rows into `images`, and checks that all keys equal the keys of their records."""
        rows = np.flatnonzero(~truncates & ~np.isin(numbers, list(bad)))
        without = [row for row in rows.tolist() if keys[int(numbers[row])] is None]
        for row in without:
            bad[int(numbers[row])] = _NO_KEY
        rows = np.setdiff1d(rows, without)
        given = [keys[int(numbers[row])] or b"" for row in rows]
        parsed = self._record_keys.parse(given)
        faults = {int(rows[at]): f"the key of the record: {reason}" for at, reason in parsed.bad.items()}
        wanted = set(self._keys)
        others = parsed.strangers.tolist()
        if len(parsed.numbers) and member_names([given[at] for at in parsed.numbers]) != wanted:
            others += [at for at in parsed.numbers.tolist() if member_names([given[at]]) != wanted]
        for at in others:
            faults[int(rows[at])] = (
                f"the key of the record has the columns {sorted(member_names([given[at]]))}, and keys= has "
                f"{sorted(wanted)}; they must be the same"
            )
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

    def _take_unchanged(
        self, values: Sequence[bytes | None], numbers: NDArray[np.int64], images: dict[str, pa.Array]
    ) -> pa.Array:
        """Returns the names of the unchanged columns of each row, and sets their values to null in `images`."""
        listed: list[list[str] | None] = [None] * len(numbers)
        touched = [
            row
            for row, number in enumerate(numbers.tolist())
            if any(mark in (values[number] or b"") for mark in self._placeholders)
        ]
        if not touched:
            return pa.nulls(len(numbers), self.schema.field(UNCHANGED).type)
        known = (self._form.unavailable, self._form.unavailable.encode())
        for name, column in images.items():
            found = [row for row in touched if _is_placeholder(column[row].as_py(), known)]
            for row in found:
                listed[row] = [*(listed[row] or ()), name]
            keep = np.ones(len(numbers), dtype=np.bool_)
            keep[found] = False
            if found:
                takes = np.arange(len(numbers), dtype=np.int64)
                images[name] = column.take(pa.array(takes, mask=~keep))
        return pa.array(listed, self.schema.field(UNCHANGED).type)

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
        values = _from_wire(column, field.type, reasons)
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


_SCHEMAS_MAX = 1_000
"""Maximum number of different event schemas that are remembered."""


@dataclass(frozen=True, slots=True)
class _Parsed:
    """The rows parsed from JSON records: `numbers[i]` is the number of the record of row i.

    `bad`: the records that are not such objects, with the reasons. `strangers`: objects without the required member.
    `any_schema`: whether a record has a schema next to its payload.
    """

    rows: pa.RecordBatch
    numbers: NDArray[np.int64]
    bad: dict[int, str]
    strangers: NDArray[np.int64]
    any_schema: bool


class _Parser:
    """Parses JSON objects with these columns, alone or as the `payload` next to a schema.

    An object without a value in the first column is reported as a stranger.
    """

    def __init__(self, columns: pa.Schema) -> None:
        self._columns = columns
        self._plain = JsonDecoder(columns)
        self._enveloped = JsonDecoder(pa.schema([("payload", pa.struct(list(columns)))]))
        self._envelope_first = False

    def parse(self, records: list[bytes]) -> _Parsed:
        """Parses records to rows. All records of one form (bare, or with a schema) are parsed at once."""
        bad: dict[int, str] = {}
        parts: list[pa.RecordBatch] = []
        places: list[NDArray[np.int64]] = []
        rest = np.arange(len(records), dtype=np.int64)
        any_schema = False
        for enveloped in (True, False) if self._envelope_first else (False, True):
            if not len(rest):
                break
            decoder = self._enveloped if enveloped else self._plain
            found = decoder.records([records[number] for number in rest])
            of_row = rest[found.payload_of_rows(len(rest))]
            rows = found.batch
            if enveloped:
                rows = pa.RecordBatch.from_arrays(rows.column("payload").flatten(), schema=self._columns)
            fits = rows.column(0).is_valid().to_numpy(zero_copy_only=False)
            if fits.any():
                self._envelope_first = enveloped
                any_schema = any_schema or enveloped
                parts.append(rows.filter(pa.array(fits)))
                places.append(of_row[fits])
            failed = rest[sorted(found.bad)]
            bad |= {int(rest[at]): reason for at, reason in found.bad.items()}
            rest = np.sort(np.concatenate([of_row[~fits], failed]))
        left = set(rest.tolist())
        bad = {number: reason for number, reason in bad.items() if number in left}
        strangers = np.array(sorted(left - set(bad)), dtype=np.int64)
        if not parts:
            empty = pa.RecordBatch.from_pylist([], self._columns)
            return _Parsed(empty, np.zeros(0, dtype=np.int64), bad, strangers, any_schema)
        numbers = np.concatenate(places)
        batch = pa.concat_batches(parts)
        if len(parts) > 1:
            order = np.argsort(numbers)
            batch, numbers = batch.take(pa.array(order)), numbers[order]
        return _Parsed(batch, numbers, bad, strangers, any_schema)


def member_names(records: Sequence[bytes]) -> set[str]:
    """Returns the names of all members of valid JSON objects, or of their payloads."""
    found = pa_json.read_json(pa.BufferReader(b"\n".join(records))).schema
    if set(found.names) != {"schema", "payload"}:
        return set(found.names)
    payload = found.field("payload").type
    return {payload.field(number).name for number in range(payload.num_fields)}


def _row_of(record: bytes) -> Mapping[str, Any]:
    """Returns the new row (`after`) of an event as a dict."""
    found = json.loads(record)
    event = found.get("payload", found)
    return dict(event["after"])


def _placeholders(text: str) -> tuple[bytes, ...]:
    """Returns the encodings of the placeholder in the bytes of an event: as a string, and as Base64."""
    return text.encode(), base64.b64encode(text.encode())


def _is_placeholder(value: object, known: Sequence[object]) -> bool:
    return value in known or (isinstance(value, list) and len(value) == 1 and value[0] in known)


def _wire_type(wanted: pa.DataType, decimals: Decimals) -> pa.DataType:
    """Returns the type as which Arrow parses values of a column.

    Raises ConfigurationError for a type that events cannot have.
    """
    if pa.types.is_decimal(wanted):
        if decimals != "precise":
            return wanted
        if wanted.bit_width > 8 * _DECIMAL_BYTES:
            raise ConfigurationError(
                f"format='debezium': {wanted} is too wide; use up to 38 digits, or decimals='string'"
            )
        return pa.binary()
    if pa.types.is_date(wanted) or pa.types.is_time32(wanted):
        return pa.int32()
    if pa.types.is_time64(wanted) or pa.types.is_duration(wanted):
        return pa.int64()
    if pa.types.is_timestamp(wanted) and wanted.tz is None:
        return pa.int64()
    if pa.types.is_struct(wanted):
        return pa.struct([pa.field(each.name, _wire_type(each.type, decimals)) for each in wanted])
    if pa.types.is_list(wanted):
        return pa.list_(_wire_type(wanted.value_type, decimals))
    return wanted


def _from_wire(column: pa.Array, wanted: pa.DataType, reasons: dict[int, str]) -> pa.Array:
    """Converts parsed values to the type of the column. `reasons` gets the numbers of values that do not fit."""
    if column.type == wanted:
        return column
    if pa.types.is_struct(wanted):
        parts = [_from_wire(part, wanted.field(number).type, reasons) for number, part in enumerate(column.flatten())]
        return pa.StructArray.from_arrays(parts, fields=list(wanted), mask=column.is_null())
    if pa.types.is_list(wanted):
        faults: dict[int, str] = {}
        values = _from_wire(column.flatten(), wanted.value_type, faults)
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
        of_value = np.repeat(np.arange(len(column)), lengths)
        for at, reason in faults.items():
            reasons.setdefault(int(of_value[at]), reason)
        offsets = np.zeros(len(column) + 1, dtype=np.int32)
        np.cumsum(lengths, out=offsets[1:])
        return pa.ListArray.from_arrays(pa.array(offsets), values, type=wanted, mask=column.is_null())
    if pa.types.is_decimal(wanted):
        return unscaled_decimals(column, wanted, reasons)
    if pa.types.is_date64(wanted):
        return column.cast(pa.date32()).cast(wanted)
    if pa.types.is_time(wanted):
        per_day = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[wanted.unit] * 86_400
        fits = pc.and_(pc.greater_equal(column, 0), pc.less(column, per_day))
        for row in np.flatnonzero(~pc.fill_null(fits, True).to_numpy(zero_copy_only=False)).tolist():
            reasons.setdefault(row, f"{value_text(column[row].as_py())} is not a time of a day in {wanted.unit}")
    return column.cast(wanted)


def unscaled_decimals(column: pa.Array, wanted: pa.DataType, reasons: dict[int, str]) -> pa.Array:
    """Converts big-endian two's complement integers to decimals. `reasons` gets the rows that do not fit."""
    count = len(column)
    sizes = pc.fill_null(pc.binary_length(column), 0).to_numpy()
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    unfit = valid & ((sizes == 0) | (sizes > _DECIMAL_BYTES))
    _, offset_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int32, count=count + 1, offset=4 * column.offset)
    data = np.frombuffer(data_buffer if data_buffer is not None else b"", dtype=np.uint8)
    wide = np.zeros((count, _DECIMAL_BYTES), dtype=np.uint8)
    for size in np.unique(sizes[valid & ~unfit]).tolist():
        rows = np.flatnonzero(valid & ~unfit & (sizes == size))
        found = data[offsets[rows][:, None] + np.arange(size)]
        wide[rows] = np.where(found[:, :1] >= 0x80, np.uint8(0xFF), np.uint8(0))
        wide[rows, _DECIMAL_BYTES - size :] = found
    little = np.ascontiguousarray(wide[:, ::-1])
    kept = valid & ~unfit
    whole = pa.Array.from_buffers(
        pa.decimal128(38, wanted.scale),
        count,
        [pa.array(kept).buffers()[1] if count else None, pa.py_buffer(little.tobytes())],
    )
    values = whole if whole.type == wanted else _narrowed(whole, wanted, unfit)
    for row in np.flatnonzero(unfit).tolist():
        reasons.setdefault(row, f"the number, of {int(sizes[row])} bytes, is not a value of {wanted}")
    return values


def _narrowed(whole: pa.Array, wanted: pa.DataType, unfit: NDArray[np.bool_]) -> pa.Array:
    """Casts decimals to a type of fewer digits, and marks values that have too many digits in `unfit`."""
    try:
        return whole.cast(wanted)
    except pa.ArrowInvalid:
        for row in range(len(whole)):
            try:
                whole.slice(row, 1).cast(wanted)
            except pa.ArrowInvalid:
                unfit[row] = True
        return whole.take(pa.array(np.arange(len(whole)), mask=unfit)).cast(wanted)


_UNITS = {
    "io.debezium.time.Timestamp": "ms",
    "io.debezium.time.MicroTimestamp": "us",
    "io.debezium.time.NanoTimestamp": "ns",
    "org.apache.kafka.connect.data.Timestamp": "ms",
    "io.debezium.time.Time": "ms",
    "io.debezium.time.MicroTime": "us",
    "io.debezium.time.NanoTime": "ns",
    "org.apache.kafka.connect.data.Time": "ms",
    "io.debezium.time.MicroDuration": "us",
    "io.debezium.time.NanoDuration": "ns",
}
_TEXTS = {
    "io.debezium.time.ZonedTimestamp",
    "io.debezium.time.ZonedTime",
    "io.debezium.time.IsoTimestamp",
    "io.debezium.time.IsoDate",
    "io.debezium.time.IsoTime",
}
_DECIMAL = "org.apache.kafka.connect.data.Decimal"


def _difference(described: Mapping[str, Any], columns: pa.Schema, decimals: Decimals) -> str | None:
    """Returns how the schema in an event differs from the columns, as text, or None if they agree."""
    parts = {each.get("field"): each for each in described.get("fields", ())}
    rows = parts.get("after", {}).get("fields")
    if rows is None:
        return "the schema of the event has no field 'after'"
    fields = {each["field"]: each for each in rows}
    for column in columns:
        if column.name not in fields:
            return (
                f"field {column.name!r} is missing in the schema of the event, which has {sorted(fields)}; remove the "
                "column from value=, or rename it"
            )
        fault = _field_difference(fields[column.name], column.type, decimals)
        if fault is not None:
            return f"field {column.name!r} {fault}"
    return None


def _field_difference(described: Mapping[str, Any], wanted: pa.DataType, decimals: Decimals) -> str | None:
    name = described.get("name")
    if pa.types.is_decimal(wanted) and decimals == "precise":
        if name != _DECIMAL:
            return (
                f"is {name or described['type']} in the event, and {wanted} in value=; give DebeziumFormat(decimals=)"
            )
        scale = int(described.get("parameters", {}).get("scale", 0))
        if scale != wanted.scale:
            return f"has {scale} decimal places in the event, and {wanted.scale} in {wanted}; use the same"
        return None
    if name == _DECIMAL:
        return f"is a number of {_DECIMAL} in the event, and {wanted} in value=; use pa.decimal128"
    unit = _UNITS.get(name or "")
    counts = pa.types.is_time(wanted) or pa.types.is_duration(wanted)
    counts = counts or (pa.types.is_timestamp(wanted) and wanted.tz is None)
    if unit is not None and counts and wanted.unit != unit:
        return f"counts {unit} in the event ({name}), and {wanted.unit} in {wanted}; use the same unit"
    if counts and name in _TEXTS:
        return f"is a string in the event ({name}), and {wanted} in value=; read it as pa.string()"
    return None


@dataclass(frozen=True, slots=True)
class DebeziumWrite(WriteFormat):
    """Debezium events bound to a changelog stream whose rows `keys` identify.

    `is_key`: the payloads are keys of records.
    """

    keys: tuple[str, ...]
    decimals: Decimals
    is_key: bool
    writes_changes = True

    def encoder(self) -> PayloadEncoder:
        """Returns an encoder for one task."""
        return DebeziumEncoder(self.keys, self.decimals, is_key=self.is_key)


class DebeziumEncoder(PayloadEncoder):
    """Encodes changes of rows as Debezium events, and keys of records as JSON objects."""

    def __init__(self, keys: Sequence[str], decimals: Decimals = "precise", *, is_key: bool = False) -> None:
        self._keys = tuple(keys)
        self._decimals = decimals
        self._is_key = is_key

    def encode(self, batch: pa.RecordBatch, topic: str = "") -> EncodedRecords:
        """Encodes each row as a JSON object (the key of a record). A key with a null is bad."""
        bad: dict[int, str] = {}
        texts = self._objects(batch, bad)
        for name in self._keys if self._is_key else ():
            for row in np.flatnonzero(batch.column(name).is_null().to_numpy(zero_copy_only=False)).tolist():
                bad.setdefault(row, f"the key column {name!r} is null, and the key of an event has a value")
        return good_payloads(texts.cast(pa.binary()), bad)

    def encode_changes(
        self, batch: pa.RecordBatch, changes: RowChanges, times_ms: pa.Array | None, topic: str
    ) -> EncodedRecords:
        """Encodes each change as one event.

        `times_ms`: when each change was made, in ms since the epoch; None for now.
        """
        unfit: dict[int, str] = {}
        rows = self._objects(batch, unfit)
        images = rows
        if unfit:
            known = np.ones(batch.num_rows, dtype=np.bool_)
            known[list(unfit)] = False
            images = pc.if_else(pa.array(known), rows, self._identities(batch))
        before = _taken(images, changes.before)
        after = _taken(rows, changes.after)
        operations = np.where(changes.after < 0, "d", np.where(changes.before < 0, "c", "u"))
        now = pa.scalar(now_ms(), pa.int64())
        times = pa.repeat(now, len(changes)) if times_ms is None else pc.fill_null(times_ms, now)
        origin, _, table = topic.rpartition(".")
        source = {"version": _WRITER_VERSION, "connector": "tidegate", "name": origin.partition(".")[0] or table}
        place = {"snapshot": "false", "db": "", "table": table}
        events = pc.binary_join_element_wise(
            '{"before":',
            before,
            ',"after":',
            after,
            f',"source":{json.dumps(source, separators=(",", ":"))[:-1]},"ts_ms":',
            times.cast(pa.string()),
            f',{json.dumps(place, separators=(",", ":"))[1:]},"transaction":null,"op":"',
            pa.array(operations, pa.string()),
            f'","ts_ms":{now.as_py()}}}',
            "",
        )
        bad = {number: unfit[row] for number, row in enumerate(changes.after.tolist()) if row in unfit} if unfit else {}
        return good_payloads(events.cast(pa.binary()), bad)

    def _objects(self, batch: pa.RecordBatch, bad: dict[int, str]) -> pa.Array:
        rows = np.arange(batch.num_rows, dtype=np.int64)
        texts = []
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            texts.append((name, json_texts(_to_wire(column, self._decimals), name, rows, bad)))
        return json_objects(texts, batch.num_rows)

    def _identities(self, batch: pa.RecordBatch) -> pa.Array:
        """Returns rows as JSON objects with the key columns only. All other columns are null."""
        columns = [
            column if name in self._keys else pa.nulls(batch.num_rows, column.type)
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
        return self._objects(pa.RecordBatch.from_arrays(columns, names=batch.schema.names), {})


_WRITER_VERSION = "1"
"""Format version of `source` in events that tidegate writes."""


def _taken(texts: pa.Array, rows: NDArray[np.int64]) -> pa.Array:
    """Returns the JSON texts of the rows with these indices, "null" for an index of -1."""
    return pc.fill_null(texts.take(pa.array(rows, mask=rows < 0)), "null")


def _unwritable(kind: pa.DataType, decimals: Decimals) -> str | None:
    """Returns why events cannot represent values of a type, or None if they can."""
    if pa.types.is_dictionary(kind):
        return _unwritable(kind.value_type, decimals)
    if pa.types.is_struct(kind):
        return next((unfit for each in kind if (unfit := _unwritable(each.type, decimals)) is not None), None)
    if pa.types.is_list(kind):
        return _unwritable(kind.value_type, decimals)
    if pa.types.is_decimal(kind) and decimals == "precise" and kind.bit_width > 8 * _DECIMAL_BYTES:
        return "events have up to 38 digits; give DebeziumFormat(decimals='string')"
    naive = pa.types.is_timestamp(kind) and kind.tz is None
    if (naive or pa.types.is_time(kind)) and kind.unit == "s":
        return "Debezium counts times in ms, us or ns"
    if pa.types.is_duration(kind) and kind.unit not in ("us", "ns"):
        return "Debezium counts durations in us or ns"
    inner = []
    if pa.types.is_map(kind):
        inner = [kind.item_type]
    elif pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = [kind.value_type]
    if any(_unwritable(each, decimals) is not None or _written_type(each, decimals) != each for each in inner):
        return f"only structs and lists (pa.list_) can have values such as {inner[0]}"
    return None


def _written_type(kind: pa.DataType, decimals: Decimals) -> pa.DataType:
    """Returns the type as which values of a column are written to JSON."""
    if pa.types.is_dictionary(kind):
        return _written_type(kind.value_type, decimals)
    if pa.types.is_decimal(kind) and decimals == "string":
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, _written_type(each.type, decimals)) for each in kind])
    if pa.types.is_list(kind):
        return pa.list_(_written_type(kind.value_type, decimals))
    return _wire_type(kind, decimals)


def _to_wire(column: pa.Array, decimals: Decimals) -> pa.Array:
    """Converts values to the encoding in events, the inverse of `_from_wire`."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _to_wire(column.dictionary_decode(), decimals)
    wire = _written_type(kind, decimals)
    if wire == kind:
        return column
    if pa.types.is_struct(kind):
        parts = [_to_wire(part, decimals) for part in column.flatten()]
        return pa.StructArray.from_arrays(parts, fields=list(wire), mask=column.is_null())
    if pa.types.is_list(kind):
        # A null list may have entries, which `flatten` leaves away.
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
        offsets = np.zeros(len(column) + 1, dtype=np.int32)
        np.cumsum(lengths, out=offsets[1:])
        values = _to_wire(column.flatten(), decimals)
        return pa.ListArray.from_arrays(pa.array(offsets), values, type=wire, mask=column.is_null())
    if pa.types.is_decimal(kind) and decimals == "precise":
        return unscaled_bytes(column)
    if pa.types.is_date64(kind):
        column = column.cast(pa.date32())
    return column.cast(wire)


def unscaled_bytes(column: pa.Array) -> pa.Array:
    """Converts decimals to the shortest big-endian two's complement integers, the inverse of `unscaled_decimals`."""
    count = len(column)
    whole = column.cast(pa.decimal128(38, column.type.scale))
    start = _DECIMAL_BYTES * whole.offset
    if not count:
        return pa.array([], pa.binary())
    data = np.frombuffer(whole.buffers()[1], dtype=np.uint8, count=_DECIMAL_BYTES * count, offset=start)
    wide = data.reshape(count, _DECIMAL_BYTES)[:, ::-1]
    filler = np.where(wide[:, :1] >= 0x80, np.uint8(0xFF), np.uint8(0))
    differs = wide != filler
    differs[:, -1] = True
    first = np.argmax(differs, axis=1)
    # The first byte that stays must have the sign of the number.
    first -= (first > 0) & ((wide[np.arange(count), first] >= 0x80) != (filler[:, 0] != 0))
    valid = whole.is_valid().to_numpy(zero_copy_only=False)
    kept = (np.arange(_DECIMAL_BYTES) >= first[:, None]) & valid[:, None]
    offsets = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(kept.sum(axis=1), out=offsets[1:])
    buffers = [pa.array(valid).buffers()[1], pa.py_buffer(offsets.tobytes()), pa.py_buffer(wide[kept].tobytes())]
    return pa.Array.from_buffers(pa.binary(), count, buffers)
