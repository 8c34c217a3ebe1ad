"""Jobs that read a bounded source and then an unbounded one: each row once, in this order, whatever happens between."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer
from kafka_server import KafkaServer
from local_jobs import NO_RESTART, GatedSource, config, local
from waiting import LIMIT_S, until

import tidegate as tg
from tidegate.connectors.memory_source import MemorySource
from tidegate.storage.errors import NotFoundError

UID = "hybrid"
SCHEMA = pa.schema([("x", pa.int64())])
FIRST, ROWS = 700, 1_000
"""The first source has the values up to FIRST, and the second one those up to ROWS."""


class Live:
    """Values from `start` to `stop`, dealt out to splits that are read in turn. It ends if it has a `stop`.

    `gate`: how many rows of each split come before `opens` is set. `begins` is called before the first read.
    """

    schema = SCHEMA
    unbounded = True

    def __init__(
        self,
        start: int = FIRST,
        stop: int = ROWS,
        splits: int = 3,
        gate: int | None = None,
        begins: Callable[[], object] = lambda: None,
    ) -> None:
        self.start = start
        self.stop = stop
        self.count = splits
        self.gate = gate
        self.begins = begins
        self.opens = threading.Event()
        self.rows = 0

    @property
    def ends(self) -> bool:
        """It does."""
        return True

    def splits(self) -> list[tg.SourceSplit]:
        """Every `count`-th value is in the same one."""
        return [tg.SourceSplit(f"live {number}", b"%d" % number) for number in range(self.count)]

    def reader(self) -> Live:
        """Returns this object, because it has no state of its own."""
        return self

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """A few values, or nothing before the gate is opened."""
        self.begins()
        values = range(self.start + int(split.payload), self.stop, self.count)
        stop = min(offset + min(rows_max, 7), len(values))
        if self.gate is not None and not self.opens.is_set():
            stop = min(stop, self.gate)
        if stop <= offset:
            return tg.ReadResult(None, offset, at_end=offset >= len(values))
        self.rows += stop - offset
        batch = pa.record_batch({"x": pa.array(values[offset:stop], pa.int64())})
        return tg.ReadResult(batch, stop, at_end=stop == len(values))

    def close(self) -> None:
        """Nothing to release."""


def values(table: pa.Table | tg.OutputTable) -> list[int]:
    """The column `x`, sorted."""
    found = table if isinstance(table, pa.Table) else table.to_arrow()
    return sorted(found["x"].to_pylist())


def program(env: tg.StreamEnvironment, first: tg.Source, second: tg.Source, folder: Path) -> tg.OutputTable:
    """Both, one after the other, in a table."""
    past = env.from_source(first)
    live = env.from_source(second)
    return env.hybrid(past, then=live, uid=UID).to_table(str(folder / "out"), uid="out")


def memory(splits: int = 7, rows: int = FIRST) -> MemorySource:
    """The first source."""
    return MemorySource.of(pa.table({"x": pa.array(range(rows), pa.int64())}), splits)


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", [1, 2, 4])
def test_the_second_source_begins_when_every_row_of_the_first_was_processed(tmp_path: Path, parallelism: int) -> None:
    """By all subtasks, also by those that have nothing to do meanwhile; and each row comes once."""
    seen: list[int] = []
    too_early: list[int] = []

    def counted(batch: pa.RecordBatch) -> pa.RecordBatch:
        seen.extend(batch.column("x").to_pylist())
        return batch

    def begins() -> None:
        if len(seen) < FIRST:
            too_early.append(len(seen))

    with local(parallelism) as env:
        past = env.from_batches(pa.table({"x": pa.array(range(FIRST), pa.int64())}), splits=3)
        live = env.from_source(Live(begins=begins))
        rows = env.hybrid(past, then=live, uid=UID).map_batches(counted, schema=SCHEMA).collect()
        job = env.execute("job", checkpoints=config(tmp_path, interval="20ms"), restart=NO_RESTART)
        assert job.wait("4min") == "finished"
    assert values(rows.to_arrow()) == list(range(ROWS))
    assert too_early == []
    assert sorted(seen[:FIRST]) == list(range(FIRST))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 2), (2, 3), (1, 2)])
def test_a_savepoint_before_the_switch(tmp_path: Path, before: int, after: int) -> None:
    """One subtask waits for the switch and another one still reads the first source; both are elsewhere afterwards."""
    first = GatedSource(30, 60, gates=(40,))
    second = Live(0, 100)
    with local(before) as env:
        rows = env.hybrid(env.from_source(first), then=env.from_source(_wide(second)), uid=UID)
        rows.to_table(str(tmp_path / "out"), uid="out")
        job = env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        first.await_gate(40)
        path = job.savepoint(str(tmp_path / "savepoints"))
        job.cancel()
        first.open_all()
        assert job.wait("4min") == "cancelled"
    assert second.rows == 0
    with local(after) as env:
        rows = env.hybrid(env.from_source(first), then=env.from_source(_wide(Live(0, 100))), uid=UID)
        table = rows.to_table(str(tmp_path / "out"), uid="out")
        job = env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART, restore=path)
        assert job.wait("4min") == "finished"
    assert values(table) == sorted([*range(30), *range(60), *range(100)])


def _wide(live: Live) -> Live:
    """With the columns of `GatedSource`."""

    class Wide(Live):
        schema = GatedSource.schema

        def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
            result = live.read(split, offset, rows_max)
            if result.batch is None:
                return result
            x = result.batch.column("x")
            batch = pa.record_batch([pa.array([1] * len(x), pa.int64()), x], schema=self.schema)
            return tg.ReadResult(batch, result.next_offset, result.at_end)

    return Wide(live.start, live.stop, live.count)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 2), (1, 3), (3, 2)])
def test_a_savepoint_after_the_switch(tmp_path: Path, before: int, after: int) -> None:
    """The first source is not read again, and the second one continues at its position."""
    second = Live(gate=40)
    with local(before) as env:
        program(env, memory(), second, tmp_path)
        job = env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        until("the rows before the gate", lambda: second.rows >= 3 * 40, lambda: second.rows)
        path = job.savepoint(str(tmp_path / "savepoints"))
        job.cancel()
        assert job.wait("4min") == "cancelled"
    with local(after) as env:
        table = program(env, memory(), Live(), tmp_path)
        job = env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART, restore=path)
        assert job.wait("4min") == "finished"
    assert values(table) == list(range(ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("dies_at", [0, FIRST - 1, FIRST, FIRST + 1, ROWS - 1])
def test_a_failure_around_the_switch_loses_and_doubles_nothing(tmp_path: Path, dies_at: int) -> None:
    """Before, at and after it. Only what is in no checkpoint is read again."""
    failed = threading.Event()

    def dies(batch: pa.RecordBatch) -> pa.RecordBatch:
        if dies_at in batch.column("x").to_pylist() and not failed.is_set():
            failed.set()
            raise ValueError("on purpose")
        return batch

    with local(2) as env:
        hybrid = env.hybrid(env.from_source(memory()), then=env.from_source(Live()), uid=UID)
        table = hybrid.map_batches(dies, schema=SCHEMA).to_table(str(tmp_path / "out"), uid="out")
        restart = tg.RestartStrategy.fixed_delay(3, 0)
        job = env.execute("job", checkpoints=config(tmp_path / "checkpoints", interval="10ms"), restart=restart)
        assert job.wait("4min") == "finished"
    assert failed.is_set()
    assert values(table) == list(range(ROWS))


@pytest.mark.parametrize("dies_at", [pytest.param(0, marks=pytest.mark.slow), FIRST, ROWS - 1])
def test_a_position_of_the_rows_is_kept_when_the_job_fails_at_the_switch(tmp_path: Path, dies_at: int) -> None:
    """The second source begins behind the greatest value of the first, and no row is lost or doubled."""
    failed = threading.Event()
    given: list[int] = []

    def dies(batch: pa.RecordBatch) -> pa.RecordBatch:
        if dies_at in batch.column("x").to_pylist() and not failed.is_set():
            failed.set()
            raise ValueError("on purpose")
        return batch

    with local(2) as env:

        def live(last: int) -> tg.Stream:
            given.append(last)
            return env.from_source(Live(start=last + 1))

        hybrid = env.hybrid(env.from_source(memory()), then=live, position="x", uid=UID)
        table = hybrid.map_batches(dies, schema=SCHEMA).to_table(str(tmp_path / "out"), uid="out")
        restart = tg.RestartStrategy.fixed_delay(3, 0)
        job = env.execute("job", checkpoints=config(tmp_path / "checkpoints", interval="10ms"), restart=restart)
        assert job.wait("4min") == "finished"
    assert failed.is_set()
    assert given == [FIRST - 1]
    assert values(table) == list(range(ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", [1, 2])
def test_no_row_is_late_because_of_the_switch(tmp_path: Path, parallelism: int) -> None:
    """Windows over both: each has all of its rows, although the splits of the second source differ in event time."""
    with local(parallelism) as env:
        past = env.from_source(memory(splits=10))
        live = env.from_source(Live(splits=4))
        rows = env.hybrid(past, then=live, uid=UID).with_columns(t=pl.col("x") * 1_000, one=pl.lit(1))
        timed = rows.assign_timestamps("t", "1s", uid="times")
        windows = timed.key_by("one").window(tg.Tumbling("50s")).aggregate(n=tg.count(), uid="windows").collect()
        job = env.execute("job", checkpoints=config(tmp_path, interval="20ms"), restart=NO_RESTART)
        assert job.wait("4min") == "finished"
    counts = windows.to_arrow()
    assert sorted(counts["n"].to_pylist()) == [50] * (ROWS // 50)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (lambda: memory(rows=FIRST - 1), Live, "the first source: split"),
        (memory, lambda: Live(splits=4), "then=: split 'live 3'"),
    ],
)
def test_a_changed_source_is_refused(
    tmp_path: Path, first: Callable[[], tg.Source], second: Callable[[], tg.Source], text: str
) -> None:
    """Before anything is changed. Rows would be lost or read twice."""
    path = _savepoint_in_second(tmp_path)
    with local(2) as env:
        program(env, first(), second(), tmp_path)
        with pytest.raises(tg.ConfigurationError, match=text):
            env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restore=path)


def test_a_source_that_was_not_hybrid_cannot_become_it(tmp_path: Path) -> None:
    """And a hybrid source cannot become another one: its splits are refused by their names."""
    path = _savepoint_in_second(tmp_path)
    with local(2) as env:
        env.from_source(Live(), uid=UID).to_table(str(tmp_path / "out"), uid="out")
        with pytest.raises(tg.ConfigurationError, match="is not what it was"):
            env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restore=path)
    plain = Live(gate=4)
    other = tmp_path / "plain"
    with local(2) as env:
        env.from_source(plain, uid=UID).to_table(str(other / "out"), uid="out")
        job = env.execute("plain", checkpoints=config(other / "checkpoints"), restart=NO_RESTART)
        until("the gate", lambda: plain.rows >= 12, lambda: plain.rows)
        path = job.savepoint(str(other / "savepoints"))
        job.cancel()
        job.wait("4min")
    with local(2) as env:
        program(env, memory(), Live(), other)
        with pytest.raises(tg.ConfigurationError, match="it was not a hybrid source"):
            env.execute("plain", checkpoints=config(other / "checkpoints"), restore=path)


def _savepoint_in_second(tmp_path: Path) -> str:
    second = Live(gate=4)
    with local(2) as env:
        program(env, memory(), second, tmp_path)
        job = env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        until("the gate", lambda: second.rows >= 12, lambda: second.rows)
        path = job.savepoint(str(tmp_path / "savepoints"))
        job.cancel()
        job.wait("4min")
    return path


class Staged:
    """A first source that is written to a file at submission, as a DataFrame is."""

    schema = SCHEMA
    staged = 0

    def stage(self, url: str) -> tg.Source:
        """Writes the values."""
        type(self).staged += 1
        Path(url).mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"x": pa.array(range(FIRST), pa.int64())}), Path(url) / "rows.parquet")
        return self.reopen(url)

    def reopen(self, url: str) -> tg.Source:
        """Reads what was written."""
        if not (Path(url) / "rows.parquet").exists():
            raise NotFoundError(url)
        return MemorySource.of(pq.read_table(Path(url) / "rows.parquet"), 5)

    def splits(self) -> list[tg.SourceSplit]:
        """Has none before."""
        raise AssertionError("it is not staged")

    def reader(self) -> tg.Source:
        """Has none before."""
        raise AssertionError("it is not staged")


@pytest.mark.slow
def test_a_staged_first_source_is_written_once(tmp_path: Path) -> None:
    """A restored job reads what the first one wrote, and the second source is still compared."""
    Staged.staged = 0
    second = Live(gate=4)
    with local(2) as env:
        program(env, Staged(), second, tmp_path)
        job = env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        until("the gate", lambda: second.rows >= 12, lambda: second.rows)
        path = job.savepoint(str(tmp_path / "savepoints"))
        job.cancel()
        job.wait("4min")
    with local(2) as env:
        program(env, Staged(), Live(splits=4), tmp_path)
        with pytest.raises(tg.ConfigurationError, match="then=: split 'live 3'"):
            env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restore=path)
    with local(3) as env:
        table = program(env, Staged(), Live(), tmp_path)
        job = env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART, restore=path)
        assert job.wait("4min") == "finished"
    assert Staged.staged == 1
    assert values(table) == list(range(ROWS))


@pytest.mark.slow
def test_files_and_then_kafka(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """The topic has three partitions, one of them with a single record. Other columns of the files are not read."""
    kafka_server.create("after-files", 3)
    for number in range(300):
        kafka_server.add("after-files", number % 2, json.dumps({"x": FIRST + number}).encode())
    kafka_server.add("after-files", 2, json.dumps({"x": FIRST + 300}).encode())
    for number in range(7):
        part = range(number * 100, number * 100 + 100)
        table = pa.table({"other": ["o"] * 100, "x": pa.array(part, pa.int64())})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    with local(2) as env:
        past = env.from_files(str(tmp_path / "*.parquet"), columns=["x"])
        live = env.from_kafka(kafka_server.servers, topics=["after-files"], value={"x": int}, end="latest")
        table = env.hybrid(past, then=live, uid=UID).to_table(str(tmp_path / "out"), uid="out")
        job = env.execute("job", checkpoints=config(tmp_path / "c", interval="20ms"), restart=NO_RESTART)
        assert job.wait("4min") == "finished"
    assert values(table) == list(range(FIRST + 301))


@pytest.mark.parametrize("by_offset", [pytest.param(False, marks=pytest.mark.slow), True])
def test_kafka_begins_where_the_files_end(kafka_server: KafkaServer, tmp_path: Path, by_offset: bool) -> None:
    """By time, or by the offset of each partition. A restored job continues at the positions of its checkpoint, also
    if a file with later rows was added since.
    """
    topic, stop = f"behind-files-{by_offset}", 300
    # By default the broker deletes records that are older than a week.
    kafka_server.create(topic, 2, **{"retention.ms": "-1"})
    producer = Producer({"bootstrap.servers": kafka_server.servers, "log_level": 0})

    def add(numbers: range) -> None:
        for x in numbers:
            value = json.dumps({"x": x, "at": at(x).isoformat()}).encode()
            producer.produce(topic, value=value, partition=x % 2, timestamp=int(at(x).timestamp() * 1_000))
        assert producer.flush(LIMIT_S) == 0

    def at(x: int) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=x)

    def write(name: str, numbers: range) -> None:
        rows = {
            "x": pa.array(numbers, pa.int64()),
            "at": pa.array(map(at, numbers), pa.timestamp("ms", "UTC")),
            "kafka_partition": pa.array([x % 2 for x in numbers], pa.int32()),
            "kafka_offset": pa.array([x // 2 for x in numbers], pa.int64()),
        }
        pq.write_table(pa.table(rows), tmp_path / f"{name}.parquet")

    def program(env: tg.StreamEnvironment, given: list[Any]) -> tg.OutputTable:
        def live(last: Any) -> tg.Stream:
            given.append(last)
            start = {topic: {part: n + 1 for part, n in last.items()}} if by_offset else last + timedelta(seconds=1)
            value = pa.schema([("x", pa.int64()), ("at", pa.timestamp("ms", "UTC"))])
            metadata = ["partition", "offset"]
            return env.from_kafka(kafka_server.servers, topics=[topic], value=value, metadata=metadata, start=start)

        past = env.from_files(str(tmp_path / "*.parquet"))
        place = {"position": "kafka_offset", "position_by": "kafka_partition"} if by_offset else {"position": "at"}
        rows = env.hybrid(past, then=live, uid=UID, **place)  # type: ignore[arg-type]
        return rows.select("x").to_table(str(tmp_path / "out"), uid="out", if_exists="append")

    # The records of the files are in the topic, too.
    add(range(200))
    write("a", range(60))
    write("b", range(60, 101))
    given: list[Any] = []
    with local(2) as env:
        table = program(env, given)
        job = env.execute("job", checkpoints=config(tmp_path / "c", interval="20ms"), restart=NO_RESTART)
        until("the records of the topic", lambda: values(table) == list(range(200)), lambda: values(table))
        path = job.savepoint(str(tmp_path / "savepoints"))
        job.cancel()
        assert job.wait("4min") == "cancelled"
    write("c", range(250, 260))
    add(range(200, stop))
    with local(3) as env:
        table = program(env, given)
        job = env.execute("job", checkpoints=config(tmp_path / "c", interval="20ms"), restart=NO_RESTART, restore=path)
        until("all records of the topic", lambda: values(table) == list(range(stop)), lambda: values(table))
        job.cancel()
        assert job.wait("4min") == "cancelled"
    assert given == ([{0: 50, 1: 49}, {0: 129, 1: 129}] if by_offset else [at(100), at(259)])
