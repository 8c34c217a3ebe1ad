"""Topics of a Kafka sink: describes, checks and creates them at submission.

Rules:

- A topic that does not exist is refused, or created if the program requests it (`create=`).
- The token topic must have the cleanup policy `compact` only: with `delete` in its cleanup policy the brokers delete
  old tokens, and a repeated commit would write its records again. It is created if it does not exist.
- Nothing is created before everything was checked.
- A record that the brokers would refuse, or delete soon, is found before it is staged (`KnownTopics`): a commit with
  such a record could never succeed, or would lose the record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.connectors.kafka.client import BrokerContact
from tidegate.connectors.kafka.producer import KafkaWriteError, error_of, kafka_errors, library
from tidegate.storage.clock import monotonic_ms, now_ms
from tidegate.storage.codec import wire
from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    import pyarrow as pa
    from confluent_kafka.admin import AdminClient

log = logging.getLogger(__name__)

TOKEN_PARTITIONS = 16
_TOKEN_CONFIG = {
    "cleanup.policy": "compact",
    # Compacts often: the topic gets a record for each commit, and a committer that starts reads a partition as a whole.
    "min.cleanable.dirty.ratio": "0.1",
    "segment.ms": "3600000",
    "segment.bytes": "33554432",
}
_ANSWER_S = 30.0
_AGAIN_S = 0.1
_KNOWN_MAX = 100_000
_FOR_EVER_MS = 2**62
"""Limits from this value on count as unlimited. Kafka's default for no limit is 2**63 - 1."""
_MISSING_MS = 10_000
_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""Text that Kafka returns for a missing topic id."""


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """An existing topic. `topic_id` is empty for brokers older than 2.8."""

    name: str
    topic_id: str
    partitions: int
    config: Mapping[str, str]


def admin(settings: Mapping[str, Any]) -> AdminClient:
    """Creates an admin client. Raises ConfigurationError for settings that the client refuses."""
    from confluent_kafka.admin import AdminClient

    try:
        return AdminClient(dict(settings), logger=BrokerContact(str(settings["bootstrap.servers"])))
    except library().KafkaException as error:
        raise ConfigurationError(
            f"to_kafka: the client refuses its settings: {error_of(error)}; correct properties="
        ) from error


def describe(client: AdminClient, topic: str, *, with_config: bool = True) -> TopicDescription | None:
    """Returns the description of a topic, or None if it does not exist.

    Raises KafkaException if the brokers do not answer.
    """
    from confluent_kafka import TopicCollection
    from confluent_kafka.admin import ConfigResource, ResourceType  # type: ignore[attr-defined]

    kafka = library()
    try:
        found: Any = _answer(
            client.describe_topics(TopicCollection([topic]), request_timeout=_ANSWER_S)[topic], "describe topic", topic
        )
    except kafka.KafkaException as error:
        if error.args[0].code() == kafka.KafkaError.UNKNOWN_TOPIC_OR_PART:
            return None
        raise
    config: dict[str, str] = {}
    if with_config:
        resource = ConfigResource(ResourceType.TOPIC, topic)
        answers = client.describe_configs([resource], request_timeout=_ANSWER_S)
        entries: Any = _answer(answers[resource], "read the configuration of topic", topic)
        config = {name: str(entry.value) for name, entry in entries.items()}
    topic_id = str(found.topic_id)
    return TopicDescription(topic, "" if topic_id == _NO_ID else topic_id, len(found.partitions), config)


def create(client: AdminClient, topic: str, partitions: int, config: Mapping[str, str] | None = None) -> None:
    """Creates a topic, with the brokers' default number of replicas. `partitions`: -1 for the brokers' default.

    If another process creates the topic at the same time, that is no error. Raises ConfigurationError if the brokers
    refuse.
    """
    from confluent_kafka.cimpl import NewTopic

    kafka = library()
    made = NewTopic(topic, num_partitions=partitions, replication_factor=-1, config=dict(config or {}))
    try:
        _answer(client.create_topics([made], request_timeout=_ANSWER_S)[topic], "create topic", topic)
    except kafka.KafkaException as error:
        if error.args[0].code() == kafka.KafkaError.TOPIC_ALREADY_EXISTS:
            return
        raise ConfigurationError(
            f"to_kafka: topic {topic!r} cannot be created: {error_of(error)}. Create it with the tools of Kafka"
        ) from error
    log.info("created topic %r (%s)", topic, ", ".join(f"{key}={value}" for key, value in (config or {}).items()))


def create_token_topic(client: AdminClient, topic: str) -> None:
    """Creates the topic of commit tokens. Raises ConfigurationError."""
    create(client, topic, TOKEN_PARTITIONS, _TOKEN_CONFIG)


def created(client: AdminClient, topic: str) -> TopicDescription:
    """Waits until the brokers describe a topic that was just created, and returns the description.

    Raises ConfigurationError.
    """
    deadline_ms = monotonic_ms() + int(_ANSWER_S * 1000)
    while monotonic_ms() < deadline_ms:
        found = describe(client, topic)
        if found is not None:
            return found
        time.sleep(_AGAIN_S)
    raise ConfigurationError(f"to_kafka: topic {topic!r} was created, but the brokers do not describe it; try again")


def check_token_topic(found: TopicDescription) -> None:
    """Raises ConfigurationError for a token topic whose cleanup policy would delete commit tokens."""
    policy = found.config.get("cleanup.policy", "delete")
    if {each.strip() for each in policy.split(",")} != {"compact"}:
        raise ConfigurationError(
            f"to_kafka: the token topic {found.name!r} has cleanup.policy={policy}, so the brokers delete old commit "
            "tokens, and records would be written twice after a restore. Set cleanup.policy=compact, or give the name "
            "of another topic, token_topic=; a topic that does not exist is created"
        )


def max_record_bytes(found: TopicDescription) -> int | None:
    """Returns the largest batch of records in bytes that a topic accepts, or None if unknown."""
    given = found.config.get("max.message.bytes", "")
    return int(given) if given.isdigit() else None


@wire
@dataclass(frozen=True, slots=True)
class TopicRules:
    """The requirements of a topic on records."""

    partitions: int
    """Number of partitions of the topic."""
    keyed: bool
    """True if the topic is compacted: brokers refuse records without a key."""
    stamped: bool
    """True if brokers replace the timestamps of records by the time of appending."""
    kept_ms: int | None
    """Time in ms for which records are kept after their timestamp. None: unlimited."""
    past_ms: int | None
    """Maximum age in ms of a timestamp that brokers accept. None: unlimited."""
    future_ms: int | None
    """Maximum distance in ms into the future of a timestamp that brokers accept. None: unlimited."""


def rules_of(found: TopicDescription) -> TopicRules:
    """Returns the requirements of a topic, from its configuration."""
    config = found.config
    policies = {each.strip() for each in config.get("cleanup.policy", "delete").split(",")}
    # Brokers before 3.6 have one setting for both directions.
    both = "message.timestamp.difference.max.ms"
    return TopicRules(
        found.partitions,
        "compact" in policies,
        config.get("message.timestamp.type") == "LogAppendTime",
        _limit_ms(config.get("retention.ms")) if "delete" in policies else None,
        _limit_ms(config.get("message.timestamp.before.max.ms", config.get(both))),
        _limit_ms(config.get("message.timestamp.after.max.ms", config.get(both))),
    )


def _limit_ms(given: str | None) -> int | None:
    return int(given) if given is not None and given.isdigit() and int(given) < _FOR_EVER_MS else None


class KnownTopics:
    """Detects rows whose topic or partition does not exist, and records that the topic's brokers would refuse. Called
    from one thread at a time.

    Brokers are contacted at the first row of a topic, unless its rules were found at submission. For a missing topic or
    partition the request to the brokers is repeated after `_MISSING_MS`.
    """

    def __init__(
        self,
        settings: Mapping[str, object],
        topic: str | None,
        record_bytes_max: int,
        rules: TopicRules | None = None,
        clock_ms: Callable[[], int] = now_ms,
    ) -> None:
        """`topic`: the topic of rows without a topic column, and `rules` its requirements if they were found at
        submission.

        `record_bytes_max`: the largest batch in bytes that the sink writes.
        """
        self._settings = settings
        self._topic = topic
        self._record_bytes_max = record_bytes_max
        self._clock_ms = clock_ms
        self._rules: dict[str, TopicRules] = {} if topic is None or rules is None else {topic: rules}
        """The requirements of existing topics, by name."""
        self._seen_ms: dict[str, int] = {}
        """Time in ms (monotonic clock) at which a topic was last requested from the brokers."""

    def bad_rows(self, topics: pa.Array | None, partitions: pa.Array | None, count: int) -> dict[int, str]:
        """Returns the reasons for rows whose topic or partition does not exist, by row number. Nulls are not checked.

        Raises KafkaWriteError if the brokers do not answer, or a topic accepts only smaller batches than the sink
        writes.
        """
        bad: dict[int, str] = {}
        wanted = np.full(count, -1) if partitions is None else pc.fill_null(partitions, -1).to_numpy()
        for topic, rows in self._by_topic(topics, count):
            self._check(topic, rows, wanted, bad)
        return bad

    def refused_rows(
        self, topics: pa.Array | None, keys: pa.Array | None, timestamps: pa.Array | None, count: int
    ) -> dict[int, str]:
        """Returns the reasons for rows whose record the brokers would refuse or soon delete, by row number.

        `timestamps`: milliseconds since 1970. Topics that do not exist are skipped.
        """
        bad: dict[int, str] = {}
        keyless = np.ones(count, np.bool_) if keys is None else keys.is_null().to_numpy(zero_copy_only=False)
        for topic, rows in self._by_topic(topics, count):
            if (rules := self._rules_of(topic)) is None:
                continue
            if rules.keyed:
                reason = f"topic {topic!r} is compacted, and the record has no key. Filter such rows in a step before"
                bad.update(dict.fromkeys(rows[keyless[rows]].tolist(), reason))
            if timestamps is not None:
                self._check_times(topic, rules, rows, timestamps, bad)
        return bad

    def _by_topic(self, topics: pa.Array | None, count: int) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """Yields each topic with the numbers of its rows. Skips rows whose topic is null."""
        if topics is None:
            assert self._topic is not None, "rows have a topic each, or all the same"
            yield self._topic, np.arange(count)
            return
        yield from rows_by_topic(topics)

    def _check_times(
        self, topic: str, rules: TopicRules, rows: NDArray[np.int64], timestamps: pa.Array, bad: dict[int, str]
    ) -> None:
        there = rows[timestamps.is_valid().to_numpy(zero_copy_only=False)[rows]]
        if not len(there):
            return
        if rules.stamped:
            bad.update(dict.fromkeys(there.tolist(), stamped_text(topic)))
            return
        ages_ms = self._clock_ms() - pc.fill_null(timestamps, 0).to_numpy()[there]
        limits = (
            (rules.kept_ms, ages_ms, "old", "retention.ms", "so that brokers would delete it"),
            (rules.past_ms, ages_ms, "old", "message.timestamp.before.max.ms", "so that brokers refuse it"),
            (rules.future_ms, -ages_ms, "ahead", "message.timestamp.after.max.ms", "so that brokers refuse it"),
        )
        for limit_ms, found_ms, word, setting, then in limits:
            for place in () if limit_ms is None else np.flatnonzero(found_ms > limit_ms).tolist():
                bad.setdefault(
                    int(there[place]),
                    f"the timestamp of the record is {int(found_ms[place])} ms {word}, and topic {topic!r} has "
                    f"{setting}={limit_ms}, {then}. Change {setting}, or remove timestamp=",
                )

    def _rules_of(self, topic: str) -> TopicRules | None:
        if topic not in self._rules:
            self._look(topic)
        return self._rules.get(topic)

    def _check(self, topic: str, rows: NDArray[np.int64], wanted: NDArray[np.int64], bad: dict[int, str]) -> None:
        if not len(rows):
            return
        largest = int(wanted[rows].max())
        rules = self._rules_of(topic)
        if rules is not None and largest >= rules.partitions:
            self._look(topic)
            rules = self._rules.get(topic)
        if rules is None:
            reason = f"topic {topic!r}, which a row names, does not exist. Create it"
            bad.update(dict.fromkeys(rows.tolist(), reason))
        elif largest >= rules.partitions:
            for row in rows[wanted[rows] >= rules.partitions].tolist():
                bad[row] = f"partition {wanted[row]} does not exist: topic {topic!r} has {rules.partitions} partitions"

    def _look(self, topic: str) -> None:
        now_ms = monotonic_ms()
        if now_ms - self._seen_ms.get(topic, -_MISSING_MS) < _MISSING_MS:
            return
        with kafka_errors(f"could not describe topic {topic!r}"):
            found = describe(admin(self._settings), topic)
        if len(self._seen_ms) >= _KNOWN_MAX:
            self._seen_ms.clear()
            self._rules.clear()
        self._seen_ms[topic] = now_ms
        if found is None:
            self._rules.pop(topic, None)
            return
        self._rules[topic] = rules_of(found)
        largest = max_record_bytes(found)
        if largest is not None and largest < self._record_bytes_max:
            raise KafkaWriteError(
                f"to_kafka: topic {topic!r}, which a row names, has max.message.bytes={largest}, and the sink writes "
                f"up to {self._record_bytes_max}. Raise it, or set message.max.bytes to {largest} in properties="
            )


def rows_by_topic(topics: pa.Array) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yields each topic with the numbers of its rows. Skips rows whose topic is null."""
    encoded = topics.dictionary_encode()
    codes = pc.fill_null(encoded.indices, -1).to_numpy()
    for code, topic in enumerate(encoded.dictionary.to_pylist()):
        yield topic, np.flatnonzero(codes == code)


def stamped_text(topic: str) -> str:
    """Returns the error text for a timestamp column if the topic replaces timestamps."""
    return (
        f"topic {topic!r} has message.timestamp.type=LogAppendTime, so its brokers replace the timestamps of records. "
        "Set it to CreateTime, or remove timestamp="
    )


def _answer(future: Any, doing: str, topic: str) -> Any:
    try:
        return future.result(_ANSWER_S + 5)
    except FutureTimeoutError as error:
        kafka = library()
        raise kafka.KafkaException(
            f"{doing} {topic!r}: the brokers did not answer within {_ANSWER_S} s; check that they run"
        ) from error
