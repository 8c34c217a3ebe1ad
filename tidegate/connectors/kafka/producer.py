"""Kafka producers: settings, and sending batches of records to the client.

A batch of records has some of the columns of `RECORD_FIELDS`. `KafkaRecords` (`tidegate/operators/sinks/kafka_sink.py`)
encodes rows as such batches.

Rules:

- The client's queue is bounded by `QUEUED_RECORDS_MAX`. A caller sends at most this number of records between two calls
  of `flush` or `commit_transaction`, or waits for free space (`wait_for_room`).
- Only failed deliveries are reported by the client (`delivery.report.only.error`): a call of Python for each record
  would cost as much as the record. `Deliveries` keeps the first failure, with topic and partition.
- Batches are passed to librdkafka as a whole (`native_producer.py`). Where that is not possible, as with
  callbacks in `properties`, `_ClientProducer` makes a call of `confluent_kafka` for each record.
- Records of one partition keep their order, and the client's retries add no duplicates (`enable.idempotence`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.connectors.kafka.client import BrokerContact
from tidegate.storage.clock import monotonic_ms
from tidegate.storage.errors import ConfigurationError, TidegateError
from tidegate.storage.extras import load

if TYPE_CHECKING:
    import confluent_kafka

log = logging.getLogger(__name__)

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
RECORD_FIELDS: Mapping[str, pa.DataType] = {
    "topic": pa.string(),
    "partition": pa.int32(),
    "key": pa.binary(),
    "value": pa.binary(),
    "headers": HEADERS,
    "timestamp": pa.int64(),
}
"""Columns of a batch of records. `timestamp`: milliseconds since 1970. Only `value` is in every batch.

