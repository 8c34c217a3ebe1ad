"""`KafkaSource`: topics as an unbounded source, or up to the records that exist at submission. A partition is a split.

Rules of the source:

- The next offset is in the payload, and so in the checkpoint with the rows before it, because offsets have gaps. The id
  of the topic is stored with it, because a topic that is created again counts other records by the same offsets.
  Committed offsets of a consumer group are neither read nor written.
- Begin and end are decided once, at submission.
- Partitions that are added later are found by FINDERS splits without rows, so that several subtasks receive some. A
  hash determines the finder of a partition. A finder stores how many partitions of each topic are read. New partitions
  are read from their begin. Without `discover_ms` finders only warn, so that it can be set later.
- A position that cannot be continued (another topic of the same name, deleted records, partitions that would not be
  read) is refused before a restore changes anything (`check_unread`), and by the running reader.

Rules of a reader (`KafkaReader`), which reads the partitions of one subtask through one consumer:

- The consumer returns records of all its partitions as they arrive. They are buffered by partition, up to
  BUFFERED_BYTES_MAX in total. When half of it is used, a partition with more than its share is unassigned, and assigned
  again when its buffer is almost empty. One large partition therefore neither fills the memory nor delays other
  partitions.
- A partition whose next offset differs from the requested one is started again there. Any reader therefore continues
  from any checkpoint.
- A topic is read only after the brokers confirmed that it has the id of the checkpoint, and not while it does not
  exist. A bounded partition ends only when the id was confirmed after its last record had arrived.
- The reader waits for brokers that do not answer: the client retries forever. An error that cannot pass, such as
  records that were deleted before they were read, is a ConfigurationError, unless `on_missing` continues behind it.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pyarrow as pa
import xxhash

from tidegate.connectors.bad_rows import BadRows
from tidegate.connectors.kafka.client import (
    WATCH_MS,
    BrokerContact,
    Start,
    TopicInfo,
    TopicWatch,
    client_settings,
    consumer,
    describe_topics,
    end_offset,
    first_offset,
    kafka,
    watermarks,
)
from tidegate.connectors.kafka.records import LETTERS, RecordFormat, RecordReader, Records
from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.storage.clock import monotonic_ms
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    import confluent_kafka
    from confluent_kafka import KafkaError, Message

log = logging.getLogger(__name__)
_Infos: TypeAlias = "Mapping[str, TopicInfo]"


@dataclass(frozen=True, slots=True)
class KafkaSource:
    """Topics of the brokers at `servers` ("host:port,host:port").

    `discover_ms`: how often to look for new partitions, or None to ignore them. `bounded`: the source ends after the
    records that exist at submission. `bad_rows`: policy for records that cannot be read. `on_missing`: policy if the
    next record of a checkpoint no longer exists.
    """

    servers: str
    topics: tuple[str, ...]
    form: RecordFormat
    start: Start = "earliest"
    bounded: bool = False
    discover_ms: int | None = None
    properties: tuple[tuple[str, object], ...] = field(default=(), repr=False)
    """Settings of the client, among them passwords."""
    bad_rows: BadRows = "fail"
    on_missing: OnMissing = "fail"
    unbounded: Literal[True] = True

    @property
    def ends(self) -> bool:
        """True if it reads only up to the records that exist at submission."""
        return self.bounded

    @property
    def schema(self) -> pa.Schema:
        """The columns of the records."""
        return self.form.schema

    @property
    def bad_rows_schema(self) -> pa.Schema | None:
        """The columns of dead letters, if they are a stream."""
        return LETTERS if self.bad_rows == "side" else None

    @property
    def settings(self) -> Mapping[str, object]:
        """The settings of a consumer."""
        return client_settings(self.servers, dict(self.properties))

    def splits(self) -> Sequence[SourceSplit]:
        """Returns finders and the existing partitions. Raises ConfigurationError if brokers or a topic are missing."""
        library = kafka()
        with consumer(self.settings) as asked:
            try:
                infos = describe_topics(asked, self.settings, self.topics)
                missing = [topic for topic, info in infos.items() if not info.partitions]
                if missing and (self.discover_ms is None or len(missing) == len(infos)):
                    raise ConfigurationError(
                        f"from_kafka: topic {missing[0]!r} does not exist at {self.servers}: create it"
                    )
                found = [
                    PartitionAt(
                        topic,
                        number,
                        first_offset(asked, topic, number, self.start),
                        end_offset(asked, topic, number) if self.bounded else None,
                        info.topic_id,
                    )
                    for topic, info in infos.items()
                    for number in range(info.partitions)
                ]
            except library.KafkaException as error:
                raise ConfigurationError(f"from_kafka: the brokers at {self.servers} do not answer: {error}") from error
        self.form.check_partitions({topic: info.partitions for topic, info in infos.items()})
        return (*self._finders({topic: info.partitions for topic, info in infos.items()}), *map(split_of, found))

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """Checks that topics and end are the same. Topics may be added if new partitions are looked for."""
        positions = [decode(split.payload) for split in splits]
        partitions = [at for at in positions if isinstance(at, PartitionAt)]
        if any((at.end is not None) != self.bounded for at in partitions):
            raise ConfigurationError(f"it had {'no ' if self.bounded else ''}end='latest', which cannot change")
        before = {at.topic for at in partitions}
        gone = sorted(before - set(self.topics))
        added = sorted(set(self.topics) - before)
        if gone or (added and self.discover_ms is None):
            raise ConfigurationError(
                f"topic {(gone or added)[0]!r} {'is missing' if gone else 'was not there'}; give the topics that it had"
                f"{'' if gone else ', or set discover='}"
            )

    def check_unread(self, splits: Sequence[SourceSplit]) -> None:
        """Checks that the brokers still have the unread data: these topics, these records, and no other partitions.

        Raises ConfigurationError if not, or if the brokers do not answer.
        """
        positions = [decode(split.payload) for split in splits]
        partitions = [at for at in positions if isinstance(at, PartitionAt)]
        known: dict[str, int] = {}
        for finder in positions:
            if isinstance(finder, KnownPartitions):
                known |= {topic: max(count, known.get(topic, 0)) for topic, count in finder.counts}
        library = kafka()
        with consumer(self.settings) as asked:
            try:
                infos = describe_topics(asked, self.settings, self.topics)
                problems = [
                    *self._missing(infos, partitions),
                    *self._unread_partitions(infos, known),
                    *self._lost_records(asked, infos, partitions),
                ]
            except library.KafkaException as error:
                raise ConfigurationError(f"the brokers at {self.servers} do not answer: {error}") from error
        if problems:
            raise ConfigurationError("; and ".join(problems))

    def reader(self) -> SourceReader:
        """Returns a reader for one subtask, with a consumer of its own."""
        return KafkaReader(self.settings, self.topics, self.form, self.bad_rows, self.discover_ms, self.on_missing)

    def _finders(self, counts: Mapping[str, int]) -> list[SourceSplit]:
        if self.bounded:
            return []
        payload = encode(KnownPartitions(tuple(counts.items())))
        return [SourceSplit(f"new partitions {number} of {FINDERS}", payload, rows=0) for number in range(FINDERS)]

    def _missing(self, infos: _Infos, partitions: Sequence[PartitionAt]) -> Iterator[str]:
        """Yields problems of topics that are gone or were replaced."""
        for topic in sorted({at.topic for at in partitions}):
            info = infos[topic]
            before = {at.topic_id for at in partitions if at.topic == topic and at.topic_id}
            if not info.partitions:
                if self.on_missing == "fail":
                    yield f"topic {topic!r} no longer exists at {self.servers}"
            elif info.topic_id and before - {info.topic_id}:
                count = max(at.partition for at in partitions if at.topic == topic) + 1
                if self.on_missing == "fail" or info.partitions < count:
                    yield replaced_text(topic, self.servers, min(before), info, count)

    def _unread_partitions(self, infos: _Infos, known: Mapping[str, int]) -> Iterator[str]:
        if self.bounded or self.discover_ms is not None:
            return
        for topic, count in known.items():
            new = range(count, infos[topic].partitions) if topic in infos else ()
            if new:
                yield (
                    f"topic {topic!r} has new partitions, {', '.join(map(str, new[:20]))}, which would not be read; "
                    "add from_kafka(discover='1min'), and they are read from their begin"
                )

    def _lost_records(
        self, asked: confluent_kafka.Consumer, infos: _Infos, partitions: Sequence[PartitionAt]
    ) -> Iterator[str]:
        """Yields a problem for each partition whose next records were deleted. Raises KafkaException."""
        for at in partitions:
            info = infos[at.topic]
            if at.offset < 0 or at.partition >= info.partitions or (at.topic_id and at.topic_id != info.topic_id):
                continue
            low, high = watermarks(asked, at.topic, at.partition)
            if low <= at.offset <= high:
                continue
            where = f"partition {at.partition} of {at.topic!r}"
            what = (
                f"{low - at.offset} records of {where} were deleted before they were read: the checkpoint is at offset "
                f"{at.offset}, and the first one left is {low}"
                if at.offset < low
                else f"{where} ends at offset {high}, and the checkpoint is at {at.offset}"
            )
            if self.on_missing == "fail":
                yield f"{what}; continue with from_kafka(on_missing='earliest' or 'latest'), which keeps all state"
            else:
                log.warning("%s; on_missing=%r continues without them", what, self.on_missing)


OnMissing: TypeAlias = Literal["fail", "earliest", "latest"]
BUFFERED_BYTES_MAX = 32 * 1024 * 1024
"""The buffer of a reader for all its partitions. One poll of the consumer may add a quarter of it."""
CONSUMED_MAX = 10_000
"""The most records that one poll of the consumer may add."""
CONSUMED_AT_ONCE = 500
"""How many records are taken from the client at once.

