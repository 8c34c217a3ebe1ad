"""Payloads of the Kafka source's splits in checkpoints: positions in partitions, and finders of new partitions."""

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
    """The position in a partition: the next offset, and the offset at which to end (None: never).

    `topic_id` is the id of the topic to which the offset belongs, or "" if the brokers have no ids.
    """

    topic: str
    partition: int
    offset: int
    end: int | None = None
    topic_id: str = ""


@wire
@dataclass(frozen=True, slots=True)
class KnownPartitions:
    """The state of a finder split: the number of partitions that are read, for each topic."""

    counts: tuple[tuple[str, int], ...]


def split_of(at: PartitionAt) -> SourceSplit:
    """Returns the split for a position in a Kafka partition."""
    return SourceSplit(f"{at.topic}[{at.partition}]", encode(at))


def finder_of(topic: str, partition: int) -> int:
    """Returns the number of the finder split that is responsible for a partition."""
    return (xxhash.xxh3_64_intdigest(topic.encode()) + partition) % FINDERS
