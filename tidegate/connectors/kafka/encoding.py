"""`RecordLayout` maps columns of a row to the parts of a Kafka record, and `RecordMaker` encodes the records.

Rules:

- Batches of rows become batches of records (`RECORD_FIELDS` of `producer.py`), a column at a time.
- A row that cannot be encoded is bad: its number is reported with the reason, and all good rows are written.
- A format encodes keys and values from their columns (`tidegate/connectors/formats/format.py`). If it returns null, the
  record has no key, or is a tombstone.
- A change of a row (`RowChanges`) becomes one record, which is a tombstone if the row was deleted. If the format writes
  changes itself, a deletion has a value and is followed by a tombstone, for log compaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.connectors.formats.format import EncodedRecords, PayloadEncoder, RowChanges, WriteFormat
from tidegate.connectors.formats.raw import as_bytes
from tidegate.connectors.kafka.options import is_topic_name
from tidegate.connectors.kafka.producer import HEADERS
from tidegate.connectors.kafka.topics import KnownTopics, rows_by_topic
from tidegate.state.kernels.distinct_integers import distinct_integers
from tidegate.state.kernels.partition import gather
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.user_values import value_text

_HEADER_BYTES = 12
"""Maximum overhead in bytes of a record header, in addition to its name and value."""
_TEXTS = (pa.types.is_string, pa.types.is_large_string)
_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """The columns of each part of a Kafka record, and the formats of key and value. None for an absent part."""

    value: tuple[str, ...]
    value_format: WriteFormat
    key: tuple[str, ...] = ()
    key_format: WriteFormat | None = None
    """None without a key."""
    topic: str | None = None
    partition: str | None = None
    timestamp: str | None = None
    headers: Mapping[str, str] | str | None = None
    """A column for each header, by header name, or the name of one column with all headers of a record."""
    replaces: bool = False
    """True if a record replaces the earlier record with its key (a compacted topic)."""

    @property
    def writes_changes(self) -> bool:
        """Returns True if a record's value is a change, with the old row and the new row."""
        return self.value_format.writes_changes

    @property
    def columns(self) -> frozenset[str]:
        """Returns the names of the columns that the record layout reads."""
        headers = [self.headers] if isinstance(self.headers, str) else (self.headers or {}).values()
        single = [name for name in (self.topic, self.partition, self.timestamp) if name is not None]
        return frozenset([*self.value, *self.key, *single, *headers])

    @property
    def schema(self) -> pa.Schema:
        """Returns the columns of a batch of encoded records."""
        parts = [pa.field("topic", pa.string())] if self.topic is not None else []
        parts += [pa.field("partition", pa.int32())] if self.partition is not None else []
        parts += [pa.field("key", pa.binary())] if self.key else []
        parts.append(pa.field("value", pa.binary()))
        parts += [pa.field("headers", HEADERS)] if self.headers else []
        parts += [pa.field("timestamp", pa.int64())] if self.timestamp is not None else []
        return pa.schema(parts)

    def check(self, schema: pa.Schema) -> None:
        """Raises ConfigurationError for columns that do not exist, or whose type does not fit their part of the
        record.
        """
        where = "to_kafka"
        for column in sorted(self.columns):
            if column not in schema.names:
                raise ConfigurationError(f"{where}: there is no column {column!r}; name one of {schema.names}")
        needs: list[tuple[str, str | None, Iterable[Any], str]] = [
            ("topic", self.topic, _TEXTS, "strings"),
            ("partition", self.partition, (pa.types.is_integer,), "integers"),
            ("timestamp", self.timestamp, (pa.types.is_timestamp, pa.types.is_integer), "timestamps"),
        ]
        if isinstance(self.headers, str):
            needs.append(("headers", self.headers, (_holds_headers,), "lists of structs (key: string, value: bytes)"))
        else:
            named = (self.headers or {}).values()
            needs += [("headers", column, (*_TEXTS, *_BYTES), "strings or bytes") for column in named]
        for part, name, tests, wanted in needs:
            if name is not None and not any(test(schema.field(name).type) for test in tests):
                raise ConfigurationError(
                    f"{where}({part}=): column {name!r} is {schema.field(name).type}; it must have {wanted}. Convert "
                    "it in a step before"
                )


