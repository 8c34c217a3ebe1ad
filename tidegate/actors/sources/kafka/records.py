"""`RecordReader`: turns records of Kafka into Arrow, a batch at a time.

Rules:

- Values that are JSON are joined to one buffer, which Arrow parses: an object a record, with the columns of the schema.
  What the schema does not name is left out, and what a record lacks is null. A record without a value, a tombstone, is
  all nulls. The value `null` is not an object, and so cannot be read.
- Whether a record can be read depends on that record alone: on its UTF-8, on line breaks within its strings, on a byte
  order mark before it. Those of its batch make no difference.
- A record that cannot be read is an error that names topic, partition and offset, or it is left out and counted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json

from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    from confluent_kafka import Message

log = logging.getLogger(__name__)
KEY, TIMESTAMP = "kafka_key", "kafka_timestamp"
_TIME = pa.timestamp("ms", "UTC")
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
METADATA = {
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": _TIME,
    "headers": _HEADERS,
    "tombstone": pa.bool_(),
}
"""Columns with more about a record, on request. Beside those of a schema their names begin with `kafka_`."""
_BOM = b"\xef\xbb\xbf"
_LINE_FEED, _BRACE = ord("\n"), ord("{")
_RAW = {"bytes": pa.binary(), "string": pa.string()}
_WARN_EVERY = 1_000


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """What rows look like: values and keys as "bytes" or "string", or values by a schema, with some columns more."""

    value: str | pa.Schema
    key: str | None = None
    metadata: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := [name for name in self.metadata if name not in METADATA]:
            raise ConfigurationError(
                f"from_kafka(metadata=): there is no {unknown[0]!r}; there is {', '.join(METADATA)}"
            )
        if not isinstance(self.value, pa.Schema) and self.value not in _RAW:
            raise ConfigurationError(
                f"from_kafka(value={self.value!r}): give a schema, for JSON objects, or 'bytes' or 'string'"
            )
        if self.key is not None and self.key not in _RAW:
            raise ConfigurationError(f"from_kafka(key={self.key!r}): it is 'bytes' or 'string'")
        ours = {KEY, *(f"kafka_{name}" for name in METADATA)}
        taken = ours & set(self.value.names if isinstance(self.value, pa.Schema) else ())
        if taken:
            raise ConfigurationError(f"from_kafka(value=): the name {min(taken)!r} is the source's own")

    @property
    def schema(self) -> pa.Schema:
        """The columns: those of Spark's Kafka source without a schema, and the metadata that was requested."""
        if isinstance(self.value, pa.Schema):
            more = [pa.field(KEY, _RAW[self.key])] if self.key is not None else []
            more += [pa.field(f"kafka_{name}", METADATA[name]) for name in self.metadata]
            return pa.schema([*self.value, *more])
        columns = [pa.field("key", _RAW[self.key or "bytes"]), pa.field("value", _RAW[self.value])]
        return pa.schema([*columns, *(pa.field(name, METADATA[name]) for name in self._named)])

    @property
    def _named(self) -> tuple[str, ...]:
        """The metadata that is in the rows."""
        if isinstance(self.value, pa.Schema):
            return self.metadata
        always = ("topic", "partition", "offset", "timestamp")
        return (*always, *(name for name in self.metadata if name not in always))

    def metadata_of(self, records: Sequence[Message]) -> list[pa.Array]:
        """Columns with more about the records."""
        return [_METADATA_OF[name](records) for name in self._named]


