"""Client of Kafka (`confluent-kafka`, from `tidegate[kafka]`): offsets, descriptions of topics, and consumer groups.

Rules:

- A topic that is deleted and created again has another id under the same name, and its offsets refer to other records.
  So an offset is valid only together with the id of its topic (`PartitionAt.topic_id`). Readers compare ids before they
  continue from an offset, and once a second while they read (`TopicWatch`).
- Brokers older than Kafka 2.8 have no ids, and librdkafka's mock does not return them. Such topics have the id "" and
  are not compared.
- The client tries several times a second to reach its brokers and logs each failure twice. `BrokerContact` logs one
  line for the first failure, one a minute while it lasts, and one when the brokers answer again. Other lines are logged
  at DEBUG.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidegate.connectors.kafka.options import AtOffset, AtTime, Place, Topics, admin_settings, kafka
from tidegate.storage.clock import monotonic_ms
from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    import confluent_kafka

TIMEOUT_S = 30.0
"""Time limit of one request to the brokers, in seconds."""


@contextmanager
def consumer(settings: Mapping[str, object]) -> Iterator[confluent_kafka.Consumer]:
    """Returns a context with a consumer for metadata requests.

    Raises ConfigurationError for settings that the client refuses.
    """
    library = kafka()
    try:
        opened = library.Consumer(dict(settings), logger=BrokerContact(str(settings["bootstrap.servers"])))
    except library.KafkaException as error:
        raise ConfigurationError(
            f"from_kafka: the client refuses its settings: {error}; correct properties="
        ) from error
    try:
        yield opened
    finally:
        opened.close()


def watermarks(
    asked: confluent_kafka.Consumer, topic: str, partition: int, timeout_s: float = TIMEOUT_S
) -> tuple[int, int]:
    """Requests two offsets of a partition: the first existing one, and the one after the last record. Waits up to
    `timeout_s` seconds. Raises KafkaException.
    """
    library = kafka()
    found = asked.get_watermark_offsets(library.TopicPartition(topic, partition), timeout=timeout_s)
    if found is None:
        # The client reports this error, and no other, by None.
        raise library.KafkaException(library.KafkaError(library.KafkaError._TIMED_OUT))
    return int(found[0]), int(found[1])


def offset_at(
    asked: confluent_kafka.Consumer, topic: str, partition: int, place: Place, bounds: tuple[int, int]
) -> int | None:
    """Resolves a start or end position to an offset in a partition. Returns None if the consumer group has committed no
    offset.

    `bounds`: the first existing offset, and the offset after the last record. A time after the last record resolves to
    the end of the partition. Raises KafkaException.
    """
    library = kafka()
    if isinstance(place, AtOffset):
        return place.offset
    if isinstance(place, AtTime):
        (found,) = asked.offsets_for_times([library.TopicPartition(topic, partition, place.at_ms)], timeout=TIMEOUT_S)
        _raise_error_of(found)
        return int(found.offset) if found.offset >= 0 else bounds[1]
    if place.startswith("group"):
        (found,) = asked.committed([library.TopicPartition(topic, partition)], timeout=TIMEOUT_S)
        _raise_error_of(found)
        if found.offset >= 0:
            return int(found.offset)
        place = place.removeprefix("group").removeprefix("_or_")
    return {"earliest": bounds[0], "latest": bounds[1]}.get(place)


def _raise_error_of(found: confluent_kafka.TopicPartition) -> None:
    if found.error is not None:
        raise kafka().KafkaException(found.error)


log = logging.getLogger(__name__)
WATCH_MS = 1_000
"""Time in ms between two requests for the descriptions of topics."""
LIST_MS = 60_000
"""Time in ms between two requests for a list of all topics, if new topics are only reported and not read."""
_ANSWER_S = 10.0
_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""Text that Kafka returns for a missing topic id."""


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """The id and the number of partitions of a topic, as the brokers report them. A missing topic has 0 partitions."""

    topic_id: str
    partitions: int


