"""Topics of Apache Kafka that change under a job: created again, deleted, with new partitions, with deleted records."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from confluent_kafka import Producer
from kafka_reading import QUICK, SCHEMA, Reading, objects, partitions_of
from kafka_server import KafkaServer
from waiting import LIMIT_S, until

from tidegate.connectors.formats.json import JsonRead
from tidegate.connectors.formats.raw import RawRead
from tidegate.connectors.kafka import client
from tidegate.connectors.kafka import reader as kafka_reader
from tidegate.connectors.kafka.options import Topics
from tidegate.connectors.kafka.records import RecordFormat
from tidegate.connectors.kafka.source import KafkaSource
from tidegate.connectors.kafka.splits import FINDERS, split_of
from tidegate.connectors.source import SourceReader, SourceSplit
from tidegate.storage.codec import decode
from tidegate.storage.errors import ConfigurationError


def source(server: KafkaServer, topic: str, **settings: object) -> KafkaSource:
    """Of one topic, as JSON."""
    return KafkaSource(server.servers, Topics((topic,)), RecordFormat(JsonRead(SCHEMA)), properties=QUICK, **settings)  # type: ignore[arg-type]


def finders_of(reader: SourceReader, found: KafkaSource) -> list[Reading]:
    """The finders of a source."""
    return [Reading(reader, split) for split in found.splits() if not split.rows]


def replaced(server: KafkaServer, topic: str, partitions: int = 1) -> list[SourceSplit]:
    """Make a topic, read half of it, and make it again; the splits that a checkpoint of the first one has."""
    server.create(topic, partitions)
    server.add(topic, 0, *objects(*range(20)))
    found = source(server, topic)
    reader = found.reader()
    readings = [Reading(reader, split) for split in partitions_of(found)]
    readings[0].until(10, rows_max=10)
    reader.close()
    server.delete(topic)
    server.create(topic)
    server.add(topic, 0, *objects(*range(100, 140)))
    return [reading.split for reading in readings]


def test_another_topic_of_the_same_name_is_refused(kafka_server: KafkaServer) -> None:
    """At a restore, and by a reader, before any of its records are taken for those that follow in the first one."""
    splits = replaced(kafka_server, "replaced")
    found = source(kafka_server, "replaced")
    with pytest.raises(ConfigurationError, match=r"another topic of this name .*'replaced' was deleted"):
        found.check_unread(splits)
    reading = Reading(found.reader(), splits[0])
    with pytest.raises(ConfigurationError, match="another topic of this name"):
        reading.until(11)
    reading.reader.close()
    assert reading.rows == []


def test_another_topic_is_read_from_its_begin_on_request(kafka_server: KafkaServer) -> None:
    """All of it, once; but not if it has fewer partitions, because then splits would wait for records for ever."""
    splits = replaced(kafka_server, "renewed", partitions=2)
    found = source(kafka_server, "renewed", on_missing="earliest")
    with pytest.raises(ConfigurationError, match="1 partitions, fewer than before"):
        found.check_unread(splits)
    found.check_unread(splits[:1])
    reading = Reading(found.reader(), splits[0])
    assert reading.until(40, rows_max=7) == list(range(100, 140))
    reading.reader.close()
    later = Reading(found.reader(), reading.split)
    kafka_server.add("renewed", 0, *objects(140))
    assert later.until(1) == [140]
    later.reader.close()


@pytest.mark.parametrize("bounded", [False, True])
def test_a_topic_that_is_made_again_under_a_reader_is_an_error(kafka_server: KafkaServer, bounded: bool) -> None:
    """Also where its records come before the reader has seen the change, and for one that ends."""
    topic = f"under-a-reader-{bounded}"
    kafka_server.create(topic)
    kafka_server.add(topic, 0, *objects(*range(10)))
    found = source(kafka_server, topic)
    (split,) = partitions_of(found)
    at = replace(decode(split.payload), end=20 if bounded else None)
    reading = Reading(found.reader(), split_of(at))
    reading.until(10)
    kafka_server.delete(topic)
    kafka_server.create(topic)
    kafka_server.add(topic, 0, *objects(*range(100, 140)))
    with pytest.raises(ConfigurationError, match="another topic of this name"):
        until("the error", lambda: reading.once().at_end)
    reading.reader.close()


def test_a_deleted_topic_is_reported_and_then_an_error(
    kafka_server: KafkaServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may come back for a while, as after a fault of a broker."""
    kafka_server.create("deleted")
    kafka_server.add("deleted", 0, *objects(1, 2))
    found = source(kafka_server, "deleted")
    reading = Reading(found.reader(), partitions_of(found)[0])
    reading.until(2)
    kafka_server.delete("deleted")

    def reported() -> bool:
        reading.once()
        return "topic 'deleted' was deleted" in caplog.text

    until("the warning", reported, lambda: caplog.text)
    monkeypatch.setattr(kafka_reader, "GONE_MS", 0)
    with pytest.raises(ConfigurationError, match="its records that were not read are lost"):
        reading.once()
    with pytest.raises(ConfigurationError, match="topic 'deleted' no longer exists"):
        found.check_unread([reading.split])
    reading.reader.close()
    assert caplog.text.count("was deleted") == 1