Beyond 700 new objects the garbage collector scans all of them.
"""
RECORD_BYTES = 300
"""The memory of a record besides the bytes of its value, key and headers."""
GONE_MS = 30_000
"""A topic that is gone for this long does not come back."""


@dataclass(slots=True)
class _Partition:
    """The buffer of a partition: `records` from `next_offset` on. The consumer continues at `fetch_offset`."""

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
    """Reads the partitions of one subtask. Called from one thread at a time."""

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
        """`settings`: settings of the client. See `KafkaSource` for the other arguments."""
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
        """Returns rows of a partition that have arrived, or the partitions that a finder has found.

        Raises ConfigurationError.
        """
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
                return self._continue_in_new_topic(at, info, offset)
        if at.end is not None and at.offset >= at.end:
            return ReadResult(None, offset, at_end=self._ends(at))
        partition = self._partition(at)
        if not partition.records:
            if partition.missing:
                return self._continue_after_loss(at, partition, offset)
            self._assign(at, partition)
            self._consume()
        return self._rows(at, partition, offset, rows_max)

    def close(self) -> None:
        """Closes the consumer."""
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
        """Returns whether a partition that has reached its end is done, and releases it then.

        It is done once it is confirmed that the rows belong to the topic of the checkpoint.
        """
        partition = self._partitions.get((at.topic, at.partition))
        if partition is not None:
            if not self._is_confirmed(at, partition):
                return False
            self._release(at)
        return True

    def _is_confirmed(self, at: PartitionAt, partition: _Partition) -> bool:
        """Returns whether the topic was described after the last records had arrived. Requests a description if not."""
        if at.topic_id and self._watch.answered <= partition.request:
            self._watch.poll(at_once=True)
            return False
        return True

    def _partition(self, at: PartitionAt) -> _Partition:
        """Returns the partition at this offset.

        If the reader is elsewhere in it, the partition is started again there.
        """
        name = at.topic, at.partition
        known = self._partitions.get(name)
        if known is not None and known.next_offset == at.offset:
            return known
        if known is not None:
            self._release(at)
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

    def _release(self, at: PartitionAt) -> None:
        name = at.topic, at.partition
        partition = self._partitions.pop(name)
        self._buffered_bytes -= partition.size_bytes
        self._unassign(name, partition)

    def _share_bytes(self) -> int:
        return BUFFERED_BYTES_MAX // len(self._partitions)

    def _consume(self) -> None:
        """Takes records that have arrived, without waiting. Unassigns partitions that have more than their share."""
        room_bytes = BUFFERED_BYTES_MAX // 4
        room = CONSUMED_MAX
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
        """Takes up to `count` messages, which are records and reports, from the client. Returns number and bytes.

        All messages are freed when this returns, so that none gets old enough for the garbage collector to scan it.
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
        """Handles a report of the client: the end of a partition, a temporary failure, or a permanent one."""
        errors = self._library.KafkaError
        if error.code() == errors._PARTITION_EOF:
            if partition is not None:
                partition.end_seen = _offset(record)
                partition.request = self._watch.requests
            return
        if partition is not None and error.code() in (errors.OFFSET_OUT_OF_RANGE, errors._AUTO_OFFSET_RESET):
            partition.missing = True
            partition.request = self._watch.requests
            return
        where = f"partition {record.partition()} of {record.topic()!r} at {self._servers}"
        if error.retriable() or error.code() in _may_pass(errors):
            self._contact.failed(f"{where}: {error}")
            return
        raise ConfigurationError(f"{where} cannot be read: {error}")

    def _continue_after_loss(self, at: PartitionAt, partition: _Partition, offset: int) -> ReadResult:
        """Continues after deleted records as `on_missing` allows. Raises ConfigurationError for "fail"."""
        where = f"partition {at.partition} of {at.topic!r} at {self._servers}"
        if not self._is_confirmed(at, partition):
            # The offset may belong to another topic. If so, that is reported instead.
            return ReadResult(None, offset, at_end=False)
        try:
            low, high = watermarks(self._consumer, at.topic, at.partition)
        except self._library.KafkaException as error:
            self._contact.failed(f"{where}: {error}")
            return ReadResult(None, offset, at_end=False)
        if self._on_missing == "fail":
            raise ConfigurationError(
                f"{where} cannot be read from offset {partition.fetch_offset} on: it has offsets {low} to {high}, and "
                "records that were deleted before they were read are lost. Continue without them with "
                "from_kafka(on_missing='earliest' or 'latest'), which keeps all state"
            )
        to = low if self._on_missing == "earliest" else high
        lost = max(0, to - partition.fetch_offset)
        log.warning("%s: up to %d records before offset %d are lost; on_missing=%r", where, lost, to, self._on_missing)
        return self._move(at, replace(at, offset=to), offset, lost)

    def _continue_in_new_topic(self, at: PartitionAt, info: TopicInfo, offset: int) -> ReadResult:
        """Continues in a topic that was created again as `on_missing` allows. Raises ConfigurationError for "fail"."""
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
            self._release(at)
        return ReadResult(None, offset, at_end=False, payload=encode(to), lost=lost)

    def _is_gone(self, topic: str, info: TopicInfo) -> bool:
        """Returns whether a topic is missing at the moment. Raises ConfigurationError if it does not come back."""
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
        """Returns the new partitions that belong to a finder."""
        number = int(split.split_id.split()[2])
        before = dict(known.counts)
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
        """Logs once each new partition that is not read."""
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
    """Returns the error text for a topic that was replaced by another one of the same name."""
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
    """Returns the codes of errors from which the client recovers by itself."""
    names = ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT", "_RESOLVE", "_MAX_POLL_EXCEEDED", "_UNKNOWN_PARTITION")
    return frozenset(getattr(errors, name) for name in names)


FINDERS = 8
FROM_THE_BEGIN = -2
"""librdkafka's code for the first existing offset."""


@wire
@dataclass(frozen=True, slots=True)
class PartitionAt:
    """A partition of a topic, its next offset, and the offset at which it ends, if it does.

    `topic_id` is the id of the topic that the offset belongs to, or "" if the brokers have none.
    """

    topic: str
    partition: int
    offset: int
    end: int | None = None
    topic_id: str = ""


@wire
@dataclass(frozen=True, slots=True)
class KnownPartitions:
    """The state of a finder: how many partitions of each topic are read."""

    counts: tuple[tuple[str, int], ...]


def split_of(at: PartitionAt) -> SourceSplit:
    """Returns the split of a partition."""
    return SourceSplit(f"{at.topic}[{at.partition}]", encode(at))


def finder_of(topic: str, partition: int) -> int:
    """Returns the finder to which a partition belongs."""
    return (xxhash.xxh3_64_intdigest(topic.encode()) + partition) % FINDERS
