"""`KafkaReader` reads the partitions of one subtask through one consumer. Rules:

- The consumer returns records of all assigned partitions as they arrive. They are buffered by partition, up to
  BUFFERED_BYTES_MAX in total. When half of the buffer is used, a partition with more than its share is unassigned, and
  assigned again when its buffer is almost empty. One large partition therefore cannot fill the memory or delay other
  partitions.
- A partition whose next offset differs from the requested one is assigned again at the requested offset. Any reader
  therefore continues from any checkpoint.
- A topic is read only after the brokers confirmed that it has the id of the checkpoint, and not while it does not
  exist. A bounded partition ends only when the id was confirmed after its last record had arrived.
- The reader waits for brokers that do not answer: the client retries forever. A permanent error, such as records that
  were deleted before they were read, raises a ConfigurationError, unless `on_missing` allows to skip them.
- Offsets are committed to a consumer group only after a checkpoint that contains them is complete.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tidegate.connectors.bad_rows import BadRows
from tidegate.connectors.kafka.client import (
    LIST_MS,
    TIMEOUT_S,
    WATCH_MS,
    BrokerContact,
    GroupOffsets,
    TopicInfo,
    TopicWatch,
)
from tidegate.connectors.kafka.consumer import open_consumer
from tidegate.connectors.kafka.options import OnMissing, Topics, kafka
from tidegate.connectors.kafka.records import FetchReport, RecordBuffer, RecordFormat, RecordReader
from tidegate.connectors.kafka.splits import (
    FINDERS,
    FROM_THE_BEGIN,
    KnownPartitions,
    PartitionAt,
    finder_of,
    split_of,
)
from tidegate.connectors.source import ReadResult, SourceSplit
from tidegate.storage.clock import monotonic_ms
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import ConfigurationError

log = logging.getLogger(__name__)
BUFFERED_BYTES_MAX = 32 * 1024 * 1024
"""Size in bytes of a reader's buffer for all its partitions. One poll of the consumer may add a quarter of it."""
CONSUMED_MAX = 10_000
"""Maximum number of records that one poll of the consumer may add."""
CONSUMED_AT_ONCE = 2_000
"""Maximum number of records that one call takes from the client. Their size is the estimate for the next call."""
_RECORD_BYTES_MIN = 100
"""Lower bound in bytes of the estimated memory of a record."""
GONE_MS = 30_000
"""Time in ms after which a missing topic counts as deleted."""


@dataclass(slots=True)
class _Partition:
    """The buffer of a partition: `records` from `next_offset` on. The consumer continues at `fetch_offset`."""

    topic: str
    number: int
    next_offset: int
    fetch_offset: int
    records: RecordBuffer
    assigned: bool = True
    end_seen: int = -1
    missing: bool = False
    """True if the brokers do not have the record at `fetch_offset`."""
    request: int = 0
    """Number of the last request for topic descriptions that was sent before the latest records, or the end,
    arrived.
    """


