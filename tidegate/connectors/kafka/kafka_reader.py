"""`KafkaReader`: reads the partitions of one subtask through one consumer.

Rules:

- The consumer gives records of all its partitions as they come. They are kept by partition until that one is read. The
  limit is BUFFERED_BYTES_MAX for all partitions together. When half of it is taken, a partition that has more than its
  share is let go at the consumer, and assigned again when little of it is left. So one large partition neither fills
  the memory nor holds up the others.
- A partition whose next offset is not the one that is asked for is begun anew there. So any reader goes on from any
  checkpoint.
- An offset belongs to one topic (`topics.py`). Nothing is read from it before the brokers have confirmed that the topic
  still has the id of the checkpoint, nothing while the topic is gone, and a bounded partition ends only when the id was
  confirmed after its last record had come.
- Brokers that do not answer are waited for: the client tries again for ever (`broker_contact.py` logs it). What cannot
  pass, such as records that were deleted before they were read, is a ConfigurationError, or `on_missing` goes on behind
  it.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tidegate.connectors.bad_rows import BadRows
from tidegate.connectors.kafka.broker_contact import BrokerContact
from tidegate.connectors.kafka.client import kafka, watermarks
from tidegate.connectors.kafka.positions import (
    FINDERS,
    FROM_THE_BEGIN,
    KnownPartitions,
    PartitionAt,
    finder_of,
    split_of,
)
from tidegate.connectors.kafka.records import RecordFormat, RecordReader, Records
from tidegate.connectors.kafka.topics import WATCH_MS, TopicInfo, TopicWatch
from tidegate.connectors.source import ReadResult, SourceSplit
from tidegate.storage.clock import monotonic_ms
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

log = logging.getLogger(__name__)
OnMissing: TypeAlias = Literal["fail", "earliest", "latest"]
BUFFERED_BYTES_MAX = 32 * 1024 * 1024
"""What a reader keeps of all its partitions. One look at the consumer may add a quarter of it."""
CONSUMED_MAX = 10_000
"""Records that one look at the consumer may add."""
CONSUMED_AT_ONCE = 500
"""Records that are taken from the client at once. Beyond 700 new objects the garbage collector looks at all of them."""
RECORD_BYTES = 300
"""What a record takes in memory besides the bytes of its value, its key and its headers."""
GONE_MS = 30_000
"""A topic that is gone for this long does not come back."""


@dataclass(slots=True)
class _Partition:
    """What a reader has of a partition: `records` from `next_offset` on, and where the consumer goes on after them."""

    next_offset: int
    fetch_offset: int
    records: Records
    size_bytes: int = 0
    assigned: bool = True
    end_seen: int = -1
    missing: bool = False
    """The brokers do not have the record at `fetch_offset`."""
    request: int = 0
    """The last request for descriptions that was sent when records or the end came."""


class KafkaReader:
    """Called from one thread at a time."""

    def __init__(
        self,
        settings: Mapping[str, object],
        topics: Sequence[str],
        form: RecordFormat,
        bad_rows: BadRows,
        discover_ms: int | None,
        on_missing: OnMissing = "fail",
        clock_ms: Callable[[], int] = monotonic_ms,
    ) -> None:
        """`settings` are those of the client; for the others see `KafkaSource`."""
        self._library = kafka()
        self._servers = str(settings["bootstrap.servers"])
        self._topics = topics
        self._discovers = discover_ms is not None
        self._on_missing = on_missing
        self._clock_ms = clock_ms
        self._contact = BrokerContact(self._servers, clock_ms)
        self._consumer = self._library.Consumer(dict(settings), logger=self._contact)
        watch_ms = min(WATCH_MS, discover_ms or WATCH_MS)
        self._watch = TopicWatch(settings, topics, self._contact, clock_ms, watch_ms)
        self._form = form
        self._records = RecordReader(form, bad_rows)
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._buffered_bytes = 0
        self._record_bytes = RECORD_BYTES
        self._gone_since_ms: dict[str, int] = {}
        self._unread: dict[str, int] = {}

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Rows of a partition that have come, or the partitions that a finder has found. ConfigurationError."""
        at = decode(split.payload)
        self._watch.poll()
        if isinstance(at, KnownPartitions):
            return self._find(split, at, offset)
        assert isinstance(at, PartitionAt)
        if at.topic_id:
            info = self._watch.info(at.topic)
            if info is None or self._is_gone(at.topic, info):
                return ReadResult(None, offset, at_end=False)
            if info.topic_id != at.topic_id:
                return self._go_on_in(at, info, offset)
        if at.end is not None and at.offset >= at.end:
            return ReadResult(None, offset, at_end=self._ends(at))
        partition = self._partition(at)
        if not partition.records:
            if partition.missing:
                return self._go_on_behind(at, partition, offset)
            self._assign(at, partition)
            self._consume()
        return self._rows(at, partition, offset, rows_max)

    def close(self) -> None:
        """Leave the brokers."""
        self._consumer.close()

    def _rows(self, at: PartitionAt, partition: _Partition, offset: int, rows_max: int) -> ReadResult:
        taken = partition.records.take(rows_max)
        payload = None
        if taken:
            size_bytes = _size_bytes(taken) if partition.records else partition.size_bytes
            self._buffered_bytes -= size_bytes
            partition.size_bytes -= size_bytes
            partition.next_offset = taken.offsets[-1] + 1
            payload = encode(replace(at, offset=partition.next_offset))
            if not partition.assigned and partition.size_bytes <= self._share_bytes() // 2 and not partition.missing:
                self._assign(at, partition)
        wanted = taken if at.end is None else taken.take(bisect_left(taken.offsets, at.end))
        batch, bad = self._records.rows(wanted) if wanted else (None, None)
        reached = max(partition.next_offset, -1 if partition.records else partition.end_seen)
        at_end = at.end is not None and reached >= at.end and self._ends(at)
        rows = sum(found.num_rows for found in (batch, bad) if found is not None)
        return ReadResult(batch, offset + rows, at_end, payload=payload, bad=bad)

    def _ends(self, at: PartitionAt) -> bool:
        """Whether a partition that has reached its end is done: what was read belongs to its topic. Then let it go."""
        partition = self._partitions.get((at.topic, at.partition))
        if partition is not None:
            if not self._is_confirmed(at, partition):
                return False
            self._let_go(at)
        return True

    def _is_confirmed(self, at: PartitionAt, partition: _Partition) -> bool:
        """Whether the topic was described after the last records had come; if not, request it."""
        if at.topic_id and self._watch.answered <= partition.request:
            self._watch.poll(at_once=True)
            return False
        return True

    def _partition(self, at: PartitionAt) -> _Partition:
        """A partition that is at this offset."""
        name = at.topic, at.partition
        known = self._partitions.get(name)
        if known is not None and known.next_offset == at.offset:
            return known
        if known is not None:
            self._let_go(at)
        self._partitions[name] = _Partition(at.offset, at.offset, self._form.records_of(*name), assigned=False)
        self._assign(at, self._partitions[name])
        return self._partitions[name]

    def _assign(self, at: PartitionAt, partition: _Partition) -> None:
        if not partition.assigned:
            place = self._library.TopicPartition(at.topic, at.partition, partition.fetch_offset)
            self._consumer.incremental_assign([place])
            partition.assigned = True

    def _unassign(self, name: tuple[str, int], partition: _Partition) -> None:
        if partition.assigned:
            self._consumer.incremental_unassign([self._library.TopicPartition(*name)])
            partition.assigned = False

    def _let_go(self, at: PartitionAt) -> None:
        name = at.topic, at.partition
        partition = self._partitions.pop(name)
        self._buffered_bytes -= partition.size_bytes
        self._unassign(name, partition)

    def _share_bytes(self) -> int:
        return BUFFERED_BYTES_MAX // len(self._partitions)

    def _consume(self) -> None:
        """Take what has come, without waiting; then let go of partitions that have more than their share."""
        room_bytes, room = BUFFERED_BYTES_MAX // 4, CONSUMED_MAX
        while room_bytes > 0 and room > 0:
            count = max(1, min(CONSUMED_AT_ONCE, room, room_bytes // self._record_bytes))
            taken, taken_bytes = self._take(count)
            room_bytes -= taken_bytes
            room -= taken
            if taken < count:
                break
        if self._buffered_bytes > BUFFERED_BYTES_MAX // 2:
            share_bytes = self._share_bytes()
            for name, partition in self._partitions.items():
                if partition.size_bytes > share_bytes:
                    self._unassign(name, partition)

    def _take(self, count: int) -> tuple[int, int]:
        """Take up to `count` messages, which are records and reports, from the client. Returns number and bytes.

        No message is left when this returns, so that none is old enough for the garbage collector to look at.
        """
        found = self._consumer.consume(count, timeout=0)
        taken = len(found)
        errors = [(record, error) for record in found if (error := record.error()) is not None]
        for record, error in errors:
            self._failed(record, error, self._partitions.get((record.topic() or "", record.partition() or 0)))
        if errors:
            found = [record for record in found if record.error() is None]
        if not found:
            return taken, 0
        kept_bytes = 0
        for name, run in self._runs(found):
            partition = self._partitions.get(name)
            if partition is None or not partition.assigned:
                continue
            records = list(run)
            size_bytes = partition.records.add(records) + RECORD_BYTES * len(records)
            kept_bytes += size_bytes
            partition.size_bytes += size_bytes
            partition.fetch_offset = _offset(records[-1]) + 1
            partition.request = self._watch.requests
        self._buffered_bytes += kept_bytes
        self._contact.answered()
        self._record_bytes = max(kept_bytes // len(found), self._record_bytes // 2, RECORD_BYTES)
        return taken, kept_bytes

    def _runs(self, records: Sequence[Message]) -> Iterator[tuple[tuple[str, int], Iterator[Message]]]:
        """Yields records that follow each other and are of one partition, with its topic and number."""
        kind = self._library.Message
        topics = groupby(records, kind.topic) if len(self._topics) > 1 else [(self._topics[0], records)]
        for topic, of_topic in topics:
            for partition, run in groupby(of_topic, kind.partition):
                yield (topic, partition), run

    def _failed(self, record: Message, error: KafkaError, partition: _Partition | None) -> None:
        """The client reports the end of a partition, a failure that may pass, or one that cannot."""
        errors = self._library.KafkaError
        if error.code() == errors._PARTITION_EOF:
            if partition is not None:
                partition.end_seen = _offset(record)
                partition.request = self._watch.requests
            return
        if partition is not None and error.code() in (errors.OFFSET_OUT_OF_RANGE, errors._AUTO_OFFSET_RESET):
            partition.missing, partition.request = True, self._watch.requests
            return
        where = f"partition {record.partition()} of {record.topic()!r} at {self._servers}"
        if error.retriable() or error.code() in _may_pass(errors):
            self._contact.failed(f"{where}: {error}")
            return
        raise ConfigurationError(f"{where} cannot be read: {error}")

    def _go_on_behind(self, at: PartitionAt, partition: _Partition, offset: int) -> ReadResult:
        """Where the next record was deleted: go on as `on_missing` allows. ConfigurationError if it does not."""
        where = f"partition {at.partition} of {at.topic!r} at {self._servers}"
        if not self._is_confirmed(at, partition):
            # The offset may be that of another topic, which is the better thing to report.
            return ReadResult(None, offset, at_end=False)
        try:
            low, high = watermarks(self._consumer, at.topic, at.partition)
        except self._library.KafkaException as error:
            self._contact.failed(f"{where}: {error}")
            return ReadResult(None, offset, at_end=False)
        if self._on_missing == "fail":
            raise ConfigurationError(
                f"{where} cannot be read from offset {partition.fetch_offset} on: it has offsets {low} to {high}, and "
                "records that were deleted before they were read are lost. Go on without them by "
                "from_kafka(on_missing='earliest' or 'latest'), with all state kept"
            )
        to = low if self._on_missing == "earliest" else high
        lost = max(0, to - partition.fetch_offset)
        log.warning("%s: up to %d records before offset %d are lost; on_missing=%r", where, lost, to, self._on_missing)
        return self._move(at, replace(at, offset=to), offset, lost)

    def _go_on_in(self, at: PartitionAt, info: TopicInfo, offset: int) -> ReadResult:
        """Where a topic was created again: go on in it as `on_missing` allows. ConfigurationError if it does not."""
        if self._on_missing == "fail" or at.partition >= info.partitions:
            raise ConfigurationError(replaced_text(at.topic, self._servers, at.topic_id, info, at.partition + 1))
        where = f"partition {at.partition} of {at.topic!r} at {self._servers}"
        try:
            low, high = watermarks(self._consumer, at.topic, at.partition)
        except self._library.KafkaException as error:
            self._contact.failed(f"{where}: {error}")
            return ReadResult(None, offset, at_end=False)
        to = low if self._on_missing == "earliest" else high
        log.warning("%s belongs to another topic now, and is read from offset %d on", where, to)
        return self._move(at, replace(at, offset=to, topic_id=info.topic_id), offset)

    def _move(self, at: PartitionAt, to: PartitionAt, offset: int, lost: int = 0) -> ReadResult:
        if (at.topic, at.partition) in self._partitions:
            self._let_go(at)
        return ReadResult(None, offset, at_end=False, payload=encode(to), lost=lost)

    def _is_gone(self, topic: str, info: TopicInfo) -> bool:
        """Whether a topic is not there at the moment. ConfigurationError if it does not come back."""
        if info.partitions:
            self._gone_since_ms.pop(topic, None)
            return False
        now_ms = self._clock_ms()
        since_ms = self._gone_since_ms.get(topic)
        if since_ms is None:
            self._gone_since_ms[topic] = now_ms
            then = f"The job fails in {GONE_MS // 1000} s" if self._on_missing == "fail" else "The job waits for it"
            log.warning("topic %r was deleted at %s, so nothing of it is read. %s", topic, self._servers, then)
        elif self._on_missing == "fail" and now_ms - since_ms >= GONE_MS:
            raise ConfigurationError(
                f"topic {topic!r} was deleted at {self._servers}; its records that were not read are lost. To read a "
                "new topic of this name restore with from_kafka(on_missing='earliest'), with all state kept"
            )
        return True

    def _find(self, split: SourceSplit, known: KnownPartitions, offset: int) -> ReadResult:
        """New partitions that belong to a finder."""
        number, before = int(split.split_id.split()[2]), dict(known.counts)
        infos = {topic: self._watch.info(topic) for topic in self._topics}
        new = {
            topic: info for topic, info in infos.items() if info is not None and info.partitions > before.get(topic, 0)
        }
        if not self._discovers:
            self._warn_of(new, before)
            return ReadResult(None, offset, at_end=False)
        found = tuple(
            split_of(PartitionAt(topic, partition, FROM_THE_BEGIN, topic_id=info.topic_id))
            for topic, info in new.items()
            for partition in range(before.get(topic, 0), info.partitions)
            if finder_of(topic, partition) == number % FINDERS
        )
        now = KnownPartitions(tuple({**before, **{topic: info.partitions for topic, info in new.items()}}.items()))
        return ReadResult(None, offset, at_end=False, payload=None if now == known else encode(now), found=found)

    def _warn_of(self, new: Mapping[str, TopicInfo], before: Mapping[str, int]) -> None:
        """Log each new partition once that is not read."""
        for topic, info in new.items():
            known = max(before.get(topic, 0), self._unread.get(topic, 0))
            if info.partitions > known:
                log.warning(
                    "topic %r has new partitions, %s, which are not read; stop the job with a savepoint, and restore "
                    "it with from_kafka(discover='1min')",
                    topic,
                    ", ".join(map(str, range(known, info.partitions)[:20])),
                )
                self._unread[topic] = info.partitions


def replaced_text(topic: str, servers: str, before: str, info: TopicInfo, partitions: int) -> str:
    """What to report of a topic with id `before` and at least so many partitions, of which another one has the name."""
    fewer = f" It has {info.partitions} partitions, fewer than before." if info.partitions < partitions else ""
    way = (
        "Give the source another uid, and restore with allow_non_restored_state=True: then it begins at start="
        if fewer
        else "Read it from its begin by from_kafka(on_missing='earliest'), or from its end by 'latest', with all state "
        "kept"
    )
    return (
        f"another topic of this name is at {servers}: {topic!r} was deleted and created again (its id was {before}, "
        f"and is {info.topic_id}), so offsets of the old one mean nothing in it.{fewer} {way}"
    )


def _offset(record: Message) -> int:
    offset = record.offset()
    assert offset is not None, "what was consumed has an offset"
    return offset


def _size_bytes(records: Records) -> int:
    return records.size_bytes + RECORD_BYTES * len(records)


def _may_pass(errors: Any) -> frozenset[int]:
    """Errors of the client that it gets over by itself."""
    names = ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT", "_RESOLVE", "_MAX_POLL_EXCEEDED", "_UNKNOWN_PARTITION")
    return frozenset(getattr(errors, name) for name in names)
