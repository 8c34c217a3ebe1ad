"""Topics of Kafka as a source: every record once, from any offset; bad records; new partitions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka import TopicPartition
from kafka_broker import PARTITIONS, Broker, broker
from kafka_reading import QUICK, SCHEMA, Reading, objects, partitions_of
from source_contract import check_source
from waiting import until

from tidegate.connectors.bad_rows import BadRows
from tidegate.connectors.formats.json import JsonRead
from tidegate.connectors.formats.raw import RawRead
from tidegate.connectors.kafka import reader as kafka_reader
from tidegate.connectors.kafka.client import offset_at
from tidegate.connectors.kafka.options import STARTS, Start, Topics, check_place, place_of
from tidegate.connectors.kafka.records import LETTERS, RecordFormat
from tidegate.connectors.kafka.source import KafkaSource
from tidegate.connectors.kafka.splits import PartitionAt, split_of
from tidegate.connectors.source import ReadResult, SourceSplit
from tidegate.storage.codec import decode
from tidegate.storage.errors import ConfigurationError

BYTES = RecordFormat(RawRead("value"), RawRead("key", part="key"), plain=True)


@pytest.fixture(scope="module")
def kafka() -> Iterator[Broker]:
    """A broker of this module; each test has topics of its own."""
    with broker() as found:
        yield found


def source(kafka: Broker, topic: str, **settings: object) -> KafkaSource:
    """Of one topic, as JSON."""
    return KafkaSource(kafka.servers, Topics((topic,)), RecordFormat(JsonRead(SCHEMA)), properties=QUICK, **settings)  # type: ignore[arg-type]


def read_to_the_end(found: KafkaSource) -> list[dict[str, object]]:
    """All rows of a bounded source."""
    reader, rows = found.reader(), []
    for split in found.splits():
        reading = Reading(reader, split)
        until("the end", lambda: reading.once().at_end, lambda: reading.rows)  # noqa: B023
        rows += reading.rows
    reader.close()
    return rows


@pytest.mark.slow
def test_every_record_comes_once_and_in_order(kafka: Broker) -> None:
    """From partitions that are read in turn, in small reads, by one reader and by the next."""
    for partition in range(3):
        kafka.add("once", partition, *objects(*range(partition * 100, partition * 100 + 20)))
    found = source(kafka, "once")
    reader = found.reader()
    readings = [Reading(reader, split) for split in partitions_of(found)][:3]
    for rows in (5, 12):
        for reading in readings:
            reading.until(rows, rows_max=2)
    reader.close()
    for number, reading in enumerate(readings):
        reading.reader = found.reader()
        assert reading.until(20, rows_max=3) == list(range(number * 100, number * 100 + 20))
        reading.reader.close()
    assert decode(readings[0].split.payload) == PartitionAt("once", 0, 20)


@pytest.mark.slow
def test_a_position_from_before_is_read_again(kafka: Broker) -> None:
    """By a reader that is further, too; no record of the later position comes in between."""
    kafka.add("again", 0, *objects(*range(30)))
    found = source(kafka, "again")
    reading = Reading(found.reader(), partitions_of(found)[0])
    reading.until(10, rows_max=10)
    reading.split, reading.rows = split_of(PartitionAt("again", 0, 4)), []
    assert reading.until(26, rows_max=7) == list(range(4, 30))
    reading.reader.close()


@pytest.mark.slow
def test_what_a_reader_holds_is_bounded(kafka: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little of it is read at a time; all comes in the end."""
    monkeypatch.setattr(kafka_reader, "BUFFERED_BYTES_MAX", 4 * 80)
    monkeypatch.setattr(kafka_reader, "CONSUMED_MAX", 3)
    for partition in (0, 1):
        kafka.add("bounded", partition, *objects(*range(30)))
    found = source(kafka, "bounded")
    reader = found.reader()
    readings = [Reading(reader, split) for split in partitions_of(found)[:2]]

    def there() -> bool:
        for reading in readings:
            reading.once(rows_max=1)
            held = [partition.records.size_bytes for partition in reader._partitions.values()]  # type: ignore[attr-defined]
            assert sum(held) == reader.buffered_bytes <= 2 * 4 * 80  # type: ignore[attr-defined]
        return all(len(reading.rows) == 30 for reading in readings)

    until("all rows", there, lambda: [len(reading.rows) for reading in readings])
    reader.close()