def _holds_headers(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return False
    names = [each.name for each in kind.value_type]
    if names != ["key", "value"]:
        return False
    key, value = (each.type for each in kind.value_type)
    return any(test(key) for test in _TEXTS) and any(test(value) for test in (*_TEXTS, *_BYTES))


@dataclass(frozen=True, slots=True)
class MadeRecords:
    """Encoded Kafka records of the good rows or changes, in order, and the reasons for bad rows, by row number."""

    records: pa.RecordBatch
    bad: dict[int, str] = field(default_factory=dict)


class RecordMaker:
    """Encodes rows as Kafka records. Called from one thread at a time."""

    def __init__(
        self, layout: RecordLayout, topic: str | None, record_limit: int, known_topics: KnownTopics | None = None
    ) -> None:
        """`topic`: for layouts without a topic column. `record_limit`: maximum size of a record in bytes.

        `known_topics`: detects rows for topics that do not exist or lack the partition.
        """
        self._layout = layout
        self._topic = topic
        self._record_limit = record_limit
        self._known_topics = known_topics
        self._schema = layout.schema
        self._values = layout.value_format.encoder()
        self._keys = layout.key_format.encoder() if layout.key_format is not None else None

    def close(self) -> None:
        """Closes the encoders."""
        self._values.close()
        if self._keys is not None:
            self._keys.close()

    def make(self, batch: pa.RecordBatch, changes: RowChanges | None = None) -> MadeRecords:
        """Encodes one record for each row, or for each change of rows."""
        layout = self._layout
        bad: dict[int, str] = {}
        made: dict[str, pa.Array] = {}
        rows = batch if changes is None else gather(batch, changes.rows.astype(np.int32))
        if layout.topic is not None:
            made["topic"] = _topics(rows.column(layout.topic), layout.topic, bad)
        if layout.partition is not None:
            made["partition"] = _partitions(rows.column(layout.partition), layout.partition, bad)
        if self._known_topics is not None:
            unknown = self._known_topics.bad_rows(made.get("topic"), made.get("partition"), rows.num_rows)
            if unknown and "topic" in made:
                # A format may keep schemas by topic, so that no value is encoded for a topic that does not exist.
                there = np.ones(rows.num_rows, dtype=np.bool_)
                there[list(unknown)] = False
                made["topic"] = pc.if_else(pa.array(there), made["topic"], pa.scalar(None, pa.string()))
            bad |= unknown
        if layout.timestamp is not None:
            made["timestamp"] = _timestamps(rows.column(layout.timestamp), layout.timestamp, bad)
        if self._keys is not None:
            made["key"] = self._payloads(self._keys, rows.select(list(layout.key)), made.get("topic"), bad)
        if changes is None:
            made["value"] = self._payloads(self._values, rows.select(list(layout.value)), made.get("topic"), bad)
        else:
            made["value"] = self._changed_values(batch, rows, changes, made, bad)
        if layout.replaces and made["key"].null_count:
            for number in np.flatnonzero(made["key"].is_null().to_numpy(zero_copy_only=False)).tolist():
                bad.setdefault(number, "the key is null, so that a later change of the row could not replace it")
        if layout.headers:
            made["headers"] = _headers(rows, layout.headers, bad)
        self._check_sizes(made, rows.num_rows, bad)
        if self._known_topics is not None:
            topics, keys, times = (made.get(name) for name in ("topic", "key", "timestamp"))
            bad = {**self._known_topics.refused_rows(topics, keys, times, rows.num_rows), **bad}
        records = pa.RecordBatch.from_arrays([made[name] for name in self._schema.names], schema=self._schema)
        keep = np.ones(rows.num_rows, dtype=np.bool_)
        if bad:
            keep[list(bad)] = False
            records = records.filter(pa.array(keep))
        if changes is None:
            return MadeRecords(records, bad)
        if layout.writes_changes:
            records = _with_tombstones(records, (changes.after < 0)[keep])
        of_rows = changes.rows
        return MadeRecords(records, {int(of_rows[number]): reason for number, reason in bad.items()})

    def _changed_values(
        self,
        batch: pa.RecordBatch,
        rows: pa.RecordBatch,
        changes: RowChanges,
        made: Mapping[str, pa.Array],
        bad: dict[int, str],
    ) -> pa.Array:
        """Encodes the values of changes. `rows`: for each change, the row that has its key."""
        names = list(self._layout.value)
        if self._layout.writes_changes:
            found = self._values.encode_changes(batch.select(names), changes, made.get("timestamp"), self._topic or "")
            return _aligned(found, len(changes), bad)
        unread: dict[int, str] = {}
        values = self._payloads(self._values, rows.select(names), made.get("topic"), unread)
        deleted = changes.after < 0
        for number, reason in unread.items():
            if not deleted[number]:
                bad.setdefault(number, reason)
        return pc.if_else(pa.array(deleted), pa.scalar(None, pa.binary()), values)

    def _payloads(
        self, encoder: PayloadEncoder, rows: pa.RecordBatch, topics: pa.Array | None, bad: dict[int, str]
    ) -> pa.Array:
        if topics is None:
            return _aligned(encoder.encode(rows, self._topic or ""), rows.num_rows, bad)
        parts = list(rows_by_topic(topics))
        if len(parts) == 1 and len(parts[0][1]) == rows.num_rows:
            return _aligned(encoder.encode(rows, parts[0][0]), rows.num_rows, bad)
        found: list[pa.Array] = []
        places: list[NDArray[np.int64]] = []
        for topic, numbers in parts:
            reasons: dict[int, str] = {}
            found.append(_aligned(encoder.encode(rows.take(pa.array(numbers)), topic), len(numbers), reasons))
            places.append(numbers)
            bad |= {int(numbers[number]): reason for number, reason in reasons.items()}
        # Rows without a valid topic are bad already, and have no payload.
        order = np.full(rows.num_rows, -1, dtype=np.int64)
        if places:
            order[np.concatenate(places)] = np.arange(sum(map(len, places)))
        return pa.concat_arrays(found or [pa.array([], pa.binary())]).take(pa.array(order, mask=order < 0))

    def _check_sizes(self, made: Mapping[str, pa.Array], count: int, bad: dict[int, str]) -> None:
        sizes = np.zeros(count, dtype=np.int64)
        for name in ("key", "value"):
            if name in made:
                sizes += pc.fill_null(pc.binary_length(made[name]), 0).to_numpy()
        if "headers" in made:
            sizes += _header_sizes(made["headers"])
        for number in np.flatnonzero(sizes > self._record_limit).tolist():
            bad.setdefault(
                number,
                f"the record has {int(sizes[number])} bytes; the topic takes up to {self._record_limit}. Raise "
                "max.message.bytes of the topic (and message.max.bytes in properties=, if it is set)",
            )


def _with_tombstones(records: pa.RecordBatch, deleted: NDArray[np.bool_]) -> pa.RecordBatch:
    """Inserts a tombstone with the same key after each deletion."""
    if not deleted.any():
        return records
    repeats = 1 + deleted.astype(np.int64)
    ends = np.cumsum(repeats) - 1
    is_tombstone = np.zeros(int(repeats.sum()), dtype=np.bool_)
    is_tombstone[ends[deleted]] = True
    records = records.take(pa.array(np.repeat(np.arange(len(repeats)), repeats)))
    number = records.schema.get_field_index("value")
    values = pc.if_else(pa.array(is_tombstone), pa.scalar(None, pa.binary()), records.column(number))
    return records.set_column(number, records.schema.field(number), values)


def _aligned(encoded: EncodedRecords, count: int, bad: dict[int, str]) -> pa.Array:
    """Returns a payload for each row, null for bad rows, whose reasons are added to `bad`."""
    payloads = encoded.payloads if encoded.payloads.type == pa.binary() else encoded.payloads.cast(pa.binary())
    if isinstance(payloads, pa.ChunkedArray):
        payloads = payloads.combine_chunks()
    if not encoded.bad:
        return payloads
    bad |= encoded.bad
    good = np.ones(count, dtype=np.bool_)
    good[list(encoded.bad)] = False
    places = np.cumsum(good) - 1
    return payloads.take(pa.array(places, mask=~good))


def _topics(column: pa.Array, name: str, bad: dict[int, str]) -> pa.Array:
    column = column.cast(pa.string())
    encoded = column.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    wrong = {code for code, topic in enumerate(names) if not is_topic_name(topic)}
    codes = pc.fill_null(encoded.indices, -1).to_numpy()
    faulty = codes < 0
    for code in wrong:
        faulty |= codes == code
    for number in np.flatnonzero(faulty).tolist():
        found = "null" if codes[number] < 0 else value_text(names[codes[number]])
        bad[number] = f"column {name!r} is {found}, which is not the name of a topic"
    return pc.if_else(pa.array(faulty), pa.scalar(None, pa.string()), column) if faulty.any() else column


def _partitions(column: pa.Array, name: str, bad: dict[int, str]) -> pa.Array:
    values = pc.fill_null(column.cast(pa.int64(), safe=False), -1).to_numpy()
    null = column.is_null().to_numpy(zero_copy_only=False)
    faulty = ~null & ((values < 0) | (values > np.iinfo(np.int32).max))
    for number in np.flatnonzero(faulty).tolist():
        bad.setdefault(number, f"column {name!r} is {int(values[number])}, which is not a partition")
    return pa.array(np.where(faulty, 0, values).astype(np.int32), mask=null)


def _timestamps(column: pa.Array, name: str, bad: dict[int, str]) -> pa.Array:
    """Returns timestamps in milliseconds since 1970."""
    kind = column.type
    # Other units and types are converted below, and would wrap around beyond these limits.
    in_seconds = pa.types.is_timestamp(kind) and kind.unit == "s"
    given = column.cast(pa.int64()) if pa.types.is_timestamp(kind) else column
    limit = np.iinfo(np.int64).max // (1_000 if in_seconds else 1)
    far = np.zeros(len(column), dtype=np.bool_)
    if in_seconds or kind == pa.uint64():
        far = pc.fill_null(pc.greater(given, pa.scalar(limit, given.type)), False).to_numpy(zero_copy_only=False)
    early = pc.fill_null(pc.less(given, pa.scalar(0, given.type)), False).to_numpy(zero_copy_only=False)
    if pa.types.is_timestamp(kind):
        column = column.cast(pa.timestamp("ms", kind.tz), safe=False)
    for number in np.flatnonzero(far).tolist():
        bad.setdefault(number, f"column {name!r} is too far in the future for a timestamp of Kafka")
    for number in np.flatnonzero(early).tolist():
        bad.setdefault(number, f"column {name!r} is before 1970, which is not a timestamp of Kafka")
    return column.cast(pa.int64(), safe=False)


def _headers(batch: pa.RecordBatch, headers: Mapping[str, str] | str, bad: dict[int, str]) -> pa.Array:
    """Returns the headers of each record. A record with a header without a name is bad, and has no headers."""
    if isinstance(headers, str):
        found = batch.column(headers).cast(HEADERS)
        pairs = pc.list_flatten(found)
        nameless = pairs.flatten()[0].is_null().to_numpy(zero_copy_only=False)
        if not nameless.any():
            return found
        of_pair = np.repeat(np.arange(len(found)), pc.fill_null(pc.list_value_length(found), 0).to_numpy())
        wrong = distinct_integers(of_pair[nameless])
        for number in wrong.tolist():
            bad.setdefault(number, f"column {headers!r} has a header whose key is null; a header of Kafka has a key")
        return pc.if_else(pa.array(np.isin(np.arange(len(found)), wrong)), pa.scalar(None, HEADERS), found)
    count = batch.num_rows
    columns = [as_bytes(batch.column(column)) for column in headers.values()]
    keys = pa.DictionaryArray.from_arrays(
        pa.array(np.tile(np.arange(len(headers), dtype=np.int32), count)), pa.array(list(headers), pa.string())
    ).cast(pa.string())
    # Columns, one after the other, become rows with a value of each.
    order = np.arange(len(columns) * count, dtype=np.int64).reshape(len(columns), count).T.ravel()
    values = pa.concat_arrays(columns).take(pa.array(order))
    pairs = pa.StructArray.from_arrays([keys, values], fields=list(HEADERS.value_type))
    offsets = np.arange(0, len(columns) * count + 1, len(columns), dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pairs).cast(HEADERS)


def _header_sizes(headers: pa.Array) -> NDArray[np.int64]:
    lengths = pc.fill_null(pc.list_value_length(headers), 0).to_numpy()
    pairs = pc.list_flatten(headers)
    keys, values = pairs.flatten()
    sizes = pc.binary_length(keys).to_numpy() + pc.fill_null(pc.binary_length(values), 0).to_numpy() + _HEADER_BYTES
    sums = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    ends = np.cumsum(lengths)
    found: NDArray[np.int64] = sums[ends] - sums[ends - lengths]
    return found
