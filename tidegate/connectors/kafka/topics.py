"""Topics as the brokers describe them: their ids and their numbers of partitions.

A topic that is deleted and created again has another id under the same name, and its offsets count other records. So
an offset is only meaningful together with the id of the topic (`PartitionAt.topic_id`), and readers compare ids before
they read on from an offset, and once a second while they read.

Brokers older than Kafka 2.8 have no ids, and librdkafka's mock cannot be asked for them. Their topics have the id "",
and are not compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidegate.connectors.kafka import client
from tidegate.connectors.kafka.broker_contact import BrokerContact

if TYPE_CHECKING:
    from concurrent.futures import Future

    import confluent_kafka

log = logging.getLogger(__name__)
WATCH_MS = 1_000
"""Between two requests for the description of topics."""
_ANSWER_S = 10.0
_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""How Kafka writes the id of a topic that has none."""


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as the brokers describe it. A topic that does not exist has no partitions."""

    topic_id: str
    partitions: int


def describe_topics(
    asked: confluent_kafka.Consumer, settings: Mapping[str, object], topics: Sequence[str]
) -> dict[str, TopicInfo]:
    """The topics as they are now. Waits for the answer. Raises KafkaException."""
    library = client.kafka()
    clusters = {topic: asked.list_topics(topic, timeout=client.TIMEOUT_S) for topic in topics}
    found = {}
    for topic, cluster in clusters.items():
        about = cluster.topics[topic]
        found[topic] = TopicInfo("", len(about.partitions) if about.error is None else 0)
    if any(cluster.controller_id not in cluster.brokers for cluster in clusters.values()):
        # A mock: it has no controller, and librdkafka waits for one before it asks for a description.
        return found
    describer = _Describer(settings, BrokerContact(str(settings["bootstrap.servers"])))
    for topic, future in describer.ask(topics).items():
        try:
            found[topic] = _info(future.result(client.TIMEOUT_S))
        except library.KafkaException as error:
            if error.args[0].code() != library.KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
            found[topic] = TopicInfo("", 0)
    return found


class TopicWatch:
    """Describes topics again and again, beside the reads of one thread. It never blocks."""

    def __init__(
        self,
        settings: Mapping[str, object],
        topics: Sequence[str],
        contact: BrokerContact,
        clock_ms: Callable[[], int],
        every_ms: int = WATCH_MS,
    ) -> None:
        """`settings` are those of the consumer. `contact` is told whether the brokers answer."""
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
        """The topic as it was described last; None before the first answer."""
        return self._infos.get(topic)

    def poll(self, *, at_once: bool = False) -> None:
        """Take the answer that has come, and send a request if it is time, or if none is pending (`at_once`)."""
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
        library = client.kafka()
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

        self._admin = AdminClient(client.for_questions(settings), logger=contact)

    def ask(self, topics: Sequence[str]) -> dict[str, Future[Any]]:
        """Request descriptions of topics; the answers come later."""
        from confluent_kafka import TopicCollection

        answers: dict[str, Future[Any]] = self._admin.describe_topics(
            TopicCollection(list(topics)), request_timeout=_ANSWER_S
        )
        return answers


def _info(description: Any) -> TopicInfo:
    topic_id = str(description.topic_id)
    return TopicInfo("" if topic_id == _NO_ID else topic_id, len(description.partitions))


def _is_unknown(error: confluent_kafka.KafkaError) -> bool:
    return bool(error.code() == client.kafka().KafkaError.UNKNOWN_TOPIC_OR_PART)