class Waiting:
    """A source whose reads wait until there is something or the end, as the contract's checks do not."""

    unbounded = True

    def __init__(self, found: KafkaSource) -> None:
        self.found, self.schema = found, found.schema

    def splits(self) -> list[SourceSplit]:
        """Those of the source."""
        return list(self.found.splits())

    def reader(self) -> Waiting:
        """A reader that waits."""
        self.inner = self.found.reader()
        return self

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Rows, or the end."""
        results: list[ReadResult] = []

        def there() -> bool:
            results.append(self.inner.read(split, offset, rows_max))
            return results[-1].batch is not None or results[-1].at_end

        until("rows or the end", there)
        return results[-1]

    def close(self) -> None:
        """Close what reads."""
        self.inner.close()

    def __reduce__(self) -> tuple[object, ...]:
        return Waiting, (self.found,)


def test_it_keeps_the_contract(kafka: Broker) -> None:
    """Up to what is there at submission."""
    kafka.add("contract", 0, *objects(1, 2, 3, 4))
    kafka.add("contract", 2, *objects(5))
    assert [row["x"] for row in check_source(Waiting(source(kafka, "contract", end="latest")))] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("earliest", [0, 1, 2, 3]),
        ("latest", []),
        ({"start": dict.fromkeys(range(PARTITIONS), 0) | {0: 3}}, [3]),
    ],
)
def test_where_it_begins_and_ends(kafka: Broker, start: object, expected: list[int]) -> None:
    """The end is that of the submission, also for what comes before anybody reads."""
    name = f"start-{type(start).__name__}-{len(expected)}"
    kafka.add(name, 0, *objects(0, 1, 2, 3))
    start = {name: start["start"]} if isinstance(start, dict) else start
    found = source(kafka, name, start=start, end="latest")
    splits = found.splits()
    kafka.add(name, 0, *objects(99))

    class Begun(KafkaSource):
        def splits(self) -> list[SourceSplit]:
            return list(splits)

    rows = read_to_the_end(Begun(found.servers, found.topics, found.form, found.start, found.end, properties=QUICK))
    assert [row["x"] for row in rows] == expected


class Times:
    """A consumer with an offset for each time, and for a group; the mock broker has none."""

    def __init__(self, committed: int = -1_001) -> None:
        self._committed = committed

    def offsets_for_times(self, asked: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        """A record a second, up to five. The first one at a time or later is found."""
        (at,) = asked
        return [TopicPartition(at.topic, at.partition, -(-at.offset // 1_000) if at.offset <= 5_000 else -1)]

    def committed(self, asked: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        """The offset of the group, in every partition."""
        return [TopicPartition(asked[0].topic, asked[0].partition, self._committed)]


@pytest.mark.parametrize(
    ("start", "offset"),
    [
        (4_000, 4),
        (datetime.fromtimestamp(3, UTC), 3),
        (datetime.fromtimestamp(3, UTC) + timedelta(microseconds=1), 4),
        (datetime.fromtimestamp(3, UTC) - timedelta(microseconds=1), 3),
        (9_000, 6),
        ("earliest", 1),
        ("latest", 6),
        ("group", None),
        ("group_or_earliest", 1),
        ("group_or_latest", 6),
        ({"t": {0: 2}}, 2),
        ({"t": {0: "latest"}}, 6),
        ({"t": {0: datetime.fromtimestamp(3, UTC)}}, 3),
        ({"t": "latest"}, 6),
        ({"t": datetime.fromtimestamp(2, UTC)}, 2),
    ],
)
def test_a_start_is_an_offset(start: Start, offset: int | None) -> None:
    """The first record at a time or later; the end, if there is none."""
    check_place(start, STARTS, "start")
    place = place_of(start, "t", 0, "start")
    assert offset_at(Times(), "t", 0, place, (1, 6)) == offset  # type: ignore[arg-type]
    if isinstance(place, str) and place.startswith("group"):
        assert offset_at(Times(5), "t", 0, place, (1, 6)) == 5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "pattern",
    [
        re.compile("SHOP-.", re.IGNORECASE),
        re.compile("(?i)SHOP-."),
        re.compile("(?ix) SHOP - . # of each shop"),
        re.compile("shop-."),
        re.compile("(?u)shop-."),
        re.compile("(?i)(?s)SHOP-."),
        re.compile(" (?i) SHOP - .", re.VERBOSE),
        re.compile("# each shop\n (?s) (?i) SHOP - .", re.VERBOSE),
        re.compile("(?#each shop)(?i)SHOP-."),
    ],
)
def test_a_pattern_keeps_its_flags(pattern: re.Pattern[str]) -> None:
    """Also flags and comments within the pattern."""
    topics = Topics.of(pattern)
    assert topics.matches("shop-a")
    assert not topics.matches("eshop-a")
    assert topics.matches("Shop-a") == bool(pattern.flags & re.IGNORECASE)


def test_a_place_that_is_missing_is_named() -> None:
    """By topic, or by partition."""
    with pytest.raises(ConfigurationError, match="partition 3 of topic 't' has no offset"):
        place_of({"t": {0: 2}}, "t", 3, "start")
    with pytest.raises(ConfigurationError, match="topic 'u' is read, and"):
        place_of({"t": {0: 2}}, "u", 0, "start")


def test_columns_are_sparks_without_a_schema(kafka: Broker) -> None:
    """Keys and values as they are; a record without a value has none."""
    kafka.add("raw", 1, b"\xff\n", None, at_ms=5_000)
    found = replace(source(kafka, "raw", end="latest"), form=BYTES)
    rows = read_to_the_end(found)
    assert [(r["key"], r["value"], r["topic"], r["partition"], r["offset"]) for r in rows] == [
        (b"1", b"\xff\n", "raw", 1, 0),
        (b"1", None, "raw", 1, 1),
    ]
    assert rows[1]["timestamp"].timestamp() == 5.001  # type: ignore[attr-defined]


def test_keys_and_times_beside_json(kafka: Broker) -> None:
    """Line breaks within an object, fields that it lacks, and a record without a value."""
    kafka.add("json", 2, b'{"s": "a",\n "x": 1}', b"{}", None, at_ms=7_000)
    form = RecordFormat(JsonRead(SCHEMA), RawRead("key", text=True, part="key"), ("timestamp", "tombstone"))
    rows = read_to_the_end(replace(source(kafka, "json", end="latest"), form=form))
    assert [(r["x"], r["s"], r["kafka_key"]) for r in rows] == [(1, "a", "2"), (None, None, "2"), (None, None, "2")]
    assert [r["kafka_timestamp"].timestamp() for r in rows] == [7.0, 7.001, 7.002]  # type: ignore[attr-defined]
    assert [r["kafka_tombstone"] for r in rows] == [False, False, True]


def test_metadata_beside_values(kafka: Broker) -> None:
    """On request, with a schema and without one."""
    kafka.add("metadata", 1, b'{"x": 1}', None, at_ms=9_000)
    names = ("headers", "offset", "partition", "topic", "tombstone")
    rows = read_to_the_end(
        replace(source(kafka, "metadata", end="latest"), form=RecordFormat(JsonRead(SCHEMA), None, names))
    )
    assert [[row[f"kafka_{name}"] for name in names] for row in rows] == [
        [[], 0, 1, "metadata", False],
        [[], 1, 1, "metadata", True],
    ]
    rows = read_to_the_end(replace(source(kafka, "metadata", end="latest"), form=replace(BYTES, metadata=names)))
    assert [(row["offset"], row["headers"], row["tombstone"]) for row in rows] == [(0, [], False), (1, [], True)]
    with pytest.raises(ConfigurationError, match="unknown column 'size'"):
        replace(BYTES, metadata=("size",))


@pytest.mark.parametrize("around", [0, 1, 2])
def test_a_record_is_read_alike_wherever_it_stands(kafka: Broker, around: int) -> None:
    """With a byte order mark, with white space and line breaks between its tokens."""
    topic = f"alike-{around}"
    odd = [b'\xef\xbb\xbf{"x": 1}', b' \n{"x": 2}\n', b'{"x":\r\n3}', '{"x": 4, "s": "ü"}'.encode()]
    kafka.add(topic, 0, *objects(*range(10, 10 + around)), *odd, *objects(*range(20, 20 + around)))
    rows = read_to_the_end(source(kafka, topic, end="latest"))
    assert [row["x"] for row in rows] == [*range(10, 10 + around), 1, 2, 3, 4, *range(20, 20 + around)]


BAD = [
    b'{"s": "\xff"}',
    b'{"s": "a\nb"}',
    b'{"s": "a\rb"}',
    b'{"s": "a\x01b"}',
    b"null",
    b" null ",
    b'{"x": 1}\n{"x": 2}',
    b'{"x": 1, "s": "\xe9"}',
    b"\xef\xbb\xbf",
    b'{"x"',
    b'{"m": {"s": "\n"}}',
    b"no json",
    b'{"x": "text"}',
    b"",
    b"  ",
    b'{"x": 1} {"x": 2}',
    b"[1]",
    b'{"x": 1.5}',
]


@pytest.mark.slow
@pytest.mark.parametrize("bad", BAD)
def test_a_record_that_cannot_be_read_is_named(kafka: Broker, bad: bytes) -> None:
    """With its offset; what comes before it in the same read does not hide it."""
    name = f"bad-{BAD.index(bad)}"
    kafka.add(name, 0, *objects(1, 2), bad, *objects(3))
    with pytest.raises(ConfigurationError, match=rf"offset 2 of partition 0 of '{name}' cannot be read: .*skip"):
        read_to_the_end(source(kafka, name, end="latest"))


@pytest.mark.parametrize("rows_max", [1, 7, 1_000])
@pytest.mark.parametrize("policy", ["skip", "side"])
def test_records_that_cannot_be_read_are_dead_letters(
    kafka: Broker, caplog: pytest.LogCaptureFixture, policy: BadRows, rows_max: int
) -> None:
    """With their bytes, place and reason, however many are read at a time. All others come."""
    topic = f"letters-{policy}-{rows_max}"
    values: list[bytes] = [value for number, bad in enumerate(BAD) for value in (*objects(number), bad)]
    kafka.add(topic, 0, *values)
    kafka.add(topic, 1, b"bad")
    found = source(kafka, topic, end="latest", bad_rows=policy)
    reader = found.reader()
    readings = [Reading(reader, split) for split in found.splits()]
    for reading in readings:
        until("the end", lambda: reading.once(rows_max).at_end)  # noqa: B023
    reader.close()
    assert [row["x"] for reading in readings for row in reading.rows] == list(range(len(BAD)))
    assert [reading.offset for reading in readings[:2]] == [2 * len(BAD), 1]
    letters = [letter for reading in readings for letter in reading.letters]
    expected = [(bad, topic, 0, 2 * number + 1) for number, bad in enumerate(BAD)] + [(b"bad", topic, 1, 0)]
    assert [(row["raw"], row["topic"], row["partition"], row["offset"]) for row in letters] == expected
    reasons = [letter["error"] for letter in letters]
    assert reasons[:2] == [
        "byte 7 of the row, 0xff, is not UTF-8",
        "a string has a line break or another control character; JSON writes it as an escape",
    ]
    assert all(reasons)
    assert f"offset 1 of partition 0 of '{topic}' is skipped" in caplog.text
    assert found.bad_rows_schema == (LETTERS if policy == "side" else None)


def test_keys_and_values_that_are_no_text_are_dead_letters(kafka: Broker) -> None:
    """Where they are read as strings: beside values of any kind, and both together."""
    kafka.add("texts", 0, b"good", b"\xff", "ä".encode(), None)
    found = replace(
        source(kafka, "texts", end="latest", bad_rows="side"),
        form=RecordFormat(RawRead("value", text=True), RawRead("key", text=True, part="key"), plain=True),
    )
    reading = Reading(found.reader(), found.splits()[0])
    until("the end", lambda: reading.once().at_end)
    assert [(row["value"], row["offset"]) for row in reading.rows] == [("good", 0), ("ä", 2), (None, 3)]
    assert [(row["raw"], row["offset"], row["error"]) for row in reading.letters] == [
        (b"\xff", 1, "byte 0 of the value, 0xff, is not UTF-8")
    ]
    reading.reader.close()
    for number, key in enumerate((b"k", b"\xff", b"\xff", b"k")):
        kafka.add("keys", 0, *(b"bad" if number > 1 else value for value in objects(number)), key=key)
    form = RecordFormat(JsonRead(SCHEMA), RawRead("key", text=True, part="key"), ("offset",))
    found = replace(source(kafka, "keys", end="latest", bad_rows="side"), form=form)
    reading = Reading(found.reader(), found.splits()[0])
    until("the end", lambda: reading.once().at_end)
    assert reading.rows == [{"x": 0, "s": "s0", "kafka_key": "k", "kafka_offset": 0}]
    assert [(row["raw"], row["offset"], row["error"]) for row in reading.letters] == [
        (objects(1)[0], 1, "byte 0 of the key, 0xff, is not UTF-8"),
        (b"bad", 2, "byte 0 of the key, 0xff, is not UTF-8"),
        (b"bad", 3, "the row is not a JSON object"),
    ]
    reading.reader.close()


def test_a_topic_or_brokers_that_are_not_there(kafka: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are found out at submission."""
    with pytest.raises(ConfigurationError, match="topic 'nowhere' does not exist"):
        source(kafka, "nowhere").splits()
    monkeypatch.setattr("tidegate.connectors.kafka.client.TIMEOUT_S", 0.01)
    with pytest.raises(ConfigurationError, match=r"brokers at 127\.0\.0\.1:1 do not answer"):
        replace(source(kafka, "nowhere"), servers="127.0.0.1:1").splits()


