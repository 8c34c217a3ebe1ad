"""The client of Kafka (`confluent-kafka`, installed with `tidegate[kafka]`): settings, offsets, and topic descriptions.

Rules:

- A topic that is deleted and created again has another id under the same name, and its offsets count other records. So
  an offset is meaningful only with the id of its topic (`PartitionAt.topic_id`). Readers compare ids before they
  continue from an offset, and once a second while they read (`TopicWatch`).
- Brokers older than Kafka 2.8 have no ids, and librdkafka's mock does not return them. Such topics have the id "" and
  are not compared.
- The client tries several times a second to reach its brokers and logs each failure twice. `BrokerContact` logs one
  line for the first failure, one a minute while it lasts, and one when the brokers answer again; the rest is DEBUG.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from tidegate.storage.clock import monotonic_ms
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.extras import load

if TYPE_CHECKING:
    from concurrent.futures import Future

    import confluent_kafka

TIMEOUT_S = 30.0
"""The time limit of one request to the brokers."""

Start: TypeAlias = "str | int | datetime | Mapping[str, Mapping[int, int]]"
"""`"earliest"`, `"latest"`, a time (milliseconds since 1970), or an offset for each partition of each topic."""

_OURS = {"enable.auto.commit": False, "enable.auto.offset.store": False, "auto.offset.reset": "error"}
"""Settings of the client on which correctness depends."""
_DEFAULTS = {
    "group.id": "tidegate",
    # The client waits this long when it has enough of a partition; its own default is a second.
    "fetch.queue.backoff.ms": 10,
    # Bounds of the client's buffer for all partitions, and of one answer of a broker.
    "queued.max.messages.kbytes": 16 * 1024,
    "fetch.max.bytes": 16 * 1024 * 1024,
}
"""Settings of the client that `properties=` may change."""


def kafka() -> Any:
    """Returns the client library. Raises ConfigurationError if it is not installed."""
    return load("from_kafka", "kafka", "confluent_kafka")


def client_settings(servers: str, properties: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings of a consumer. Raises ConfigurationError for properties that are the source's own."""
    taken = sorted({*_OURS, "bootstrap.servers", "enable.partition.eof"} & set(properties))
    if taken:
        raise ConfigurationError(f"from_kafka(properties=): {taken[0]!r} is set by the source; remove it")
    settings: dict[str, object] = {**_DEFAULTS, **properties}
    return settings | _OURS | {"bootstrap.servers": servers, "enable.partition.eof": True}


def for_questions(settings: Mapping[str, object]) -> dict[str, Any]:
    """Returns the settings of a client that requests metadata only, from the settings of a consumer."""
    ours = {*_OURS, *_DEFAULTS, "enable.partition.eof"}
    return {name: value for name, value in settings.items() if name not in ours}


@contextmanager
def consumer(settings: Mapping[str, object]) -> Iterator[confluent_kafka.Consumer]:
    """Yields a consumer for requests of metadata. Raises ConfigurationError for settings that the client refuses."""
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
    """Returns the offset at which to begin a partition. Raises KafkaException, ConfigurationError."""
    library = kafka()
    if isinstance(start, Mapping):
        try:
            return start[topic][partition]
        except KeyError as error:
            raise ConfigurationError(
                f"from_kafka(start=): the offset for partition {partition} of {topic!r} is missing; add it"
            ) from error
    if not isinstance(start, str):
        at_ms = int(start.timestamp() * 1000) if isinstance(start, datetime) else start
        (found,) = asked.offsets_for_times([library.TopicPartition(topic, partition, at_ms)], timeout=TIMEOUT_S)
        if found.offset >= 0:
            return int(found.offset)
    low, high = watermarks(asked, topic, partition)
    return low if start == "earliest" else high


def watermarks(asked: confluent_kafka.Consumer, topic: str, partition: int) -> tuple[int, int]:
    """Returns the first existing offset, and the offset after the last record. Raises KafkaException."""
    low, high = asked.get_watermark_offsets(kafka().TopicPartition(topic, partition), timeout=TIMEOUT_S)
    return int(low), int(high)


def end_offset(asked: confluent_kafka.Consumer, topic: str, partition: int) -> int:
    """Returns the offset after the last record that exists now. Raises KafkaException."""
    return watermarks(asked, topic, partition)[1]


def check_start(start: object) -> None:
    """Raises ConfigurationError for an invalid start."""
    if isinstance(start, bool) or not isinstance(start, str | int | datetime | Mapping):
        raise ConfigurationError(f"from_kafka(start={start!r}): give 'earliest', 'latest', a time, or offsets")
    if isinstance(start, str) and start not in ("earliest", "latest"):
        raise ConfigurationError(f"from_kafka(start={start!r}): give 'earliest', 'latest', a time, or offsets")


