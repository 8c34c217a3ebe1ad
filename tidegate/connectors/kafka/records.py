"""`Records` of a Kafka partition, a buffer for them, and `RecordReader`, which decodes them to rows a batch at a time.

Rules:

- The needed parts of records are copied from the client's messages at once, to one Arrow array for each part.
- Formats decode values and keys to columns (`tidegate/connectors/formats/format.py`). A record without a value, a
  tombstone, is a row of nulls. A key is one column, a struct if its format has several columns.
- Formats of change data decode values and keys to row versions (`formats/row_versions.py`).
- Whether a record can be read depends on that record alone, and not on the records that are fetched with it.
- A record that cannot be decoded raises an error that names topic, partition and offset, or becomes a dead letter.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.connectors.bad_rows import BadRows, BadRowsLog
from tidegate.connectors.formats.format import PayloadDecoder, ReadFormat
from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

log = logging.getLogger(__name__)
KEY = "kafka_key"
TIMESTAMP = "kafka_timestamp"
_TIME = pa.timestamp("ms", "UTC")
_RECORD_BYTES = 40
"""Assumed memory of a record in bytes, in addition to its value, key and headers."""
_HEADER_BYTES = 20
"""Assumed memory of a record header in bytes, in addition to its name and value."""
_TAKEN_BYTES_MAX = 1 << 30
"""Maximum size in bytes of records that are joined. Arrow's offsets have 32 bits."""
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
METADATA = {
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": _TIME,
    "headers": _HEADERS,
    "tombstone": pa.bool_(),
}
"""Optional columns with metadata of a record. With the columns of a schema, their names begin with `kafka_`."""
LETTERS = pa.schema(
    [
        ("raw", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("error", pa.string()),
    ]
)
"""Schema of the dead letters of Kafka. `raw` is the value of the record."""
_PLACE = "the record at offset {offset} of partition {partition} of {topic!r}"


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """The formats of values and keys, and the optional metadata columns, which define the columns of rows.

    - `key`: None for rows without the key.
    - `plain`: the columns are those in Spark's Kafka source: key, value, topic, partition, offset and timestamp.
      Otherwise they are the columns of the values, the column `kafka_key`, and the metadata.
    """

    value: ReadFormat
    key: ReadFormat | None = None
    metadata: tuple[str, ...] = ()
    plain: bool = False

    def __post_init__(self) -> None:
        if unknown := [name for name in self.metadata if name not in METADATA]:
            raise ConfigurationError(
                f"from_kafka(metadata=): unknown column {unknown[0]!r}; give some of {', '.join(METADATA)}"
            )
        if self.value.has_changes and self.key is not None:
            raise ConfigurationError("from_kafka: key= does not apply to change data; name the keys with keys=")
        if self.plain:
            return
        columns = self.value.schema.names
        if not columns:
            raise ConfigurationError("from_kafka(value=): the schema has no columns; name one, or give metadata=")
        if taken := {KEY, *(f"kafka_{name}" for name in METADATA)} & set(columns):
            raise ConfigurationError(
                f"from_kafka(value=): the name {min(taken)!r} is reserved; rename the column in the schema"
            )

    def check_partitions(self, counts: Mapping[str, int]) -> None:
        """Raises ConfigurationError if the format needs one order of all events, and a topic has several partitions.

        `counts`: number of partitions of each topic.
        """
        if not self.value.needs_one_partition:
            return
        for topic, count in counts.items():
            if count > 1:
                raise ConfigurationError(
                    f"from_kafka(format='debezium'): topic {topic!r} has {count} partitions, and a truncated table has "
                    "no order among them. Use a topic with one partition, or DebeziumFormat(truncates='fail')"
                )

    @property
    def schema(self) -> pa.Schema:
        """Returns the columns of the source."""
        if self.plain:
            assert self.key is not None
            columns = [pa.field("key", self._key_type), pa.field("value", self.value.schema[0].type)]
            return pa.schema([*columns, *(pa.field(name, METADATA[name]) for name in self._named)])
        more = [pa.field(KEY, self._key_type)] if self.key is not None else []
        named = [pa.field(f"kafka_{name}", METADATA[name]) for name in self._named]
        return pa.schema([*self.value.schema, *more, *named])

    @property
    def _key_type(self) -> pa.DataType:
        """Returns the type of the column with the record keys."""
        assert self.key is not None
        return self.key.schema[0].type if self.key.single else pa.struct(list(self.key.schema))

    @property
    def _named(self) -> tuple[str, ...]:
        """Returns the names of the metadata columns in the rows."""
        if not self.plain:
            return self.metadata
        always = ("topic", "partition", "offset", "timestamp")
        return (*always, *(name for name in self.metadata if name not in always))

    @property
    def parts(self) -> Sequence[str]:
        """Returns the parts of records that rows need, as `Records.columns` names them."""
        with_keys = self.key is not None or self.value.has_changes
        held = [name for name in ("timestamp", "headers") if name in self._named]
        if "headers" not in held and (self.value.has_registry or (self.key is not None and self.key.has_registry)):
            held.append("headers")  # They may have the id of a schema, which is refused.
        return ("value", *(("key",) if with_keys else ()), *held)

    def metadata_of(self, records: Records) -> list[pa.Array]:
        """Returns the metadata columns of the records."""
        return [_METADATA_OF[name](records) for name in self._named]


@dataclass(frozen=True, slots=True)
class Records:
    """Consecutive records of a partition, as one array for each needed part of a record.

    `offsets`: the offset of each record, ascending. `columns`: "value" (binary, null for a tombstone), and optionally
    "key" (binary, null for none), "timestamp" (int64, ms since 1970) and "headers" (a list of names and values).
    """

    topic: str
    partition: int
    offsets: NDArray[np.int64]
    columns: Mapping[str, pa.Array]

    @staticmethod
    def of_messages(topic: str, partition: int, names: Collection[str], messages: Sequence[Message]) -> Records:
        """Copies parts of messages of `confluent_kafka` (at least one)."""
        kind: Any = type(messages[0])
        columns = {}
        for name in names:
            found = list(map(getattr(kind, name), messages))
            if name == "headers":
                columns[name] = headers_array([each or () for each in found])
            elif name == "timestamp":
                columns[name] = pa.array([at_ms for _, at_ms in found], pa.int64())
            else:
                columns[name] = pa.array(found, pa.binary())
        offsets = np.fromiter(map(kind.offset, messages), np.int64, len(messages))
        return Records(topic, partition, offsets, columns)

    def __len__(self) -> int:
        return len(self.offsets)

    def slice(self, begin: int, end: int) -> Records:
        """Returns the records with indices from `begin` to before `end`, without a copy."""
        columns = {name: column.slice(begin, end - begin) for name, column in self.columns.items()}
        return Records(self.topic, self.partition, self.offsets[begin:end], columns)

    def only(self, numbers: NDArray[np.int64]) -> Records:
        """Returns the records with these indices."""
        indexes = pa.array(numbers)
        columns = {name: column.take(indexes) for name, column in self.columns.items()}
        return Records(self.topic, self.partition, self.offsets[numbers], columns)

    @property
    def values(self) -> pa.Array:
        """Returns the values of the records; null for a tombstone."""
        return self.columns["value"]

    @property
    def size_bytes(self) -> int:
        """Returns the memory of the records in bytes."""
        return _RECORD_BYTES * len(self) + sum(_bytes_of(name, column) for name, column in self.columns.items())


@dataclass(frozen=True, slots=True)
class FetchReport:
    """An error or the end of a partition, at an offset. `topic` is "" for a report about no partition."""

    error: KafkaError
    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """The number of records and reports that were fetched, the reports, and the records by consecutive partition."""

    count: int
    reports: Sequence[FetchReport]
    records: Sequence[Records]


def headers_array(headers: Sequence[Sequence[tuple[str, bytes | None]]]) -> pa.Array:
    """Returns the headers of records, each given by name and value, as an array of lists."""
    ends = np.zeros(len(headers) + 1, np.int32)
    np.cumsum([len(each) for each in headers], out=ends[1:])
    pairs = [pair for each in headers for pair in each]
    names = pa.array([name for name, _ in pairs], pa.string())
    values = pa.array([value for _, value in pairs], pa.binary())
    entries = pa.StructArray.from_arrays([names, values], fields=list(_HEADERS.value_type))
    return pa.ListArray.from_arrays(pa.array(ends), entries, type=_HEADERS)


def _bytes_of(name: str, column: pa.Array) -> int:
    if name == "timestamp":
        return 0
    if name == "headers":
        pairs = column.flatten()
        return _HEADER_BYTES * len(pairs) + sum(_bytes_of("value", each) for each in pairs.flatten())
    # Offsets of a slice begin anywhere.
    ends = np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, column.offset * 4) if len(column) else (0,)
    return int(ends[-1]) - int(ends[0])