def describe_topics(
    asked: confluent_kafka.Consumer, settings: Mapping[str, object], topics: Topics, also: Iterable[str] = ()
) -> dict[str, TopicInfo]:
    """Requests and returns descriptions of topics, and of the topics named in `also`, by name.

    Raises KafkaException.
    """
    library = kafka()
    cluster = asked.list_topics(timeout=TIMEOUT_S)
    names = dict.fromkeys([*topics.names, *also, *filter(topics.matches, sorted(cluster.topics))])
    found = {}
    for name in names:
        about = cluster.topics.get(name)
        found[name] = TopicInfo("", len(about.partitions) if about is not None and about.error is None else 0)
    if not names or cluster.controller_id not in cluster.brokers:
        # A mock broker has no controller, and librdkafka waits for one before it requests a description.
        return found
    admin = _AdminClient(settings, BrokerContact(str(settings["bootstrap.servers"])))
    for topic, future in admin.describe(list(names)).items():
        try:
            found[topic] = _info(future.result(TIMEOUT_S))
        except library.KafkaException as error:
            if error.args[0].code() != library.KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
            found[topic] = TopicInfo("", 0)
    return found


class TopicWatch:
    """Requests descriptions of topics repeatedly, between the reads of one thread. Never blocks.

    With a pattern, a separate thread also lists the topics that match, because the client's call for a list blocks.
    """

    def __init__(
        self,
        settings: Mapping[str, object],
        topics: Topics,
        contact: BrokerContact,
        clock_ms: Callable[[], int],
        every_ms: int = WATCH_MS,
        list_every_ms: int = LIST_MS,
    ) -> None:
        """`settings`: settings of the consumer.

        `contact` is notified of answers and failures of the brokers. `clock_ms`: a monotonic clock.
        """
        self._settings = settings
        self._pattern = topics
        self._topics = dict.fromkeys(topics.names)
        self._contact = contact
        self._clock_ms = clock_ms
        self._every_ms = every_ms
        self._list_every_ms = list_every_ms
        self._admin: _AdminClient | None = None
        self._pending: dict[str, Future[Any]] = {}
        self._due_at_ms = 0
        self._infos: dict[str, TopicInfo] = {}
        self._lister: ThreadPoolExecutor | None = None
        self._listing: Future[list[str]] | None = None
        self._listed_at_ms = 0
        self.requests = 0
        """Number of requests that were sent."""
        self.answered = 0
        """Number of the last request that was answered for every topic."""

    @property
    def topics(self) -> Sequence[str]:
        """Returns the names of all topics that are described repeatedly."""
        return tuple(self._topics)

    def info(self, topic: str) -> TopicInfo | None:
        """Returns the last description of a topic, or None before the first answer.

        A new topic is described from now on.
        """
        if topic not in self._topics:
            self._add([topic])
        return self._infos.get(topic)

    def poll(self, *, at_once: bool = False) -> None:
        """Receives pending answers, and sends a request if the interval has passed.

        `at_once` sends unless a request is pending.
        """
        if self._pending and all(future.done() for future in self._pending.values()):
            self._take()
        now_ms = self._clock_ms()
        if self._pending or not self._topics or not (at_once or not self.requests or now_ms >= self._due_at_ms):
            return
        self._admin = self._admin or _AdminClient(self._settings, self._contact)
        self._due_at_ms = now_ms + self._every_ms
        self._pending = self._admin.describe(list(self._topics))
        self.requests += 1

    def poll_list(self) -> None:
        """Receives a list of topics, and requests a new one if the interval has passed.

        Does nothing without a pattern.
        """
        if self._pattern.pattern is None:
            return
        if self._listing is not None:
            if not self._listing.done():
                return
            failure = self._listing.exception()
            if failure is None:
                self._add([name for name in self._listing.result() if self._pattern.matches(name)])
            elif isinstance(failure, kafka().KafkaException):
                self._contact.failed(f"topics are listed later: {failure}")
            else:
                raise failure
            self._listing = None
        now_ms = self._clock_ms()
        if self._lister is not None and now_ms - self._listed_at_ms < self._list_every_ms:
            return
        self._admin = self._admin or _AdminClient(self._settings, self._contact)
        self._lister = self._lister or ThreadPoolExecutor(1, thread_name_prefix="tidegate-kafka-topics")
        self._listed_at_ms = now_ms
        self._listing = self._lister.submit(self._admin.topic_names)

    def close(self) -> None:
        """Stops the thread that lists topics, after its current request."""
        if self._lister is not None:
            self._lister.shutdown(wait=False, cancel_futures=True)

    def _add(self, topics: Sequence[str]) -> None:
        new = [topic for topic in topics if topic not in self._topics]
        self._topics.update(dict.fromkeys(new))
        if new:
            self._due_at_ms = self._clock_ms()

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


