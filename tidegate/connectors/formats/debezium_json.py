"""Events of Debezium in JSON: `JsonEvents` and `JsonKeys` parse them, `JsonEventEncoder` writes them.

Rules:

- An event is an object with `op`, `before` and `after`, alone or as the `payload` next to its `schema`, as Kafka
  Connect's JsonConverter writes it with `schemas.enable`. A key has one of the same two forms.
- A schema in the event is compared with the columns: scale and unit must be equal, and no column may be missing.
  Without a schema they cannot be compared, except that a missing column is found in each event.
- All events of a batch are parsed by Arrow at once.
- Bytes are Base64. Everything else that has no wire form (`debezium_values.py`) is as in JSON (`json_decoder.py`).
- Events are written without schemas. A row with a value that no event can hold, such as NaN, is bad. If it is the row
  before a change, the event has only the keys of this row, as from a table without `REPLICA IDENTITY FULL`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pa_json
from numpy.typing import NDArray

from tidegate.connectors.formats.debezium_values import (
    NO_EVENT,
    Decimals,
    EventParser,
    Parsed,
    add_null_keys,
    event_schema,
    field_difference,
    taken_images,
    to_wire,
    wire_type,
)
from tidegate.connectors.formats.format import EncodedRecords, PayloadEncoder, RowChanges, good_payloads
from tidegate.connectors.formats.json import json_objects, json_texts
from tidegate.connectors.formats.json_decoder import JsonDecoder
from tidegate.connectors.formats.payload_block import Block
from tidegate.storage.clock import now_ms

WRITER_VERSION = "1"
"""Format version of `source` in events that tidegate writes."""


class JsonEvents(EventParser):
    """Parses JSON events of a table with these columns."""

    def __init__(self, columns: pa.Schema, keys: tuple[str, ...], decimals: Decimals, *, has_source: bool) -> None:
        self._columns = columns
        self._decimals = decimals
        wires = [pa.field(each.name, wire_type(each.type, decimals)) for each in columns]
        self._objects = _Objects(event_schema(wires, keys, has_source=has_source))
        self._checked: dict[bytes, str | None] = {}

    def parse(self, records: pa.Array) -> Parsed:
        """Decodes the values of Kafka records: a row for each event. An event with another schema is in `bad`."""
        found = self._objects.parse(Block.of(records))
        bad = found.bad | dict.fromkeys(found.strangers.tolist(), NO_EVENT)
        numbers = found.numbers if found.any_schema else found.numbers[:0]
        while len(numbers):
            record = records[int(numbers[0])].as_py()
            head, separator, _ = record.partition(_PAYLOAD)
            # Most events of a batch have the same schema, in the same bytes.
            same = pc.starts_with(records.take(pa.array(numbers)), pattern=head + separator)
            fits = same.to_numpy(zero_copy_only=False) if separator else np.arange(len(numbers)) == 0
            if (fault := self._schema_fault(record)) is not None:
                for number in numbers[fits].tolist():
                    bad.setdefault(number, fault)
            numbers = numbers[~fits]
        return Parsed(found.rows, found.numbers, bad)

    def lacking(self, records: pa.Array, column: str) -> list[int]:
        """Returns the numbers of events whose new row lacks a column. A column without a value has the value `null`
        instead.
        """
        written = pc.match_substring(records, json.dumps(column).encode() + b":null")
        others = np.flatnonzero(pc.invert(written)).tolist()
        return [number for number in others if column not in _row_of(records[number].as_py())]

    def _schema_fault(self, record: bytes) -> str | None:
        """Returns text about the difference between the schema in an event and the columns, or None. Each distinct
        schema is compared once.
        """
        head, found, _ = record.partition(_PAYLOAD)
        if not found or not head.startswith(b'{"schema":'):
            described = json.loads(record).get("schema")
            return None if described is None else _difference(described, self._columns, self._decimals)
        if head not in self._checked:
            if len(self._checked) >= _SCHEMAS_MAX:
                self._checked.clear()
            try:
                described = json.loads(head + b"}")["schema"]
            except ValueError:
                described = json.loads(record).get("schema")
            self._checked[head] = _difference(described, self._columns, self._decimals) if described else None
        return self._checked[head]


class JsonKeys(EventParser):
    """Parses the JSON keys of records, which must have exactly these columns."""

    def __init__(self, keys: pa.Schema, decimals: Decimals) -> None:
        wires = [pa.field(each.name, wire_type(each.type, decimals)) for each in keys]
        self._objects = _Objects(pa.schema(wires))
        self._wanted = set(keys.names)
        self._first = keys.names[0]

    def parse(self, records: pa.Array) -> Parsed:
        """Decodes the keys of Kafka records: a row for each. A key with other columns is in `bad`."""
        block = Block.of(records)
        found = self._objects.parse(block)
        bad = {number: f"the key of the record: {reason}" for number, reason in found.bad.items()}
        others = {number: _member_names(block.only(np.array([number]))) for number in found.strangers.tolist()}
        others |= strange_members(block, found.numbers, self._wanted)
        for at, names in others.items():
            bad[at] = (
                f"the key of the record has the columns {sorted(names)}, and keys= has {sorted(self._wanted)}; they "
                "must be the same"
                if names != self._wanted
                else f"field {self._first!r} is null in the key of the record; a key of a table has a value"
            )
        return Parsed(found.rows, found.numbers, bad)


_PAYLOAD = b',"payload":'
"""The text between the schema of an event and its payload."""
_SCHEMAS_MAX = 1_000
"""Maximum number of different event schemas that are remembered."""


@dataclass(frozen=True, slots=True)
class _ParsedObjects:
    """The rows parsed from JSON records: `numbers[i]` is the record number of row i.

    `bad`: the records that are not valid objects, with the reasons. `strangers`: objects without the required member.
    `any_schema`: whether a record has a schema next to its payload.
    """

    rows: pa.RecordBatch
    numbers: NDArray[np.int64]
    bad: dict[int, str]
    strangers: NDArray[np.int64]
    any_schema: bool


class _Objects:
    """Parses JSON objects with these columns, alone or as the `payload` next to a schema.

    An object without a value in the first column is reported as a stranger.
    """

    def __init__(self, columns: pa.Schema) -> None:
        self._columns = columns
        self._plain = JsonDecoder(columns)
        self._enveloped = JsonDecoder(pa.schema([("payload", pa.struct(list(columns)))]))
        self._envelope_first = False

    def parse(self, records: Block) -> _ParsedObjects:
        """Parses records to rows.

        Records without a schema, and records with one, are each parsed in one call.
        """
        bad: dict[int, str] = {}
        parts: list[pa.RecordBatch] = []
        places: list[NDArray[np.int64]] = []
        rest = np.arange(len(records), dtype=np.int64)
        any_schema = False
        for enveloped in (True, False) if self._envelope_first else (False, True):
            if not len(rest):
                break
            decoder = self._enveloped if enveloped else self._plain
            found = decoder.records(records.only(rest) if len(rest) < len(records) else records)
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
            return _ParsedObjects(empty, np.zeros(0, dtype=np.int64), bad, strangers, any_schema)
        numbers = np.concatenate(places)
        batch = pa.concat_batches(parts)
        if len(parts) > 1:
            order = np.argsort(numbers)
            batch, numbers = batch.take(pa.array(order)), numbers[order]
        return _ParsedObjects(batch, numbers, bad, strangers, any_schema)


def strange_members(records: Block, numbers: NDArray[np.int64], wanted: set[str]) -> dict[int, set[str]]:
    """Returns the names of the members of those records that have not the members `wanted`, by the record's number.

    `numbers`: the records to compare, which are valid JSON objects.
    """
    if not len(numbers) or _member_names(records.only(numbers)) == wanted:
        return {}
    names = {number: _member_names(records.only(np.array([number]))) for number in numbers.tolist()}
    return {number: found for number, found in names.items() if found != wanted}


def _member_names(records: Block) -> set[str]:
    """Returns the names of all members of valid JSON objects, or of their payloads."""
    found = pa_json.read_json(pa.BufferReader(records.lines().data)).schema
    if set(found.names) != {"schema", "payload"}:
        return set(found.names)
    payload = found.field("payload").type
    return {payload.field(number).name for number in range(payload.num_fields)}


def _row_of(record: bytes) -> Mapping[str, Any]:
    """Returns the new row (`after`) of an event as a dict."""
    found = json.loads(record)
    event = found.get("payload", found)
    return dict(event["after"])


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
        fault = field_difference(fields[column.name], column.type, decimals)
        if fault is not None:
            return f"field {column.name!r} {fault}"
    return None


class JsonEventEncoder(PayloadEncoder):
    """Encodes changes of rows as Debezium events, and keys of records as JSON objects."""

    def __init__(self, keys: Sequence[str], decimals: Decimals = "precise", *, is_key: bool = False) -> None:
        self._keys = tuple(keys)
        self._decimals = decimals
        self._is_key = is_key

    def encode(self, batch: pa.RecordBatch, topic: str = "") -> EncodedRecords:
        """Encodes each row as a JSON object (the key of a record). A key with a null is bad."""
        bad: dict[int, str] = {}
        texts = self._objects(batch, bad)
        if self._is_key:
            add_null_keys(batch, self._keys, bad)
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
        before = pc.fill_null(taken_images(images, changes.before), "null")
        after = pc.fill_null(taken_images(rows, changes.after), "null")
        operations = np.where(changes.after < 0, "d", np.where(changes.before < 0, "c", "u"))
        now = pa.scalar(now_ms(), pa.int64())
        times = pa.repeat(now, len(changes)) if times_ms is None else pc.fill_null(times_ms, now)
        origin, _, table = topic.rpartition(".")
        source = {"version": WRITER_VERSION, "connector": "tidegate", "name": origin.partition(".")[0] or table}
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
            wires = to_wire(column, self._decimals, name, rows, bad)
            texts.append((name, json_texts(wires, name, rows, bad)))
        return json_objects(texts, batch.num_rows)

    def _identities(self, batch: pa.RecordBatch) -> pa.Array:
        """Returns rows as JSON objects with the key columns only. All other columns are null."""
        columns = [
            column if name in self._keys else pa.nulls(batch.num_rows, column.type)
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
        return self._objects(pa.RecordBatch.from_arrays(columns, names=batch.schema.names), {})
