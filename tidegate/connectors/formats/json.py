"""`JsonFormat`: each payload is one JSON object. `json_decoder.py` decodes them; this module encodes them.

Rules of the writer:

- A row becomes an object with a member for each column, in the order of the columns. A null is `null`.
- Arrow formats a column at a time, and the texts are joined to objects at the end.
- A written value is read back as the same value, and is valid JSON. A row with NaN or an infinity is bad, and so is one
  with a year outside 0 to 9999, a time of day in a date, a time outside of a day, or a map that has a key twice.
- Dates, times and timestamps are ISO 8601 strings (a timestamp with a zone ends with Z), bytes are Base64, and decimals
  are numbers with all of their digits. A map is an object, so its keys must be strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.connectors.formats.format import (
    DecodedRecords,
    EncodedRecords,
    Format,
    PayloadDecoder,
    PayloadEncoder,
    PayloadUse,
    ReadFormat,
    WriteFormat,
    good_payloads,
    repeated_keys,
    required_columns,
)
from tidegate.connectors.formats.json_decoder import JsonDecoder
from tidegate.connectors.formats.payload_block import Block
from tidegate.connectors.formats.text import unwritable_times
from tidegate.storage.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class JsonFormat(Format):
    """JSON objects without a schema registry.

    Example:

        >>> tg.JsonFormat().kind
        'json'
    """

    kind = "json"

    def for_reading(self, columns: pa.Schema | None, use: PayloadUse) -> ReadFormat:
        """Binds the format to the columns of a source.

        Raises ConfigurationError for types that JSON cannot represent.
        """
        found = JsonRead(required_columns(columns, self.kind, use))
        found.decoder()
        return found

    def for_writing(self, columns: pa.Schema, use: PayloadUse) -> WriteFormat:
        """Binds the format to the columns of a sink. Raises ConfigurationError for types that JSON cannot represent."""
        check_json_types(columns, use)
        return JsonWrite()


@dataclass(frozen=True, slots=True)
class JsonRead(ReadFormat):
    """JSON bound to the columns of a source."""

    columns: pa.Schema

    @property
    def schema(self) -> pa.Schema:
        """Returns the columns of every decoded batch."""
        return self.columns

    def decoder(self) -> PayloadDecoder:
        """Returns a decoder for one task."""
        return _JsonPayloads(self.columns)


class _JsonPayloads(PayloadDecoder):
    def __init__(self, columns: pa.Schema) -> None:
        self._decoder = JsonDecoder(columns)

    def decode(self, payloads: pa.Array) -> DecodedRecords:
        return self._decoder.records(Block.of(payloads))


@dataclass(frozen=True, slots=True)
class JsonWrite(WriteFormat):
    """JSON bound to the columns of a sink."""

    def encoder(self) -> PayloadEncoder:
        """Returns an encoder for one task."""
        return JsonEncoder()


class JsonEncoder(PayloadEncoder):
    """Encodes rows as JSON objects."""

    def encode(self, batch: pa.RecordBatch, topic: str = "") -> EncodedRecords:
        """Encodes each row as a JSON object. A row with a float that is not finite is bad."""
        bad: dict[int, str] = {}
        rows = np.arange(batch.num_rows, dtype=np.int64)
        fields = list(zip(batch.schema.names, batch.columns, strict=True))
        texts = [(name, *_member(column, name, rows, bad)) for name, column in fields]
        return good_payloads(_objects(texts, batch.num_rows).cast(pa.binary()), bad)


def check_json_types(columns: pa.Schema, use: PayloadUse, kind: str = "json") -> None:
    """Raises ConfigurationError for a column of a type that JSON cannot represent."""
    for field in columns:
        if (unfit := _unfit(field.type)) is not None:
            raise ConfigurationError(
                f"{use.method}(format={kind!r}): column {field.name!r} is {field.type}; {unfit} cannot be written as "
                "JSON. Convert it in a step before"
            )


def _unfit(kind: pa.DataType) -> str | None:
    """Returns text that names the part of a type that JSON cannot represent, or None if JSON can represent the whole
    type.
    """
    if pa.types.is_map(kind):
        if not _is_string(kind.key_type):
            return f"a map with keys of type {kind.key_type}"
        return _unfit(kind.item_type)
    if pa.types.is_dictionary(kind):
        return _unfit(kind.value_type)
    if pa.types.is_struct(kind):
        names = [each.name for each in kind]
        if twice := [name for name in names if names.count(name) > 1]:
            return f"a struct with two fields {twice[0]!r}"
        return next((unfit for each in kind if (unfit := _unfit(each.type)) is not None), None)
    if _is_list(kind):
        return _unfit(kind.value_type)
    tests = (
        *(pa.types.is_null, pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal),
        *(_is_string, _is_binary, pa.types.is_date, pa.types.is_time, pa.types.is_timestamp),
    )
    return None if any(test(kind) for test in tests) else f"the type {kind}"


def json_texts(column: pa.Array, name: str, rows: NDArray[np.int64], bad: dict[int, str]) -> pa.Array:
    """Returns the JSON text of each value, "null" for a null.

    `rows` is the row number of each value. Bad rows go to `bad`.
    """
    kind = column.type
    if pa.types.is_null(kind):
        return _repeated("null", len(column))
    if pa.types.is_dictionary(kind):
        return json_texts(column.cast(kind.value_type), name, rows, bad)
    if pa.types.is_struct(kind):
        # `flatten` makes the fields of a null struct null.
        parts = zip(kind, column.flatten(), strict=True)
        texts = [(each.name, *_member(part, f"{name}.{each.name}", rows, bad)) for each, part in parts]
        return _with_nulls(_objects(texts, len(column)), column)
    if pa.types.is_map(kind) or _is_list(kind):
        return _sequence_texts(column, name, rows, bad)
    if pa.types.is_floating(kind):
        odd = pc.fill_null(pc.invert(pc.is_finite(column)), False)
        for entry in np.flatnonzero(odd.to_numpy(zero_copy_only=False)).tolist():
            reason = f"column {name!r} is NaN or infinite, which JSON cannot hold; make it null in a step before"
            bad.setdefault(int(rows[entry]), reason)
        column = column.cast(pa.float32()) if pa.types.is_float16(kind) else column
    for entry, reason in unwritable_times(column).items():
        bad.setdefault(int(rows[entry]), f"column {name!r} {reason}")
    texts = _text_of(column)
    return _with_nulls(texts, column)


def _text_of(column: pa.Array) -> pa.Array:
    """Returns the JSON text of values of a type that is not nested; null for a null."""
    kind = column.type
    if _is_string(kind):
        return _quoted(_escaped(column.cast(pa.string())))
    if _is_binary(kind):
        import polars as pl

        return _quoted(pl.Series(column.cast(pa.large_binary())).bin.encode("base64").to_arrow().cast(pa.string()))
    if pa.types.is_date(kind) or pa.types.is_time(kind):
        return _quoted(column.cast(pa.string()))
    if pa.types.is_timestamp(kind):
        utc = column if kind.tz is None else column.cast(pa.timestamp(kind.unit, "UTC"))
        return _quoted(pc.replace_substring(utc.cast(pa.string()), " ", "T", max_replacements=1))
    return column.cast(pa.string())


def _sequence_texts(column: pa.Array, name: str, rows: NDArray[np.int64], bad: dict[int, str]) -> pa.Array:
    """Returns the JSON texts of lists (as arrays) and maps (as objects)."""
    is_map = pa.types.is_map(column.type)
    inner = pa.struct([column.type.key_field, column.type.item_field]) if is_map else column.type.value_type
    lists = column.cast(pa.list_(inner))
    # A null list may have entries, which do not count.
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    values = pc.list_flatten(lists)
    rows_below = np.repeat(rows, lengths)
    if is_map:
        keys, items = values.flatten()
        for entry in repeated_keys(keys, lengths).tolist():
            reason = f"column {name!r} is a map with a key twice, of which readers of JSON keep one; make keys unique"
            bad.setdefault(int(rows_below[entry]), reason)
        texts = json_texts(items, name, rows_below, bad)
        texts = pc.binary_join_element_wise(_quoted(_escaped(keys.cast(pa.string()))), texts, ":")
        opening, closing = "{", "}"
    else:
        texts = json_texts(values, name, rows_below, bad)
        opening, closing = "[", "]"
    offsets = np.zeros(len(lists) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), texts), ",")
    return _with_nulls(pc.binary_join_element_wise(opening, joined, closing, ""), column)


def json_objects(texts: Sequence[tuple[str, pa.Array]], count: int) -> pa.Array:
    """Builds `count` JSON objects from pairs of member name and JSON texts of its values."""
    return _objects([(name, values, False) for name, values in texts], count)


def _member(column: pa.Array, name: str, rows: NDArray[np.int64], bad: dict[int, str]) -> tuple[pa.Array, bool]:
    """Returns the JSON texts of a column.

    The second result is True if they are strings without quotation marks, which `_objects` adds.
    """
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    # `_objects` adds the marks while it joins, which saves a copy.
    if _is_string(column.type) and not column.null_count:
        return _escaped(column.cast(pa.string())), True
    return json_texts(column, name, rows, bad), False


def _objects(texts: Sequence[tuple[str, pa.Array, bool]], count: int) -> pa.Array:
    """Builds `count` JSON objects from members: name, JSON texts, and whether the texts are strings without
    quotation marks.
    """
    if not texts:
        return _repeated("{}", count)
    pieces: list[str | pa.Array] = []
    before = "{"
    for name, values, lacks_marks in texts:
        mark = '"' if lacks_marks else ""
        pieces += [f"{before}{json.dumps(name, ensure_ascii=False)}:{mark}", values]
        before = f"{mark},"
    return pc.binary_join_element_wise(*pieces, f"{before[:-1]}}}", "")


_SPECIAL = re.compile(rb'["\\\x00-\x1f]')
_FIRST_PRINTABLE = 0x20


def _escaped(texts: pa.Array) -> pa.Array:
    """Returns strings with quotes, backslashes and control characters escaped for JSON."""
    _, offset_buffer, data = texts.buffers()
    present: set[bytes] = set()
    if data is not None and len(texts):
        # A slice shares the buffers of its parent, whose other texts do not count.
        offsets = np.frombuffer(offset_buffer, dtype=np.int32, count=len(texts) + 1, offset=4 * texts.offset)
        own = data.slice(offsets[0], offsets[-1] - offsets[0]).to_pybytes()
        # Most texts have none. To find that out, three passes by the processor's vectors cost a tenth of a search.
        if b'"' in own or b"\\" in own or (own and np.frombuffer(own, dtype=np.uint8).min() < _FIRST_PRINTABLE):
            present = set(_SPECIAL.findall(own))
    for found in sorted(present, key=lambda each: each != b"\\"):
        texts = pc.replace_substring(texts, found.decode(), json.dumps(found.decode())[1:-1])
    return texts


def _quoted(texts: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise('"', texts, '"', "")


def _with_nulls(texts: pa.Array, column: pa.Array) -> pa.Array:
    return texts if not column.null_count else pc.if_else(column.is_null(), "null", texts)


def _repeated(text: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(text, pa.string()), count)


def _is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_binary(kind: pa.DataType) -> bool:
    large = pa.types.is_large_binary(kind)
    return bool(pa.types.is_binary(kind) or large or pa.types.is_fixed_size_binary(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
