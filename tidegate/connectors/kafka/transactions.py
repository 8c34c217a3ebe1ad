"""Commits to Kafka in short transactions, each with records and a commit token, which a repeated commit finds.

A *lane* is the sequence of commits of one sink bucket of one job. Its records come in *parts*, the files that the
writer has staged. A transaction has one part, or several small ones, also of several checkpoints. So a transaction
stays short however many rows a checkpoint has, and a lane that is behind needs few transactions. Rules:

- Each lane has its own transactional id. `init_transactions` therefore fences any earlier process that commits the same
  lane, and waits until its open transaction has ended.
- Only then the token of the lane is read, up to the end of its partition, with `read_committed` isolation. A part that
  the token covers is done. If the end cannot be read, the commit fails.
- The token of a lane is written in the same transaction as the records. So both are visible, or neither. It is the
  token of the last part, and covers all parts before it.
- After any failure the outcome of the transaction is unknown. The producer is discarded, and the next attempt begins
  with `init_transactions` and reads the token again.
- An open transaction blocks readers. If its process has stopped, the brokers abort it after a time limit. The limit
  begins with 10 s and is doubled by each failure, so that slow brokers get the time that they need.
- A lane has its tokens in one partition, chosen by a hash of its name. A commit is refused if the token topic is not
  the topic that the job was submitted with, or has another number of partitions: tokens would not be found.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidegate.connectors.kafka import topics
from tidegate.connectors.kafka.client import TIMEOUT_S, BrokerContact
from tidegate.connectors.kafka.producer import (
    QUEUED_RECORDS_MAX,
    TRANSACTION_MS_MIN,
    Deliveries,
    KafkaWriteError,
    RecordProducer,
    client_error,
    client_settings,
    error_of,
    kafka_errors,
    library,
    make_producer,
    send,
)
from tidegate.storage.clock import monotonic_ms
from tidegate.storage.codec import wire

if TYPE_CHECKING:
    import confluent_kafka

log = logging.getLogger(__name__)

_CALL_S = 60.0
"""Time limit in seconds of one client call that changes the state of a transaction."""
_READ_LIMIT_MS = 120_000
"""Time limit in ms of reading a partition of tokens. An open transaction of a lost process may delay the read."""
_READ_RECORDS = 1_000
_READ_S = 0.02
"""Time in seconds that one read waits for more records, also at the end of a partition."""
_AGAIN_S = 0.05
_SLOW_READ_MS = 5_000
_REPORTS_S = 5.0
"""Time in seconds that a failed transaction waits for the reports of its records."""
PART_BYTES_MAX = 64 << 20
"""Maximum size of a staged file in bytes, and so of a transaction. Such a transaction takes about a second."""
PART_RECORDS_MAX = QUEUED_RECORDS_MAX - 1
"""Maximum number of records in a transaction. Together with the token they fit into the client's queue."""


@wire
@dataclass(frozen=True, slots=True)
class TokenTopic:
    """The topic of commit tokens as it was at submission. `topic_id` is empty for old brokers."""

    name: str
    topic_id: str
    partitions: int

    def partition_of(self, lane: str) -> int:
        """Returns the partition of the token topic that stores the tokens of a lane (the commits of one sink
        bucket).
        """
        return zlib.crc32(lane.encode()) % self.partitions


@dataclass(frozen=True, slots=True, order=True)
class Token:
    """The commit progress of a lane (the commits of one sink bucket).

    All checkpoints before this one, and the first `parts` parts of this one, are committed.
    """

    checkpoint_id: int
    parts: int

    def encoded(self) -> bytes:
        """Returns the token as the value of a Kafka record."""
        return json.dumps({"checkpoint": self.checkpoint_id, "parts": self.parts}).encode()

    @staticmethod
    def decoded(value: bytes | None, lane: str) -> Token:
        """Parses the token of a lane from the value of a record. Raises KafkaWriteError for a record that tidegate has
        not written.
        """
        try:
            found = json.loads(value or b"")
            return Token(int(found["checkpoint"]), int(found["parts"]))
        except (ValueError, KeyError, TypeError) as error:
            raise KafkaWriteError(
                f"the commit token of {lane!r} cannot be understood: {value!r}. Another program writes to the token "
                "topic; give this job a token topic of its own (token_topic=)"
            ) from error


def read_token(
    servers: str, properties: Mapping[str, object], topic: TokenTopic, lane: str, limit_ms: int = _READ_LIMIT_MS
) -> Token | None:
    """Returns the newest committed token of a lane (the commits of one sink bucket), or None if there is none.

    Reads the partition up to the end that it has at the call. Raises KafkaWriteError if that takes longer than
    `limit_ms`.
    """
    partition = topic.partition_of(lane)
    doing = f"read the commit tokens in partition {partition} of topic {topic.name!r} to their end"
    settings = client_settings(servers, properties)
    with kafka_errors(f"could not {doing}"):
        end = _end_offset(settings, topic.name, partition)
        reader = _reader(settings, "read_committed")
        with closing(reader):
            reader.assign([library().TopicPartition(topic.name, partition, library().OFFSET_BEGINNING)])
            return _read_to(reader, end, lane, doing, limit_ms)


