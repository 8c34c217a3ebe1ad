"""Jobs that write to Apache Kafka: each record once through failures, kills and restores, or at least once."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from kafka_commits import read, values_of
from kafka_server import KafkaServer
from local_jobs import NO_RESTART, GatedSource, config, fails_once, finish, local, opening
from waiting import until

import tidegate as tg

pytestmark = pytest.mark.slow
RESTART = tg.RestartStrategy.fixed_delay(5, "10ms")
SCHEMA = pa.schema([("k", pa.string()), ("x", pa.int64())])


def xs(servers: str, topic: str, isolation: str = "read_committed") -> list[int]:
    """Return the numbers that a reader sees, sorted."""
    return sorted(json.loads(value)["x"] for _, value in read(servers, topic, isolation) if value is not None)


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_rows_become_records(kafka_server: KafkaServer, tmp_path: Path, delivery: str) -> None:
    """With keys, in JSON; the topic is created."""
    topic = f"rows-{delivery}"
    with local() as env:
        rows = env.from_rows([{"k": "a", "x": 1}, {"k": "b", "x": 2}], schema=SCHEMA)
        rows.to_kafka(kafka_server.servers, topic=topic, key="k", create=2, delivery=delivery, uid="kafka")  # type: ignore[arg-type]
        finish(env, tmp_path / "c")
    assert sorted(read(kafka_server.servers, topic)) == [(b"a", b'{"k":"a","x":1}'), (b"b", b'{"k":"b","x":2}')]


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_a_job_that_fails_writes_again_what_no_checkpoint_covers(
    kafka_server: KafkaServer, tmp_path: Path, delivery: str
) -> None:
    """Exactly once, readers see each row once. At least once, they see rows of the failed attempt twice."""
    topic = f"failing-{delivery}"
    kafka_server.create(topic, 3)
    source, flag = GatedSource(200, 150, gates=(100,)), tmp_path / "failed"

    with opening(source), local() as env:
        rows = env.from_source(source).map(fails_once(140, flag), schema=source.schema, traced=False)
        rows.to_kafka(kafka_server.servers, topic=topic, delivery=delivery, uid="kafka")  # type: ignore[arg-type]
        job = env.execute("job", checkpoints=config(tmp_path / "c"), restart=RESTART)
        source.await_gate(100)
        job.trigger_checkpoint()
        until("the first half", lambda: len(xs(kafka_server.servers, topic)) >= 200)
        source.open_all()
        assert job.wait("4min") == "finished"
    assert flag.exists()
    expected = sorted(source.table()["x"].to_pylist())
    found = xs(kafka_server.servers, topic)
    if delivery == "exactly_once":
        assert found == expected
    else:
        assert set(found) == set(expected)
        assert not Counter(expected) - Counter(found)


def test_a_restored_job_with_another_parallelism_writes_each_row_once(
    kafka_server: KafkaServer, tmp_path: Path
) -> None:
    """Through three jobs, from a savepoint and from a checkpoint of a job that was cancelled."""
    kafka_server.create("rescaled", 4)
    source = GatedSource(300, 300, gates=(100, 200))
    restore: str | None = None
    with opening(source):
        for parallelism, gate in ((2, 100), (4, 200), (1, None)):
            with local(parallelism) as env:
                env.from_source(source, uid="numbers").to_kafka(kafka_server.servers, topic="rescaled", uid="kafka")
                job = env.execute("job", checkpoints=config(tmp_path / "c"), restart=RESTART, restore=restore)
                if gate is None:
                    source.open_all()
                    assert job.wait("4min") == "finished"
                    break
                source.await_gate(gate)
                if gate == 100:
                    restore = job.stop(savepoint=str(tmp_path / "s"))
                    assert job.wait("4min") == "suspended"
                else:
                    restore = job.trigger_checkpoint()
                    job.cancel()
                source.open_gate(gate)
    assert xs(kafka_server.servers, "rescaled") == sorted(source.table()["x"].to_pylist())


def test_changes_become_upserts_and_tombstones(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """The newest record of each key is the row that it has at the end, or a tombstone."""
    kafka_server.create("changes", 2, **{"cleanup.policy": "compact"})
    recorded = [
        {"id": 1, "team": "a", "row_kind": "+I"},
        {"id": 2, "team": "a", "row_kind": "+I"},
        {"id": 1, "team": "a", "row_kind": "-U"},
        {"id": 1, "team": "b", "row_kind": "+U"},
        {"id": 2, "team": "a", "row_kind": "-D"},
        {"id": 3, "team": "c", "row_kind": "+I"},
    ]
    # Batches that wait would be merged, if the machine is busy. A team that comes and goes in one batch has no record.
    one_by_one = {"task.merged-rows": 1}
    two_rows = tg.DataPlaneOptions(source_rows_max=2)
    with tg.StreamEnvironment.local(2, config=one_by_one, options=two_rows) as env:
        people = env.from_batches(pa.Table.from_pylist(recorded), splits=1).as_changes(keys=["id"])
        people.to_kafka(kafka_server.servers, topic="changes", format="upsert", uid="people")
        teams = people.key_by("team").aggregate(people=tg.count(), emit="changes")
        teams.to_kafka(kafka_server.servers, topic="teams", key="team", create=True, uid="teams")
        finish(env, tmp_path / "c")
    newest = dict(read(kafka_server.servers, "changes"))
    assert newest == {
        b'{"id":1}': b'{"id":1,"team":"b"}',
        b'{"id":2}': None,
        b'{"id":3}': b'{"id":3,"team":"c"}',
    }
    assert dict(read(kafka_server.servers, "teams")) == {
        b"a": None,
        b"b": b'{"team":"b","people":1}',
        b"c": b'{"team":"c","people":1}',
    }


def test_a_column_row_kind_of_plain_rows_is_written(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """Only changes have it for the kind of a change."""
    with tg.StreamEnvironment.local(1) as env:
        rows = env.from_batches(pa.table({"id": [1], "row_kind": ["-D"]}), splits=1)
        rows.to_kafka(kafka_server.servers, topic="kinds", key="id", create=True, uid="kinds")
        finish(env, tmp_path / "c")
    assert dict(read(kafka_server.servers, "kinds")) == {b'{"id":1}': b'{"id":1,"row_kind":"-D"}'}


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_rows_that_cannot_be_records_go_aside(kafka_server: KafkaServer, tmp_path: Path, delivery: str) -> None:
    """With the reason: too large, no name of a topic, no such topic or partition, NaN in JSON, before 1970."""
    topic = f"aside-{delivery}"
    kafka_server.create(topic, 1, **{"max.message.bytes": "2000", "retention.ms": "-1"})
    fits = {"to": topic, "p": 0, "s": "fits", "f": 0.5, "at": 1_000}
    rows = [
        fits,
        {**fits, "s": "name", "to": "not a topic"},
        {**fits, "s": "topic", "to": "nowhere"},
        {**fits, "s": "partition", "p": 1},
        {**fits, "s": "nan", "f": float("nan")},
        {**fits, "s": "time", "at": -1},
        {**fits, "s": "x" * 3_000},
    ]
    with local(1) as env:
        stream = env.from_rows(rows)
        records = stream.to_kafka(
            kafka_server.servers, topic=pl.col("to"), partition="p", timestamp="at", value=["s", "f"], errors_to="bad",
            delivery=delivery, properties={"message.max.bytes": 2_000}, uid="kafka",  # type: ignore[arg-type]
        )  # fmt: skip
        bad = records.side_output("bad").collect()
        finish(env, tmp_path / "c")
    assert values_of(read(kafka_server.servers, topic)) == ['{"s":"fits","f":0.5}']
    reasons = {row["s"][:9]: row["error"] for row in bad.to_arrow().to_pylist()}
    assert set(reasons) == {"name", "topic", "partition", "nan", "time", "xxxxxxxxx"}
    assert "which is not the name of a topic" in reasons["name"]
    assert "topic 'nowhere', which a row names, does not exist" in reasons["topic"]
    assert f"partition 1 does not exist: topic '{topic}' has 1 partitions" in reasons["partition"]
    assert "NaN" in reasons["nan"]
    assert "before 1970" in reasons["time"]
    assert "bytes; the topic takes up to" in reasons["xxxxxxxxx"]


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_each_part_of_a_record_is_written(kafka_server: KafkaServer, tmp_path: Path, delivery: str) -> None:
    """Key, value, headers, timestamp and partition, as readers get them; a null is what the client chooses."""
    topic = f"parts-{delivery}"
    kafka_server.create(topic, 3, **{"retention.ms": "-1"})
    rows = [
        {"k": "a", "x": 1, "p": 2, "at": datetime(2024, 1, 2, tzinfo=UTC), "h": "first"},
        {"k": "b", "x": 2, "p": 0, "at": datetime(2024, 1, 3, tzinfo=UTC), "h": None},
        {"k": None, "x": 3, "p": 1, "at": None, "h": ""},
    ]
    with local(1) as env:
        env.from_rows(rows).to_kafka(
            kafka_server.servers, topic=topic, key="k", value=["x"], headers={"kind": "h", "again": "k"},
            partition="p", timestamp="at", delivery=delivery, uid="kafka",  # type: ignore[arg-type]
        )  # fmt: skip
        finish(env, tmp_path / "c")
        begun = env.from_kafka(
            kafka_server.servers, topics=[topic], value="string", metadata=["headers"], end="latest", uid="in"
        )
        found = begun.collect()
        finish(env, tmp_path / "d")
    records = sorted(found.to_arrow().to_pylist(), key=lambda record: record["partition"])
    assert [(each["partition"], each["key"], each["value"]) for each in records] == [
        (0, b"b", '{"x":2}'),
        (1, None, '{"x":3}'),
        (2, b"a", '{"x":1}'),
    ]
    assert [each["timestamp"] for each in records][::2] == [rows[1]["at"], rows[0]["at"]]
    assert records[1]["timestamp"] > datetime(2025, 1, 1, tzinfo=UTC)
    headers = [[(pair["key"], pair["value"]) for pair in each["headers"]] for each in records]
    assert headers == [
        [("kind", None), ("again", b"b")],
        [("kind", b""), ("again", None)],
        [("kind", b"first"), ("again", b"a")],
    ]


def test_a_row_that_cannot_be_a_record_fails_the_job_with_its_reason(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """And with the row."""
    kafka_server.create("failing-row", 1, **{"max.message.bytes": "2000"})
    with local(1) as env:
        rows = env.from_rows([{"s": "a"}, {"s": "b" * 3_000}])
        rows.to_kafka(kafka_server.servers, topic="failing-row", uid="kafka")
        job = env.execute("job", checkpoints=config(tmp_path / "c"), restart=NO_RESTART)
        with pytest.raises(tg.JobFailedError, match=r"'to_kafka records'.*3\d\d\d bytes; the topic takes up to 1872"):
            job.wait("4min")
    assert read(kafka_server.servers, "failing-row") == []


def test_it_is_refused_before_anything_runs(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """Settings in the call, topics by `execute`."""
    with local() as env:
        rows = env.from_rows([{"k": "a", "x": 1}], schema=SCHEMA)
        for settings, reason in (
            ({"topic": "no topic"}, r"a name has 1 to 249 letters"),
            ({"topic": pl.col("k") + "x"}, "or a column as pl.col"),
            ({"topic": pl.col("x")}, "must have strings"),
            ({"topic": "t", "properties": {"transactional.id": "mine"}}, "remove 'transactional.id'"),
            ({"topic": "t", "properties": {"acks": 1, "enable.idempotence": False}}, "remove 'enable.idempotence'"),
            ({"topic": "t", "delivery": "once"}, "delivery='once'"),
            ({"topic": "t", "partitioner": "mine"}, "give partition=, a column"),
            ({"topic": "t", "format": "raw"}, "a value is the value of one column"),
            ({"topic": "t", "format": "xml"}, "give one of 'json'"),
            ({"topic": "t", "value": ["missing"]}, "no column 'missing'"),
            ({"topic": "t", "value": ["x", "k", "x"]}, r"to_kafka\(value=\): column 'x' is there twice"),
            ({"topic": "t", "key": ["x", "x"]}, r"to_kafka\(key=\): column 'x' is there twice"),
            ({"topic": "t", "headers": {1: "k"}}, "the header 1 is not a name; give a str"),
            ({"topic": "t", "create": 0}, "the number of partitions"),
            ({"topic": pl.col("k"), "create": True}, "not known at submission"),
            ({"topic": "t", "token_topic": "t"}, "is the token topic, too"),
            ({"topic": "t", "delivery_timeout": "1ms"}, "at least a second"),
        ):
            with pytest.raises(tg.ConfigurationError, match=reason):
                rows.to_kafka(kafka_server.servers, **settings)  # type: ignore[arg-type]
        updates = rows.key_by("k").aggregate(n=tg.count())
        with pytest.raises(tg.ConfigurationError, match="cannot follow"):
            updates.to_kafka(kafka_server.servers, topic="t")
        changes = rows.key_by("k").aggregate(n=tg.count(), emit="changes")
        with pytest.raises(tg.ConfigurationError, match="delivery"):
            changes.to_kafka(kafka_server.servers, topic="t", key="k", delivery="at_least_once")
    with local() as env:
        rows = env.from_rows([{"k": "a", "x": 1}], schema=SCHEMA)
        rows.to_kafka(kafka_server.servers, topic="nowhere", uid="kafka")
        with pytest.raises(tg.ConfigurationError, match="topic 'nowhere' does not exist"):
            env.execute("job", checkpoints=config(tmp_path / "c"))
    assert not (tmp_path / "c").exists() or not list((tmp_path / "c").rglob("*.meta"))


def test_running_aggregates_become_upserts(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """The newest record of each key is its final result."""
    with local() as env:
        rows = env.from_rows([{"k": "ab"[x % 2], "x": x} for x in range(10)], schema=SCHEMA)
        counts = rows.key_by("k").aggregate(total=tg.sum("x"))
        counts.to_kafka(kafka_server.servers, topic="counts", key="k", create=1, delivery="at_least_once", uid="kafka")
        finish(env, tmp_path / "c")
    assert dict(read(kafka_server.servers, "counts")) == {b"a": b'{"k":"a","total":20}', b"b": b'{"k":"b","total":25}'}


def test_rows_that_the_topic_would_drop_go_to_the_side(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """Timestamps older than the topic keeps: without this Kafka deletes the records within minutes."""
    kafka_server.create("kept-a-week", 1, **{"retention.ms": "604800000"})
    rows = [{"x": 1, "t": 0}, {"x": 2, "t": 4_000_000_000_000}, {"x": 3, "t": None}]
    schema = pa.schema([("x", pa.int64()), ("t", pa.timestamp("ms", "UTC"))])
    with local() as env:
        sent = env.from_rows(rows, schema=schema).to_kafka(
            kafka_server.servers, topic="kept-a-week", value="x", timestamp="t", errors_to="bad", uid="kafka"
        )
        bad = sent.side_output("bad").collect()
        finish(env, tmp_path / "c")
    assert xs(kafka_server.servers, "kept-a-week") == [3]
    assert ["retention.ms" in text for text in bad.to_arrow()["error"].to_pylist()] == [True, False]