class KafkaReader:
    """Reads the partitions of one subtask through one consumer. Called from one thread at a time."""

    def __init__(
        self,
        settings: Mapping[str, object],
        topics: Topics,
        form: RecordFormat,
        bad_rows: BadRows,
        discover_ms: int | None,
        on_missing: OnMissing = "fail",
        commit_offsets: bool = False,
    ) -> None:
        """`settings`: settings of the client. See `KafkaSource` for the other arguments."""
        self._library = kafka()
        self._servers = str(settings["bootstrap.servers"])
        self._discovers = discover_ms is not None
        self._on_missing = on_missing
        self._contact = BrokerContact(self._servers, monotonic_ms)
        self._consumer = open_consumer(settings, form.parts, self._contact)
        watch_ms = min(WATCH_MS, discover_ms or WATCH_MS)
        self._watch = TopicWatch(settings, topics, self._contact, monotonic_ms, watch_ms, discover_ms or LIST_MS)
        self._records = RecordReader(form, bad_rows)
        self._group = GroupOffsets(settings, self._contact, monotonic_ms) if commit_offsets else None
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self.buffered_bytes = 0
        """Memory in bytes of the buffered records of all partitions."""
        self._record_bytes = _RECORD_BYTES_MIN
        self._gone_since_ms: dict[str, int] = {}
        self._unread: dict[str, int] = {}

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns the next rows of a partition that have arrived, or for a finder split the new partitions.

        Raises ConfigurationError.
        """
        at = decode(split.payload)
        self._watch.poll()
        if self._group is not None:
            self._group.poll()
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

    def checkpoint_completed(self, splits: Sequence[SourceSplit]) -> None:
        """Commits the offsets of a completed checkpoint to the consumer group, without waiting."""
        assert self._group is not None
        positions = [decode(split.payload) for split in splits]
        self._group.commit(
            {
                (at.topic, at.partition): self._end_of(at)
                for at in positions
                if isinstance(at, PartitionAt) and at.offset >= 0
            }
        )

    def close(self) -> None:
        """Closes the consumer. Waits up to a second for offsets that are being committed."""
        if self._group is not None:
            self._group.close()
        self._watch.close()
        self._records.close()
        self._consumer.close()

    def _end_of(self, at: PartitionAt) -> int:
        """Returns the offset to commit for a position.

        It skips transaction markers between the position and the partition's end.
        """
        partition = self._partitions.get((at.topic, at.partition))
        if partition is None or partition.records or partition.next_offset != at.offset:
            return at.offset
        return max(at.offset, partition.end_seen)

    def _rows(self, at: PartitionAt, partition: _Partition, offset: int, rows_max: int) -> ReadResult:
        before_bytes = partition.records.size_bytes
        taken = partition.records.take(rows_max)
        payload = None
        if taken is not None:
            self.buffered_bytes -= before_bytes - partition.records.size_bytes
            partition.next_offset = int(taken.offsets[-1]) + 1
            payload = encode(replace(at, offset=partition.next_offset))
            nearly_empty = partition.records.size_bytes <= self._share_bytes() // 2
            if not partition.assigned and nearly_empty and not partition.missing:
                self._assign(at, partition)
        wanted = taken
        if taken is not None and at.end is not None:
            wanted = taken.slice(0, int(np.searchsorted(taken.offsets, at.end)))
        batch, bad = self._records.rows(wanted) if wanted else (None, None)
        reached = max(partition.next_offset, -1 if partition.records else partition.end_seen)
        at_end = at.end is not None and reached >= at.end and self._ends(at)
        rows = sum(found.num_rows for found in (batch, bad) if found is not None)
        behind = None if at_end else self._behind(at, partition, reached)
        return ReadResult(batch, offset + rows, at_end, payload=payload, bad=bad, behind=behind)

    def _behind(self, at: PartitionAt, partition: _Partition, reached: int) -> int | None:
        """Returns the number of offsets between `reached` and the end of the partition, from the last fetch.

        None if unknown.
        """
        if not partition.assigned:
            return None
        end = self._consumer.end_seen(at.topic, at.partition)
        if end is None:
            return None
        return max(0, (end if at.end is None else min(end, at.end)) - reached)

    def _ends(self, at: PartitionAt) -> bool:
        """Returns whether a partition that has reached its end position is finished. If so, releases the partition.

        It is finished once the brokers have confirmed that the topic still has the id of the checkpoint.
        """
        partition = self._partitions.get((at.topic, at.partition))
        if partition is not None:
            if not self._is_confirmed(at, partition):
                return False
            self._release(at)
        return True

    def _is_confirmed(self, at: PartitionAt, partition: _Partition) -> bool:
        """Returns whether the topic was described after the last records arrived. If not, requests a description."""
        if at.topic_id and self._watch.answered <= partition.request:
            self._watch.poll(at_once=True)
            return False
        return True

    def _partition(self, at: PartitionAt) -> _Partition:
        """Returns the partition's buffer, positioned at the offset of `at`.

        If it is at another offset, the partition is assigned again.
        """
        name = at.topic, at.partition
        known = self._partitions.get(name)
        if known is not None and known.next_offset == at.offset:
            return known
        if known is not None:
            self._release(at)
        self._partitions[name] = _Partition(*name, at.offset, at.offset, RecordBuffer(), assigned=False)
        self._assign(at, self._partitions[name])
        return self._partitions[name]

    def _assign(self, at: PartitionAt, partition: _Partition) -> None:
        if not partition.assigned:
            self._consumer.assign(at.topic, at.partition, partition.fetch_offset)
            partition.assigned = True

    def _unassign(self, partition: _Partition) -> None:
        if partition.assigned:
            self._consumer.unassign(partition.topic, partition.number)
            partition.assigned = False

    def _release(self, at: PartitionAt) -> None:
        name = at.topic, at.partition
        partition = self._partitions.pop(name)
        self.buffered_bytes -= partition.records.size_bytes
        self._unassign(partition)

    def _share_bytes(self) -> int:
        return BUFFERED_BYTES_MAX // len(self._partitions)

    def _consume(self) -> None:
        """Receives records that have arrived, without waiting.

        Stops reading partitions that use more than their share of the buffer.
        """
        room_bytes = BUFFERED_BYTES_MAX // 4
        room = CONSUMED_MAX
        while room_bytes > 0 and room > 0:
            count = max(1, min(CONSUMED_AT_ONCE, room, room_bytes // self._record_bytes))
            taken, taken_bytes = self._take(count)
            room_bytes -= taken_bytes
            room -= taken
            if taken < count:
                break
        if self.buffered_bytes > BUFFERED_BYTES_MAX // 2:
            share_bytes = self._share_bytes()
            for partition in self._partitions.values():
                if partition.records.size_bytes > share_bytes:
                    self._unassign(partition)

    def _take(self, count: int) -> tuple[int, int]:
        """Receives up to `count` records and reports from the client. Returns their number, and the kept bytes."""
        found = self._consumer.fetch(count)
        for report in found.reports:
            self._failed(report, self._partitions.get((report.topic, report.partition)))
        kept_bytes = 0
        for records in found.records:
            partition = self._partitions.get((records.topic, records.partition))
            if partition is None or not partition.assigned:
                continue
            kept_bytes += partition.records.add(records)
            partition.fetch_offset = int(records.offsets[-1]) + 1
            partition.request = self._watch.requests
        if found.records:
            self.buffered_bytes += kept_bytes
            self._contact.answered()
            received = found.count - len(found.reports)
            self._record_bytes = max(kept_bytes // received, self._record_bytes // 2, _RECORD_BYTES_MIN)
        return found.count, kept_bytes

    def _failed(self, report: FetchReport, partition: _Partition | None) -> None:
        """Handles a report of the client: the end of a partition, a temporary failure, or a permanent one."""
        error, errors = report.error, self._library.KafkaError
        if error.code() == errors._PARTITION_EOF:
            if partition is not None:
                partition.end_seen = report.offset
                partition.request = self._watch.requests
            return
        if partition is not None and error.code() in (errors.OFFSET_OUT_OF_RANGE, errors._AUTO_OFFSET_RESET):
            partition.missing = True
            partition.request = self._watch.requests
            return
        where = f"partition {report.partition} of {report.topic!r} at {self._servers}"
        if error.retriable() or error.code() in _may_pass(errors):
            self._contact.failed(f"{where}: {error}")
            return
        raise ConfigurationError(
            f"{where} cannot be read: {error}; check the rights of the user and the settings in properties="
        )

    def _continue_after_loss(self, at: PartitionAt, partition: _Partition, offset: int) -> ReadResult:
        """Continues after deleted records if `on_missing` allows that. Raises ConfigurationError for "fail"."""
        where = f"partition {at.partition} of {at.topic!r} at {self._servers}"
        if not self._is_confirmed(at, partition):
            # The offset may belong to another topic. If so, that is reported instead.
            return ReadResult(None, offset, at_end=False)
        try:
            low, high = self._consumer.bounds(at.topic, at.partition, TIMEOUT_S)
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
        """Continues in a topic that was deleted and created again, if `on_missing` allows that.

        Raises ConfigurationError for "fail".
        """
        if self._on_missing == "fail" or at.partition >= info.partitions:
            raise ConfigurationError(replaced_text(at.topic, self._servers, at.topic_id, info, at.partition + 1))
        where = f"partition {at.partition} of {at.topic!r} at {self._servers}"
        try:
            low, high = self._consumer.bounds(at.topic, at.partition, TIMEOUT_S)
        except self._library.KafkaException as error:
            self._contact.failed(f"{where}: {error}")
            return ReadResult(None, offset, at_end=False)
        to = low if self._on_missing == "earliest" else high
        log.warning("%s belongs to another topic now, and is read from offset %d on", where, to)
        end = None if at.end is None else high
        return self._move(at, replace(at, offset=to, end=end, topic_id=info.topic_id), offset)

    def _move(self, at: PartitionAt, to: PartitionAt, offset: int, lost: int = 0) -> ReadResult:
        if (at.topic, at.partition) in self._partitions:
            self._release(at)
        return ReadResult(None, offset, at_end=False, payload=encode(to), lost=lost)

    def _is_gone(self, topic: str, info: TopicInfo) -> bool:
        """Returns whether a topic is missing now. Raises ConfigurationError if it has been missing for GONE_MS."""
        if info.partitions:
            self._gone_since_ms.pop(topic, None)
            return False
        now_ms = monotonic_ms()
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
        """Finds new partitions, and returns as new splits the ones that the hash assigns to this finder split."""
        number = int(split.split_id.split()[2])
        before = dict(known.counts)
        self._watch.poll_list()
        infos = {topic: self._watch.info(topic) for topic in self._watch.topics}
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
        """Logs each new partition that the job does not read. Each one is logged once."""
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
    """Returns the error text for a topic that was deleted and created again with the same name."""
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


def _may_pass(errors: Any) -> frozenset[int]:
    """Returns the codes of errors that are temporary, because the client recovers from them by itself."""
    names = ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT", "_RESOLVE", "_MAX_POLL_EXCEEDED", "_UNKNOWN_PARTITION")
    return frozenset(getattr(errors, name) for name in names)