def _end_offset(settings: Mapping[str, object], topic: str, partition: int) -> int:
    """Returns the offset after the last record of a partition, including records of open transactions."""
    # A reader of committed records would return the end of the committed part only.
    with closing(_reader(settings, "read_uncommitted")) as asked:
        found = asked.get_watermark_offsets(library().TopicPartition(topic, partition), timeout=TIMEOUT_S)
    if found is None:
        raise KafkaWriteError(
            f"the brokers did not return the end of partition {partition} of topic {topic!r} in time; check that they "
            "run, and their load"
        )
    return int(found[1])


def _read_to(reader: confluent_kafka.Consumer, end: int, lane: str, doing: str, limit_ms: int) -> Token | None:
    kafka = library()
    key = lane.encode()
    newest: Token | None = None
    began_ms = monotonic_ms()
    position = 0
    while position < end:
        if monotonic_ms() - began_ms > limit_ms:
            raise KafkaWriteError(
                f"could not {doing}: reached offset {position} of {end} in {limit_ms} ms. An open transaction of "
                "another process may block readers; it ends by its transaction.timeout.ms at the latest"
            )
        for message in reader.consume(_READ_RECORDS, timeout=_READ_S):
            error = message.error()
            if error is None:
                position = max(position, _offset(message) + 1)
                if message.key() == key:
                    newest = Token.decoded(message.value(), lane)
            elif error.code() == kafka.KafkaError._PARTITION_EOF:
                # The offset is behind records that readers do not see, such as the marks of transactions.
                position = max(position, _offset(message))
            elif error.retriable():
                log.debug("reading of commit tokens is tried again: %s", error.str())
            else:
                raise KafkaWriteError(
                    f"could not {doing}: {error.str()} ({error.name()}); check that the user may read the token topic"
                )
    took_ms = monotonic_ms() - began_ms
    if took_ms > _SLOW_READ_MS:
        log.warning("It took %d ms to %s (%d records). Is the topic compacted?", took_ms, doing, end)
    return newest


def _offset(message: confluent_kafka.Message) -> int:
    offset = message.offset()
    assert offset is not None, "a consumed message has an offset"
    return offset


def _reader(settings: Mapping[str, object], isolation: str) -> confluent_kafka.Consumer:
    contact = BrokerContact(str(settings["bootstrap.servers"]))
    ours = {
        "group.id": "tidegate-commits",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "error",
        "isolation.level": isolation,
        "fetch.wait.max.ms": 10,
        "error_cb": client_error,
    }
    made: confluent_kafka.Consumer = library().Consumer({**settings, **ours}, logger=contact)
    return made


@dataclass(frozen=True, slots=True)
class Part:
    """Records of a lane that are committed together. `batches` returns them."""

    done: Token
    """The token after this part."""
    batches: Callable[[], Iterable[pa.RecordBatch]]
    topic: str | None
    """The topic of records without a column `topic`."""
    records: int
    size_bytes: int


def transactions_of(parts: Iterable[Part], records_max: int, bytes_max: int) -> Iterator[list[Part]]:
    """Groups consecutive parts to transactions within these limits. A larger part has a transaction of its own."""
    group: list[Part] = []
    records = size_bytes = 0
    for part in parts:
        if group and (records + part.records > records_max or size_bytes + part.size_bytes > bytes_max):
            yield group
            group = []
            records = size_bytes = 0
        group.append(part)
        records += part.records
        size_bytes += part.size_bytes
    if group:
        yield group


def _is_not_fatal(error: BaseException | None) -> bool:
    """Returns whether an error of the client allows further calls. After a fatal error, callbacks would fail too."""
    return isinstance(error, library().KafkaException) and not error.args[0].fatal()


