"""The Kafka sink: the destination (`KafkaTarget`), checks at submission, and the exactly-once and at-least-once sinks.

With exactly-once delivery, rows pass through three stages:

1. `_StagingWriter` stages batches of records in checkpoint storage (`staged_rows.py`). No transaction is open at the
   brokers.
2. The checkpoint refers to the files and describes them (`StagedRecords`).
3. After the checkpoint completed, `_KafkaCommitter` sends the files in transactions (`transactions.py`).

With at-least-once delivery (`KafkaSender`), records are sent immediately, and a checkpoint waits until all are
delivered.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from tidegate.connectors.committing_sink import (
    Committable,
    Committer,
    CommittingContext,
    CommittingSink,
    CommittingWriter,
    CommitToken,
)
from tidegate.connectors.kafka import topics
from tidegate.connectors.kafka.producer import (
    CHUNK_RECORDS,
    DELIVERY_TIMEOUT_MS,
    TRANSACTION_MS_MIN,
    Deliveries,
    KafkaWriteError,
    client_settings,
    error_of,
    kafka_errors,
    library,
    make_producer,
    producer_settings,
    send,
    wait_for_room,
)
from tidegate.connectors.kafka.transactions import (
    PART_BYTES_MAX,
    PART_RECORDS_MAX,
    LaneCommitter,
    Part,
    Token,
    TokenTopic,
)
from tidegate.connectors.staged_rows import RowStage, StagedPart, forget_staged, staged_rows
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import ConfigurationError

log = logging.getLogger(__name__)

Delivery: TypeAlias = Literal["exactly_once", "at_least_once"]
TOKEN_TOPIC = "tidegate-commits"
PREFIX = "tidegate"
_BATCH_OVERHEAD_BYTES = 128
"""Overhead of a batch with one record in bytes, in addition to key, value and headers."""
_DEFAULT_RECORD_BYTES = 1_000_000
"""The client's default of `message.max.bytes`, used if the topic is unknown at submission."""


@dataclass(slots=True)
class KafkaTarget:
    """The brokers and topics to which a sink writes. `check` sets `record_bytes_max`, `rules` and `tokens` when the job
    is submitted.
    """

    servers: str
    topic: str | None
    """The topic of all records, or None if a column has the topics."""
    delivery: Delivery = "exactly_once"
    create: bool | int = False
    partitioner: str = "murmur2_random"
    delivery_timeout_ms: int = DELIVERY_TIMEOUT_MS
    token_topic: str = TOKEN_TOPIC
    transactional_id_prefix: str = PREFIX
    properties: Mapping[str, object] = field(default_factory=dict)
    record_bytes_max: int | None = None
    """The largest batch in bytes that the topic accepts; None before submission, or if unknown."""
    rules: topics.TopicRules | None = None
    """The requirements of the topic; None before submission, or if a column has the topics."""
    keyed: bool = True
    """True if records have a key."""
    timed: bool = False
    """True if a column provides the timestamps of records."""
    tokens: TokenTopic | None = None
    """The topic of commit tokens; None before submission, and with at-least-once delivery."""

    def check(self) -> None:
        """Checks the topics, and creates missing ones. Called when the job is submitted.

        Raises ConfigurationError, and then has created no topic.
        """
        kafka = library()
        settings = client_settings(self.servers, self.properties)
        try:
            client = topics.admin(settings)
            self._check(client)
        except kafka.KafkaException as error:
            raise ConfigurationError(
                f"to_kafka: the brokers at {self.servers} did not answer as they should: {error_of(error)}. Check the "
                "address, the settings in properties=, and the rights to describe the topics and their configuration"
            ) from error

    @property
    def record_limit(self) -> int:
        """Returns the maximum size of a record in bytes: key, value and headers."""
        given = self.properties.get("message.max.bytes")
        limits = [int(str(given))] if given is not None else []
        if self.record_bytes_max is not None:
            limits.append(self.record_bytes_max)
        return min(limits, default=_DEFAULT_RECORD_BYTES) - _BATCH_OVERHEAD_BYTES

    def known_topics(self) -> topics.KnownTopics:
        """Returns a checker of the topics and partitions that rows name."""
        settings = client_settings(self.servers, self.properties)
        return topics.KnownTopics(settings, self.topic, self.record_limit + _BATCH_OVERHEAD_BYTES, self.rules)

    def producer_settings(
        self, transactional_id: str | None = None, transaction_ms: int = TRANSACTION_MS_MIN
    ) -> dict[str, object]:
        """Returns the settings of a producer. With `transactional_id`, the producer is transactional.

        `transaction_ms`: time limit in ms of a transaction.
        """
        given = self.properties.get("message.max.bytes")
        largest = self.record_bytes_max
        if given is not None and largest is not None:
            largest = min(largest, int(str(given)))
        return producer_settings(
            self.servers,
            self.properties,
            partitioner=self.partitioner,
            delivery_timeout_ms=self.delivery_timeout_ms,
            record_bytes_max=largest,
            transactional_id=transactional_id,
            transaction_ms=transaction_ms,
        )

    def _check(self, client: Any) -> None:
        exactly_once = self.delivery == "exactly_once"
        # The client checks its settings when it is made. It contacts no broker for that.
        make_producer(self.producer_settings("check" if exactly_once else None), Deliveries())
        found = topics.describe(client, self.topic) if self.topic is not None else None
        if self.topic is not None and found is None and self.create is False:
            raise ConfigurationError(
                f"to_kafka: topic {self.topic!r} does not exist at {self.servers}. Create it, or give create=True, or "
                "create=12 for 12 partitions"
            )
        if found is not None:
            self._check_rules(found.name, topics.rules_of(found))
        token_topic = topics.describe(client, self.token_topic) if exactly_once else None
        if token_topic is not None:
            topics.check_token_topic(token_topic)
        if self.topic is not None and found is None:
            topics.create(client, self.topic, -1 if self.create is True else int(self.create))
            found = topics.created(client, self.topic)
        if found is not None:
            self.record_bytes_max, self.rules = topics.max_record_bytes(found), topics.rules_of(found)
        if not exactly_once:
            return
        if token_topic is None:
            topics.create_token_topic(client, self.token_topic)
            token_topic = topics.created(client, self.token_topic)
            topics.check_token_topic(token_topic)
        self.tokens = TokenTopic(token_topic.name, token_topic.topic_id, token_topic.partitions)

    def _check_rules(self, topic: str, rules: topics.TopicRules) -> None:
        if rules.keyed and not self.keyed:
            raise ConfigurationError(
                f"to_kafka: topic {topic!r} is compacted, so its brokers refuse records without a key. Give key="
            )
        if rules.stamped and self.timed:
            raise ConfigurationError(f"to_kafka(timestamp=): {topics.stamped_text(topic)}")


