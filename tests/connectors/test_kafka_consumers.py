"""Consumers of Kafka: whole batches through librdkafka, and message by message, with the same results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, Producer
from kafka_broker import Broker, broker
from waiting import LIMIT_S, until

from tidegate.connectors.kafka import native_consumer
from tidegate.connectors.kafka.client import BrokerContact
from tidegate.connectors.kafka.consumer import Consumer, MessageConsumer, open_consumer
from tidegate.connectors.kafka.librdkafka import library_for
from tidegate.connectors.kafka.native_consumer import NativeConsumer
from tidegate.connectors.kafka.options import client_settings
from tidegate.connectors.kafka.records import Fetched, Records

PARTS = ("value", "key", "timestamp", "headers")
WAY = pytest.mark.parametrize("native", [True, False], ids=["batches", "messages"])
QUICK = {"fetch.wait.max.ms": 10, "fetch.queue.backoff.ms": 10, "log_level": 0}


@pytest.fixture
def kafka() -> Iterator[Broker]:
    """A broker of its own."""
    with broker() as found:
        yield found


def consumer_of(kafka: Broker, native: bool, **properties: object) -> Consumer:
    """Open a consumer of all parts of records."""
    settings = client_settings(kafka.servers, {**QUICK, **properties})
    contact = BrokerContact(kafka.servers)
    if not native:
        return MessageConsumer(settings, PARTS, contact)
    found = open_consumer(settings, PARTS, contact)
    assert isinstance(found, NativeConsumer)
    return found


def fetched(consumer: Consumer, enough: Callable[[list[Fetched]], bool], count: int = 100) -> list[Fetched]:
    """Fetch until there is enough."""
    found: list[Fetched] = []

    def there() -> bool:
        found.append(consumer.fetch(count))
        return enough(found)

    until("enough records and reports", there, lambda: [each for each in found if each.count])
    return found


def rows(found: list[Fetched], partition: int = 0) -> list[tuple[object, ...]]:
    """Return offset, value, key, time and headers of each record of a partition."""
    records = [part for each in found for part in each.records if part.partition == partition]
    return [row for part in records for row in rows_of(part)]


def rows_of(records: Records) -> list[tuple[object, ...]]:
    """Return offset, value, key, time and headers of each record."""
    assert set(records.columns) == set(PARTS)
    headers = [[(each["key"], each["value"]) for each in pairs] for pairs in records.columns["headers"].to_pylist()]
    parts = [records.columns[name].to_pylist() for name in PARTS[:3]]
    return list(zip(records.offsets.tolist(), *parts, headers, strict=True))


def reports(found: list[Fetched]) -> list[tuple[int, str, int, int]]:
    """Return code, topic, partition and offset of each report."""
    return [(each.error.code(), each.topic, each.partition, each.offset) for part in found for each in part.reports]


@WAY
def test_every_part_of_a_record_arrives(kafka: Broker, native: bool) -> None:
    """Missing and empty values and keys differ, and a record may repeat a header."""
    sent = [
        (b"v", b"k", 5_000, [("h", b"1"), ("h\u00e9", None), ("h", b"")]),
        (b"", b"", 6_000, []),
        (None, None, 7_000, []),
        (bytes(range(256)) * 9, b"\0", 8_000, [("x", b"\0y")]),
    ]
    producer = Producer({"bootstrap.servers": kafka.servers, "log_level": 0})
    for value, key, at_ms, headers in sent:
        producer.produce("t", value, key, 0, timestamp=at_ms, headers=headers)  # type: ignore[arg-type]
    assert producer.flush(LIMIT_S) == 0
    with closing(consumer_of(kafka, native)) as consumer:
        consumer.assign("t", 0, OFFSET_BEGINNING)
        found = fetched(consumer, lambda each: bool(reports(each)))
        assert consumer.end_seen("t", 0) == 4
        assert consumer.end_seen("t", 1) is None
        assert consumer.bounds("t", 0, 30.0) == (0, 4)
    assert rows(found) == [(offset, value, key, at, headers) for offset, (value, key, at, headers) in enumerate(sent)]
    assert reports(found) == [(KafkaError._PARTITION_EOF, "t", 0, 4)]
    assert sum(each.count for each in found) == 5
    assert {part.topic for each in found for part in each.records} == {"t"}


@WAY
def test_partitions_are_assigned_at_an_offset_and_unassigned(kafka: Broker, native: bool) -> None:
    """A fetch returns nothing of a partition once it is unassigned, and each part belongs to one partition."""
    for partition in (0, 1):
        kafka.add("t", partition, *(b"%d-%d" % (partition, number) for number in range(20)))
    with closing(consumer_of(kafka, native)) as consumer:
        consumer.assign("t", 0, 15)
        consumer.assign("t", 1, 18)
        found = fetched(consumer, lambda each: len(reports(each)) == 2, count=3)
        assert [row[:2] for row in rows(found, 0)] == [(number, b"0-%d" % number) for number in range(15, 20)]
        assert [row[:2] for row in rows(found, 1)] == [(number, b"1-%d" % number) for number in (18, 19)]
        assert all(each.count <= 3 for each in found)
        consumer.unassign("t", 0)
        for partition in (0, 1):
            kafka.add("t", partition, b"last")
        found = fetched(consumer, lambda each: bool(rows(each, 1)))
        assert (rows(found, 0), [row[0] for row in rows(found, 1)]) == ([], [20])
        consumer.assign("t", 0, 20)
        assert [row[:2] for row in rows(fetched(consumer, lambda each: bool(rows(each))))] == [(20, b"last")]


@WAY
def test_an_offset_that_does_not_exist_is_reported(kafka: Broker, native: bool) -> None:
    """The client does not continue at another one by itself."""
    kafka.add("t", 0, b"a")
    with closing(consumer_of(kafka, native)) as consumer:
        consumer.assign("t", 0, 9)
        found = fetched(consumer, lambda each: bool(reports(each)))
        assert [each[0] for each in reports(found)] == [KafkaError._AUTO_OFFSET_RESET]
        assert rows(found) == []
        with pytest.raises(KafkaException):
            consumer.assign("t", 0, 0)


@WAY
def test_a_refused_setting_names_itself(kafka: Broker, native: bool) -> None:
    """The error is that of the client."""
    with pytest.raises(KafkaException, match="no\\.such\\.setting"):
        consumer_of(kafka, native, **{"no.such.setting": 1})


@WAY
def test_brokers_that_cannot_be_reached_are_logged_once(native: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The lines of the client's log arrive with its fetches."""
    settings = client_settings("127.0.0.1:1", {**QUICK, "log_level": 6})
    make = open_consumer if native else MessageConsumer
    with caplog.at_level(logging.WARNING), closing(make(settings, PARTS, BrokerContact("127.0.0.1:1"))) as consumer:
        consumer.assign("t", 0, 0)
        fetched(consumer, lambda _: "do not answer" in caplog.text)
        with pytest.raises(KafkaException):
            consumer.bounds("t", 0, 0.01)