def test_records_that_are_gone_are_an_error(kafka: Broker) -> None:
    """An offset that the partition does not have is never skipped over."""
    kafka.add("gone", 0, *objects(1))
    reading = Reading(source(kafka, "gone").reader(), split_of(PartitionAt("gone", 0, 50)))
    with pytest.raises(ConfigurationError, match=r"partition 0 of 'gone' .*deleted before they were read"):
        reading.until(1)
    reading.reader.close()


def test_what_cannot_be_restored_is_refused() -> None:
    """Other topics, or another end. A search for new partitions may begin and end at a restore."""
    before = (split_of(PartitionAt("a", 0, 5)),)
    base = KafkaSource("h:1", Topics(("a",)), BYTES)
    base.check_restored(before)
    for other, named in [
        (replace(base, topics=Topics(("b",))), "topic 'a' is missing"),
        (replace(base, topics=Topics(("a", "b"))), "topic 'b' was not there"),
        (replace(base, end="latest"), "without end="),
    ]:
        with pytest.raises(ConfigurationError, match=named):
            other.check_restored(before)
    finding = replace(base, discover_ms=5)
    finding.check_restored(before)
    base.check_restored((*finding._finders({"a": 1}), *before))
    replace(finding, topics=Topics(("a", "b"))).check_restored((*finding._finders({"a": 1}), *before))
