"""What checkpoints have of partitions, and of those that find new ones."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from tidegate.actors.sources.source import SourceSplit
from tidegate.storage.codec import encode, wire

FINDERS = 8
FROM_THE_BEGIN = -2
"""librdkafka's name for the first offset that there is."""


@wire
@dataclass(frozen=True, slots=True)
class PartitionAt:
    """A partition, the next offset of it, and the offset at which it ends, if it does."""

    topic: str
    partition: int
    offset: int
    end: int | None = None


@wire
@dataclass(frozen=True, slots=True)
class KnownPartitions:
    """What a finder remembers: how many partitions each topic had."""

    counts: tuple[tuple[str, int], ...]


def split_of(at: PartitionAt) -> SourceSplit:
    """The split of a partition."""
    return SourceSplit(f"{at.topic}[{at.partition}]", encode(at))


def finder_of(topic: str, partition: int) -> int:
    """The finder that a partition belongs to."""
    return (xxhash.xxh3_64_intdigest(topic.encode()) + partition) % FINDERS
