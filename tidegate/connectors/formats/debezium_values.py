"""The values in events of Debezium, and how an encoding of events is read (`EventParser`).

Debezium has a form of its own for decimals, dates, times and durations, the wire form, which is the same in JSON
(`debezium_json.py`) and Avro (`debezium_avro.py`). An encoding parses events to wire forms, and `from_wire` makes
values of them. `to_wire` is the inverse.

| column | wire form |
| --- | --- |
| decimal | a big-endian integer, to be divided by 10**scale; a string or a number with `decimals=` |
| date | days since 1970 |
| timestamp without a zone, time, duration | an integer in the unit of the type |
| timestamp with a zone | an ISO 8601 string |
| everything else | the value |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.connectors.formats.text import (
    DEFAULTS,
    converted,
    converter_of,
    times_beyond_a_day,
    unwritable_times,
)
from tidegate.state.kernels.distinct_integers import distinct_integers
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.exact_casts import times_per_day
from tidegate.storage.user_values import value_text

Decimals = Literal["precise", "string", "double"]
SOURCE = pa.struct([("snapshot", pa.string()), ("ts_ms", pa.int64())])
"""The parts of an event's `source` that are read for metadata."""
NO_EVENT = (
    "field 'op' is missing: this is not an event of Debezium with its envelope. Read rows that were unwrapped "
    "(ExtractNewRecordState) as JSON"
)
_DECIMAL_BYTES = 16


@dataclass(frozen=True, slots=True)
class Parsed:
    """Parsed events or keys: `numbers[i]` is the record number of row i.

    `bad`: the numbers of records that cannot be used, with the reasons. Rows of bad records may be among the rows.
    """

    rows: pa.RecordBatch
    numbers: NDArray[np.int64]
    bad: dict[int, str]


class EventParser(ABC):
    """The interface of a parser of a table's change events, or of their record keys, in one encoding."""

    @abstractmethod
    def parse(self, records: pa.Array) -> Parsed:
        """Returns the rows of some records, with values in wire types."""

    def lacking(self, records: pa.Array, column: str) -> list[int]:
        """Returns the numbers of the valid events whose new row lacks a column. For encodings in which events have no
        schema to compare.
        """
        return []


def event_schema(of_row: list[pa.Field], keys: tuple[str, ...], *, has_source: bool) -> pa.Schema:
    """Returns the columns of parsed events. `of_row`: the columns of a table row, with wire types."""
    of_keys = [each for each in of_row if each.name in keys]
    event = [
        pa.field("op", pa.string()),
        pa.field("before", pa.struct(of_keys)),
        pa.field("after", pa.struct(of_row)),
        *([pa.field("source", SOURCE)] if has_source else []),
    ]
    return pa.schema(event)


def taken_images(images: pa.Array, rows: NDArray[np.int64]) -> pa.Array:
    """Returns the row images with the indices `rows`, null for the index -1."""
    return images.take(pa.array(rows, mask=rows < 0))


def add_null_keys(batch: pa.RecordBatch, keys: tuple[str, ...], bad: dict[int, str]) -> None:
    """Adds rows with a null in their key to `bad`."""
    for name in keys:
        for row in np.flatnonzero(batch.column(name).is_null().to_numpy(zero_copy_only=False)).tolist():
            bad.setdefault(row, f"the key column {name!r} is null, and the key of an event has a value")


def wire_type(wanted: pa.DataType, decimals: Decimals, *, typed: bool = False) -> pa.DataType:
    """Returns the Arrow type as which a value in an event is parsed (wire type), before it is converted to the column
    type `wanted`.

    `typed`: the encoding has types, as Avro does, so that text is parsed as text and numbers as numbers. The JSON
    parser makes times and decimals itself. Raises ConfigurationError for a type that no event has.
    """
    if pa.types.is_decimal(wanted):
        if decimals != "precise":
            return wanted if not typed else pa.string() if decimals == "string" else pa.float64()
        if wanted.bit_width > 8 * _DECIMAL_BYTES:
            raise ConfigurationError(
                f"format='debezium': a column of type {wanted} is too wide; use up to 38 digits, or decimals='string'"
            )
        return pa.binary()
    if pa.types.is_date(wanted) or pa.types.is_time32(wanted):
        return pa.int32()
    if pa.types.is_time64(wanted) or pa.types.is_duration(wanted):
        return pa.int64()
    if pa.types.is_timestamp(wanted):
        return pa.int64() if wanted.tz is None else pa.string() if typed else wanted
    if pa.types.is_struct(wanted):
        return pa.struct([pa.field(each.name, wire_type(each.type, decimals, typed=typed)) for each in wanted])
    if pa.types.is_list(wanted):
        return pa.list_(wire_type(wanted.value_type, decimals, typed=typed))
    return wanted