@wire
@dataclass(frozen=True, slots=True)
class StagedRecords:
    """The content of a committable: the records that a subtask has staged for one checkpoint, and all settings that a
    commit needs.

    `topic`: empty if a column of the records has the topics. `prefix`: prefix of the transactional id.
    """

    uid: str
    topic: str
    prefix: str
    tokens: TokenTopic
    parts: tuple[StagedPart, ...]


class KafkaSink(CommittingSink):
    """The exactly-once sink for batches of records."""

    def __init__(self, target: KafkaTarget) -> None:
        self.target = target

    def check(self) -> None:
        """Checks the target when the job is submitted. Raises ConfigurationError."""
        self.target.check()

    def open_writer(self, context: CommittingContext) -> CommittingWriter:
        """Returns the writer of one subtask."""
        return _StagingWriter(self.target, context)

    def open_committer(self, context: CommittingContext) -> Committer:
        """Returns the committer of one subtask."""
        return _KafkaCommitter(self.target, context)


class _StagingWriter(CommittingWriter):
    """Stages records in files for the commit.

    All records of a subtask use its first bucket, so one `LaneCommitter` commits a checkpoint.
    """

    def __init__(self, target: KafkaTarget, context: CommittingContext) -> None:
        assert target.tokens is not None, "the target is checked when the job is submitted"
        self._target = target
        self._tokens = target.tokens
        self._context = context
        self._stage = RowStage(
            context.files.write,
            bytes_max=PART_BYTES_MAX,
            rows_max=PART_RECORDS_MAX,
            chunk_rows=CHUNK_RECORDS,
            convert=_joined,
            compression=None,
            recent_of=context.prefix,
        )

    def close(self) -> None:
        """Releases memory. Prepared records stay in their files."""
        self._stage.close()

    def write(self, batch: pa.RecordBatch) -> None:
        """Buffers records, and stages a file whenever the buffer has the size of one."""
        self._stage.add(batch)

    def prepare(self, checkpoint_id: int) -> Sequence[Committable]:
        """Stages the buffered records, and returns one committable, or none if there are no records."""
        files = self._stage.take()
        if not files:
            return []
        staged = StagedRecords(
            self._context.uid,
            self._target.topic or "",
            self._target.transactional_id_prefix,
            self._tokens,
            tuple(part for _, part in files),
        )
        return [Committable(self._context.buckets[0], encode(staged), tuple(path for path, _ in files))]