class RecordBuffer:
    """A queue of the records of one partition, in offset order."""

    def __init__(self) -> None:
        self._parts: deque[Records] = deque()
        self._count = 0
        self.size_bytes = 0
        """Memory of the records in bytes."""

    def __len__(self) -> int:
        return self._count

    def add(self, records: Records) -> int:
        """Appends records. Returns their memory in bytes."""
        size_bytes = records.size_bytes
        self._parts.append(records)
        self._count += len(records)
        self.size_bytes += size_bytes
        return size_bytes

    def take(self, count: int) -> Records | None:
        """Removes and returns the first records, up to `count` (at least 1). Returns None if there are none."""
        taken: list[Records] = []
        room, room_bytes = count, _TAKEN_BYTES_MAX
        while self._parts and room > 0:
            first = self._parts.popleft()
            if len(first) > room:
                self._parts.appendleft(first.slice(room, len(first)))
                first = first.slice(0, room)
            size_bytes = first.size_bytes
            if taken and size_bytes > room_bytes:
                self._parts.appendleft(first)
                break
            taken.append(first)
            room -= len(first)
            room_bytes -= size_bytes
        if not taken:
            return None
        self._count -= sum(map(len, taken))
        self.size_bytes -= _TAKEN_BYTES_MAX - room_bytes
        return taken[0] if len(taken) == 1 else _joined(taken)