class _AdminClient:
    """An admin client with the connection settings of a consumer."""

    def __init__(self, settings: Mapping[str, object], contact: BrokerContact) -> None:
        from confluent_kafka.admin import AdminClient

        self._admin = AdminClient(admin_settings(settings), logger=contact)

    def describe(self, topics: Sequence[str]) -> dict[str, Future[Any]]:
        """Requests descriptions of topics. Returns a future for each topic."""
        from confluent_kafka import TopicCollection

        answers: dict[str, Future[Any]] = self._admin.describe_topics(
            TopicCollection(list(topics)), request_timeout=_ANSWER_S
        )
        return answers

    def commit(self, group: str, offsets: Mapping[tuple[str, int], int]) -> Future[Any]:
        """Commits offsets of a consumer group, given by topic and partition. Returns a future."""
        library = kafka()
        places = [library.TopicPartition(topic, number, offset) for (topic, number), offset in offsets.items()]
        request = library.ConsumerGroupTopicPartitions(group, places)
        answers: dict[str, Future[Any]] = self._admin.alter_consumer_group_offsets([request], request_timeout=_ANSWER_S)
        return answers[group]

    def topic_names(self) -> list[str]:
        """Requests and returns the names of all topics. Raises KafkaException."""
        return list(self._admin.list_topics(timeout=_ANSWER_S).topics)


def _info(description: Any) -> TopicInfo:
    topic_id = str(description.topic_id)
    return TopicInfo("" if topic_id == _NO_ID else topic_id, len(description.partitions))


def _is_unknown(error: confluent_kafka.KafkaError) -> bool:
    return bool(error.code() == kafka().KafkaError.UNKNOWN_TOPIC_OR_PART)


