"""Producers of Kafka: whole batches through librdkafka, and record by record, with the same results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pyarrow as pa
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition
from kafka_broker import PARTITIONS, Broker, broker
from waiting import LIMIT_S

from tidegate.connectors.kafka import native_producer
from tidegate.connectors.kafka.producer import (
    HEADERS,
    Deliveries,
    KafkaWriteError,
    RecordProducer,
    make_producer,
    producer_settings,
    send,
)
from tidegate.storage.errors import ConfigurationError

WAY = pytest.mark.parametrize("native", [True, False], ids=["batches", "records"])
RECORDS = pa.RecordBatch.from_pydict(
    {
        "topic": ["skipped", "one", "two", "one", "one"],
        "partition": pa.array([0, 1, 2, None, 3], pa.int32()),
        "key": pa.array([b"skipped", b"a", None, b"c", b""], pa.binary()),
        "value": pa.array([b"skipped", b"v", b"", None, b"x" * 10], pa.binary()),
        "headers": pa.array(
            [
                [{"key": "skipped", "value": b"s"}],
                [{"key": "h", "value": b"1"}, {"key": "hé", "value": None}],
                None,
                [],
                [{"key": "h", "value": b""}],
            ],
            HEADERS,
        ),
        "timestamp": pa.array([1, 5_000, None, 6_000, 7_000], pa.int64()),
    }
).slice(1)
"""A slice, so that offsets do not begin at 0."""


@pytest.fixture
def kafka() -> Iterator[Broker]:
    """A broker of its own."""
    with broker() as found:
        yield found


def settings_of(kafka: Broker, **properties: object) -> dict[str, object]:
    """Return the settings of a producer."""
    given = {"log_level": 0, **properties}
    return producer_settings(kafka.servers, given, partitioner="murmur2_random", delivery_timeout_ms=30_000)


def producer(kafka: Broker, native: bool, deliveries: Deliveries, **properties: object) -> RecordProducer:
    """Return a producer of this kind."""
    made = make_producer(settings_of(kafka, **properties), deliveries, native=native)
    assert isinstance(made, native_producer.NativeProducer) == native
    return made


def read(kafka: Broker, topic: str) -> list[tuple[object, ...]]:
    """Return partition, key, value, timestamp and headers of all records, sorted."""
    return sorted(unsorted(kafka, topic), key=repr)


def unsorted(kafka: Broker, topic: str) -> list[tuple[object, ...]]:
    """Return the records of `read` as they come."""
    found: list[tuple[object, ...]] = []
    settings = {"bootstrap.servers": kafka.servers, "group.id": "tests", "enable.partition.eof": True, "log_level": 0}
    with closing(Consumer(settings)) as reader:
        reader.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in range(PARTITIONS)])
        left = PARTITIONS
        while left:
            message = reader.poll(LIMIT_S)
            assert message is not None
            if message.error() is not None:
                left -= 1
                continue
            place = message.partition(), message.key(), message.value(), message.timestamp()[1], message.headers()
            found.append(place)
    return found


@WAY
def test_each_part_arrives(kafka: Broker, native: bool) -> None:
    """Nulls and empty values are told apart; records of several topics may be in one batch."""
    deliveries = Deliveries()
    made = producer(kafka, native, deliveries)
    send(made, RECORDS, None, "testing")
    assert made.flush(LIMIT_S) == 0
    deliveries.check("testing")
    chosen, *rest = [record for record in read(kafka, "one") if record[1] == b"c"]
    assert rest == []
    assert chosen[2:] == (None, 6_000, None)
    assert [record for record in read(kafka, "one") if record != chosen] == [
        (1, b"a", b"v", 5_000, [("h", b"1"), ("hé", None)]),
        (3, b"", b"x" * 10, 7_000, [("h", b"")]),
    ]
    (alone,) = read(kafka, "two")
    assert alone[:3] == (2, None, b"")
    assert alone[3] > 1_600_000_000_000  # type: ignore[operator]


def test_keys_choose_the_same_partition_either_way(kafka: Broker) -> None:
    """With records of many keys, in their order."""
    count = 500
    keys = [f"k{number}".encode() for number in range(count)]
    values = [str(number).encode() for number in range(count)]
    records = pa.RecordBatch.from_pydict({"key": keys, "value": values})
    found = []
    for native in (True, False):
        deliveries = Deliveries()
        made = producer(kafka, native, deliveries)
        send(made, records, f"keyed-{native}", "testing")
        assert made.flush(LIMIT_S) == 0
        found.append([record[:3] for record in read(kafka, f"keyed-{native}")])
    assert found[0] == found[1]
    assert len(found[0]) == count


@WAY
def test_partitions_that_are_given_keep_the_order_of_records(kafka: Broker, native: bool) -> None:
    """Also in the first transaction of a producer, which has not seen the topic, and beside records without one."""
    deliveries = Deliveries()
    made = producer(kafka, native, deliveries, **{"transactional.id": f"order-{native}"})
    made.init_transactions(LIMIT_S)
    partitions = [number % 3 if number % 7 else None for number in range(100)]
    records = {"key": [b"k"] * 100, "value": [str(number).encode() for number in range(100)]}
    given = pa.RecordBatch.from_pydict({**records, "partition": pa.array(partitions, pa.int32())})
    all_given = given.filter(given.column("partition").is_valid())
    for batch in (given, all_given, given):
        made.begin_transaction()
        send(made, batch, "one", "testing")
        made.commit_transaction(LIMIT_S)
    deliveries.check("testing")
    found = read(kafka, "one")
    assert len(found) == 2 * given.num_rows + all_given.num_rows
    for partition in range(PARTITIONS):
        numbers = [int(record[2]) for record in unsorted(kafka, "one") if record[0] == partition]  # type: ignore[call-overload]
        begins = [place for place, number in enumerate(numbers) if place and number <= numbers[place - 1]]
        assert len(begins) <= 2, "each transaction goes up"


@WAY
def test_a_record_that_is_not_delivered_is_reported(kafka: Broker, native: bool) -> None:
    """By the call, or by the next check; with topic and partition where they are known."""
    deliveries = Deliveries()
    made = producer(kafka, native, deliveries)
    with pytest.raises(KafkaWriteError, match=r"testing: .*Message size too large"):
        send(made, pa.RecordBatch.from_pydict({"value": [b"y" * 2_000_000]}), "one", "testing")
    beyond = pa.RecordBatch.from_pydict({"value": [b"y"] * 3, "partition": pa.array([17] * 3, pa.int32())})

    def deliver() -> None:
        # The client knows the partitions of the topic now, or learns them before it delivers.
        send(made, beyond, "one", "testing")
        assert made.flush(LIMIT_S) == 0
        deliveries.check("testing")

    with pytest.raises(KafkaWriteError, match=r"testing: .*Unknown partition"):
        deliver()


@WAY
def test_a_full_queue_is_an_error(kafka: Broker, native: bool) -> None:
    """The caller has to leave room."""
    made = producer(kafka, native, Deliveries(), **{"queue.buffering.max.messages": 10, "linger.ms": 20_000})
    with pytest.raises(KafkaWriteError, match="the queue of the client is full"):
        send(made, pa.RecordBatch.from_pydict({"value": [b"y"] * 20}), "one", "testing")
    assert len(made) == 10
    made.purge()
    made.poll(1)


@WAY
def test_errors_of_transactions_have_their_flags(kafka: Broker, native: bool) -> None:
    """A call out of turn is no fatal error, and cannot be repeated."""
    made = producer(kafka, native, Deliveries(), **{"transactional.id": f"t-{native}"})
    with pytest.raises(KafkaException) as caught:
        made.begin_transaction()
    error = caught.value.args[0]
    assert error.name() == "_STATE"
    assert (error.fatal(), error.retriable(), error.txn_requires_abort()) == (False, False, False)
    made.init_transactions(LIMIT_S)
    made.begin_transaction()
    send(made, pa.RecordBatch.from_pydict({"value": [b"y"]}), "one", "testing")
    made.commit_transaction(LIMIT_S)
    made.begin_transaction()
    made.abort_transaction(LIMIT_S)


@WAY
def test_settings_that_the_client_refuses(kafka: Broker, native: bool) -> None:
    """With its reason."""
    for settings, reason in (({"no.such.setting": 1}, "No such configuration"), ({"linger.ms": -5}, "outside")):
        with pytest.raises(ConfigurationError, match=f"the client refuses its settings: .*{reason}"):
            make_producer({**settings_of(kafka), **settings}, Deliveries(), native=native)


@WAY
@pytest.mark.parametrize(
    ("properties", "limits"),
    [
        ({}, (10_000, 10_000)),
        ({"socket.timeout.ms": 30_000}, (30_000, 30_000)),
        ({"transaction.timeout.ms": "5000", "socket.timeout.ms": 4_000}, (5_000, 5_000)),
        ({"transaction.timeout.ms": 300_000}, (300_000, 60_000)),
    ],
)
def test_time_limits_fit_each_other(native: bool, properties: dict[str, object], limits: tuple[int, int]) -> None:
    """The client refuses requests or deliveries that may outlast their transaction."""
    settings = producer_settings(
        "127.0.0.1:1", properties, partitioner="murmur2", delivery_timeout_ms=60_000, transactional_id="lane"
    )
    assert (int(str(settings["transaction.timeout.ms"])), settings["delivery.timeout.ms"]) == limits
    make_producer({**settings, "log_level": 0}, Deliveries(), native=native)


def test_settings_with_callbacks_need_the_client_of_python(kafka: Broker) -> None:
    """Tokens of OAuth need it too."""
    for properties in ({"stats_cb": print}, {"sasl.oauthbearer.config": "principal=me"}):
        made = make_producer(settings_of(kafka, **properties), Deliveries())
        assert not isinstance(made, native_producer.NativeProducer)
    assert isinstance(make_producer(settings_of(kafka), Deliveries()), native_producer.NativeProducer)
