"""`KafkaSource`: topics as an unbounded source, or up to the records that are there at submission.

A partition is a split. Rules:

- The next offset is in the payload, and so in the checkpoint with the rows before it, because offsets have gaps. What a
  consumer group has committed is neither read nor written.
- Where to begin and to end is decided once, at submission.
- Partitions that are added later are found by splits without rows, FINDERS of them, so that several subtasks get some.
  A hash says which finder a partition belongs to. A finder remembers how many partitions each topic had. New partitions
  are read from their begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from tidegate.actors.sources.kafka.client import (
    Start,
    client_settings,
    consumer,
    end_offset,
    first_offset,
    kafka,
    partition_counts,
)
from tidegate.actors.sources.kafka.kafka_reader import KafkaReader
from tidegate.actors.sources.kafka.positions import FINDERS, KnownPartitions, PartitionAt, split_of
from tidegate.actors.sources.kafka.records import RecordFormat
from tidegate.actors.sources.source import SourceReader, SourceSplit
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class KafkaSource:
    """Some topics of the brokers at `servers` ("host:port,host:port").

    `discover_ms`: how often to look for new partitions; None: never. `bounded`: it ends behind the records that are
    there at submission. `skip`: records that cannot be read are left out.
    """

    servers: str
    topics: tuple[str, ...]
    form: RecordFormat
    start: Start = "earliest"
    bounded: bool = False
    discover_ms: int | None = None
    properties: tuple[tuple[str, object], ...] = ()
    skip: bool = False
    unbounded: Literal[True] = True

    @property
    def schema(self) -> pa.Schema:
        """That of the records."""
        return self.form.schema

    @property
    def settings(self) -> Mapping[str, object]:
        """Those of a consumer."""
        return client_settings(self.servers, dict(self.properties))

    def splits(self) -> Sequence[SourceSplit]:
        """Finders, and the partitions that there are now. ConfigurationError without brokers, or without a topic."""
        library = kafka()
        with consumer(self.settings) as asked:
            try:
                counts = partition_counts(asked, self.topics)
                missing = [topic for topic, count in counts.items() if not count]
                if missing and (self.discover_ms is None or len(missing) == len(counts)):
                    raise ConfigurationError(f"from_kafka: there is no topic {missing[0]!r} at {self.servers}")
                partitions = [(topic, number) for topic, count in counts.items() for number in range(count)]
                found = [
                    PartitionAt(
                        topic,
                        number,
                        first_offset(asked, topic, number, self.start),
                        end_offset(asked, topic, number) if self.bounded else None,
                    )
                    for topic, number in partitions
                ]
            except library.KafkaException as error:
                raise ConfigurationError(f"from_kafka: the brokers at {self.servers} do not answer: {error}") from error
        return (*self._finders(counts), *map(split_of, found))

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """Topics may be added if new partitions are looked for; what is read to its end goes on to that end."""
        positions = [decode(split.payload) for split in splits]
        partitions = [at for at in positions if isinstance(at, PartitionAt)]
        finding = len(partitions) < len(positions)
        if finding != (self.discover_ms is not None):
            raise ConfigurationError(f"it had {'a' if finding else 'no'} discover=, which cannot change")
        if any((at.end is not None) != self.bounded for at in partitions):
            raise ConfigurationError(f"it had {'no ' if self.bounded else ''}end='latest', which cannot change")
        before = {at.topic for at in partitions}
        gone, added = sorted(before - set(self.topics)), sorted(set(self.topics) - before)
        if gone or (added and not finding):
            raise ConfigurationError(
                f"topic {(gone or added)[0]!r} {'is missing' if gone else 'was not there'}; give the topics that it had"
                f"{'' if gone else ', or set discover= in a new job'}"
            )

    def reader(self) -> SourceReader:
        """A reader for one subtask, with a consumer of its own."""
        return KafkaReader(self.settings, self.topics, self.form, self.skip, self.discover_ms)

    def _finders(self, counts: Mapping[str, int]) -> list[SourceSplit]:
        if self.discover_ms is None:
            return []
        payload = encode(KnownPartitions(tuple(counts.items())))
        return [SourceSplit(f"new partitions {number} of {FINDERS}", payload, rows=0) for number in range(FINDERS)]
