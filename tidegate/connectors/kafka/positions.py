"""What checkpoints have of partitions, and of the splits that find new ones."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from tidegate.connectors.source import SourceSplit
from tidegate.storage.codec import encode, wire

FINDERS = 8
FROM_THE_BEGIN = -2
"""librdkafka's name for the first offset that there is."""


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
    """What a finder remembers: the number of partitions of each topic that are read."""

    counts: tuple[tuple[str, int], ...]


def split_of(at: PartitionAt) -> SourceSplit:
    """The split of a partition."""
    return SourceSplit(f"{at.topic}[{at.partition}]", encode(at))


def finder_of(topic: str, partition: int) -> int:
    """The finder that a partition belongs to."""
    return (xxhash.xxh3_64_intdigest(topic.encode()) + partition) % FINDERS