def _joined(batches: list[pa.RecordBatch]) -> Sequence[pa.RecordBatch]:
    """Joins small batches to batches of up to CHUNK_RECORDS records. Each batch has a cost, here and in the commit."""
    found: list[pa.RecordBatch] = []
    group: list[pa.RecordBatch] = []
    records = 0
    for batch in batches:
        if group and records + batch.num_rows > CHUNK_RECORDS:
            found.append(pa.concat_batches(group))
            group, records = [], 0
        group.append(batch)
        records += batch.num_rows
    return [*found, pa.concat_batches(group)]


class _KafkaCommitter(Committer):
    """Commits the records that a subtask has staged, and the records of earlier jobs that it has taken over."""

    def __init__(self, target: KafkaTarget, context: CommittingContext) -> None:
        self._target = target
        self._context = context
        self._lanes: dict[str, LaneCommitter] = {}

    def commit(self, token: CommitToken, committables: Sequence[Committable]) -> None:
        """Sends the records of committables, unless they are committed already."""
        self.commit_all([(token, committables)])

    def commit_all(self, prepared: Sequence[tuple[CommitToken, Sequence[Committable]]]) -> None:
        """Sends the records of several checkpoints, in as few transactions of each lane as possible."""
        parts: dict[tuple[str, str], list[Part]] = {}
        settings: dict[str, StagedRecords] = {}
        for token, committables in prepared:
            for committable in committables:
                staged = decode(committable.data)
                lane = f"{token.job_id}/{staged.uid}/{committable.bucket}"
                settings.setdefault(lane, staged)
                parts.setdefault((token.job_id, lane), []).extend(self._parts(token.checkpoint_id, committable, staged))
        for (job_id, lane), of_lane in parts.items():
            if lane not in self._lanes:
                self._lanes[lane] = self._lane(lane, settings[lane])
            try:
                self._lanes[lane].commit(of_lane)
            finally:
                if job_id != self._context.job_id:
                    # A lane of an earlier job gets no further records.
                    self._lanes.pop(lane).close()
        for _, committables in prepared:
            forget_staged(chain(*(each.files for each in committables)), recent_of=self._context.prefix)

    def close(self) -> None:
        """Closes the Kafka producers."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes = {}

    def _lane(self, lane: str, staged: StagedRecords) -> LaneCommitter:
        transactional_id = f"{staged.prefix}/{lane}"
        target = self._target
        settings = partial(target.producer_settings, transactional_id)
        limit_ms = max(DELIVERY_TIMEOUT_MS, target.delivery_timeout_ms)
        return LaneCommitter(target.servers, target.properties, settings, staged.tokens, lane, limit_ms)

    def _parts(self, checkpoint_id: int, committable: Committable, staged: StagedRecords) -> Iterator[Part]:
        for number, (path, part) in enumerate(zip(committable.files, staged.parts, strict=True)):
            yield Part(
                Token(checkpoint_id, number + 1),
                partial(staged_rows, self._context.files.read, path, part, recent_of=self._context.prefix),
                staged.topic or None,
                part.rows,
                part.size_bytes,
            )


class KafkaSender:
    """Sends records immediately (at-least-once delivery). `flush` returns when the brokers have all of them."""

    def __init__(self, target: KafkaTarget) -> None:
        self._target = target
        self._deliveries = Deliveries()
        self._producer = make_producer(target.producer_settings(), self._deliveries)
        self._doing = f"could not write to Kafka at {target.servers}"

    def send(self, batch: pa.RecordBatch) -> None:
        """Adds records to the client's queue, and waits for free space if necessary. Raises KafkaWriteError."""
        for start in range(0, batch.num_rows, CHUNK_RECORDS):
            chunk = batch.slice(start, CHUNK_RECORDS)
            limit_ms = 2 * self._target.delivery_timeout_ms
            wait_for_room(self._producer, chunk.num_rows, self._deliveries, self._doing, limit_ms)
            send(self._producer, chunk, self._target.topic, self._doing)
            with kafka_errors(self._doing):
                self._producer.poll(0)
        self._deliveries.check(self._doing)

    def flush(self) -> None:
        """Waits until all records are delivered. Raises KafkaWriteError if a delivery fails."""
        with kafka_errors(self._doing):
            left = self._producer.flush(2 * self._target.delivery_timeout_ms / 1000)
        self._deliveries.check(self._doing)
        if left:
            raise KafkaWriteError(
                f"{self._doing}: {left} records were not delivered in time"
                "; check that the brokers run, and give a larger delivery_timeout= if they are slow"
            )

    def close(self) -> None:
        """Drops records that were not delivered. They are sent again after a restore."""
        with kafka_errors(self._doing):
            self._producer.purge()
            self._producer.poll(0)