class LaneCommitter:
    """Commits the parts of one lane (the commits of one sink bucket of one job), in order. Not thread-safe."""

    def __init__(
        self,
        servers: str,
        properties: Mapping[str, object],
        producer: Callable[[int], Mapping[str, object]],
        tokens: TokenTopic,
        lane: str,
        transaction_ms_max: int,
    ) -> None:
        """`producer`: returns the settings of a producer with the lane's transactional id, from the time limit in ms of
        its transactions. `transaction_ms_max`: the longest such limit.

        `tokens`: the topic of commit tokens.
        """
        self._servers = servers
        self._properties = properties
        self._settings = producer
        self._transaction_ms = TRANSACTION_MS_MIN
        self._transaction_ms_max = transaction_ms_max
        self._tokens = tokens
        self._lane = lane
        self._producer: RecordProducer | None = None
        self._deliveries = Deliveries()
        self._token: Token | None = None

    def commit(self, parts: Iterable[Part]) -> None:
        """Commits the parts that are not committed yet, in transactions of limited size.

        Raises KafkaWriteError, after which some parts may be committed.
        """
        if self._producer is None:
            self._open()
        missing = []
        for part in parts:
            if self._token is not None and part.done <= self._token:
                log.info("%s of %r is committed already", part.done, self._lane)
            else:
                missing.append(part)
        for group in transactions_of(missing, PART_RECORDS_MAX, PART_BYTES_MAX):
            try:
                self._transaction(group)
            except BaseException:
                self._drop()
                self._transaction_ms = min(2 * self._transaction_ms, self._transaction_ms_max)
                raise
            self._token = group[-1].done

    def close(self) -> None:
        """Discards the producer. No transaction is open between two calls of `commit`."""
        self._producer = None

    def _open(self) -> None:
        """Opens the producer, which fences earlier processes that commit this lane, and reads the lane's token."""
        self._deliveries = Deliveries()
        producer = make_producer(self._settings(self._transaction_ms), self._deliveries)
        doing = f"could not begin to commit {self._lane!r}"
        self._call(doing, producer.init_transactions)
        with kafka_errors(doing):
            self._check_token_topic()
        self._token = read_token(self._servers, self._properties, self._tokens, self._lane)
        self._producer = producer

    def _check_token_topic(self) -> None:
        """Raises KafkaWriteError if the token topic is not the same topic as at submission."""
        tokens = self._tokens
        found = topics.describe(
            topics.admin(client_settings(self._servers, self._properties)), tokens.name, with_config=False
        )
        changed = None
        if found is None:
            changed = "does not exist any more"
        elif found.topic_id != tokens.topic_id:
            changed = "is another topic of this name than when the records were prepared"
        elif found.partitions != tokens.partitions:
            changed = f"has {found.partitions} partitions, and had {tokens.partitions} when the records were prepared"
        if changed is not None:
            raise KafkaWriteError(
                f"could not commit {self._lane!r}: the token topic {tokens.name!r} {changed}, so it is unknown which "
                "records are committed. Restore the topic. To give up the prepared records, start the job with another "
                "uid for to_kafka and allow_non_restored_state=True"
            )

    def _transaction(self, parts: Sequence[Part]) -> None:
        producer = self._producer
        assert producer is not None
        done = parts[-1].done
        first = parts[0].done.checkpoint_id
        checkpoints = f"checkpoints {first} to" if first < done.checkpoint_id else "checkpoint"
        doing = f"could not commit {checkpoints} {done.checkpoint_id} of {self._lane!r}"
        token = pa.RecordBatch.from_pydict(
            {"key": [self._lane.encode()], "value": [done.encoded()], "partition": [self._partition]},
            pa.schema([("key", pa.binary()), ("value", pa.binary()), ("partition", pa.int32())]),
        )
        try:
            with kafka_errors(doing):
                producer.begin_transaction()
                for part in parts:
                    for batch in part.batches():
                        send(producer, batch, part.topic, doing)
                        producer.poll(0)
                        self._deliveries.check(doing)
                send(producer, token, self._tokens.name, doing)
            self._call(doing, producer.commit_transaction)
        except KafkaWriteError as error:
            # If a record has failed, this error is only that. The client's report of the record has the reason. It may
            # be waiting behind records that will not be sent any more.
            if _is_not_fatal(error.__cause__):
                with kafka_errors(doing):
                    producer.purge()
                    producer.flush(_REPORTS_S)
            self._deliveries.check(doing, after_failure=True)
            raise
        self._deliveries.check(doing)

    @property
    def _partition(self) -> int:
        return self._tokens.partition_of(self._lane)

    def _call(self, doing: str, call: Callable[[float], Any]) -> None:
        """Calls the client, and repeats the call after retriable errors, for up to _CALL_S seconds.

        Raises KafkaWriteError.
        """
        deadline_ms = monotonic_ms() + int(_CALL_S * 1000)
        while True:
            try:
                call(max(0.1, (deadline_ms - monotonic_ms()) / 1000))
                return
            except (library().KafkaException, SystemError) as error:
                passes = not isinstance(error, SystemError) and error.args[0].retriable()
                if not passes or monotonic_ms() >= deadline_ms:
                    raise KafkaWriteError(
                        f"{doing}: {error_of(error)}; check that the brokers run, and the rights of the user"
                    ) from error
            time.sleep(_AGAIN_S)

    def _drop(self) -> None:
        """Aborts an open transaction if possible, so that readers need not wait for the next attempt, and discards
        the producer.
        """
        producer, self._producer = self._producer, None
        if producer is None:
            return
        try:
            producer.purge()
            producer.abort_transaction(5.0)
        except (library().KafkaException, SystemError) as error:
            log.debug("the transaction of %r is ended by the next try: %s", self._lane, error_of(error))
