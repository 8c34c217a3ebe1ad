"""`KafkaSource`: topics as an unbounded source, or up to the records that are there at submission.

A partition is a split. Rules:

- The next offset is in the payload, and so in the checkpoint with the rows before it, because offsets have gaps. Beside
  it is the id of the topic, because a topic that is created again counts other records by the same offsets. What a
  consumer group has committed is neither read nor written.
- Where to begin and to end is decided once, at submission.
- Partitions that are added later are found by splits without rows, FINDERS of them, so that several subtasks get some.
  A hash determines which finder a partition belongs to. A finder remembers how many partitions of each topic are read.
  New partitions are read from their begin. Without `discover_ms` the finders only warn, so that it can be added later.
- What cannot be read as the checkpoint expects it is refused before a restore changes anything (`check_unread`), and by
  the running reader: another topic of the same name, deleted records, partitions that would not be read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import pyarrow as pa

from tidegate.connectors.bad_rows import BadRows
from tidegate.connectors.kafka.client import (
    Start,
    client_settings,
    consumer,
    end_offset,
    first_offset,
    kafka,
    watermarks,
)
from tidegate.connectors.kafka.kafka_reader import KafkaReader, OnMissing, replaced_text
from tidegate.connectors.kafka.positions import FINDERS, KnownPartitions, PartitionAt, split_of
from tidegate.connectors.kafka.records import LETTERS, RecordFormat
from tidegate.connectors.kafka.topics import TopicInfo, describe_topics
from tidegate.connectors.source import SourceReader, SourceSplit
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    import confluent_kafka

log = logging.getLogger(__name__)
_Infos: TypeAlias = "Mapping[str, TopicInfo]"


@dataclass(frozen=True, slots=True)
class KafkaSource:
    """Topics of the brokers at `servers` ("host:port,host:port").

    `discover_ms`: how often to look for new partitions, or None to leave them out. `bounded`: it ends behind the
    records that are there at submission. `bad_rows`: what to do with records that cannot be read. `on_missing`: what
    to do where the next record of a checkpoint is not there any more.
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
        """Whether it reads no further than what is there at submission."""
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
        """Finders, and the partitions that there are now. ConfigurationError without brokers, or without a topic."""
        library = kafka()
        with consumer(self.settings) as asked:
            try:
                infos = describe_topics(asked, self.settings, self.topics)
                missing = [topic for topic, info in infos.items() if not info.partitions]
                if missing and (self.discover_ms is None or len(missing) == len(infos)):
                    raise ConfigurationError(f"from_kafka: there is no topic {missing[0]!r} at {self.servers}")
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
        return (*self._finders({topic: info.partitions for topic, info in infos.items()}), *map(split_of, found))

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """Topics may be added if new partitions are looked for; what is read to its end goes on to that end."""
        positions = [decode(split.payload) for split in splits]
        partitions = [at for at in positions if isinstance(at, PartitionAt)]
        if any((at.end is not None) != self.bounded for at in partitions):
            raise ConfigurationError(f"it had {'no ' if self.bounded else ''}end='latest', which cannot change")
        before = {at.topic for at in partitions}
        gone, added = sorted(before - set(self.topics)), sorted(set(self.topics) - before)
        if gone or (added and self.discover_ms is None):
            raise ConfigurationError(
                f"topic {(gone or added)[0]!r} {'is missing' if gone else 'was not there'}; give the topics that it had"
                f"{'' if gone else ', or set discover='}"
            )

    def check_unread(self, splits: Sequence[SourceSplit]) -> None:
        """Whether the brokers still have what is to be read: these topics, these records, no partitions besides."""
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
        """A reader for one subtask, with a consumer of its own."""
        return KafkaReader(self.settings, self.topics, self.form, self.bad_rows, self.discover_ms, self.on_missing)

    def _finders(self, counts: Mapping[str, int]) -> list[SourceSplit]:
        if self.bounded:
            return []
        payload = encode(KnownPartitions(tuple(counts.items())))
        return [SourceSplit(f"new partitions {number} of {FINDERS}", payload, rows=0) for number in range(FINDERS)]

    def _missing(self, infos: _Infos, partitions: Sequence[PartitionAt]) -> Iterator[str]:
        """Topics that are gone, and topics that are not those of the checkpoint."""
        for topic in sorted({at.topic for at in partitions}):
            info = infos[topic]
            before = {at.topic_id for at in partitions if at.topic == topic and at.topic_id}
            if not info.partitions:
                if self.on_missing == "fail":
                    yield f"there is no topic {topic!r} at {self.servers} any more"
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
        """Records behind the offsets of the checkpoint that were deleted. Raises KafkaException."""
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
                yield f"{what}; go on by from_kafka(on_missing='earliest' or 'latest'), with all state kept"
            else:
                log.warning("%s; on_missing=%r goes on without them", what, self.on_missing)