log = logging.getLogger(__name__)
WATCH_MS = 1_000
"""The time between two requests for the description of topics."""
_ANSWER_S = 10.0
_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""Kafka's notation for a missing topic id."""


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as the brokers describe it. A topic that does not exist has no partitions."""

    topic_id: str
    partitions: int


def describe_topics(
    asked: confluent_kafka.Consumer, settings: Mapping[str, object], topics: Sequence[str]
) -> dict[str, TopicInfo]:
    """Returns the current descriptions of topics. Waits for the answer. Raises KafkaException."""
    library = kafka()
    clusters = {topic: asked.list_topics(topic, timeout=TIMEOUT_S) for topic in topics}
    found = {}
    for topic, cluster in clusters.items():
        about = cluster.topics[topic]
        found[topic] = TopicInfo("", len(about.partitions) if about.error is None else 0)
    if any(cluster.controller_id not in cluster.brokers for cluster in clusters.values()):
        # A mock broker: it has no controller, and librdkafka waits for one before it requests a description.
        return found
    describer = _Describer(settings, BrokerContact(str(settings["bootstrap.servers"])))
    for topic, future in describer.ask(topics).items():
        try:
            found[topic] = _info(future.result(TIMEOUT_S))
        except library.KafkaException as error:
            if error.args[0].code() != library.KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
            found[topic] = TopicInfo("", 0)
    return found


class TopicWatch:
    """Requests descriptions of topics repeatedly, between the reads of one thread. Never blocks."""

    def __init__(
        self,
        settings: Mapping[str, object],
        topics: Sequence[str],
        contact: BrokerContact,
        clock_ms: Callable[[], int],
        every_ms: int = WATCH_MS,
    ) -> None:
        """`settings`: settings of the consumer. `contact` is notified whether the brokers answer."""
        self._settings = settings
        self._topics = topics
        self._contact = contact
        self._clock_ms = clock_ms
        self._every_ms = every_ms
        self._describer: _Describer | None = None
        self._pending: dict[str, Future[Any]] = {}
        self._asked_at_ms = 0
        self._infos: dict[str, TopicInfo] = {}
        self.requests = 0
        """Number of requests that were sent."""
        self.answered = 0
        """Number of the last request that was answered for every topic."""

    def info(self, topic: str) -> TopicInfo | None:
        """Returns the last description of the topic, or None before the first answer."""
        return self._infos.get(topic)

    def poll(self, *, at_once: bool = False) -> None:
        """Receives an answer, and sends a request if it is time, or if none is pending (`at_once`)."""
        if self._pending and all(future.done() for future in self._pending.values()):
            self._take()
        now_ms = self._clock_ms()
        if self._pending or not (at_once or not self.requests or now_ms - self._asked_at_ms >= self._every_ms):
            return
        self._describer = self._describer or _Describer(self._settings, self._contact)
        self._asked_at_ms = now_ms
        self._pending = self._describer.ask(self._topics)
        self.requests += 1

    def _take(self) -> None:
        library = kafka()
        answered = True
        for topic, future in self._pending.items():
            failure = future.exception()
            if failure is None:
                self._infos[topic] = _info(future.result())
            elif isinstance(failure, library.KafkaException) and _is_unknown(failure.args[0]):
                self._infos[topic] = TopicInfo("", 0)
            else:
                log.debug("topic %r is described later: %s", topic, failure)
                answered = False
        self._pending = {}
        if answered:
            self.answered = self.requests
            self._contact.answered()


class _Describer:
    """A client for descriptions, with the settings of a consumer."""

    def __init__(self, settings: Mapping[str, object], contact: BrokerContact) -> None:
        from confluent_kafka.admin import AdminClient

        self._admin = AdminClient(for_questions(settings), logger=contact)

    def ask(self, topics: Sequence[str]) -> dict[str, Future[Any]]:
        """Requests descriptions of topics; the answers come later."""
        from confluent_kafka import TopicCollection

        answers: dict[str, Future[Any]] = self._admin.describe_topics(
            TopicCollection(list(topics)), request_timeout=_ANSWER_S
        )
        return answers


def _info(description: Any) -> TopicInfo:
    topic_id = str(description.topic_id)
    return TopicInfo("" if topic_id == _NO_ID else topic_id, len(description.partitions))


def _is_unknown(error: confluent_kafka.KafkaError) -> bool:
    return bool(error.code() == kafka().KafkaError.UNKNOWN_TOPIC_OR_PART)


_AGAIN_MS = 60_000
_SETTLED_MS = 15_000
"""A time without failures after which all brokers answer: longer than the client's pause between connects."""
_TRIES = {"FAIL", "ERROR"}
_NOISE = {"CONFWARN"}
"""Warnings that a setting of a consumer has no effect for a client that only requests metadata."""


class BrokerContact:
    """Tracks whether the brokers at `servers` answer one client. It is the client's logger; its threads may call it."""

    def __init__(self, servers: str, clock_ms: Callable[[], int] = monotonic_ms) -> None:
        self._servers = servers
        self._clock_ms = clock_ms
        self._lock = threading.Lock()
        self._since_ms: int | None = None
        self._failed_at_ms = 0
        self._logged_at_ms = 0

    def log(self, level: int, text: str, *values: object) -> None:
        """Receives a line of the client's log, as `logging.Logger.log` does."""
        kind = str(values[0]) if values else ""
        if kind in _TRIES and level >= logging.ERROR:
            log.debug(text, *values)
            self.failed(str(values[-1]))
        else:
            log.log(logging.DEBUG if kind in _NOISE else level, text, *values)

    def failed(self, reason: object) -> None:
        """Reports a failed try."""
        with self._lock:
            now_ms = self._clock_ms()
            self._failed_at_ms = now_ms
            if self._since_ms is None:
                self._since_ms = self._logged_at_ms = now_ms
                log.warning("the brokers at %s do not answer, and are tried again: %s", self._servers, reason)
            elif now_ms - self._logged_at_ms >= _AGAIN_MS:
                self._logged_at_ms = now_ms
                lasted_s = (now_ms - self._since_ms) // 1000
                log.warning("the brokers at %s have not answered for %d s: %s", self._servers, lasted_s, reason)

    def answered(self) -> None:
        """Reports an answer of the brokers. If one of several brokers is still away, failures continue."""
        with self._lock:
            now_ms = self._clock_ms()
            if self._since_ms is None or now_ms - self._failed_at_ms < _SETTLED_MS:
                return
            log.info("the brokers at %s answer again, after %d s", self._servers, (now_ms - self._since_ms) // 1000)
            self._since_ms = None
