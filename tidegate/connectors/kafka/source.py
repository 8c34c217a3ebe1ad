"""`KafkaSource`: reads topics as an unbounded source, or up to an end position. A partition is a split.

Rules:

- The next offset is in the payload, and so in the checkpoint with the rows before it, because offsets have gaps. The id
  of the topic is stored with the offset, because a topic that is created again has other records at the same offsets.
- Start and end offsets are resolved once, at submission. The offsets of a consumer group are read only then, and only
  for `start="group"`.
- Partitions that are added later, and topics that match a pattern, are found by FINDERS splits without rows (finders),
  so that several subtasks receive new partitions. A hash determines the finder of a partition. A finder stores how many
  partitions of each topic are read. New partitions are read from their first record. Without `discover_ms` finders only
  log a warning.
- A position that cannot be continued (another topic of the same name, deleted records, partitions that would not be
  read) is refused before a restore changes anything (`check_unread`), and by the running reader.

`reader.py` has the reader, `splits.py` the payloads of splits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import pyarrow as pa

from tidegate.connectors.bad_rows import BadRows
from tidegate.connectors.kafka.client import TopicInfo, consumer, describe_topics, offset_at, watermarks
from tidegate.connectors.kafka.options import (
    AtOffset,
    End,
    OnMissing,
    Place,
    Start,
    Topics,
    check_named,
    client_settings,
    kafka,
    place_of,
    times_in,
)
from tidegate.connectors.kafka.reader import KafkaReader, replaced_text
from tidegate.connectors.kafka.records import LETTERS, RecordFormat
from tidegate.connectors.kafka.splits import FINDERS, KnownPartitions, PartitionAt, split_of
from tidegate.connectors.source import SourceReader, SourceSplit
from tidegate.storage.clock import now_ms
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    import confluent_kafka

log = logging.getLogger(__name__)
_Infos: TypeAlias = "Mapping[str, TopicInfo]"
_NAMED_MAX = 20
"""Maximum number of partitions that an error lists."""


@dataclass(frozen=True, slots=True)
class KafkaSource:
    """Topics of the brokers at `servers` ("host:port,host:port").

    `end`: the position at which the source ends, or None if it never does. `discover_ms`: interval of looking for new
    partitions, or None to ignore them. `bad_rows`: policy for records that cannot be read. `on_missing`: policy if the
    next record of a checkpoint no longer exists. `commit_offsets`: whether to commit offsets to the consumer group of
    `properties`.
    """

    servers: str
    topics: Topics
    form: RecordFormat
    start: Start = "earliest"
    end: End | None = None
    discover_ms: int | None = None
    properties: tuple[tuple[str, object], ...] = field(default=(), repr=False)
    """Settings of the client, which may include passwords."""
    bad_rows: BadRows = "fail"
    on_missing: OnMissing = "fail"
    commit_offsets: bool = False
    unbounded: Literal[True] = True

    @property
    def ends(self) -> bool:
        """Returns True if the source has an end position."""
        return self.end is not None

    @property
    def schema(self) -> pa.Schema:
        """Returns the columns of the source."""
        return self.form.schema

    @property
    def bad_rows_schema(self) -> pa.Schema | None:
        """Returns the schema of the stream of dead letters, or None if there is no such stream."""
        return LETTERS if self.bad_rows == "side" else None

    @property
    def notified(self) -> bool:
        """Returns True if readers are notified of completed checkpoints."""
        return self.commit_offsets

    @property
    def settings(self) -> Mapping[str, object]:
        """Returns the settings of a consumer."""
        return client_settings(self.servers, dict(self.properties))

    def splits(self) -> Sequence[SourceSplit]:
        """Returns the finder splits and a split for each existing partition.

        Raises ConfigurationError if the brokers do not answer, or a topic or a start or end position is missing.
        """
        if any(at_ms > now_ms() for at_ms in times_in(self.end)):
            raise ConfigurationError(
                f"from_kafka(end={self.end!r}) is in the future: the end is resolved when the job is submitted. Give a "
                "time in the past, or remove end= and stop the job when it is time"
            )
        library = kafka()
        with consumer(self.settings) as asked:
            try:
                infos = describe_topics(asked, self.settings, self.topics)
                self._check_exist(infos)
                counts = {topic: info.partitions for topic, info in infos.items()}
                check_named(self.start, counts, "start")
                check_named(self.end, counts, "end")
                found = [
                    self._begin(asked, topic, number, info.topic_id)
                    for topic, info in infos.items()
                    for number in range(info.partitions)
                ]
            except library.KafkaException as error:
                raise ConfigurationError(
                    f"from_kafka: the brokers at {self.servers} do not answer: {error}"
                    "; check that they run, and that the address is right"
                ) from error
        self.form.check_partitions(counts)
        return (*self._finders(counts), *map(split_of, found))

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """Raises ConfigurationError if `topics` or `end` differ from the checkpoint.

        With `discover_ms`, topics may be added.
        """
        positions = [decode(split.payload) for split in splits]
        partitions = [at for at in positions if isinstance(at, PartitionAt)]
        if any((at.end is not None) != self.ends for at in partitions):
            raise ConfigurationError(
                f"from_kafka: the job was started {'without' if self.ends else 'with'} end=, which cannot change; "
                f"{'remove it' if self.ends else 'give it again'}, or start without restore"
            )
        before = {at.topic for at in partitions}
        gone = sorted(topic for topic in before if not self.topics.matches(topic))
        if gone:
            raise ConfigurationError(f"topic {gone[0]!r} is missing in topics=; add it, because its records are unread")
        added = sorted(set(self.topics.names) - before)
        if added and self.discover_ms is None:
            raise ConfigurationError(f"topic {added[0]!r} was not there; give the topics that it had, or set discover=")

    def check_unread(self, splits: Sequence[SourceSplit]) -> None:
        """Raises ConfigurationError unless the brokers still have the unread topics and records, and no new partition
        would be ignored.

        Also raises ConfigurationError if the brokers do not answer.
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
                infos = describe_topics(asked, self.settings, self.topics, also={at.topic for at in partitions})
                problems = [
                    *self._missing(infos, partitions),
                    *self._unread_partitions(infos, known),
                    *self._lost_records(asked, infos, partitions),
                ]
            except library.KafkaException as error:
                raise ConfigurationError(
                    f"from_kafka: the brokers at {self.servers} do not answer: {error}; check that they run, and that "
                    "the address is right"
                ) from error
        if problems:
            raise ConfigurationError("; and ".join(problems))

    def reader(self) -> SourceReader:
        """Returns a reader for one subtask, with a new consumer."""
        return KafkaReader(
            self.settings,
            self.topics,
            self.form,
            self.bad_rows,
            self.discover_ms,
            self.on_missing,
            commit_offsets=self.commit_offsets,
        )

    def _check_exist(self, infos: _Infos) -> None:
        """Raises ConfigurationError if a topic is missing. With `discover_ms`, at least one topic must exist."""
        missing = [topic for topic, info in infos.items() if not info.partitions]
        if not infos:
            raise ConfigurationError(f"from_kafka: no topic at {self.servers} matches the {self.topics}: create one")
        if missing and (self.discover_ms is None or len(missing) == len(infos)):
            raise ConfigurationError(f"from_kafka: topic {missing[0]!r} does not exist at {self.servers}: create it")

    def _begin(self, asked: confluent_kafka.Consumer, topic: str, partition: int, topic_id: str) -> PartitionAt:
        """Returns the position of a partition: its first offset to read, and the offset at which it ends.

        Raises KafkaException, and ConfigurationError.
        """
        bounds = low, high = watermarks(asked, topic, partition)
        start = place_of(self.start, topic, partition, "start")
        first = offset_at(asked, topic, partition, start, bounds)
        where = f"partition {partition} of {topic!r}"
        if first is None:
            group = self.settings["group.id"]
            raise ConfigurationError(
                f"from_kafka(start='group'): consumer group {group!r} has committed no offset for {where}; give "
                "'group_or_earliest' or 'group_or_latest'"
            )
        if not low <= first <= high and self.on_missing == "fail":
            raise ConfigurationError(
                f"from_kafka(start={_place_text(start)}): {where} has offsets {low} to {high}, and not {first}; give "
                "another start=, or continue at the next record that exists by on_missing='earliest' or 'latest'"
            )
        last = None
        if self.end is not None:
            last = offset_at(asked, topic, partition, place_of(self.end, topic, partition, "end"), bounds)
        return PartitionAt(topic, partition, first, last, topic_id)

    def _finders(self, counts: Mapping[str, int]) -> list[SourceSplit]:
        if self.ends:
            return []
        payload = encode(KnownPartitions(tuple(counts.items())))
        return [SourceSplit(f"new partitions {number} of {FINDERS}", payload, rows=0) for number in range(FINDERS)]

    def _missing(self, infos: _Infos, partitions: Sequence[PartitionAt]) -> Iterator[str]:
        """Yields an error text for each topic that was deleted or replaced."""
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
        if not known or self.discover_ms is not None:
            return
        for topic, info in infos.items():
            new = range(known.get(topic, 0), info.partitions)
            if new:
                yield (
                    f"topic {topic!r} has new partitions, {', '.join(map(str, new[:_NAMED_MAX]))}, which would not be "
                    "read; add from_kafka(discover='1min'), and they are read from their begin"
                )

    def _lost_records(
        self, asked: confluent_kafka.Consumer, infos: _Infos, partitions: Sequence[PartitionAt]
    ) -> Iterator[str]:
        """Yields an error text for each partition whose next records were deleted. Raises KafkaException."""
        for at in partitions:
            info = infos[at.topic]
            if at.offset < 0 or at.partition >= info.partitions or (at.topic_id and at.topic_id != info.topic_id):
                continue
            if at.end is not None and at.offset >= at.end:
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


def _place_text(place: Place) -> str:
    return str(place.offset) if isinstance(place, AtOffset) else str(place)