def from_wire(column: pa.Array, wanted: pa.DataType, reasons: dict[int, str]) -> pa.Array:
    """Converts parsed values from their wire type to the type of the column. `reasons` gets the numbers of values that
    do not fit.
    """
    if column.type == wanted:
        return column
    if pa.types.is_struct(wanted):
        parts = [from_wire(part, wanted.field(number).type, reasons) for number, part in enumerate(column.flatten())]
        return pa.StructArray.from_arrays(parts, fields=list(wanted), mask=column.is_null())
    if pa.types.is_list(wanted):
        faults: dict[int, str] = {}
        values = from_wire(column.flatten(), wanted.value_type, faults)
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
        of_value = np.repeat(np.arange(len(column)), lengths)
        for at, reason in faults.items():
            reasons.setdefault(int(of_value[at]), reason)
        offsets = np.zeros(len(column) + 1, dtype=np.int32)
        np.cumsum(lengths, out=offsets[1:])
        return pa.ListArray.from_arrays(pa.array(offsets), values, type=wanted, mask=column.is_null())
    if pa.types.is_string(column.type) or pa.types.is_floating(column.type):
        return _of_texts(column.cast(pa.string()), wanted, reasons)
    if pa.types.is_decimal(wanted):
        return unscaled_decimals(column, wanted, reasons)
    for row in _infinite_rows(column, wanted):
        reasons.setdefault(
            row,
            f"{value_text(column[row].as_py())} is infinity, which {wanted} does not have; read the column as "
            f"pa.{column.type}(), or filter it in the connector",
        )
    if pa.types.is_date64(wanted):
        return column.cast(pa.date32()).cast(wanted)
    if pa.types.is_time(wanted):
        fits = pc.and_(pc.greater_equal(column, 0), pc.less(column, times_per_day(wanted.unit)))
        for row in np.flatnonzero(~pc.fill_null(fits, True).to_numpy(zero_copy_only=False)).tolist():
            reasons.setdefault(row, f"{value_text(column[row].as_py())} is not a time of a day in {wanted.unit}")
    return column.cast(wanted)


_FIRST_DAY = -2_440_588
"""The first day that PostgreSQL has, 4714-11-24 BC, counted from 1970."""
_DAYS = 2_145_042_906
"""The day after the last date that PostgreSQL has, 5874897-12-31, counted from 1970."""
_DAYS_OF_TIMESTAMPS = 106_762_940
"""The day after the last timestamp that PostgreSQL has, 294276-12-31, counted from 1970."""
_INFINITY = {"ms": 9_223_372_036_825_200, "us": 9_223_372_036_825_200_000}
"""The count that Debezium writes for `infinity` of PostgreSQL, by unit. `-infinity` is before the first day."""


def _infinite_rows(column: pa.Array, wanted: pa.DataType) -> list[int]:
    """Returns the rows with an infinity: Debezium writes it as a date or a timestamp that no database has."""
    if pa.types.is_date(wanted):
        outside = pc.or_(pc.less(column, _FIRST_DAY), pc.greater_equal(column, _DAYS))
    elif pa.types.is_timestamp(wanted) and wanted.unit in ("ms", "us"):
        per_day = times_per_day(wanted.unit)
        outside = pc.or_(pc.less(column, _FIRST_DAY * per_day), pc.equal(column, _INFINITY[wanted.unit]))
        if (end := _DAYS_OF_TIMESTAMPS * per_day) <= np.iinfo(np.int64).max:
            outside = pc.or_(outside, pc.greater_equal(column, end))
    else:
        return []
    return np.flatnonzero(pc.fill_null(outside, False).to_numpy(zero_copy_only=False)).tolist()