class GroupOffsets:
    """Commits offsets to a consumer group, so that Kafka's tools show the progress of the job. The job never reads
    them.

    At most one request is pending. Newer offsets replace offsets that wait to be sent. A failed request is repeated
    after RETRY_MS. Only `close` blocks, for up to CLOSE_S seconds.
    """

    def __init__(self, settings: Mapping[str, object], contact: BrokerContact, clock_ms: Callable[[], int]) -> None:
        """`settings`: settings of the consumer, including `group.id`. `contact` is notified of answers and failures of
        the brokers. `clock_ms`: a monotonic clock.
        """
        self._group = str(settings["group.id"])
        self._admin = _AdminClient(settings, contact)
        self._clock_ms = clock_ms
        self._waiting: Mapping[tuple[str, int], int] = {}
        self._sent: Mapping[tuple[str, int], int] = {}
        self._committed: Mapping[tuple[str, int], int] = {}
        self._pending: Future[Any] | None = None
        self._due_at_ms: int | None = None
        """Clock time in ms at which a failed request is repeated. None if no request has failed."""
        self._failing_since_ms: int | None = None
        self._reported_at_ms: int | None = None

    def commit(self, offsets: Mapping[tuple[str, int], int]) -> None:
        """Commits the next offset of each partition (by topic and number), unless it is committed already."""
        self._waiting = offsets
        self.poll()

    def poll(self) -> None:
        """Receives a pending answer, and sends the offsets that wait."""
        if self._pending is not None:
            if not self._pending.done():
                return
            failure = self._failure_of(self._pending)
            self._pending = None
            if failure is None:
                self._succeeded()
            else:
                self._failed(failure)
        if self._due_at_ms is None or self._clock_ms() >= self._due_at_ms:
            self._send()

    def close(self) -> None:
        """Waits for the pending request, and sends and awaits a last one, for up to CLOSE_S seconds."""
        until_ms = self._clock_ms() + int(CLOSE_S * 1000)
        for _ in range(2):
            if self._pending is None:
                self._send()
            if self._pending is None:
                return
            try:
                self._pending.exception(max(0, until_ms - self._clock_ms()) / 1000)
            except TimeoutError:
                log.warning("offsets of consumer group %r are not committed in time at the end", self._group)
                return
            self.poll()

    def _send(self) -> None:
        new = {place: offset for place, offset in self._waiting.items() if self._committed.get(place) != offset}
        self._waiting = {}
        if new:
            self._sent = new
            self._pending = self._admin.commit(self._group, new)

    def _failure_of(self, answer: Future[Any]) -> confluent_kafka.KafkaError | None:
        failure = answer.exception()
        if failure is None:
            errors = [place.error for place in answer.result().topic_partitions if place.error is not None]
            return errors[0] if errors else None
        if not isinstance(failure, kafka().KafkaException):
            raise failure
        error: confluent_kafka.KafkaError = failure.args[0]
        return error

    def _succeeded(self) -> None:
        self._committed = {**self._committed, **self._sent}
        self._due_at_ms = self._failing_since_ms = None
        if self._reported_at_ms is not None:
            self._reported_at_ms = None
            log.info("offsets of consumer group %r are committed again", self._group)

    def _failed(self, error: confluent_kafka.KafkaError) -> None:
        now_ms = self._clock_ms()
        self._waiting = self._waiting or self._sent
        self._due_at_ms = now_ms + RETRY_MS
        if self._failing_since_ms is None:
            self._failing_since_ms = now_ms
        passes = error.retriable() and now_ms - self._failing_since_ms < PATIENCE_MS
        reported = self._reported_at_ms is not None and now_ms - self._reported_at_ms < _AGAIN_MS
        if passes or reported:
            log.debug("offsets of consumer group %r are not committed: %s", self._group, error)
            return
        self._reported_at_ms = now_ms
        log.warning(
            "offsets of consumer group %r are not committed: %s. They are only for monitoring, and the job continues "
            "without them",
            self._group,
            error,
        )


RETRY_MS = 500
"""Time in ms after which a failed commit of offsets is repeated."""
PATIENCE_MS = 10_000
"""Time in ms for which a transient failure is not logged, such as a group that the broker is still loading."""
CLOSE_S = 1.0
"""Time in seconds for which `GroupOffsets.close` waits for the last commit of offsets."""
_AGAIN_MS = 60_000
_SETTLED_MS = 15_000
"""Time in ms without failures after which all brokers count as reachable.

It exceeds the client's pause between connects.
"""
_TRIES = {"FAIL", "ERROR"}
_NOISE = {"CONFWARN"}
"""Kinds of log lines that warn about consumer settings without effect for an admin client."""


class BrokerContact:
    """Tracks whether the brokers at `servers` answer one client, and logs outages.

    It serves as the client's logger. Thread-safe.
    """

    def __init__(self, servers: str, clock_ms: Callable[[], int] = monotonic_ms) -> None:
        self._servers = servers
        self._clock_ms = clock_ms
        self._lock = threading.Lock()
        self._since_ms: int | None = None
        self._failed_at_ms = 0
        self._logged_at_ms = 0

    def log(self, level: int, text: str, *values: object) -> None:
        """Receives a line of the Kafka client's log, as `logging.Logger.log` does."""
        kind = str(values[0]) if values else ""
        if kind in _TRIES and level >= logging.ERROR:
            log.debug(text, *values)
            self.failed(str(values[-1]))
        else:
            log.log(logging.DEBUG if kind in _NOISE else level, text, *values)

    def failed(self, reason: object) -> None:
        """Records a failed attempt to reach a broker, and logs the outage at most once a minute."""
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
        """Records an answer of a broker. The outage ends once there were no failures for a while."""
        with self._lock:
            now_ms = self._clock_ms()
            if self._since_ms is None or now_ms - self._failed_at_ms < _SETTLED_MS:
                return
            log.info("the brokers at %s answer again, after %d s", self._servers, (now_ms - self._since_ms) // 1000)
            self._since_ms = None