def _joined(parts: Sequence[Records]) -> Records:
    first = parts[0]
    columns = {name: pa.concat_arrays([part.columns[name] for part in parts]) for name in first.columns}
    return Records(first.topic, first.partition, np.concatenate([part.offsets for part in parts]), columns)


class RecordReader:
    """Decodes records to rows and dead letters. `bad_rows`: policy for records that cannot be decoded."""

    def __init__(self, form: RecordFormat, bad_rows: BadRows) -> None:
        self._form = form
        self._schema = form.schema
        self._bad_rows = bad_rows
        self._values = form.value.decoder()
        self._keys = None if form.key is None else form.key.decoder()
        self._log = BadRowsLog(log)

    def close(self) -> None:
        """Releases the connections of the formats."""
        self._values.close()
        if self._keys is not None:
            self._keys.close()

    def rows(self, records: Records) -> tuple[pa.RecordBatch | None, pa.RecordBatch | None]:
        """Decodes records.

        Returns the rows and the dead letters, each None if there are none. With `bad_rows` "fail", raises
        ConfigurationError for a record that cannot be decoded.
        """
        elsewhere = self._schema_ids_in_headers(records)
        values = records.values
        if elsewhere:
            # Their payloads have no id, and the first bytes could be the id of another schema.
            there = np.isin(np.arange(len(records)), list(elsewhere))
            values = pc.if_else(pa.array(there), pa.scalar(b"", pa.binary()), values)
        found = self._values.decode_records(values, records.columns.get("key"))
        numbers = found.payload_of_rows(len(records))
        bad = found.bad | elsewhere
        columns = found.batch.columns
        if elsewhere:
            good = ~np.isin(numbers, list(elsewhere))
            columns = [column.filter(pa.array(good)) for column in columns]
            numbers = numbers[good]
        if self._keys is not None:
            keys, bad_keys = self._key_column(self._keys, records)
            if bad_keys:
                bad |= bad_keys
                good = ~np.isin(numbers, list(bad_keys))
                columns = [column.filter(pa.array(good)) for column in columns]
                numbers = numbers[good]
            if len(numbers) < len(records):
                keys = keys.take(pa.array(numbers))
            columns = [keys, *columns] if self._form.plain else [*columns, keys]
        letters = self._letters(records, bad) if bad else None
        if not len(numbers):
            return None, letters
        # A record of change data is one row or none, and never several.
        of_rows = records if len(numbers) == len(records) else records.only(numbers)
        made = [*columns, *self._form.metadata_of(of_rows)]
        return pa.RecordBatch.from_arrays(made, schema=self._schema), letters

    def _schema_ids_in_headers(self, records: Records) -> dict[int, str]:
        """Returns the reasons for records whose schema id is in a header and not in the payload, by record."""
        names = set()
        if self._form.value.has_registry:
            names |= {_VALUE_SCHEMA_ID} if not self._form.value.has_changes else {_VALUE_SCHEMA_ID, _KEY_SCHEMA_ID}
        if self._form.key is not None and self._form.key.has_registry:
            names.add(_KEY_SCHEMA_ID)
        if not names:
            return {}
        headers = records.columns["headers"]
        keys = headers.flatten().field("key")
        there = np.flatnonzero(pc.is_in(keys, pa.array(sorted(names))).to_numpy(zero_copy_only=False))
        found: dict[int, str] = {}
        for number, name in zip(
            pc.list_parent_indices(headers).take(pa.array(there)).to_pylist(),
            keys.take(pa.array(there)).to_pylist(),
            strict=True,
        ):
            found[number] = (
                f"the id of its schema is in the header {name!r}, which is not supported; let the producer "
                "write it before the payload (PrefixSchemaIdSerializer)"
            )
        return found

    def _key_column(self, decoder: PayloadDecoder, records: Records) -> tuple[pa.Array, dict[int, str]]:
        """Decodes the keys to one column, null for a missing or bad key.

        Also returns the reasons for bad keys, by record.
        """
        form = self._form.key
        assert form is not None
        keys = records.columns["key"]
        numbers = np.flatnonzero(keys.is_valid().to_numpy(zero_copy_only=False))
        found = decoder.decode(keys.drop_null())
        bad = {int(numbers[at]): reason if form.single else f"the key: {reason}" for at, reason in found.bad.items()}
        batch = found.batch
        column = (
            batch.column(0) if form.single else pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))
        )
        if len(column) == len(keys):
            return column, bad
        places = np.full(len(keys), -1, dtype=np.int64)
        places[np.delete(numbers, sorted(found.bad))] = np.arange(len(column))
        return column.take(pa.array(places, mask=places < 0)), bad

    def _letters(self, records: Records, bad: Mapping[int, str]) -> pa.RecordBatch:
        numbers = sorted(bad)
        if self._bad_rows == "fail":
            offset = records.offsets[numbers[0]]
            where = _PLACE.format(topic=records.topic, partition=records.partition, offset=offset)
            raise ConfigurationError(
                f"{where} cannot be read: {bad[numbers[0]]}. Skip such records with "
                'from_kafka(bad_rows="skip"), or read them as a stream with bad_rows="side"'
            )
        wrong = records.only(np.array(numbers, np.int64))
        columns = [
            wrong.values,
            *(_METADATA_OF[name](wrong) for name in ("topic", "partition", "offset")),
            pa.array([bad[number] for number in numbers], pa.string()),
        ]
        letters = pa.RecordBatch.from_arrays(columns, schema=LETTERS)
        return self._log.add(letters, _PLACE)


_VALUE_SCHEMA_ID, _KEY_SCHEMA_ID = "__value_schema_id", "__key_schema_id"
"""The headers in which Confluent's HeaderSchemaIdSerializer writes the GUID of a schema."""


_METADATA_OF: Mapping[str, Callable[[Records], pa.Array]] = {
    "topic": lambda records: pa.repeat(pa.scalar(records.topic, pa.string()), len(records)),
    "partition": lambda records: pa.repeat(pa.scalar(records.partition, pa.int32()), len(records)),
    "offset": lambda records: pa.array(records.offsets),
    "timestamp": lambda records: records.columns["timestamp"].cast(_TIME),
    "headers": lambda records: records.columns["headers"],
    "tombstone": lambda records: records.values.is_null(),
}