def _of_texts(texts: pa.Array, wanted: pa.DataType, reasons: dict[int, str]) -> pa.Array:
    """Converts strings to times and decimals, as the JSON parser does. `reasons` gets the numbers of values that do not
    fit.
    """
    field = pa.field("", wanted)
    faults: dict[int, str] = {}
    values = converted(texts, field, converter_of(field, DEFAULTS), faults, blank_is_null=False)
    advice = "" if pa.types.is_decimal(wanted) else "; read the column as pa.string()"
    for row, reason in faults.items():
        reasons.setdefault(row, f"{reason.removeprefix(_NO_NAME)}{advice}")
    return values


_NO_NAME = "column '': "


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
    for size in distinct_integers(sizes[valid & ~unfit]).tolist():
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


UNITS = {
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
_COUNTED = ((pa.types.is_timestamp, "Timestamp"), (pa.types.is_time, "Time"), (pa.types.is_duration, "Duration"))
"""Types that are counts of a unit, and the ends of the names that Debezium has for them."""
_DATES = {"io.debezium.time.Date", "org.apache.kafka.connect.data.Date"}
DECIMAL = "org.apache.kafka.connect.data.Decimal"


def field_difference(described: Mapping[str, Any], wanted: pa.DataType, decimals: Decimals) -> str | None:
    """Returns how a field of an event differs from a column, or None. The text continues a sentence that begins with
    the field's name.

    `described`: the field as Kafka Connect describes it: `type`, and perhaps `name` and `parameters`, `items` of an
    array, `fields` of a struct.
    """
    name = described.get("name")
    if pa.types.is_list(wanted) and "items" in described:
        fault = field_difference(described["items"], wanted.value_type, decimals)
        return None if fault is None else f"has elements of which each {fault}"
    if pa.types.is_struct(wanted) and "fields" in described:
        members = {each["field"]: each for each in described["fields"]}
        faults = (
            (each.name, field_difference(members[each.name], each.type, decimals))
            for each in wanted
            if each.name in members
        )
        return next((f"has the member {member!r}, which {fault}" for member, fault in faults if fault), None)
    is_binary = pa.types.is_binary(wanted) or pa.types.is_large_binary(wanted)
    is_text = pa.types.is_string(wanted) or pa.types.is_large_string(wanted)
    if name != DECIMAL and (is_binary or is_text) and is_binary != (described.get("type") in ("bytes", "fixed")):
        return (
            f"is {described.get('type')} in the event, and {wanted} in value=; give pa.binary() for bytes, and "
            "pa.string() for texts"
        )
    if pa.types.is_decimal(wanted) and decimals == "precise":
        if name != DECIMAL:
            return (
                f"is {name or described['type']} in the event, and {wanted} in value=; give DebeziumFormat(decimals=)"
            )
        scale = int(described.get("parameters", {}).get("scale", 0))
        if scale != wanted.scale:
            return f"has {scale} decimal places in the event, and {wanted.scale} in {wanted}; use the same"
        return None
    if name == DECIMAL:
        return f"is a number of {DECIMAL} in the event, and {wanted} in value=; use pa.decimal128"
    if pa.types.is_date(wanted) and name not in _DATES:
        return _other_form(described, wanted)
    counted = next((suffix for test, suffix in _COUNTED if test(wanted)), None)
    if counted is None or (pa.types.is_timestamp(wanted) and wanted.tz is not None):
        return None
    unit = UNITS.get(name or "")
    if unit is None or not str(name).endswith(counted):
        return _other_form(described, wanted)
    if wanted.unit != unit:
        return f"counts {unit} in the event ({name}), and {wanted.unit} in {wanted}; use the same unit"
    return None


def _other_form(described: Mapping[str, Any], wanted: pa.DataType) -> str:
    name = described.get("name")
    if name in _TEXTS:
        return f"is a string in the event ({name}), and {wanted} in value=; read it as pa.string()"
    found = described["type"] if name is None else f"{described['type']} ({name})"
    return f"is {found} in the event, and {wanted} in value=; read it as it is, and convert it in a step"


def unwritable(kind: pa.DataType, decimals: Decimals, *, typed: bool = False) -> str | None:
    """Returns why events cannot represent values of a type, or None if they can. `typed`: as for `wire_type`."""
    if pa.types.is_dictionary(kind):
        return unwritable(kind.value_type, decimals, typed=typed)
    if pa.types.is_struct(kind):
        return next(
            (unfit for each in kind if (unfit := unwritable(each.type, decimals, typed=typed)) is not None), None
        )
    if pa.types.is_list(kind):
        return unwritable(kind.value_type, decimals, typed=typed)
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
    if any(unwritable(each, decimals) or written_type(each, decimals, typed=typed) != each for each in inner):
        return f"only structs and lists (pa.list_) can have values such as {inner[0]}"
    return None


def written_type(kind: pa.DataType, decimals: Decimals, *, typed: bool = False) -> pa.DataType:
    """Returns the wire type in which values of a column type are written. `typed`: as for `wire_type`."""
    if pa.types.is_dictionary(kind):
        return written_type(kind.value_type, decimals, typed=typed)
    if pa.types.is_decimal(kind) and decimals == "string":
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, written_type(each.type, decimals, typed=typed)) for each in kind])
    if pa.types.is_list(kind):
        return pa.list_(written_type(kind.value_type, decimals, typed=typed))
    return wire_type(kind, decimals, typed=typed)