def test_new_partitions_are_found_once(kafka_server: KafkaServer) -> None:
    """By one of the finders, which remember them; they are read from their begin."""
    kafka_server.create("grows", 2)
    found = source(kafka_server, "grows", discover_ms=1)
    reader = found.reader()
    finders = finders_of(reader, found)
    assert len(finders) == FINDERS
    kafka_server.grow("grows", 5)
    kafka_server.add("grows", 3, *objects(7))
    new: list[SourceSplit] = []

    def there() -> bool:
        new.extend(split for finder in finders for split in finder.once().found)
        return len(new) >= 3

    until("three partitions", there, lambda: new)
    assert sorted(split.split_id for split in new) == ["grows[2]", "grows[3]", "grows[4]"]
    restored = found.reader()
    later = [Reading(restored, finder.split) for finder in finders]
    partition = Reading(restored, next(split for split in new if split.split_id == "grows[3]"))
    assert partition.until(1) == [7]
    assert [finder.once().found for finder in later] == [()] * FINDERS
    reader.close()
    restored.close()


def test_new_partitions_that_are_not_looked_for_are_reported(
    kafka_server: KafkaServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Once by a reader, and refused at a restore; then `discover=` can be added, and reads them from their begin."""
    kafka_server.create("ignored", 1)
    found = source(kafka_server, "ignored")
    splits = list(found.splits())
    reader = found.reader()
    finders = finders_of(reader, found)
    kafka_server.grow("ignored", 3)

    def reported() -> bool:
        for finder in finders:
            assert finder.once().found == ()
        return "new partitions, 1, 2, which are not read" in caplog.text

    until("the warning", reported, lambda: caplog.text)
    for finder in finders:
        finder.once()
    reader.close()
    assert caplog.text.count("new partitions") == 1
    with pytest.raises(ConfigurationError, match=r"new partitions, 1, 2, which would not be read; add .*discover="):
        found.check_unread(splits)
    finding = replace(found, discover_ms=1)
    finding.check_restored(splits)
    finding.check_unread(splits)
    reader = finding.reader()
    finders = [Reading(reader, split) for split in splits if not split.rows]
    new: list[SourceSplit] = []

    def there() -> bool:
        new.extend(split for finder in finders for split in finder.once().found)
        return len(new) >= 2

    until("two partitions", there, lambda: new)
    assert sorted(split.split_id for split in new) == ["ignored[1]", "ignored[2]"]
    reader.close()


def test_deleted_records_are_refused_or_counted(kafka_server: KafkaServer, caplog: pytest.LogCaptureFixture) -> None:
    """What was not read is lost: named at a restore and by a reader, and left behind on request, with its number."""
    kafka_server.create("expired")
    kafka_server.add("expired", 0, *objects(*range(30)))
    found = source(kafka_server, "expired")
    reading = Reading(found.reader(), partitions_of(found)[0])
    reading.until(10, rows_max=10)
    reading.reader.close()
    kafka_server.delete_records("expired", 0, before=25)
    with pytest.raises(ConfigurationError, match="15 records of partition 0 of 'expired' were deleted"):
        found.check_unread([reading.split])
    failing = Reading(found.reader(), reading.split)
    with pytest.raises(ConfigurationError, match="from offset 10 on: it has offsets 25 to 30"):
        failing.until(1)
    failing.reader.close()
    for on_missing, rows, lost in (("earliest", [*range(25, 31)], 15), ("latest", [31], 21)):
        going_on = replace(found, on_missing=on_missing)
        going_on.check_unread([reading.split])
        later = Reading(going_on.reader(), reading.split)
        counts: list[int] = []

        def moved() -> bool:
            result = later.once()  # noqa: B023
            counts.append(result.lost)  # noqa: B023
            return result.payload is not None

        until("the new place", moved)
        assert counts[-1] == lost
        kafka_server.add("expired", 0, *objects(rows[-1]))
        assert later.until(len(rows)) == rows
        later.reader.close()
        assert f"up to {lost} records before offset" in caplog.text


def test_one_large_partition_neither_fills_the_memory_nor_holds_up_others(
    kafka_server: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a reader keeps is limited in bytes; all records come in the end, in order."""
    limit_bytes = 1024 * 1024
    monkeypatch.setattr(kafka_reader, "BUFFERED_BYTES_MAX", limit_bytes)
    kafka_server.create("large", 2)
    record_bytes = 50_000
    kafka_server.add("large", 0, *[b"%06d" % number + bytes(record_bytes) for number in range(200)])
    kafka_server.add("large", 1, *[b"%06d" % number for number in range(100)])
    client = (*QUICK, ("queued.max.messages.kbytes", 512), ("fetch.max.bytes", 500_000), ("message.max.bytes", 100_000))
    found = KafkaSource(
        kafka_server.servers,
        Topics(("large",)),
        RecordFormat(RawRead("value"), RawRead("key", part="key"), plain=True),
        properties=client,
    )
    reader = found.reader()
    large, small = (Reading(reader, split) for split in partitions_of(found))
    most = 0

    def small_ones() -> bool:
        nonlocal most
        small.once(rows_max=10)
        if not large.rows:
            large.once(rows_max=1)
        most = max(most, reader.buffered_bytes)  # type: ignore[attr-defined]
        return len(small.rows) == 100

    until("all of the small partition", small_ones, lambda: len(small.rows))
    assert len(large.rows) == 1

    def large_ones() -> bool:
        nonlocal most
        large.once(rows_max=3)
        most = max(most, reader.buffered_bytes)  # type: ignore[attr-defined]
        return len(large.rows) == 200

    until("all of the large partition", large_ones, lambda: len(large.rows))
    reader.close()
    assert limit_bytes // 4 < most <= 2 * limit_bytes
    for reading in (large, small):
        assert [int(bytes(row["value"])[:6]) for row in reading.rows] == list(range(len(reading.rows)))  # type: ignore[arg-type]


def test_brokers_that_are_away_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not with a line for each try of the client."""
    with caplog.at_level(logging.INFO):
        now_ms = 0
        contact = client.BrokerContact("h:1", lambda: now_ms)
        for _ in range(100):
            contact.log(logging.ERROR, "%s [%s] %s", "FAIL", "consumer-1", "Connection refused")
            contact.log(logging.ERROR, "%s [%s] %s", "ERROR", "consumer-1", "Connection refused")
            now_ms += 1_000
        contact.answered()
        now_ms += 20_000
        contact.answered()
        contact.answered()
    lines = [record.message for record in caplog.records]
    assert len(lines) == 3
    assert [text in line for text, line in zip(("tried again", "for 60 s", "answer again"), lines, strict=True)] == [
        True
    ] * 3


def test_offsets_with_gaps(kafka_server: KafkaServer) -> None:
    """Transactions leave gaps: their ends, and records that were withdrawn. Rows and bad records keep their offsets."""
    kafka_server.create("gaps", 2)
    producer = Producer({"bootstrap.servers": kafka_server.servers, "transactional.id": "gaps", "log_level": 0})
    producer.init_transactions(LIMIT_S)
    for number, withdrawn in enumerate([False, True, False]):
        producer.begin_transaction()
        for value in (*objects(number, number + 10), b"{"):
            for partition in range(2):
                producer.produce("gaps", value=value, partition=partition)
        assert producer.flush(LIMIT_S) == 0
        end = producer.abort_transaction if withdrawn else producer.commit_transaction
        end(LIMIT_S)
    form = RecordFormat(JsonRead(SCHEMA), metadata=("partition", "offset"))
    found = KafkaSource(kafka_server.servers, Topics(("gaps",)), form, end="latest", properties=QUICK, bad_rows="side")
    reader = found.reader()
    readings = [Reading(reader, split) for split in partitions_of(found)]

    def over() -> bool:
        for reading in readings:
            if not reading.at_end:
                reading.once(rows_max=2)
        return all(reading.at_end for reading in readings)

    until("both partitions", over, lambda: [reading.rows for reading in readings])
    reader.close()
    for partition, reading in enumerate(readings):
        assert [tuple(row.values()) for row in reading.rows] == [
            (x, f"s{x}", partition, offset) for x, offset in ((0, 0), (10, 1), (2, 8), (12, 9))
        ]
        assert [(letter["partition"], letter["offset"]) for letter in reading.letters] == [
            (partition, 2),
            (partition, 10),
        ]
