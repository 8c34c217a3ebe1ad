"""`Records` holds records of a partition of Kafka, and `RecordReader` turns them into Arrow, a batch at a time.

Rules:

- The needed parts of a record are copied from the client's message at once, and the message is dropped. A message is an
  object of the garbage collector, and one that is kept costs more than its value is worth.
- Values become rows by a format (`tidegate/connectors/formats/format.py`). A record without a value, a tombstone, is
  all nulls. The JSON value `null` is not an object, so it cannot be read.
- Formats of change data make newest versions of rows, of values and keys (`formats/changes.py`).
- Whether a record can be read depends on that record alone, and not on the records that are fetched with it.
- A record that cannot be read is an error that names topic, partition and offset, or it is a dead letter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidegate.connectors.bad_rows import BadRows, BadRowsLog
from tidegate.connectors.formats.format import ReadFormat
from tidegate.connectors.formats.json_format import JsonRead
from tidegate.connectors.formats.text import not_utf8
from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    from confluent_kafka import Message

log = logging.getLogger(__name__)
KEY = "kafka_key"
TIMESTAMP = "kafka_timestamp"
_TIME = pa.timestamp("ms", "UTC")
_HEADER_BYTES = 200
"""The memory of a header besides its name and value."""
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
METADATA = {
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": _TIME,
    "headers": _HEADERS,
    "tombstone": pa.bool_(),
}
"""Optional columns about a record. Next to the columns of a schema, their names begin with `kafka_`."""
_RAW = {"bytes": pa.binary(), "string": pa.string()}
LETTERS = pa.schema(
    [
        ("raw", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("error", pa.string()),
    ]
)
"""The columns of dead letters. `raw` is the value of the record."""
_PLACE = "the record at offset {offset} of partition {partition} of {topic!r}"


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """The form of rows: values and keys as "bytes" or "string", or values by a schema, and optional columns."""

    value: str | pa.Schema
    key: str | None = None
    metadata: tuple[str, ...] = ()
    reads: ReadFormat | None = None
    """The format of values with a schema; None for JSON."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.metadata if name not in METADATA]:
            raise ConfigurationError(
                f"from_kafka(metadata=): unknown column {unknown[0]!r}; give some of {', '.join(METADATA)}"
            )
        if not isinstance(self.value, pa.Schema) and self.value not in _RAW:
            raise ConfigurationError(
                f"from_kafka(value={self.value!r}): give a schema, for JSON objects, or 'bytes' or 'string'"
            )
        if self.key is not None and self.key not in _RAW:
            raise ConfigurationError(f"from_kafka(key={self.key!r}): give 'bytes' or 'string'")
        ours = {KEY, *(f"kafka_{name}" for name in METADATA)}
        taken = ours & set(self.value.names if isinstance(self.value, pa.Schema) else ())
        if taken:
            raise ConfigurationError(
                f"from_kafka(value=): the name {min(taken)!r} is reserved; rename the column in the schema"
            )
        if isinstance(self.value, pa.Schema):
            if not self.schema.names:
                raise ConfigurationError("from_kafka(value=): the schema has no columns; name one, or give metadata=")
            if self.reads is None:
                JsonRead(self.value).decoder()
        if self.has_changes and self.key is not None:
            raise ConfigurationError("from_kafka: key= does not apply to change data; name the keys with keys=")

    @property
    def has_changes(self) -> bool:
        """True if the rows are newest versions, of which a step makes changes."""
        return self.reads is not None and self.reads.has_changes

    def check_partitions(self, counts: Mapping[str, int]) -> None:
        """Raises ConfigurationError if the events of some topics, with this many partitions, have no common order."""
        if self.reads is None or not self.reads.needs_one_partition:
            return
        for topic, count in counts.items():
            if count > 1:
                raise ConfigurationError(
                    f"from_kafka(format='debezium'): topic {topic!r} has {count} partitions, and a truncated table has "
                    "no order among them. Use a topic with one partition, or DebeziumFormat(truncates='fail')"
                )

    @property
    def schema(self) -> pa.Schema:
        """The columns. Without a schema they are the columns of Spark's Kafka source, plus requested metadata."""
        if isinstance(self.value, pa.Schema):
            if self.reads is not None and self.reads.has_changes:
                return pa.schema([*self.reads.schema, *self._metadata_fields])
            more = [pa.field(KEY, _RAW[self.key])] if self.key is not None else []
            return pa.schema([*self.value, *more, *self._metadata_fields])
        columns = [pa.field("key", _RAW[self.key or "bytes"]), pa.field("value", _RAW[self.value])]
        return pa.schema([*columns, *(pa.field(name, METADATA[name]) for name in self._named)])

    @property
    def _metadata_fields(self) -> list[pa.Field]:
        """The columns of metadata next to the columns of a schema."""
        return [pa.field(f"kafka_{name}", METADATA[name]) for name in self.metadata]

    @property
    def _named(self) -> tuple[str, ...]:
        """The metadata that is in the rows."""
        if isinstance(self.value, pa.Schema):
            return self.metadata
        always = ("topic", "partition", "offset", "timestamp")
        return (*always, *(name for name in self.metadata if name not in always))

    def records_of(self, topic: str, partition: int) -> Records:
        """Returns an empty `Records` of a partition, with a list for each column that rows need."""
        with_keys = self.key is not None or self.has_changes or not isinstance(self.value, pa.Schema)
        held = [name for name in ("timestamp", "headers") if name in self._named]
        return Records(topic, partition, ("value", *(("key",) if with_keys else ()), *held))

    def metadata_of(self, records: Records) -> list[pa.Array]:
        """Returns the columns of metadata that the records have."""
        return [_METADATA_OF[name](records) for name in self._named]