def to_wire(
    column: pa.Array,
    decimals: Decimals,
    name: str,
    rows: NDArray[np.int64],
    bad: dict[int, str],
    *,
    typed: bool = False,
) -> pa.Array:
    """Converts values to their wire type in events: the inverse of `from_wire`.

    `name`: the column, for reasons. `rows`: the row number of each value. Values that events cannot represent become
    null, and their rows go to `bad`.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        return to_wire(column.dictionary_decode(), decimals, name, rows, bad, typed=typed)
    wire = written_type(kind, decimals, typed=typed)
    if wire == kind:
        return column
    if pa.types.is_struct(kind):
        parts = [
            to_wire(part, decimals, f"{name}.{each.name}", rows, bad, typed=typed)
            for each, part in zip(kind, column.flatten(), strict=True)
        ]
        return pa.StructArray.from_arrays(parts, fields=list(wire), mask=column.is_null())
    if pa.types.is_list(kind):
        # A null list may have entries, which `flatten` leaves away.
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
        offsets = np.zeros(len(column) + 1, dtype=np.int32)
        np.cumsum(lengths, out=offsets[1:])
        values = to_wire(column.flatten(), decimals, name, np.repeat(rows, lengths), bad, typed=typed)
        return pa.ListArray.from_arrays(pa.array(offsets), values, type=wire, mask=column.is_null())
    if pa.types.is_decimal(kind) and decimals == "precise":
        return unscaled_bytes(column)
    faults = _unwritable(column, wire)
    for at, reason in faults.items():
        bad.setdefault(int(rows[at]), f"column {name!r} {reason}")
    if faults:
        keep = np.ones(len(column), dtype=np.bool_)
        keep[list(faults)] = False
        column = pc.if_else(pa.array(keep), column, pa.scalar(None, kind))
    if pa.types.is_timestamp(kind) and pa.types.is_string(wire):
        text = column.cast(pa.timestamp(kind.unit, "UTC")).cast(pa.string())
        return pc.replace_substring(text, " ", "T", max_replacements=1)
    if pa.types.is_date64(kind):
        column = column.cast(pa.date32())
    return column.cast(wire)


def _unwritable(column: pa.Array, wire: pa.DataType) -> dict[int, str]:
    """Returns the reasons for dates and times that have no wire form, by row number. A reason follows the name of the
    column.
    """
    kind = column.type
    if pa.types.is_time(kind):
        return times_beyond_a_day(column)
    # Dates and timestamps without a zone are counts, which represent any year.
    if pa.types.is_date64(kind) or (pa.types.is_timestamp(kind) and pa.types.is_string(wire)):
        return unwritable_times(column)
    return {}


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