class RecordReader:
    """Makes batches. `skip`: records that cannot be read are left out."""

    def __init__(self, form: RecordFormat, skip: bool) -> None:
        self._form = form
        self._schema = form.schema
        self._skip = skip
        self.skipped = 0
        """Records that were left out."""

    def batch(self, records: Sequence[Message]) -> pa.RecordBatch | None:
        """The rows of some records; None if there are none. ConfigurationError for a record that cannot be read."""
        try:
            return self._made(records)
        except (pa.ArrowException, ValueError) as error:
            good = [found for record in records if (found := self._alone(record, error)) is not None]
        if not good:
            return None
        (batch,) = pa.Table.from_batches(good).combine_chunks().to_batches()
        return batch

    def _made(self, records: Sequence[Message]) -> pa.RecordBatch:
        form, values = self._form, [record.value() for record in records]
        keys = [] if form.key is None and isinstance(form.value, pa.Schema) else [record.key() for record in records]
        if isinstance(form.value, pa.Schema):
            columns = _parsed(values, form.value).columns
            columns += [_raw(keys, form.key)] if form.key is not None else []
        else:
            columns = [_raw(keys, form.key or "bytes"), _raw(values, form.value)]
        return pa.RecordBatch.from_arrays([*columns, *form.metadata_of(records)], schema=self._schema)

    def _alone(self, record: Message, found: Exception) -> pa.RecordBatch | None:
        """The row of one record; None if it is left out. `found` is what was wrong with some record of its batch."""
        try:
            return self._made([record])
        except (pa.ArrowException, ValueError) as error:
            where = f"the record at offset {record.offset()} of partition {record.partition()} of {record.topic()!r}"
            if not self._skip:
                raise ConfigurationError(
                    f'{where} cannot be read: {error}; leave such records out with from_kafka(errors="skip")'
                ) from found
            if self.skipped % _WARN_EVERY == 0:
                log.warning("%s is left out, and %d before it: %s", where, self.skipped, error)
            self.skipped += 1
            return None


def _raw(values: Sequence[bytes | None], kind: str) -> pa.Array:
    found = pa.array(values, pa.binary())
    return found if kind == "bytes" else found.cast(pa.string())


def _times(records: Sequence[Message]) -> pa.Array:
    return pa.array([record.timestamp()[1] for record in records], pa.int64()).cast(_TIME)


def _headers(records: Sequence[Message]) -> pa.Array:
    pairs: list[list[tuple[str, bytes]]] = [list(record.headers() or ()) for record in records]  # type: ignore[arg-type]
    return pa.array([[{"key": key, "value": value} for key, value in each] for each in pairs], _HEADERS)


_METADATA_OF: Mapping[str, Callable[[Sequence[Message]], pa.Array]] = {
    "topic": lambda records: pa.array([record.topic() for record in records], pa.string()),
    "partition": lambda records: pa.array([record.partition() for record in records], pa.int32()),
    "offset": lambda records: pa.array([record.offset() for record in records], pa.int64()),
    "timestamp": _times,
    "headers": _headers,
    "tombstone": lambda records: pa.array([record.value() is None for record in records], pa.bool_()),
}


def _parsed(values: Sequence[bytes | None], schema: pa.Schema) -> pa.RecordBatch:
    """JSON objects as rows. Raises ArrowInvalid, ValueError if a value is not one object that fits the schema."""
    lines = [b"{}" if value is None else value for value in values] if None in values else values
    data = b"\n".join(lines)  # type: ignore[arg-type]
    if not _begins_with_objects(data, len(lines)):
        # Rare: white space, a byte order mark or line breaks. What is then no line with an object is refused here.
        data = b"\n".join([_one_line(line) for line in lines])  # type: ignore[arg-type]
    if not data.isascii():
        data.decode()
    table = pa_json.read_json(
        pa.BufferReader(data),
        read_options=pa_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )
    # Every line begins with an object, so each has given a row at least, or an error.
    if table.num_rows != len(lines):
        raise ValueError("the value is not one JSON object")
    (batch,) = table.select(schema.names).cast(schema).combine_chunks().to_batches()
    return batch


def _begins_with_objects(data: bytes, lines: int) -> bool:
    """Whether there are so many lines, and an object begins each."""
    found = np.frombuffer(data, dtype=np.uint8)
    breaks = np.flatnonzero(found == _LINE_FEED)
    if len(breaks) != lines - 1 or not data.startswith(b"{") or data.endswith(b"\n"):
        return False
    return bool((found[breaks + 1] == _BRACE).all())


def _one_line(value: bytes) -> bytes:
    """A JSON object without line breaks around its tokens. ValueError if it is none, or has one in a string."""
    line = value.removeprefix(_BOM).strip()
    if line[:1] != b"{":
        raise ValueError("the value is empty" if not line else "the value is not a JSON object")
    if b"\n" in line or b"\r" in line:
        # Python's parser refuses raw line breaks in strings, so those that are left stand between tokens.
        try:
            json.loads(line)
        except RecursionError as error:
            raise ValueError("the value is nested too deeply") from error
        line = line.replace(b"\n", b" ").replace(b"\r", b" ")
    return line