class Records:
    """Records of a partition in the order of their offsets, as a list for each column that is held of them."""

    __slots__ = ("columns", "offsets", "partition", "topic")

    def __init__(self, topic: str, partition: int, names: Iterable[str]) -> None:
        """`names`: "value", and what else is held: "key", "timestamp" (milliseconds since 1970), "headers"."""
        self.topic = topic
        self.partition = partition
        self.offsets: list[int] = []
        self.columns: dict[str, list[Any]] = {name: [] for name in names}

    def __len__(self) -> int:
        return len(self.offsets)

    def add(self, messages: Sequence[Message]) -> int:
        """Adds the next messages of this partition, at least one. Returns the bytes that are kept of them."""
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
        """Returns some of the records, by their position here."""
        found = Records(self.topic, self.partition, ())
        found.offsets = [self.offsets[number] for number in numbers]
        found.columns = {name: [column[number] for number in numbers] for name, column in self.columns.items()}
        return found

    @property
    def values(self) -> list[bytes | None]:
        """The values; None for a tombstone."""
        return self.columns["value"]

    @property
    def size_bytes(self) -> int:
        """The bytes of all values, keys and headers that are held."""
        return sum(_bytes_of(name, column) for name, column in self.columns.items())


def _bytes_of(name: str, column: Sequence[Any]) -> int:
    if name == "timestamp":
        return 0
    if name == "headers":
        pairs = [pair for found in column if found for pair in found]
        return sum(_HEADER_BYTES + len(key) + len(value or b"") for key, value in pairs)
    return sum(map(len, filter(None, column)))


class RecordReader:
    """Makes batches and dead letters. `bad_rows`: what to do with records that cannot be read."""

    def __init__(self, form: RecordFormat, bad_rows: BadRows) -> None:
        self._form = form
        self._schema = form.schema
        self._bad_rows = bad_rows
        reads = form.reads or (JsonRead(form.value) if isinstance(form.value, pa.Schema) else None)
        self._decoder = None if reads is None else reads.decoder()
        self._log = BadRowsLog(log)

    def rows(self, records: Records) -> tuple[pa.RecordBatch | None, pa.RecordBatch | None]:
        """Returns the rows of some records and the dead letters, each None if there are none.

        Raises ConfigurationError for a record that cannot be read if that fails the job.
        """
        if self._form.has_changes:
            return self._versions(records)
        columns, bad = self._columns(records)
        letters = None
        if bad:
            letters = self._letters(records, bad)
            records = records.only([number for number in range(len(records)) if number not in bad])
            if not records:
                return None, letters
            # Each record is judged by itself, so all of these are good.
            columns, bad = self._columns(records)
            assert not bad
        made = [*columns, *self._form.metadata_of(records)]
        return pa.RecordBatch.from_arrays(made, schema=self._schema), letters

    def _versions(self, records: Records) -> tuple[pa.RecordBatch | None, pa.RecordBatch | None]:
        """Returns the newest versions of rows in some records, and the dead letters."""
        assert self._decoder is not None
        found = self._decoder.decode_records(records.values, records.columns["key"])
        letters = self._letters(records, found.bad) if found.bad else None
        if not found.batch.num_rows:
            return None, letters
        of_rows = records.only(found.payload_of_rows(len(records)).tolist())
        made = [*found.batch.columns, *self._form.metadata_of(of_rows)]
        return pa.RecordBatch.from_arrays(made, schema=self._schema), letters

    def _columns(self, records: Records) -> tuple[list[pa.Array], dict[int, str]]:
        """Returns columns of values and keys, and the numbers of records that cannot be read with the reasons."""
        form = self._form
        bad = dict[int, str]()
        values = records.values
        held = records.columns
        keys = [_raw(held["key"], form.key or "bytes", "of the key", bad)] if "key" in held else []
        if self._decoder is None:
            assert isinstance(form.value, str)
            return [*keys, _raw(values, form.value, "of the value", bad)], bad
        found = self._decoder.decode_with_nulls(values)
        return [*found.batch.columns, *keys], found.bad | bad

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


def _raw(values: Sequence[bytes | None], kind: str, of: str, bad: dict[int, str]) -> pa.Array:
    """Returns bytes, or strings. What is not UTF-8 is null, and its number goes to `bad` with the reason."""
    found = pa.array(values, pa.binary())
    if kind == "bytes":
        return found
    try:
        return found.cast(pa.string())
    except pa.ArrowInvalid:
        faults = {
            number: fault
            for number, value in enumerate(values)
            if value is not None and (fault := not_utf8(value, of)) is not None
        }
        for number, fault in faults.items():
            bad.setdefault(number, fault)
        texts = [None if number in faults else value for number, value in enumerate(values)]
        return pa.array(texts, pa.binary()).cast(pa.string())


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