A null means, in the order of the columns after `topic`: the client's partitioner, no key, a tombstone, no headers, the
time of sending.
"""

QUEUED_RECORDS_MAX = 500_000
"""Maximum number of records in the queue of one client."""
CHUNK_RECORDS = 20_000
"""Number of records that are sent to the client between two checks for failed deliveries."""
DELIVERY_TIMEOUT_MS = 60_000
TRANSACTION_MS_MIN = 10_000
"""The first `transaction.timeout.ms` of a committer. Brokers look for transactions that are over every 10 s."""
TRANSACTION_MS_MAX = 900_000
"""Maximum `transaction.timeout.ms` that brokers accept by default."""
PARTITIONERS = ("murmur2_random", "murmur2", "consistent_random", "consistent", "fnv1a_random", "fnv1a", "random")

_FORCED = {"enable.idempotence": True, "delivery.report.only.error": True}
"""Settings of the client on which correctness depends. Users cannot change them."""
_RESERVED = {
    **dict.fromkeys(_FORCED, "it is set by the sink"),
    "bootstrap.servers": "give the brokers as the first argument",
    "transactional.id": "the sink has transactional ids of its own, which fence lost processes; choose how they begin "
    "with transactional_id_prefix=",
    "partitioner": "give partitioner=",
    "delivery.timeout.ms": "give delivery_timeout=",
    "message.timeout.ms": "give delivery_timeout=",
    "isolation.level": "it is set by the sink",
    "group.id": "the sink has no consumer group",
}
_OF_PRODUCERS = {
    # Records come in batches already, so a longer wait adds latency and saves no requests.
    "linger.ms": 1,
    # The sink bounds what it passes to the client. These limits are above its own, so that the queue is never full.
    "queue.buffering.max.messages": 2 * QUEUED_RECORDS_MAX,
    "queue.buffering.max.kbytes": 2_097_151,
}
"""Settings that `properties=` may change, except the limits of the queue."""


class KafkaWriteError(TidegateError):
    """Raised if records could not be written to Kafka."""


def library() -> Any:
    """Imports and returns `confluent_kafka`. Raises ConfigurationError if it is not installed."""
    return load("to_kafka", "kafka", "confluent_kafka")


def check_properties(properties: Mapping[str, object]) -> None:
    """Raises ConfigurationError for client settings in `properties` that only the sink may set."""
    for name in properties:
        if not isinstance(name, str):
            raise ConfigurationError(
                f"to_kafka(properties=): {name!r} is not the name of a setting of librdkafka; correct the name"
            )
        if name in _RESERVED:
            raise ConfigurationError(f"to_kafka(properties=): remove {name!r}: {_RESERVED[name]}")
        if name.startswith("queue.buffering.max.") and name != "queue.buffering.max.ms":
            raise ConfigurationError(
                f"to_kafka(properties=): remove {name!r}: the sink bounds the client's queue itself"
            )


def producer_settings(
    servers: str,
    properties: Mapping[str, object],
    *,
    partitioner: str,
    delivery_timeout_ms: int,
    record_bytes_max: int | None = None,
    transactional_id: str | None = None,
    transaction_ms: int = TRANSACTION_MS_MIN,
) -> dict[str, object]:
    """Returns the settings of a producer.

    `transaction_ms`: time limit in ms of a transaction, after which the brokers abort it. `properties` may set another.

    `record_bytes_max`: the largest batch that the topic accepts, in bytes. The client's batches get the same limit,
    because a batch of several small records could be too large.
    """
    settings: dict[str, object] = {**_OF_PRODUCERS, **properties, **_FORCED}
    settings["bootstrap.servers"] = servers
    settings["partitioner"] = partitioner
    settings["delivery.timeout.ms"] = delivery_timeout_ms
    if record_bytes_max is not None:
        settings["message.max.bytes"] = record_bytes_max
        settings.setdefault("batch.size", min(1_000_000, record_bytes_max))
    if transactional_id is not None:
        settings["transactional.id"] = transactional_id
        # The client refuses requests and records that may outlast their transaction.
        limit_ms = _number(properties.get("transaction.timeout.ms"))
        if limit_ms is None:
            limit_ms = max(transaction_ms, _number(properties.get("socket.timeout.ms")) or 0)
            settings.setdefault("transaction.timeout.ms", limit_ms)
        settings["delivery.timeout.ms"] = min(delivery_timeout_ms, limit_ms)
    return settings


def _number(setting: object) -> int | None:
    """Returns the number of a setting of the client, or None if it is not set. The client refuses other values."""
    try:
        return int(str(setting))
    except ValueError:
        return None


def client_settings(servers: str, properties: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings of a client that writes no records (admin or consumer)."""
    return {**properties, "bootstrap.servers": servers}


