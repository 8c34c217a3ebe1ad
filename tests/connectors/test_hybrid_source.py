"""A bounded source and then an unbounded one as one source: what its splits, columns and errors are."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kafka_broker import broker
from kafka_reading import QUICK
from source_contract import check_source
from test_kafka_source import Waiting

import tidegate as tg
from tidegate.connectors.files.source import source_of_files
from tidegate.connectors.formats.json import JsonRead
from tidegate.connectors.hybrid_source import HybridSource, greatest, hybrid_source
from tidegate.connectors.kafka.options import Topics
from tidegate.connectors.kafka.records import RecordFormat
from tidegate.connectors.kafka.source import KafkaSource
from tidegate.connectors.memory_source import MemorySource
from tidegate.connectors.rate_source import RateSource
from tidegate.connectors.source import ReadResult, SourceSplit
from tidegate.storage.errors import ConfigurationError

SCHEMA = pa.schema([("x", pa.int64()), ("s", pa.string())])
TABLE = pa.table({"x": [1, 2, 3], "s": ["a", "b", "c"]})


class Live:
    """One row in one split, which has no end, with the columns of `schema`."""

    unbounded = True

    def __init__(self, schema: pa.Schema = SCHEMA, *, found: bool = False) -> None:
        self.schema = schema
        self.closed = 0
        self.found = found

    def splits(self) -> list[SourceSplit]:
        """One."""
        return [SourceSplit("live", b"")]

    def reader(self) -> Live:
        """Itself."""
        return self

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """The row, once."""
        if offset:
            return ReadResult(None, offset, at_end=False)
        values: dict[str, Any] = {"x": 9, "s": "z"}
        batch = pa.RecordBatch.from_pylist([{name: values[name] for name in self.schema.names}], self.schema)
        return ReadResult(batch, 1, at_end=False, found=(SourceSplit("more", b""),) if self.found else ())

    def close(self) -> None:
        """Counts."""
        self.closed += 1


def memory(table: pa.Table = TABLE) -> MemorySource:
    """A bounded source of two splits."""
    return MemorySource.of(table, 2)


def read_all(source: HybridSource) -> list[dict[str, object]]:
    """All rows of all splits, as they are at the moment."""
    reader = source.reader()
    batches = [reader.read(split, 0, 10).batch for split in source.splits()]
    return [row for batch in batches if batch is not None for row in batch.to_pylist()]


@pytest.mark.slow
def test_it_keeps_the_contract(tmp_path: Path) -> None:
    """Files and then partitions of Kafka."""
    pq.write_table(TABLE.select(["x"]), tmp_path / "a.parquet")
    pq.write_table(TABLE.select(["x"]).slice(1), tmp_path / "b.parquet")
    files = source_of_files(str(tmp_path / "*.parquet"))
    with broker() as kafka:
        kafka.add("hybrid", 0, b'{"x": 11}', b'{"x": 12}')
        kafka.add("hybrid", 3, b'{"x": 13}')
        records = KafkaSource(
            kafka.servers, Topics(("hybrid",)), RecordFormat(JsonRead(pa.schema([("x", pa.int64())]))), end="latest",
            properties=QUICK,
        )  # fmt: skip
        rows = check_source(Waiting(hybrid_source(files, records)))  # type: ignore[arg-type]
    assert [row["x"] for row in rows] == [1, 2, 3, 2, 3, 11, 12, 13]


def test_splits_have_names_of_their_part() -> None:
    """So two sources may name their splits alike, and payloads stay what they are."""
    source = hybrid_source(memory(), Live())
    names = [split.split_id for split in source.splits()]
    assert names == ["first: 0: rows 0 to 1", "first: 1: rows 1 to 3", "then: live"]
    assert [source.is_second(split) for split in source.splits()] == [False, False, True]


def test_columns_are_matched_by_name() -> None:
    """In the order of the first source; a column may be null if it may be in one of them."""
    other = pa.schema([pa.field("s", pa.string()), pa.field("x", pa.int64(), nullable=False)])
    first = pa.table({"x": [1], "s": ["a"]}, schema=pa.schema([SCHEMA.field("x"), pa.field("s", pa.string(), False)]))
    source = hybrid_source(memory(first), Live(other))
    assert source.schema.equals(SCHEMA)
    assert read_all(source) == [{"x": 1, "s": "a"}, {"x": 9, "s": "z"}]
    assert read_all(source.projected(["s"])) == [{"s": "a"}, {"s": "z"}]


def test_the_second_reader_is_opened_at_the_switch() -> None:
    """And the first one is closed by then."""
    first = Live()
    source = HybridSource(first, Live(), SCHEMA)
    reader = source.reader()
    one, two = source.splits()
    reader.read(one, 0, 1)
    assert first.closed == 0
    reader.read(two, 0, 1)
    assert first.closed == 1
    reader.close()
    assert source.second.closed == 1  # type: ignore[attr-defined]


def test_splits_that_are_found_belong_to_the_second_part() -> None:
    """The first source is bounded, so it may find none."""
    source = hybrid_source(memory(), Live(found=True))
    (found,) = source.reader().read(source.splits()[-1], 0, 1).found
    assert source.is_second(found)
    wrong = HybridSource(Live(found=True), Live(), SCHEMA)
    with pytest.raises(ConfigurationError, match="the first source has found new splits"):
        wrong.reader().read(wrong.splits()[0], 0, 1)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (memory, lambda: Live(pa.schema([("x", pa.int32()), ("s", pa.string())])), "'x' is int64 in the first source"),
        (memory, lambda: Live(pa.schema([("x", pa.int64())])), "only the first source has 's'"),
        (lambda: memory(TABLE.select(["s"])), Live, "only then= has 'x'"),
        (Live, Live, "the first source never ends"),
        (lambda: RateSource(None, 5, 1), Live, "the first source is read in turn"),
        (memory, memory, "then= is a bounded source"),
        (memory, lambda: hybrid_source(memory(), Live()), "then= is a hybrid source itself"),
    ],
)
def test_sources_that_do_not_fit_are_refused(
    first: Callable[[], tg.Source], second: Callable[[], tg.Source], text: str
) -> None:
    """When the program is made, with the reason."""
    with pytest.raises(ConfigurationError, match=text):
        hybrid_source(first(), second())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (lambda env: (env.from_source(memory()), memory()), r"hybrid\(then=\): give a stream"),
        (
            lambda env: (env.from_source(memory()).select("x", "s"), live(env)),
            r"\(first=\): give the stream that",
        ),
        (lambda env: (env.from_source(memory()).assign_timestamps("x"), live(env)), r"timestamp= .* to the result of"),
        (lambda env: (env.from_source(memory(), parallelism=3), live(env)), r"parallelism \[1, 3\]; give parallelism="),
        (lambda env: (live(env),) * 2, "are one stream"),
    ],
)
def test_streams_that_do_not_fit_are_refused(given: Callable[[tg.StreamEnvironment], Any], text: str) -> None:
    """Only streams that come straight from a source can be put together."""
    with tg.StreamEnvironment.local(1) as env:
        first, second = given(env)
        with pytest.raises(ConfigurationError, match=text):
            env.hybrid(first, then=second)


def live(env: tg.StreamEnvironment) -> tg.Stream:
    """The stream of an unbounded source."""
    return env.from_source(Live())


def test_a_stream_can_be_used_once() -> None:
    """By one hybrid, and by no other step."""
    with tg.StreamEnvironment.local(1) as env:
        first, second = env.from_source(memory()), live(env)
        first.select("x")
        with pytest.raises(ConfigurationError, match="another step reads 'source'"):
            env.hybrid(first, then=second)
        past = env.from_source(memory())
        env.hybrid(past, then=second)
        with pytest.raises(ConfigurationError, match="was used by another hybrid"):
            env.hybrid(env.from_source(memory()), then=second)


def test_the_greatest_value_is_over_all_splits() -> None:
    """The position is the greatest value, of all rows or of each group. A null counts if there is nothing else."""
    times = pa.array([5_000_000_001, None, 7_000_000_002, 6], pa.timestamp("ns", "UTC"))
    table = pa.table({"x": [4, 9, None, 9], "at": times, "part": [0, 0, 1, 0], "name": list("abcd")})
    source = MemorySource.of(table, 3)
    assert greatest(source, "x").value == 9
    required = pa.schema([pa.field("x", pa.int64(), nullable=False), pa.field("part", pa.int32(), nullable=False)])
    strict = MemorySource.of(pa.table({"x": [4, 9, 3], "part": pa.array([0, 0, 1], pa.int32())}, required), 2)
    assert greatest(strict, "x", "part").value == {0: 9, 1: 3}
    assert greatest(strict, "x").value == 9
    assert greatest(source, "at").value == datetime(1970, 1, 1, 0, 0, 7, tzinfo=UTC)
    assert greatest(source, "x", "part").value == {0: 9, 1: None}
    assert greatest(source, "part", "name").value == {"a": 0, "b": 0, "c": 1, "d": 0}
    assert greatest(MemorySource.of(table.slice(0, 0), 2), "x").value is None
    assert greatest(MemorySource.of(table.slice(0, 0), 2), "x", "part").value == {}
    for column, by, text in (
        ("y", None, "has no column 'y'"),
        ("x", "y", "has no column 'y'"),
        ("name", None, "'name' is string"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            greatest(source, column, by)


def test_sources_that_give_no_position_are_refused() -> None:
    """Without an end, without rows so far, and with rows that are written when the job is submitted."""

    class Late(Live):
        unbounded = False

        def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
            return ReadResult(None, offset, at_end=False)

    class Staged(Live):
        unbounded = False

        def stage(self, url: str) -> tg.Source:
            raise AssertionError(url)

    for source, text in ((Live(), "never ends"), (Late(), "has no rows yet"), (Staged(), "compute the position")):
        with pytest.raises(ConfigurationError, match=text):
            greatest(source, "x")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"position": "x"}, "needs a function as then="),
        ({"position_by": "x"}, "is for position="),
        ({"then": lambda last: None}, "is a function, which needs position="),
        ({"then": lambda last: None, "position": "x"}, r"hybrid\(then=\): give a stream"),
    ],
)
def test_a_position_needs_a_function(settings: dict[str, Any], text: str) -> None:
    """And a function needs a position."""
    with tg.StreamEnvironment.local(1) as env:
        given = {"then": live(env)} | settings
        with pytest.raises(ConfigurationError, match=text):
            env.hybrid(env.from_source(memory()), **given)


def test_the_rows_of_the_job_are_the_rows_that_gave_the_position(tmp_path: Path) -> None:
    """A file that comes between is neither counted nor read."""
    pq.write_table(TABLE, tmp_path / "a.parquet")
    files = source_of_files(str(tmp_path / "*.parquet"))
    found = greatest(files, "x")
    pq.write_table(TABLE, tmp_path / "b.parquet")
    assert found.value == 3
    source = hybrid_source(files, Live(), found.splits)
    assert [row["x"] for row in read_all(source)] == [1, 2, 3, 9]
    assert [row["x"] for row in read_all(source.projected(["x"]))] == [1, 2, 3, 9]
    source.check_restored(source.splits())


def test_bad_rows_have_one_form() -> None:
    """Files and Kafka name other places, and a stream has one schema."""

    class Letters(Live):
        bad_rows_schema = pa.schema([("raw", pa.binary())])

    with pytest.raises(ConfigurationError, match="bad_rows='side' gives other columns"):
        hybrid_source(memory(), Letters())
