"""Settings of the client, and requests for the offsets to begin and end at.

The client is `confluent-kafka`, which is installed with `tidegate[kafka]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from tidegate.connectors.kafka.broker_contact import BrokerContact
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.extras import load

if TYPE_CHECKING:
    import confluent_kafka

TIMEOUT_S = 30.0
"""How long one question to the brokers may take."""

Start: TypeAlias = "str | int | datetime | Mapping[str, Mapping[int, int]]"
"""`"earliest"`, `"latest"`, a time (milliseconds since 1970), or an offset for each partition of each topic."""

_OURS = {"enable.auto.commit": False, "enable.auto.offset.store": False, "auto.offset.reset": "error"}
"""Settings of the client on which correctness depends."""
_DEFAULTS = {
    "group.id": "tidegate",
    # The client waits this long when it has enough of a partition; its own default is a second.
    "fetch.queue.backoff.ms": 10,
    # What the client holds of all partitions, and what one answer of a broker may add to it.
    "queued.max.messages.kbytes": 16 * 1024,
    "fetch.max.bytes": 16 * 1024 * 1024,
}
"""Settings of the client that `properties=` may change."""


def kafka() -> Any:
    """The client library. ConfigurationError if it is not installed."""
    return load("from_kafka", "kafka", "confluent_kafka")


def client_settings(servers: str, properties: Mapping[str, object]) -> dict[str, object]:
    """The settings of a consumer. ConfigurationError for properties that are the source's own."""
    taken = sorted({*_OURS, "bootstrap.servers", "enable.partition.eof"} & set(properties))
    if taken:
        raise ConfigurationError(f"from_kafka(properties=): {taken[0]!r} is the source's own; leave it out")
    settings: dict[str, object] = {**_DEFAULTS, **properties}
    return settings | _OURS | {"bootstrap.servers": servers, "enable.partition.eof": True}


def for_questions(settings: Mapping[str, object]) -> dict[str, Any]:
    """The settings of a client that reads no records, from the settings of a consumer."""
    ours = {*_OURS, *_DEFAULTS, "enable.partition.eof"}
    return {name: value for name, value in settings.items() if name not in ours}


@contextmanager
def consumer(settings: Mapping[str, object]) -> Iterator[confluent_kafka.Consumer]:
    """A consumer for questions. ConfigurationError for settings that the client refuses, and for what it cannot do."""
    library = kafka()
    try:
        opened = library.Consumer(dict(settings), logger=BrokerContact(str(settings["bootstrap.servers"])))
    except library.KafkaException as error:
        raise ConfigurationError(f"from_kafka: the client refuses its settings: {error}") from error
    try:
        yield opened
    finally:
        opened.close()


def first_offset(asked: confluent_kafka.Consumer, topic: str, partition: int, start: Start) -> int:
    """The offset at which a partition is begun. Raises KafkaException, ConfigurationError."""
    library = kafka()
    if isinstance(start, Mapping):
        try:
            return start[topic][partition]
        except KeyError as error:
            raise ConfigurationError(f"from_kafka(start=): no offset for partition {partition} of {topic!r}") from error
    if not isinstance(start, str):
        at_ms = int(start.timestamp() * 1000) if isinstance(start, datetime) else start
        (found,) = asked.offsets_for_times([library.TopicPartition(topic, partition, at_ms)], timeout=TIMEOUT_S)
        if found.offset >= 0:
            return int(found.offset)
    low, high = watermarks(asked, topic, partition)
    return low if start == "earliest" else high


def watermarks(asked: confluent_kafka.Consumer, topic: str, partition: int) -> tuple[int, int]:
    """The first offset that there is, and the offset behind the last record. Raises KafkaException."""
    low, high = asked.get_watermark_offsets(kafka().TopicPartition(topic, partition), timeout=TIMEOUT_S)
    return int(low), int(high)


def end_offset(asked: confluent_kafka.Consumer, topic: str, partition: int) -> int:
    """The offset behind the last record that is there now. Raises KafkaException."""
    return watermarks(asked, topic, partition)[1]


def check_start(start: object) -> None:
    """Raise ConfigurationError for what is no start."""
    if isinstance(start, bool) or not isinstance(start, str | int | datetime | Mapping):
        raise ConfigurationError(f"from_kafka(start={start!r}): give 'earliest', 'latest', a time, or offsets")
    if isinstance(start, str) and start not in ("earliest", "latest"):
        raise ConfigurationError(f"from_kafka(start={start!r}): it is 'earliest' or 'latest', a time, or offsets")