def test_values_beyond_what_one_array_holds_come_in_several(kafka: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is larger than the limit comes alone, and order stays."""
    monkeypatch.setattr(native_consumer, "ARRAY_BYTES_MAX", 100)
    values = [bytes([65 + number]) * size for number, size in enumerate((40, 60, 1, 300, 20, 0, 80, 1))]
    kafka.add("t", 0, *values)
    with closing(consumer_of(kafka, native=True)) as consumer:
        consumer.assign("t", 0, 0)
        found = fetched(consumer, lambda each: len(rows(each)) == len(values))
    assert [row[1] for row in rows(found)] == values
    for each in found:
        for part in each.records:
            assert len(part) == 1 or sum(map(len, part.values.to_pylist())) <= 100


def test_settings_with_callbacks_need_the_client_of_python(kafka: Broker) -> None:
    """Tokens of OAuth need it too."""
    assert library_for({"group.id": "g", "linger.ms": 5, "enable.idempotence": True}) is not None
    assert library_for({"sasl.oauthbearer.config": "principal=me"}) is None
    settings = client_settings(kafka.servers, {**QUICK, "stats_cb": print})
    with closing(open_consumer(settings, PARTS, BrokerContact(kafka.servers))) as consumer:
        assert isinstance(consumer, MessageConsumer)
