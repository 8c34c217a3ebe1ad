"""`Consumer` fetches records of assigned partitions as Arrow arrays, and reports errors of the brokers.

`open_consumer` returns a `NativeConsumer`, or where that is impossible (see `librdkafka.py`) a `MessageConsumer` over
`confluent_kafka`, which makes an object for each record.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from tidegate.connectors.kafka.client import BrokerContact, watermarks
from tidegate.connectors.kafka.options import kafka
from tidegate.connectors.kafka.records import Fetched, FetchReport, Records

if TYPE_CHECKING:
    from confluent_kafka import Message

_MESSAGES_MAX = 500
"""Maximum number of messages that one call takes from the client.

Beyond 700 new objects the garbage collector scans all of them.
"""


class Consumer(Protocol):
    """A client that fetches records. Called from one thread at a time."""

    def fetch(self, count: int) -> Fetched:
        """Returns up to `count` records that have arrived, without waiting. Raises KafkaException."""

    def assign(self, topic: str, partition: int, offset: int) -> None:
        """Begins to fetch a partition from an offset on. Raises KafkaException."""

    def unassign(self, topic: str, partition: int) -> None:
        """Stops fetching a partition. No later `fetch` returns its records. Raises KafkaException."""

    def end_seen(self, topic: str, partition: int) -> int | None:
        """Returns the offset after a partition's last record, as the last answer of its broker reports it.

        None if unknown. Does not wait.
        """

    def bounds(self, topic: str, partition: int, timeout_s: float) -> tuple[int, int]:
        """Requests a partition's first offset, and the offset after its last record. Waits up to `timeout_s` seconds.

        Raises KafkaException.
        """

    def close(self) -> None:
        """Stops fetching, and closes the connections."""


def open_consumer(settings: Mapping[str, object], parts: Collection[str], contact: BrokerContact) -> Consumer:
    """Creates a consumer.

    `parts`: the parts of records to return, see `Records`. `contact` receives the lines of the client's log. Raises
    KafkaException for settings that the client refuses.
    """
    kafka()
    from tidegate.connectors.kafka.librdkafka import library_for
    from tidegate.connectors.kafka.native_consumer import NativeConsumer

    library = library_for(settings)
    if library is None:
        return MessageConsumer(settings, parts, contact)
    return NativeConsumer(library, settings, parts, lambda level, kind, text: contact.log(level, "%s: %s", kind, text))


class MessageConsumer:
    """A `Consumer` over `confluent_kafka.Consumer`."""

    def __init__(self, settings: Mapping[str, object], parts: Collection[str], contact: BrokerContact) -> None:
        """See `open_consumer`. Raises KafkaException for settings that the client refuses."""
        self._library = kafka()
        self._parts = parts
        self._consumer = self._library.Consumer(dict(settings), logger=contact)

    def fetch(self, count: int) -> Fetched:
        """Returns up to `count` records that have arrived, without waiting. Raises KafkaException."""
        reports: list[FetchReport] = []
        records: list[Records] = []
        taken = 0
        while taken < count:
            at_once = min(_MESSAGES_MAX, count - taken)
            found = self._consumer.consume(at_once, timeout=0)
            taken += len(found)
            reports += [
                FetchReport(error, each.topic() or "", each.partition() or 0, each.offset() or 0)
                for each in found
                if (error := each.error()) is not None
            ]
            records += self._records([each for each in found if each.error() is None])
            if len(found) < at_once:
                break
        return Fetched(taken, reports, records)

    def _records(self, messages: Sequence[Message]) -> Iterator[Records]:
        """Yields the records of consecutive messages of one partition."""
        kind: Any = self._library.Message
        for topic, of_topic in groupby(messages, kind.topic):
            for partition, run in groupby(of_topic, kind.partition):
                yield Records.of_messages(topic, partition, self._parts, list(run))

    def assign(self, topic: str, partition: int, offset: int) -> None:
        """Begins to fetch a partition from an offset on. Raises KafkaException."""
        self._consumer.incremental_assign([self._library.TopicPartition(topic, partition, offset)])

    def unassign(self, topic: str, partition: int) -> None:
        """Stops fetching a partition. No later `fetch` returns its records. Raises KafkaException."""
        self._consumer.incremental_unassign([self._library.TopicPartition(topic, partition)])

    def end_seen(self, topic: str, partition: int) -> int | None:
        """Returns the offset after a partition's last record, as the last answer of its broker reports it."""
        place = self._library.TopicPartition(topic, partition)
        _, end = self._consumer.get_watermark_offsets(place, cached=True)
        return None if end < 0 else int(end)

    def bounds(self, topic: str, partition: int, timeout_s: float) -> tuple[int, int]:
        """Requests a partition's first offset, and the offset after its last record. Raises KafkaException."""
        return watermarks(self._consumer, topic, partition, timeout_s)

    def close(self) -> None:
        """Stops fetching, and closes the connections."""
        self._consumer.close()
