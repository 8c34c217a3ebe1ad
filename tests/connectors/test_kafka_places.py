"""Starts and ends of the Kafka source, patterns of topics, lag, and consumer groups.

All against Apache Kafka.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from kafka_reading import QUICK, SCHEMA, Reading, objects, partitions_of
from kafka_server import KafkaServer
from waiting import LIMIT_S, until

from tidegate.connectors.formats.json import JsonRead
from tidegate.connectors.kafka import client
from tidegate.connectors.kafka.options import End, Start, Topics
from tidegate.connectors.kafka.records import RecordFormat
from tidegate.connectors.kafka.source import KafkaSource
from tidegate.connectors.kafka.splits import PartitionAt, split_of
from tidegate.connectors.source import NotifiedReader, SourceSplit
from tidegate.storage.codec import decode
from tidegate.storage.errors import ConfigurationError


def source(server: KafkaServer, *topics: str, group: str = "readers", **settings: object) -> KafkaSource:
    """Returns a source of some topics with JSON."""
    properties = (*QUICK, ("group.id", group))
    return KafkaSource(
        server.servers, Topics(topics), RecordFormat(JsonRead(SCHEMA)), properties=properties, **settings
    )  # type: ignore[arg-type]


def commit(server: KafkaServer, group: str, topic: str, partition: int, offset: int) -> None:
    """Commit an offset of a consumer group."""
    admin = AdminClient({"bootstrap.servers": server.servers, "log_level": 0})
    places = [TopicPartition(topic, partition, offset)]

    def done() -> bool:
        """A broker that has just started may still be loading the group."""
        request = ConsumerGroupTopicPartitions(group, places)
        answer = admin.alter_consumer_group_offsets([request])[group].result(LIMIT_S)
        return all(place.error is None for place in answer.topic_partitions)

    until("the offset", done)


def committed(server: KafkaServer, group: str, topic: str, partitions: int) -> list[int]:
    """The offsets that a consumer group has committed; -1001 where it has none."""
    asked = Consumer({"bootstrap.servers": server.servers, "group.id": group, "log_level": 0})
    found = asked.committed([TopicPartition(topic, number) for number in range(partitions)], timeout=LIMIT_S)
    asked.close()
    return [place.offset for place in found]


def timed(server: KafkaServer, topic: str) -> None:
    """Make a topic of 2 partitions: 10 records in each, a second apart; 3 of the first are deleted."""
    # The records are of 1970, so the broker would delete them.
    server.create(topic, 2, **{"retention.ms": "-1"})
    producer = Producer({"bootstrap.servers": server.servers, "log_level": 0})
    for partition in range(2):
        for number, value in enumerate(objects(*range(partition * 100, partition * 100 + 10))):
            producer.produce(topic, value=value, partition=partition, timestamp=1_000_000 + 1_000 * number)
    assert producer.flush(LIMIT_S) == 0
    server.delete_records(topic, 0, before=3)


def test_starts_and_ends(kafka_server: KafkaServer) -> None:
    """For all partitions, for each topic, and for each partition."""
    timed(kafka_server, "places")
    commit(kafka_server, "places-readers", "places", 1, 7)
    at = datetime.fromtimestamp(1_004, UTC)
    cases: list[tuple[Start, End | None, list[tuple[int, int | None]]]] = [
        ("earliest", None, [(3, None), (0, None)]),
        ("earliest", "latest", [(3, 10), (0, 10)]),
        ("latest", "latest", [(10, 10), (10, 10)]),
        (1_004_000, at, [(4, 4), (4, 4)]),
        (1_003_001, 1_008_000, [(4, 8), (4, 8)]),
        (0, 2_000_000, [(3, 10), (0, 10)]),
        ("group_or_earliest", "latest", [(3, 10), (7, 10)]),
        ("group_or_latest", "latest", [(10, 10), (7, 10)]),
        ({"places": at}, {"places": {0: 6, 1: at}}, [(4, 6), (4, 4)]),
        ({"places": {0: 5, 1: "group"}}, {"places": "latest"}, [(5, 10), (7, 10)]),
        ({"places": {0: "latest", 1: at}}, {"places": {0: 12, 1: "latest"}}, [(10, 12), (4, 10)]),
    ]
    for start, end, expected in cases:
        found = [
            decode(split.payload)
            for split in partitions_of(source(kafka_server, "places", group="places-readers", start=start, end=end))
        ]
        assert [(each.offset, each.end) for each in found] == expected, (start, end)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"start": "group"}, "'refused' has committed no offset for partition 0 .*'group_or_earliest'"),
        ({"start": {"refused": {0: 2, 1: 0}}}, "partition 0 of 'refused' has offsets 3 to 10, and not 2"),
        ({"start": {"refused": {0: 3, 1: 11}}}, "partition 1 of 'refused' has offsets 0 to 10, and not 11"),
        ({"start": {"refused": {0: 3}}}, "partition 1 of topic 'refused' has no offset"),
        ({"start": {"refused": {0: 3, 1: 0, 2: 0}}}, "has 2 partitions, and no partition 2"),
        ({"start": {"refused": "latest", "typo": "latest"}}, r"'typo' is not in topics="),
        ({"end": {"refused": {0: 3}}}, r"end=.*partition 1 of topic"),
        ({"end": datetime(2999, 1, 1, tzinfo=UTC)}, "is in the future"),
    ],
)
def test_places_that_do_not_exist_are_refused(
    kafka_server: KafkaServer, settings: dict[str, object], named: str
) -> None:
    """At submission, before anything is read."""
    if "refused" not in AdminClient({"bootstrap.servers": kafka_server.servers}).list_topics(timeout=LIMIT_S).topics:
        timed(kafka_server, "refused")
    with pytest.raises(ConfigurationError, match=named):
        source(kafka_server, "refused", group="refused", **settings).splits()


def test_an_end_is_reached_or_waited_for(kafka_server: KafkaServer) -> None:
    """An offset that does not exist yet is waited for. Records behind the end are not read."""
    kafka_server.create("waits", 1)
    kafka_server.add("waits", 0, *objects(0, 1, 2))
    found = source(kafka_server, "waits", end={"waits": {0: 5}})
    reading = Reading(found.reader(), partitions_of(found)[0])
    reading.until(3)
    for _ in range(20):
        assert not reading.once().at_end
    kafka_server.add("waits", 0, *objects(3, 4, 5, 6))
    until("the end", lambda: reading.once().at_end, lambda: reading.rows)
    assert [row["x"] for row in reading.rows] == [0, 1, 2, 3, 4]
    reading.reader.close()


def test_a_start_outside_of_a_partition_follows_on_missing(kafka_server: KafkaServer) -> None:
    """The number of lost records is reported, as for a checkpoint whose records were deleted."""
    timed(kafka_server, "outside")
    found = source(kafka_server, "outside", start={"outside": {0: 1, 1: 0}}, on_missing="earliest")
    reading = Reading(found.reader(), partitions_of(found)[0])
    lost: list[int] = []

    def moved() -> bool:
        lost.append(reading.once().lost)
        return lost[-1] > 0

    until("the first record", moved)
    assert lost[-1] == 2
    assert reading.until(7) == list(range(3, 10))
    reading.reader.close()


def test_a_bounded_source_ends_in_a_topic_that_was_made_again(kafka_server: KafkaServer) -> None:
    """Its end is an offset of the old topic, which the new one may never reach."""
    kafka_server.create("shorter", 1)
    kafka_server.add("shorter", 0, *objects(*range(20)))
    found = source(kafka_server, "shorter", end="latest", on_missing="earliest")
    (split,) = found.splits()
    kafka_server.delete("shorter")
    kafka_server.create("shorter", 1)
    kafka_server.add("shorter", 0, *objects(7, 8))
    reading = Reading(found.reader(), split)
    until("the end", lambda: reading.once().at_end, lambda: reading.rows)
    assert [row["x"] for row in reading.rows] == [7, 8]
    reading.reader.close()


def test_topics_that_match_a_pattern(kafka_server: KafkaServer, caplog: pytest.LogCaptureFixture) -> None:
    """As a whole name; new ones are found with `discover=`, and otherwise reported, and refused at a restore."""
    for topic in ("shop-a", "shop-b", "shop", "eshop-a"):
        kafka_server.create(topic, 1)
    kafka_server.add("shop-a", 0, *objects(1))
    topics = Topics.of(re.compile("SHOP-.", re.IGNORECASE))
    found = replace(source(kafka_server), topics=topics)
    splits = list(found.splits())
    assert [split.split_id for split in splits if split.rows] == ["shop-a[0]", "shop-b[0]"]
    kafka_server.create("shop-c", 2)
    kafka_server.add("shop-c", 1, *objects(3))
    found.check_restored(splits)
    with pytest.raises(ConfigurationError, match=r"'shop-c' has new partitions, 0, 1, .*discover="):
        found.check_unread(splits)
    reader = found.reader()
    finders = [Reading(reader, split) for split in splits if not split.rows]

    def reported() -> bool:
        for finder in finders:
            assert finder.once().found == ()
        return "'shop-c' has new partitions, 0, 1, which are not read" in caplog.text

    until("the warning", reported, lambda: caplog.text)
    reader.close()
    finding = replace(found, discover_ms=1)
    finding.check_unread(splits)
    reader = finding.reader()
    finders = [Reading(reader, split) for split in splits if not split.rows]
    new: list[SourceSplit] = []

    def there() -> bool:
        new.extend(split for finder in finders for split in finder.once().found)
        return len(new) >= 2

    until("two partitions", there, lambda: new)
    assert sorted(split.split_id for split in new) == ["shop-c[0]", "shop-c[1]"]
    old = Reading(reader, next(split for split in splits if split.rows))
    later = Reading(reader, next(split for split in new if split.split_id == "shop-c[1]"))
    assert (old.until(1), later.until(1)) == ([1], [3])
    reader.close()
    with pytest.raises(ConfigurationError, match="topic 'shop-a' is missing in topics="):
        replace(finding, topics=Topics.of(re.compile("shop-[bc]"))).check_restored(splits)
    with pytest.raises(ConfigurationError, match="matches the pattern 'nothing'"):
        replace(finding, topics=Topics.of(re.compile("nothing"))).splits()


def test_names_of_kafka_itself_match_no_pattern() -> None:
    """Offsets of groups and transactions are topics too."""
    topics = Topics.of(re.compile(".*"))
    assert [topics.matches(name) for name in ("orders", "_orders", "__consumer_offsets")] == [True, True, False]


def test_a_reader_counts_the_records_behind_it(kafka_server: KafkaServer) -> None:
    """Up to the end of the partition, or of the source; a mark of a transaction is not a record."""
    kafka_server.create("lag", 1)
    kafka_server.add("lag", 0, *objects(*range(8)))
    for end, counts in ((None, [6, 4, 2, 0]), ({"lag": {0: 5}}, [3, 1, 0])):
        found = source(kafka_server, "lag", end=end)
        reading = Reading(found.reader(), partitions_of(found)[0])
        behind = []
        while len(behind) < len(counts):
            result = reading.once(rows_max=2)
            if result.batch is not None or result.at_end:
                behind.append(result.behind)
        assert behind == counts
        reading.reader.close()
    producer = Producer({"bootstrap.servers": kafka_server.servers, "transactional.id": "lag", "log_level": 0})
    producer.init_transactions(LIMIT_S)
    producer.begin_transaction()
    producer.produce("lag", value=objects(8)[0], partition=0)
    producer.commit_transaction(LIMIT_S)
    found = source(kafka_server, "lag", start={"lag": {0: 8}})
    reading = Reading(found.reader(), partitions_of(found)[0])
    reading.until(1)
    until("no lag", lambda: reading.once().behind == 0)
    reading.reader.close()


def test_offsets_of_a_group_follow_completed_checkpoints(kafka_server: KafkaServer) -> None:
    """They are committed when a checkpoint is complete, and the last ones when the reader is closed."""
    kafka_server.create("monitored", 2)
    kafka_server.add("monitored", 0, *objects(*range(6)))
    found = source(kafka_server, "monitored", group="monitors", commit_offsets=True)
    reader = found.reader()
    assert isinstance(reader, NotifiedReader)
    splits = partitions_of(found)
    first = Reading(reader, splits[0])
    first.until(4, rows_max=2)
    done = first.split
    first.until(6, rows_max=2)
    assert committed(kafka_server, "monitors", "monitored", 2) == [-1_001, -1_001]
    reader.checkpoint_completed([done, splits[1]])

    def there() -> bool:
        first.once()
        return committed(kafka_server, "monitors", "monitored", 2) == [4, 0]

    until("the offsets", there, lambda: committed(kafka_server, "monitors", "monitored", 2))
    reader.checkpoint_completed([first.split, splits[1]])
    reader.close()
    assert committed(kafka_server, "monitors", "monitored", 2) == [6, 0]


def test_a_group_that_refuses_offsets_is_reported_once(
    kafka_server: KafkaServer, caplog: pytest.LogCaptureFixture
) -> None:
    """As a group does that has members. The job does not depend on it, and it is committed to when they are gone."""
    kafka_server.create("refusing", 1)
    kafka_server.add("refusing", 0, *objects(1, 2))
    member = Consumer({"bootstrap.servers": kafka_server.servers, "group.id": "members", "log_level": 0})
    member.subscribe(["refusing"])
    until("the member", lambda: member.poll(0.1) is None and bool(member.assignment()))
    found = source(kafka_server, "refusing", group="members", commit_offsets=True)
    reader = found.reader()
    assert isinstance(reader, NotifiedReader)
    reading = Reading(reader, partitions_of(found)[0])
    reading.until(2)

    def reported() -> bool:
        reader.checkpoint_completed([reading.split])
        reading.once()
        return "offsets of consumer group 'members' are not committed" in caplog.text

    until("the warning", reported, lambda: caplog.text)
    member.close()

    def again() -> bool:
        reader.checkpoint_completed([reading.split])
        reading.once()
        return "'members' are committed again" in caplog.text

    with caplog.at_level(logging.INFO):
        until("the offsets", again, lambda: caplog.text)
    assert committed(kafka_server, "members", "refusing", 1) == [2]
    assert caplog.text.count("are not committed") == 1
    reader.close()


def test_a_client_that_gets_no_answer_in_time_has_an_error() -> None:
    """The client returns None for it, where other failures are exceptions."""

    class Silent:
        def get_watermark_offsets(self, partition: TopicPartition, timeout: float) -> None:
            assert timeout == client.TIMEOUT_S

    with pytest.raises(client.kafka().KafkaException, match="_TIMED_OUT"):
        client.watermarks(Silent(), "t", 0)  # type: ignore[arg-type]


def test_positions_of_a_bounded_source_are_not_looked_for_behind_its_end(kafka_server: KafkaServer) -> None:
    """A partition that was read to its end needs no records any more."""
    timed(kafka_server, "over")
    found = source(kafka_server, "over", end="latest")
    found.check_unread([split_of(PartitionAt("over", 0, 2, 2))])
    with pytest.raises(ConfigurationError, match="1 records of partition 0 of 'over' were deleted"):
        found.check_unread([split_of(PartitionAt("over", 0, 2, 10))])
