"""`KafkaReader`: reads the partitions of one subtask through one consumer.

Rules:

- The consumer gives records of all its partitions as they come. They are kept by partition until that one is read,
  BUFFERED_MAX of them in all; then nothing more is taken.
- A partition whose next offset is not the one that is asked for is begun anew there. So any reader goes on from any
  checkpoint.
- Brokers that do not answer are waited for: the client tries again for ever, and says so in the log. What cannot pass,
  such as records that were deleted before they were read, is a ConfigurationError.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tidegate.actors.sources.kafka.client import kafka, partition_counts
from tidegate.actors.sources.kafka.positions import (
    FINDERS,
    FROM_THE_BEGIN,
    KnownPartitions,
    PartitionAt,
    finder_of,
    split_of,
)
from tidegate.actors.sources.kafka.records import RecordFormat, RecordReader
from tidegate.actors.sources.source import ReadResult, SourceSplit
from tidegate.storage.clock import monotonic_ms
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

log = logging.getLogger(__name__)
BUFFERED_MAX = 50_000
CONSUMED_MAX = 10_000
"""So many records are taken from the client at once."""


@dataclass(slots=True)
class _Partition:
    """What a reader has of a partition: the next offset, the records from there on, and the end that was seen."""

    next_offset: int
    records: deque[Message] = field(default_factory=deque)
    end_seen: int = -1


class KafkaReader:
    """Called from one thread at a time."""

    def __init__(
        self,
        settings: Mapping[str, object],
        topics: Sequence[str],
        form: RecordFormat,
        skip: bool,
        discover_ms: int | None,
        clock_ms: Callable[[], int] = monotonic_ms,
    ) -> None:
        """`settings` are those of the client; for the others see `KafkaSource`."""
        self._library = kafka()
        self._servers = settings["bootstrap.servers"]
        self._topics = topics
        self._discover_ms = discover_ms
        self._consumer = self._library.Consumer(dict(settings), logger=log)
        self._records = RecordReader(form, skip)
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._buffered = 0
        self._clock_ms = clock_ms
        self._counts: dict[str, int] = {}
        self._looked_at_ms: int | None = None

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Rows of a partition that have come, or the partitions that a finder has found. ConfigurationError."""
        at = decode(split.payload)
        if isinstance(at, KnownPartitions):
            return self._find(split, at, offset)
        assert isinstance(at, PartitionAt)
        if at.end is not None and at.offset >= at.end:
            return ReadResult(None, offset, at_end=True)
        partition = self._partition(at)
        if not partition.records and self._buffered < BUFFERED_MAX:
            self._consume()
        taken = [partition.records.popleft() for _ in range(min(rows_max, len(partition.records)))]
        self._buffered -= len(taken)
        if taken:
            partition.next_offset = _offset(taken[-1]) + 1
        wanted = taken if at.end is None else [record for record in taken if _offset(record) < at.end]
        batch = self._records.batch(wanted) if wanted else None
        reached = max(partition.next_offset, -1 if partition.records else partition.end_seen)
        at_end = at.end is not None and reached >= at.end
        if at_end:
            self._let_go(at)
        payload = encode(replace(at, offset=partition.next_offset)) if taken else None
        return ReadResult(batch, offset + (0 if batch is None else batch.num_rows), at_end, payload=payload)

    def close(self) -> None:
        """Leave the brokers."""
        self._consumer.close()

    def _partition(self, at: PartitionAt) -> _Partition:
        """A partition that is at this offset."""
        name = at.topic, at.partition
        known = self._partitions.get(name)
        if known is not None and known.next_offset == at.offset:
            return known
        if known is not None:
            self._let_go(at)
        self._consumer.incremental_assign([self._library.TopicPartition(at.topic, at.partition, at.offset)])
        self._partitions[name] = _Partition(at.offset)
        return self._partitions[name]

    def _let_go(self, at: PartitionAt) -> None:
        self._buffered -= len(self._partitions.pop((at.topic, at.partition)).records)
        self._consumer.incremental_unassign([self._library.TopicPartition(at.topic, at.partition)])

    def _consume(self) -> None:
        """Take what has come, without waiting."""
        for record in self._consumer.consume(CONSUMED_MAX, timeout=0):
            partition = self._partitions.get((record.topic() or "", record.partition() or 0))
            if (error := record.error()) is not None:
                self._failed(record, error, partition)
            elif partition is not None:
                partition.records.append(record)
                self._buffered += 1

    def _failed(self, record: Message, error: KafkaError, partition: _Partition | None) -> None:
        """The client says that there is nothing more, that something may pass, or that something cannot."""
        if error.code() == self._library.KafkaError._PARTITION_EOF:
            if partition is not None:
                partition.end_seen = _offset(record)
            return
        where = f"partition {record.partition()} of {record.topic()!r} at {self._servers}"
        if error.retriable() or error.code() in _may_pass(self._library.KafkaError):
            log.warning("%s cannot be read, and is tried again: %s", where, error)
            return
        gone = "; records that were deleted before they were read are lost: restore a newer checkpoint, or start anew"
        raise ConfigurationError(
            f"{where} cannot be read: {error}{gone if _is_gone(error, self._library.KafkaError) else ''}"
        )

    def _find(self, split: SourceSplit, known: KnownPartitions, offset: int) -> ReadResult:
        """New partitions that belong to a finder."""
        self._look()
        number, before = int(split.split_id.split()[2]), dict(known.counts)
        found = tuple(
            split_of(PartitionAt(topic, partition, FROM_THE_BEGIN))
            for topic, count in self._counts.items()
            for partition in range(before.get(topic, 0), count)
            if finder_of(topic, partition) == number % FINDERS
        )
        now = KnownPartitions(tuple({**before, **_greater(self._counts, before)}.items()))
        return ReadResult(None, offset, at_end=False, payload=None if now == known else encode(now), found=found)

    def _look(self) -> None:
        """Ask how many partitions there are, once an interval."""
        now_ms, every_ms = self._clock_ms(), self._discover_ms
        assert every_ms is not None
        if self._looked_at_ms is not None and now_ms - self._looked_at_ms < every_ms:
            return
        self._looked_at_ms = now_ms
        try:
            self._counts = partition_counts(self._consumer, self._topics)
        except self._library.KafkaException as error:
            log.warning("new partitions are looked for later: %s", error)


def _greater(counts: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {topic: count for topic, count in counts.items() if count > before.get(topic, 0)}


def _offset(record: Message) -> int:
    offset = record.offset()
    assert offset is not None, "what was consumed has an offset"
    return offset


def _may_pass(errors: Any) -> frozenset[int]:
    """Errors of the client that it gets over by itself."""
    names = ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT", "_RESOLVE", "_MAX_POLL_EXCEEDED", "_UNKNOWN_PARTITION")
    return frozenset(getattr(errors, name) for name in names)


def _is_gone(error: KafkaError, errors: Any) -> bool:
    return error.code() in (errors.OFFSET_OUT_OF_RANGE, errors._AUTO_OFFSET_RESET)
