"""`Format`: converts payloads (the bytes of one record each) to Arrow rows and back. Kafka and files share it.

A format is used in three steps, so that errors are raised at submission where possible:

1. A user names a format, or constructs one (`JsonFormat()`). It is a plain value.
2. At submission, `for_reading` and `for_writing` bind it to columns and topics. They may request schemas from a
   registry, and raise ConfigurationError for columns that do not fit. Their result is pickled and sent to the tasks.
3. A task creates a decoder or an encoder from it, and closes that at its end. A decoder may request further schemas.

Rules:

- A decoder works on a batch of payloads at a time. Whether a payload can be read depends on that payload alone.
- A bad payload is reported by its number with a reason, and never by an exception. The connector names topic, partition
  and offset, and applies its `bad_rows`. The same holds for rows that an encoder cannot write.
- A decoder raises only for failures that do not depend on a payload, such as a registry that does not answer. Then the
  task fails, and reads the same payloads again after its restart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.storage.errors import ConfigurationError

Part: TypeAlias = Literal["value", "key"]
"""The part of a Kafka record that a payload is."""


@dataclass(frozen=True, slots=True)
class PayloadUse:
    """Describes where payloads come from or go to. `method`: the public method, for errors, such as "from_kafka".

    `topics`: the topics that are known at submission. `part`: the part of a record that the payloads are. `keys`: the
    columns that identify a row, for formats of change data.
    """

    method: str
    topics: tuple[str, ...] = ()
    part: Part = "value"
    keys: tuple[str, ...] = ()
    setting: str = ""
    """The parameter with the columns, for errors, if it is not called as the part of the record."""

    @property
    def parameter(self) -> str:
        """Returns the parameter of the public method with the columns, for errors, such as "value="."""
        return f"{self.setting or self.part}="


@dataclass(frozen=True, slots=True)
class DecodedRecords:
    """The rows of the good payloads, in order, and the numbers of the bad payloads, each with the reason.

    `sources`: for each row, the number of its payload, for formats in which a payload may produce no row or several.
    None if each good payload is one row.
    """

    batch: pa.RecordBatch
    bad: dict[int, str]
    sources: NDArray[np.int64] | None = None

    def payload_of_rows(self, payloads: int) -> NDArray[np.int64]:
        """Returns the number of the payload of each row, given the number of payloads."""
        if self.sources is not None:
            return self.sources
        return np.delete(np.arange(payloads, dtype=np.int64), sorted(self.bad))


@dataclass(frozen=True, slots=True)
class EncodedRecords:
    """The payloads of the good rows, in order, and the numbers of the bad rows, each with the reason.

    `payloads`: a binary array. A null is a tombstone.
    """

    payloads: pa.Array
    bad: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowChanges:
    """Changes of rows: for each change, the index in a batch of the old row and of the new row; -1 if there is none.

    A change without a new row is a deletion.
    """

    before: NDArray[np.int64]
    after: NDArray[np.int64]

    @property
    def rows(self) -> NDArray[np.int64]:
        """For each change, the index of a row that has its key: the new row, or the old row of a deletion."""
        return np.where(self.after < 0, self.before, self.after)

    def __len__(self) -> int:
        return len(self.after)


class PayloadDecoder(ABC):
    """Decodes payloads to rows. Called from one thread at a time."""

    @abstractmethod
    def decode(self, payloads: pa.Array) -> DecodedRecords:
        """Decodes payloads to rows. Raises StorageError if a schema that they need cannot be loaded.

        `payloads`: a binary array without nulls.
        """

    def decode_with_nulls(self, payloads: pa.Array) -> DecodedRecords:
        """Decodes payloads to rows. A missing payload (null, of a tombstone) becomes a row of nulls.

        If a column is not nullable, a missing payload is bad.
        """
        if not payloads.null_count:
            return self.decode(payloads)
        present = payloads.drop_null()
        found = self.decode(present)
        numbers = np.flatnonzero(payloads.is_valid().to_numpy(zero_copy_only=False))
        bad = {int(numbers[number]): reason for number, reason in found.bad.items()}
        rows = numbers[found.payload_of_rows(len(present))]
        schema = found.batch.schema
        missing = np.delete(np.arange(len(payloads), dtype=np.int64), numbers)
        if required := [each.name for each in schema if not each.nullable]:
            bad |= {int(number): f"column {required[0]!r} is not nullable, and has no value" for number in missing}
            return DecodedRecords(found.batch, bad, None if found.sources is None else rows)
        places = np.concatenate([rows, missing])
        order = np.argsort(places, kind="stable")
        takes = np.concatenate([np.arange(len(rows)), np.full(len(missing), -1)])[order]
        indexes = pa.array(takes, pa.int64(), mask=takes < 0)
        columns = [column.take(indexes) for column in found.batch.columns]
        batch = pa.RecordBatch.from_arrays(columns, schema=schema)
        return DecodedRecords(batch, bad, None if found.sources is None else places[order])

    def decode_records(self, values: pa.Array, keys: pa.Array | None) -> DecodedRecords:
        """Decodes records to rows, given their values and keys (binary arrays; null for none).

        Only formats of change data use the keys. The other formats accept None.
        """
        return self.decode_with_nulls(values)

    def close(self) -> None:  # noqa: B027
        """Releases connections. The default does nothing."""


class PayloadEncoder(ABC):
    """Encodes rows as payloads. Called from one thread at a time."""

    @abstractmethod
    def encode(self, batch: pa.RecordBatch, topic: str = "") -> EncodedRecords:
        """Encodes rows that are sent to `topic`. Raises StorageError if a registry does not answer."""

    def encode_changes(
        self, batch: pa.RecordBatch, changes: RowChanges, times_ms: pa.Array | None, topic: str
    ) -> EncodedRecords:
        """Encodes one payload for each change. Only formats that write changes implement this method.

        `times_ms`: when each change was made, in ms since 1970; None for now.
        """
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027
        """Releases connections. The default does nothing."""


class ReadFormat(ABC):
    """A format that is bound to the columns of a source. Must be picklable and comparable."""

    has_changes = False
    """True if the rows are row versions (`row_versions.py`), which a later step turns into a stream of changes."""

    @property
    def single(self) -> bool:
        """Returns True if a payload is one value (the only column), and not an object with a member for each column."""
        return False

    @property
    def needs_one_partition(self) -> bool:
        """Returns True if the events of a topic must be read in one order, so that the topic must have one
        partition.
        """
        return False

    @property
    def has_registry(self) -> bool:
        """Returns True if each payload begins with the id of its schema in a registry."""
        return False

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """Returns the columns of every decoded batch."""

    @abstractmethod
    def decoder(self) -> PayloadDecoder:
        """Returns a decoder for one task."""


class WriteFormat(ABC):
    """A format that is bound to the columns of a sink. Must be picklable."""

    writes_changes = False
    """True if a payload is a change with the old row and the new row."""

    @abstractmethod
    def encoder(self) -> PayloadEncoder:
        """Returns an encoder for one task."""


class Format(ABC):
    """A payload format with its options. Must be picklable and comparable."""

    kind: str
    """The name by which users select the format, such as "json"."""
    # Kind of the payloads that are written: "rows", "upserts" (the newest row of a key), or "changes" (the old and the
    # new row). A comment, because each format has its own value, and the reference would show this one.
    writes = "rows"

    @abstractmethod
    def for_reading(self, columns: pa.Schema | None, use: PayloadUse) -> ReadFormat:
        """Binds the format to the columns of a source (None: the columns of the format's own schema). Called at
        submission.

        Raises ConfigurationError for columns that do not fit, and for a registry that does not answer.
        """

    @abstractmethod
    def for_writing(self, columns: pa.Schema, use: PayloadUse) -> WriteFormat:
        """Binds the format to the columns of a sink. Called at submission.

        Raises ConfigurationError for columns that the format cannot represent, and for a registry that does not answer.
        """


def required_columns(columns: pa.Schema | None, kind: str, use: PayloadUse) -> pa.Schema:
    """Returns `columns`, for a format without a schema. Raises ConfigurationError if they are missing."""
    if columns is None or not len(columns):
        raise ConfigurationError(f"{use.method}(format={kind!r}): give the columns, {use.part}={{'name': str, ...}}")
    return columns


def good_payloads(payloads: pa.Array, bad: dict[int, str]) -> EncodedRecords:
    """Returns the payloads without the payloads of rows in `bad`, together with `bad`."""
    if bad:
        keep = np.ones(len(payloads), dtype=np.bool_)
        keep[list(bad)] = False
        payloads = pc.filter(payloads, pa.array(keep))
    return EncodedRecords(payloads, bad)


def repeated_keys(keys: pa.Array, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the numbers of map entries whose key the same map has before.

    `keys`: the keys of all maps, one map after the other. `lengths`: the number of entries of each map.
    """
    if not len(lengths) or lengths.max() < 2:
        return np.zeros(0, dtype=np.int64)
    encoded = keys.dictionary_encode()
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    places = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths) * max(1, len(encoded.dictionary)) + codes
    # Almost no map repeats a key, and a plain sort is much faster than a sort of positions.
    ordered = np.sort(places)
    if not (ordered[1:] == ordered[:-1]).any():
        return np.zeros(0, dtype=np.int64)
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    return np.sort(order[1:][ordered[1:] == ordered[:-1]])
