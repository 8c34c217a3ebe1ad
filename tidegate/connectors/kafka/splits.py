"""Splits of the Kafka source: partitions, and finders of new partitions. Their payloads are in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from tidegate.connectors.source import SourceSplit
from tidegate.storage.codec import encode, wire

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