class Deliveries:
    """Collects failed deliveries of one producer. The Kafka client calls its methods in the thread that calls the
    client.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed = 0
        self._first = ""
        self._too_large = False
        self._dropped = False

    def failed(self, error: confluent_kafka.KafkaError, topic: str, partition: int) -> None:
        """Records a failed delivery. `partition` is negative if unknown."""
        kafka = library().KafkaError
        dropped = error.code() in (kafka._PURGE_QUEUE, kafka._PURGE_INFLIGHT)
        with self._lock:
            self._failed += 1
            # Records that the client has dropped have no reason of their own.
            if self._failed > 1 and (dropped or not self._dropped):
                return
            self._dropped = dropped
            where = "" if partition < 0 else f", partition {partition}"
            self._first = f"{error.str()} (topic {topic!r}{where})"
            self._too_large = error.code() == kafka.MSG_SIZE_TOO_LARGE

    def check(self, doing: str, *, after_failure: bool = False) -> None:
        """Raises KafkaWriteError, beginning with `doing`, if a record was not delivered.

        `after_failure`: a call has failed already, so records that the client dropped because of that are ignored.
        """
        with self._lock:
            failed = 0 if after_failure and self._dropped else self._failed
            first = self._first
            too_large = self._too_large
        if not failed:
            return
        advice = (
            "The topic's max.message.bytes is smaller than when the job was submitted; raise it, or restart the job"
            if too_large
            else "See that the brokers answer and the topic exists; delivery_timeout= is the time that a record has"
        )
        raise KafkaWriteError(f"{doing}: {failed} records were not delivered: {first}. {advice}")


@contextmanager
def kafka_errors(doing: str) -> Iterator[None]:
    """Returns a context that converts errors of the Kafka client to a KafkaWriteError that begins with `doing`.

    On a fatal error, calls of the client may raise SystemError, with or without the original error as its cause.
    """
    try:
        yield
    except (library().KafkaException, SystemError) as error:
        raise KafkaWriteError(
            f"{doing}: {error_of(error)}; check that the brokers run, and the settings in properties="
        ) from error


def error_of(error: BaseException) -> str:
    """Returns the text of an exception of the Kafka client."""
    if isinstance(error, SystemError):
        if error.__cause__ is None:
            return "a fatal error of the client. Another process may have taken over"
        return error_of(error.__cause__)
    given: Any = error.args[0] if error.args else error
    return f"{given.str()} ({given.name()})" if isinstance(given, library().KafkaError) else str(given)


_OF_TRANSACTIONS = {"ADDPARTS", "ENDTXN", "FATAL", "GETPID", "TXNERR", "TXNINIT"}


class ProducerContact(BrokerContact):
    """Tracks whether the brokers answer one producer.

    Log lines about transactions are DEBUG, because these errors are also raised.
    """

    def log(self, level: int, text: str, *values: object) -> None:
        """Receives a line of the client's log, as `logging.Logger.log` does."""
        if values and str(values[0]) in _OF_TRANSACTIONS:
            log.debug(text, *values)
        else:
            super().log(level, text, *values)


def client_error(error: confluent_kafka.KafkaError) -> None:
    """Callback for errors of the client as a whole. Without it, a fatal error would make the current call raise
    SystemError.

    The next call of the client raises a fatal error. Other errors are temporary, or are reported as failed deliveries.
    """
    log.debug("the client reports %s", error.str())


class RecordProducer(Protocol):
    """A Kafka producer that sends batches of records. Its methods raise KafkaException."""

    def __len__(self) -> int:
        """Returns the number of records in the queue or in flight."""
        ...

    def send(self, records: pa.RecordBatch, topic: str | None) -> None:
        """Adds records to the client's queue.

        `topic` is for records without a column `topic`. Raises BufferError if it is full.
        """
        ...

    def poll(self, timeout: float) -> object:
        """Serves callbacks. Waits up to `timeout` seconds for the first one."""
        ...

    def flush(self, timeout: float) -> int:
        """Waits until all records are delivered or have failed, for up to `timeout` seconds.

        Returns the number of remaining records.
        """
        ...

    def purge(self) -> None:
        """Drops all records in the queue and in flight. The next `poll` reports them as failed."""
        ...

    def init_transactions(self, timeout: float) -> None:
        """Fences earlier producers with the same transactional id."""
        ...

    def begin_transaction(self) -> None:
        """Begins a transaction."""
        ...

    def commit_transaction(self, timeout: float) -> None:
        """Delivers all records and commits the transaction. Fails if a record was not delivered."""
        ...

    def abort_transaction(self, timeout: float) -> None:
        """Aborts the transaction."""
        ...


@dataclass(frozen=True, slots=True)
class _Reports:
    """Callbacks of a producer, which forward failed deliveries and log lines."""

    deliveries: Deliveries
    contact: ProducerContact

    def failed(self, error: confluent_kafka.KafkaError, topic: str, partition: int) -> None:
        self.deliveries.failed(error, topic, partition)

    def delivered(self, error: confluent_kafka.KafkaError | None, message: confluent_kafka.Message) -> None:
        if error is not None:
            partition = message.partition()
            self.failed(error, message.topic() or "", -1 if partition is None else partition)

    def client_error(self, error: confluent_kafka.KafkaError) -> None:
        client_error(error)

    def log(self, level: int, facility: str, text: str) -> None:
        self.contact.log(level, "%s %s", facility, text)


