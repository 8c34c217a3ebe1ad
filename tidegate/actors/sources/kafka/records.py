"""`RecordReader`: turns records of Kafka into Arrow, a batch at a time.

Rules:

- Values that are JSON are joined to one buffer, which Arrow parses: an object a record, with the columns of the schema.
  What the schema does not name is left out, and what a record lacks is null. A record without a value is all nulls.
- A record that cannot be read is an error that names topic, partition and offset, or it is left out and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.json as pa_json

from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    from confluent_kafka import Message

log = logging.getLogger(__name__)
KEY, TIMESTAMP = "kafka_key", "kafka_timestamp"
_TIME = pa.timestamp("ms", "UTC")
_RAW = {"bytes": pa.binary(), "string": pa.string()}
_WARN_EVERY = 1_000


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """What rows look like: values and keys as "bytes" or "string", or values by a schema, with some columns more."""

    value: str | pa.Schema
    key: str | None = None
    timestamp: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.value, pa.Schema) and self.value not in _RAW:
            raise ConfigurationError(
                f"from_kafka(value={self.value!r}): give a schema, for JSON objects, or 'bytes' or 'string'"
            )
        if self.key is not None and self.key not in _RAW:
            raise ConfigurationError(f"from_kafka(key={self.key!r}): it is 'bytes' or 'string'")
        taken = {KEY, TIMESTAMP} & set(self.value.names if isinstance(self.value, pa.Schema) else ())
        if taken:
            raise ConfigurationError(f"from_kafka(value=): the name {min(taken)!r} is the source's own")

    @property
    def schema(self) -> pa.Schema:
        """The columns: those of Spark's Kafka source without a schema."""
        if isinstance(self.value, pa.Schema):
            more = [pa.field(KEY, _RAW[self.key])] if self.key is not None else []
            more += [pa.field(TIMESTAMP, _TIME)] if self.timestamp else []
            return pa.schema([*self.value, *more])
        columns = [("key", _RAW[self.key or "bytes"]), ("value", _RAW[self.value]), ("topic", pa.string())]
        return pa.schema([*columns, ("partition", pa.int32()), ("offset", pa.int64()), ("timestamp", _TIME)])


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
            good = [record for record in records if self._is_good(record, error)]
        return self._made(good) if good else None

    def _made(self, records: Sequence[Message]) -> pa.RecordBatch:
        form, columns = self._form, []
        if isinstance(form.value, pa.Schema):
            columns += _parsed([record.value() for record in records], form.value).columns
            if form.key is not None:
                columns.append(_raw([record.key() for record in records], form.key))
            if form.timestamp:
                columns.append(_times(records))
            return pa.RecordBatch.from_arrays(columns, schema=self._schema)
        columns = [
            _raw([record.key() for record in records], form.key or "bytes"),
            _raw([record.value() for record in records], form.value),
            pa.array([record.topic() for record in records], pa.string()),
            pa.array([record.partition() for record in records], pa.int32()),
            pa.array([record.offset() for record in records], pa.int64()),
            _times(records),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _is_good(self, record: Message, found: Exception) -> bool:
        """Whether a record alone can be read; `found` is what was wrong with some record."""
        try:
            self._made([record])
        except (pa.ArrowException, ValueError) as error:
            where = f"the record at offset {record.offset()} of partition {record.partition()} of {record.topic()!r}"
            if not self._skip:
                raise ConfigurationError(
                    f'{where} cannot be read: {error}; leave such records out with from_kafka(errors="skip")'
                ) from found
            if self.skipped % _WARN_EVERY == 0:
                log.warning("%s is left out, and %d before it: %s", where, self.skipped, error)
            self.skipped += 1
            return False
        return True


def _raw(values: Sequence[bytes | None], kind: str) -> pa.Array:
    found = pa.array(values, pa.binary())
    return found if kind == "bytes" else found.cast(pa.string())


def _times(records: Sequence[Message]) -> pa.Array:
    return pa.array([record.timestamp()[1] for record in records], pa.int64()).cast(_TIME)


def _parsed(values: Sequence[bytes | None], schema: pa.Schema) -> pa.RecordBatch:
    """JSON objects as rows. Raises ArrowInvalid, ValueError if a value is not one object that fits the schema."""
    lines = [b"{}" if value is None else value for value in values]
    if not all(line.strip() for line in lines):
        raise ValueError("the value is empty")
    data = b"\n".join(lines)
    if data.count(b"\n") != len(lines) - 1:
        # A line break in JSON is white space: in strings it is written as an escape.
        data = b"\n".join(line.replace(b"\n", b" ") for line in lines)
    table = pa_json.read_json(
        pa.BufferReader(data),
        read_options=pa_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )
    # Every line has given a row at least, or an error.
    if table.num_rows != len(lines):
        raise ValueError("the value is not one JSON object")
    (batch,) = table.select(schema.names).cast(schema).combine_chunks().to_batches()
    return batch
