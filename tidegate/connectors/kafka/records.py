"""`Records` buffers records of a Kafka partition, and `RecordReader` decodes them to Arrow, a batch at a time.

Rules:

- The needed parts of a record are copied from the client's message at once, and the message is dropped. A message is
  tracked by Python's garbage collector, and keeping it is expensive.
- Formats decode values and keys to columns (`tidegate/connectors/formats/format.py`). A record without a value, a
  tombstone, is a row of nulls. A key is one column, a struct if its format has several columns.
- Formats of change data decode values and keys to row versions (`formats/row_versions.py`).
- Whether a record can be read depends on that record alone, and not on the records that are fetched with it.
- A record that cannot be decoded raises an error that names topic, partition and offset, or becomes a dead letter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tidegate.connectors.bad_rows import BadRows, BadRowsLog
from tidegate.connectors.formats.format import PayloadDecoder, ReadFormat
from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    from confluent_kafka import Message

log = logging.getLogger(__name__)
KEY = "kafka_key"
TIMESTAMP = "kafka_timestamp"
_TIME = pa.timestamp("ms", "UTC")
_HEADER_BYTES = 200
"""Assumed memory of a record header in bytes, in addition to its name and value."""
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

    def records_of(self, topic: str, partition: int) -> Records:
        """Returns an empty buffer for records of a partition, with the parts of records that rows need."""
        with_keys = self.key is not None or self.value.has_changes
        held = [name for name in ("timestamp", "headers") if name in self._named]
        if "headers" not in held and (self.value.has_registry or (self.key is not None and self.key.has_registry)):
            held.append("headers")  # They may have the id of a schema, which is refused.
        return Records(topic, partition, ("value", *(("key",) if with_keys else ()), *held))

    def metadata_of(self, records: Records) -> list[pa.Array]:
        """Returns the metadata columns of the records."""
        return [_METADATA_OF[name](records) for name in self._named]


class Records:
    """Buffered records of a partition in offset order, as one list for each needed part of a record."""

    __slots__ = ("columns", "offsets", "partition", "topic")

    def __init__(self, topic: str, partition: int, names: Iterable[str]) -> None:
        """`names`: the parts to keep: "value", and optionally "key", "timestamp" (ms since 1970), "headers"."""
        self.topic = topic
        self.partition = partition
        self.offsets: list[int] = []
        self.columns: dict[str, list[Any]] = {name: [] for name in names}

    def __len__(self) -> int:
        return len(self.offsets)

    def add(self, messages: Sequence[Message]) -> int:
        """Appends messages of this partition (at least one). Returns the number of bytes that are kept."""
        kind: Any = type(messages[0])
        size_bytes = 0
        for name, column in self.columns.items():
            found = list(map(getattr(kind, name), messages))
            column.extend([at_ms for _, at_ms in found] if name == "timestamp" else found)
            size_bytes += _bytes_of(name, found)
        self.offsets.extend(map(kind.offset, messages))
        return size_bytes

    def take(self, count: int) -> Records:
        """Removes and returns the first records, up to `count`."""
        taken = Records(self.topic, self.partition, self.columns)
        if count >= len(self):
            taken.offsets, self.offsets = self.offsets, taken.offsets
            taken.columns, self.columns = self.columns, taken.columns
            return taken
        taken.offsets = self.offsets[:count]
        del self.offsets[:count]
        for name, column in self.columns.items():
            taken.columns[name] = column[:count]
            del column[:count]
        return taken

    def only(self, numbers: Sequence[int]) -> Records:
        """Returns the records with these indices."""
        found = Records(self.topic, self.partition, ())
        found.offsets = [self.offsets[number] for number in numbers]
        found.columns = {name: [column[number] for number in numbers] for name, column in self.columns.items()}
        return found

    @property
    def values(self) -> list[bytes | None]:
        """Returns the values of the records; None for a tombstone."""
        return self.columns["value"]

    @property
    def size_bytes(self) -> int:
        """Returns the total bytes of all buffered values, keys and headers."""
        return sum(_bytes_of(name, column) for name, column in self.columns.items())


def _bytes_of(name: str, column: Sequence[Any]) -> int:
    if name == "timestamp":
        return 0
    if name == "headers":
        pairs = [pair for found in column if found for pair in found]
        return sum(_HEADER_BYTES + len(key) + len(value or b"") for key, value in pairs)
    return sum(map(len, filter(None, column)))


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
            values = [b"" if number in elsewhere else value for number, value in enumerate(values)]
        found = self._values.decode_records(values, records.columns.get("key", ()))
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
        of_rows = records if len(numbers) == len(records) else records.only(numbers.tolist())
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
        found = {}
        for number, headers in enumerate(records.columns.get("headers", ())):
            if headers and (name := next((key for key, _ in headers if key in names), None)) is not None:
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
        keys: Sequence[bytes | None] = records.columns["key"]
        numbers = [number for number, key in enumerate(keys) if key is not None]
        found = decoder.decode([keys[number] or b"" for number in numbers])
        bad = {numbers[at]: reason if form.single else f"the key: {reason}" for at, reason in found.bad.items()}
        batch = found.batch
        column = (
            batch.column(0) if form.single else pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))
        )
        if len(column) == len(keys):
            return column, bad
        places = np.full(len(keys), -1, dtype=np.int64)
        places[np.delete(np.array(numbers, dtype=np.int64), sorted(found.bad))] = np.arange(len(column))
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
        wrong = records.only(numbers)
        columns = [
            pa.array(wrong.values, pa.binary()),
            *(_METADATA_OF[name](wrong) for name in ("topic", "partition", "offset")),
            pa.array([bad[number] for number in numbers], pa.string()),
        ]
        letters = pa.RecordBatch.from_arrays(columns, schema=LETTERS)
        return self._log.add(letters, _PLACE)


_VALUE_SCHEMA_ID, _KEY_SCHEMA_ID = "__value_schema_id", "__key_schema_id"
"""The headers in which Confluent's HeaderSchemaIdSerializer writes the GUID of a schema."""


def _headers(records: Records) -> pa.Array:
    pairs = [found or () for found in records.columns["headers"]]
    return pa.array([[{"key": key, "value": value} for key, value in each] for each in pairs], _HEADERS)


_METADATA_OF: Mapping[str, Callable[[Records], pa.Array]] = {
    "topic": lambda records: pa.repeat(pa.scalar(records.topic, pa.string()), len(records)),
    "partition": lambda records: pa.repeat(pa.scalar(records.partition, pa.int32()), len(records)),
    "offset": lambda records: pa.array(records.offsets, pa.int64()),
    "timestamp": lambda records: pa.array(records.columns["timestamp"], pa.int64()).cast(_TIME),
    "headers": _headers,
    "tombstone": lambda records: pa.array([value is None for value in records.values], pa.bool_()),
}