def make_producer(settings: Mapping[str, object], deliveries: Deliveries, *, native: bool = True) -> RecordProducer:
    """Creates a producer. Raises ConfigurationError for settings that the client refuses.

    `native`: whether batches may be passed directly to librdkafka (`native_producer.py`).
    """
    kafka = library()
    from tidegate.connectors.kafka.native_producer import connect

    contact = ProducerContact(str(settings["bootstrap.servers"]))
    reports = _Reports(deliveries, contact)
    try:
        made = connect(settings, reports) if native else None
        if made is not None:
            return made
        ours = {"on_delivery": reports.delivered, "error_cb": client_error}
        return _ClientProducer(kafka.Producer({**settings, **ours}, logger=contact))
    except kafka.KafkaException as error:
        raise ConfigurationError(
            f"to_kafka: the client refuses its settings: {error_of(error)}; correct properties="
        ) from error


def send(producer: RecordProducer, records: pa.RecordBatch, topic: str | None, doing: str) -> None:
    """Adds records to the client's queue, in their order. `topic` is for records without a column `topic`.

    Raises KafkaWriteError, beginning with `doing`. The caller must ensure that the queue has space (`wait_for_room`).
    """
    with kafka_errors(doing):
        try:
            producer.send(records, topic)
        except BufferError as error:
            raise KafkaWriteError(
                f"{doing}: the queue of the client is full; give a larger delivery_timeout=, or send fewer rows at once"
            ) from error


class _ClientProducer:
    """A `RecordProducer` over `confluent_kafka.Producer`, which sends records one by one."""

    def __init__(self, producer: confluent_kafka.Producer) -> None:
        self._producer = producer
        self.poll = producer.poll
        self.flush = producer.flush
        self.purge = producer.purge
        self.init_transactions = producer.init_transactions
        self.begin_transaction = producer.begin_transaction
        self.commit_transaction = producer.commit_transaction
        self.abort_transaction = producer.abort_transaction

    def __len__(self) -> int:
        return len(self._producer)

    def send(self, records: pa.RecordBatch, topic: str | None) -> None:
        columns = {name: _values(records.column(name), name) for name in records.schema.names}
        produce, count = self._producer.produce, records.num_rows
        values = columns["value"]
        keys = columns.get("key") or [None] * count
        if topic is not None and columns.keys() <= {"key", "value"}:
            for value, key in zip(values, keys, strict=True):
                produce(topic, value, key)
            return
        topics = columns.get("topic") or [topic] * count
        partitions = columns.get("partition") or [-1] * count
        times = columns.get("timestamp") or [0] * count
        headers = columns.get("headers") or [None] * count
        parts = zip(topics, values, keys, partitions, times, headers, strict=True)
        for to, value, key, partition, at_ms, pairs in parts:
            produce(to, value, key, partition, None, None, at_ms, pairs)


def _values(column: pa.Array, name: str) -> list[Any]:
    if name in ("partition", "timestamp"):
        filled: list[Any] = pc.fill_null(column, -1 if name == "partition" else 0).to_pylist()
        return filled
    if name == "headers":
        lists = column.to_pylist()
        return [None if pairs is None else [(pair["key"], pair["value"]) for pair in pairs] for pairs in lists]
    objects: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
    return objects


def wait_for_room(producer: RecordProducer, count: int, deliveries: Deliveries, doing: str, limit_ms: int) -> None:
    """Waits until the client's queue has space for `count` more records. Raises KafkaWriteError for a failed delivery.

    `limit_ms`: maximum time to wait. A record that was not delivered within this time has failed.
    """
    deadline_ms = monotonic_ms() + limit_ms
    while len(producer) + count > QUEUED_RECORDS_MAX:
        with kafka_errors(doing):
            producer.poll(0.01)
        deliveries.check(doing)
        if monotonic_ms() > deadline_ms:
            raise KafkaWriteError(
                f"{doing}: the brokers took no records for {limit_ms} ms"
                "; check that they run, and give a larger delivery_timeout= if they are slow"
            )
