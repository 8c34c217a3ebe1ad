"""Jobs over events of Debezium: their table equals the source table after every event, whatever is restarted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import polars as pl
import pytest
from confluent_kafka import Producer
from debezium_events import FILES, TABLE, Event, apply, avro_events, events
from kafka_broker import Broker, broker
from kafka_commits import read
from kafka_server import KafkaServer
from local_jobs import NO_RESTART, config, local
from registry_server import registry_server
from waiting import LIMIT_S, until

import tidegate as tg
from tidegate.connectors.kafka.records import RecordFormat

QUICK = {"fetch.wait.max.ms": 10, "fetch.queue.backoff.ms": 10}
APPLY = tg.DebeziumFormat(truncates="apply")


@pytest.fixture
def kafka() -> Iterator[Broker]:
    """A broker of its own, with topics of four partitions."""
    with broker() as found:
        yield found


def names(rows: dict[int, dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Returns columns of each row that events contain unchanged."""
    return sorted((row["id"], row["name"], row["ok"], row["big"], row["f"], row["data"]) for row in rows.values())


def follow(
    servers: str, waiting: list[Event], form: tg.DebeziumFormat, add: Callable[[Event], None], folder: Path
) -> None:
    """Add one event after the other, wait for the table after each, and restart the job after some."""
    model: dict[int, dict[str, Any]] = {}
    path: str | None = None
    for parallelism, count in ((2, 6), (1, 6), (2, 5), (1, 99)):
        with local(parallelism) as env:
            items = env.from_kafka(
                servers, topics=["items"], value=TABLE, format=form, keys=["id"], properties=QUICK, uid="items"
            )
            sums = items.key_by("ok").aggregate(n=tg.count(), total=tg.sum("big"), emit="changes", uid="sums")
            mode = "append" if path else "error"
            table = items.to_table(str(folder / "t"), mode="upsert", keys=["id"], uid="t", if_exists=mode)
            groups = sums.to_table(str(folder / "g"), mode="upsert", keys=["ok"], uid="g", if_exists=mode)
            job = env.execute("job", checkpoints=config(folder / "c", interval="20ms"), restore=path)
            for event in waiting[:count]:
                add(event)
                apply(model, event.event)

                def found(table: tg.OutputTable = table) -> list[tuple[Any, ...]]:
                    return sorted(table.to_polars().select("id", "name", "ok", "big", "f", "data").rows())

                until(f"the table after {event}", lambda: found() == names(model), found)
            expected = sorted(
                (
                    (ok, len(rows), sum(row["big"] or 0 for row in rows) if any(row["big"] for row in rows) else None)
                    for ok in (None, False, True)
                    if (rows := [row for row in model.values() if row["ok"] == ok])
                ),
                key=repr,
            )

            def totals(groups: tg.OutputTable = groups) -> list[tuple[Any, ...]]:
                return sorted(groups.to_polars().select("ok", "n", "total").rows(), key=repr)

            until("the sums", lambda: totals() == expected, totals)  # noqa: B023
            del waiting[:count]
            path = job.stop(savepoint=str(folder / "savepoints"))
            assert job.wait("4min") == "suspended"
    assert not waiting


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_the_table_equals_the_source_after_every_event(
    name: str, kafka: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a snapshot, creates, updates, deletes, tombstones, a change of key, a transaction, a truncate."""
    # This broker has no topics of one partition. All events are in the first.
    monkeypatch.setattr(RecordFormat, "check_partitions", lambda *_: None)
    kafka.add("items", 0, None)  # It makes a topic when somebody writes to it.
    follow(
        kafka.servers, events(name), APPLY, lambda event: kafka.add("items", 0, event.value, key=event.key), tmp_path
    )


@pytest.mark.slow
def test_the_table_equals_the_source_after_every_event_in_avro(
    kafka: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events in Avro with a schema registry give the table that events in JSON give."""
    monkeypatch.setattr(RecordFormat, "check_partitions", lambda *_: None)
    kafka.add("items", 0, None)
    with registry_server() as registry:
        written = avro_events(registry, "items")
        form = tg.DebeziumFormat(truncates="apply", registry=registry.url)
        follow(kafka.servers, written, form, lambda event: kafka.add("items", 0, event.value, key=event.key), tmp_path)


def test_the_table_equals_the_source_with_apache_kafka(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """A topic of one partition ends in the same table."""
    kafka_server.create("items")
    producer = Producer({"bootstrap.servers": kafka_server.servers, "log_level": 0})

    def add(event: Event) -> None:
        producer.produce("items", value=event.value, key=event.key, partition=0)
        assert producer.flush(LIMIT_S) == 0

    follow(kafka_server.servers, events(FILES[0]), APPLY, add, tmp_path)


def test_events_that_come_again_change_nothing(kafka: Broker, tmp_path: Path) -> None:
    """Debezium writes events again after its own failures. Events of a key are in one partition, in order."""
    model: dict[int, dict[str, Any]] = {}
    for event in events(FILES[0]):
        if event.key is None:
            break
        apply(model, event.event)
        for _ in range(2):
            kafka.add("items", event.key[-2] % 3, event.value, key=event.key)
    with local(2) as env:
        items = env.from_kafka(
            kafka.servers, topics=["items"], value=TABLE, format="debezium", keys=["id"], end="latest", properties=QUICK
        )
        table = items.to_table(str(tmp_path / "t"), mode="upsert", keys=["id"])
        counts = items.aggregate(n=tg.count(), total=tg.sum("big"), emit="changes").collect()
        assert env.execute("job", checkpoints=config(tmp_path), restart=NO_RESTART).wait("4min") == "finished"
    assert sorted(table.to_polars().select("id", "name", "ok", "big", "f", "data").rows()) == names(model)
    last = [row for row in counts.to_arrow().to_pylist() if row["row_kind"] in ("+I", "+U")][-1]
    assert (last["n"], last["total"]) == (len(model), sum(row["big"] for row in model.values()))


def test_an_event_that_cannot_be_read_is_named(kafka: Broker, tmp_path: Path) -> None:
    """By topic, partition, offset and field. With bad_rows="side" it is a dead letter."""
    good, bad = events(FILES[0])[0], b'{"op": "c", "after": {"id": 5}}'
    kafka.add("items", 2, good.value, key=good.key)
    kafka.add("items", 2, bad, key=b'{"id": 5}')
    kafka.add("items", 1, b'{"op": "t"}', key=None)

    def run(policy: str) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
        with local(1) as env:
            items = env.from_kafka(
                kafka.servers, topics=["items"], value=TABLE, format="debezium", keys=["id"], end="latest",
                properties=QUICK, bad_rows=policy,  # type: ignore[arg-type]
            )  # fmt: skip
            letters = items.bad_rows().collect() if policy == "side" else None
            rows = items.collect()
            job = env.execute("job", checkpoints=config(tmp_path / policy), restart=NO_RESTART)
            try:
                job.wait("4min")
            except tg.JobFailedError as error:
                return str(error), [], []
            assert letters is not None
            return "", rows.to_arrow().to_pylist(), letters.to_arrow().to_pylist()

    error, _, _ = run("fail")
    assert "the record at offset" in error
    assert "of 'items' cannot be read" in error
    _, rows, letters = run("side")
    assert [(row["id"], row["row_kind"]) for row in rows] == [(1, "+I")]
    places = {(letter["partition"], letter["offset"]): letter["error"] for letter in letters}
    assert "field 'name' is missing in 'after'" in places[(2, 1)]
    assert "the table was truncated" in places[(1, 0)]
    assert len(places) == 2


def test_what_events_cannot_give_is_refused(kafka: Broker, tmp_path: Path) -> None:
    """In the call, or when the job is submitted."""
    kafka.add("items", 0, None)

    def call(**settings: Any) -> tg.Stream:
        given: dict[str, Any] = {"topics": ["items"], "value": TABLE, "format": "debezium", "keys": ["id"]}
        return env.from_kafka(kafka.servers, **(given | settings))

    with local(1) as env:
        for wrong, match in (
            ({"format": "xml"}, "give one of 'json'"),
            ({"format": "upsert", "keys": []}, "needs keys="),
            ({"format": "upsert", "timestamp": "at"}, "has no event time"),
            ({"keys": []}, "needs keys="),
            ({"keys": ["no"]}, "not 'no'"),
            ({"value": "bytes"}, "needs the columns of the table"),
            ({"key": "bytes"}, "key= does not apply"),
            ({"topics": ["a", "b"]}, "a topic of change data is a table"),
            ({"timestamp": "at"}, "has no event time"),
            ({"format": "json"}, "remove it"),
            ({"format": APPLY, "discover": "1s"}, "remove discover="),
        ):
            with pytest.raises(tg.ConfigurationError, match=match):
                call(**wrong)
        with pytest.raises(tg.ConfigurationError, match="cannot follow"):
            call().broadcast()
    with local(1) as env:
        call(format=APPLY, properties=QUICK).collect()
        with pytest.raises(tg.ConfigurationError, match="topic 'items' has 4 partitions"):
            env.execute("job", checkpoints=config(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["debezium", "upsert"])
def test_changes_that_are_written_are_read_as_the_same_table(
    form: Literal["debezium", "upsert"], kafka_server: KafkaServer, tmp_path: Path
) -> None:
    """After every event of Debezium: a topic of changes is read, written in another form, and read again."""
    origin, copy = f"origin-{form}", f"copy-{form}"
    kafka_server.create(origin)
    kafka_server.create(copy, 3)
    producer = Producer({"bootstrap.servers": kafka_server.servers, "log_level": 0})
    model: dict[int, dict[str, Any]] = {}
    with local(2) as env:

        def items(topic: str, format: Any) -> tg.Stream:
            return env.from_kafka(
                kafka_server.servers, topics=[topic], value=TABLE, format=format, keys=["id"], properties=QUICK
            )

        changes = items(origin, APPLY)
        changes.to_kafka(kafka_server.servers, topic=copy, format=form, uid="copy")
        first = changes.to_table(str(tmp_path / "1"), mode="upsert", keys=["id"])
        second = items(copy, form).to_table(str(tmp_path / "2"), mode="upsert", keys=["id"])
        job = env.execute("job", checkpoints=config(tmp_path / "c", interval="20ms"))

        def rows(table: tg.OutputTable) -> list[tuple[Any, ...]]:
            return sorted(table.to_polars().select(TABLE.names).rows())

        for event in events(FILES[0]):
            producer.produce(origin, value=event.value, key=event.key, partition=0)
            assert producer.flush(LIMIT_S) == 0
            apply(model, event.event)

            def copied() -> bool:
                found = rows(first)
                ids = [(row[0], row[1]) for row in found]
                return ids == sorted((row["id"], row["name"]) for row in model.values()) and rows(second) == found

            until(f"both tables after {event}", copied, lambda: (rows(first), rows(second)))
        job.cancel()
    records = read(kafka_server.servers, copy)
    assert {key for key, _ in records} == {b'{"id":%d}' % number for number in (1, 2, 3, 4, 5, 6, 7, 30, 40, 50)}
    if form == "debezium":
        operations = [(key, None if value is None else json.loads(value)["op"]) for key, value in records]
        of_three = [operation for key, operation in operations if key == b'{"id":3}']
        assert of_three == ["c", "u", "d", None]
        assert [operation for key, operation in operations if key == b'{"id":2}'] == ["c", "d", None]
    else:
        assert {key for key, value in dict(records).items() if value is not None} == {b'{"id":50}'}


def test_changes_of_an_aggregate_are_events_of_its_keys(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """A key of strings is an object, as Debezium writes it. Rows that cannot be events go aside."""
    kafka_server.create("groups", 2)
    rows = [{"team": team, "x": x} for team, x in (("a", 1.0), ("b", 2.0), ("a", 2.0), ("c", float("nan")))]
    with local(2, rows_max=1) as env:
        sums = env.from_rows(rows).key_by("team").aggregate(x=tg.max("x"), n=tg.count(), emit="changes")
        events_of = sums.to_kafka(kafka_server.servers, topic="groups", format="debezium", errors_to="bad", uid="kafka")
        bad = events_of.side_output("bad").collect()
        assert env.execute("job", checkpoints=config(tmp_path / "c")).wait("4min") == "finished"
    assert [row["team"] for row in bad.to_arrow().to_pylist()] == ["c"]
    columns: dict[str, Any] = {"team": str, "x": float, "n": int}
    with local(2) as env:
        copy = env.from_kafka(
            kafka_server.servers, topics=["groups"], value=columns, format="debezium", keys=["team"], end="latest",
            properties=QUICK,
        )  # fmt: skip
        table = copy.to_table(str(tmp_path / "t"), mode="upsert", keys=["team"])
        assert env.execute("job", checkpoints=config(tmp_path / "d")).wait("4min") == "finished"
    assert sorted(table.to_polars().rows()) == [("a", 2.0, 2), ("b", 2.0, 1)]
    assert {key for key, _ in read(kafka_server.servers, "groups")} == {b'{"team":"a"}', b'{"team":"b"}'}


def test_changes_are_written_and_read_as_events_in_avro(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """With the registry by name. The columns of the reader come from the registry, and so do its refusals."""
    kafka_server.create("avro-groups", 2)
    rows = [{"team": team, "x": x} for team, x in (("a", 1.0), ("b", 2.0), ("a", 2.0), ("c", float("nan")))]
    servers = kafka_server.servers
    with registry_server() as registry:
        with local(2, rows_max=1) as env:
            sums = env.from_rows(rows).key_by("team").aggregate(x=tg.max("x"), n=tg.count(), emit="changes")
            sums.to_kafka(servers, topic="avro-groups", format="debezium", registry=registry.url, uid="kafka")
            assert env.execute("job", checkpoints=config(tmp_path / "c")).wait("4min") == "finished"
        assert sorted(registry.subjects) == ["avro-groups-key", "avro-groups-value"]
        with local(2) as env:

            def read_back(**settings: Any) -> tg.Stream:
                given: dict[str, Any] = {"topics": ["avro-groups"], "format": "debezium", "registry": registry.url}
                return env.from_kafka(servers, **given | {"keys": ["team"], "end": "latest"} | settings)

            for wrong, match in (
                ({"value": {"team": str, "x": bool}}, "'x' is double in the event, and bool in value="),
                ({"keys": ["n"]}, r"has the columns \['team'\], and keys= has \['n'\]"),
                ({"format": APPLY}, "give the registry to the format"),
            ):
                with pytest.raises(tg.ConfigurationError, match=match):
                    read_back(**wrong)
            table = read_back(properties=QUICK).to_table(str(tmp_path / "t"), mode="upsert", keys=["team"])
            assert env.execute("job", checkpoints=config(tmp_path / "d")).wait("4min") == "finished"
    found = {team: (x, n) for team, x, n in table.to_polars().select("team", "x", "n").rows()}
    assert found.keys() == {"a", "b", "c"}
    assert (found["a"], found["b"], found["c"][1]) == ((2.0, 2), (2.0, 1), 1)
    assert math.isnan(found["c"][0])


def test_streams_that_cannot_be_changes_in_kafka_are_refused() -> None:
    """In the call, with what to do."""
    with local(1) as env:
        rows = env.from_rows([{"k": "a", "to": "t", "p": 1, "x": 1}])
        changes = rows.key_by("k").aggregate(n=tg.count(), p=tg.max("p"), to=tg.max("to"), emit="changes")
        updates = rows.key_by("k").aggregate(n=tg.count())
        total = rows.aggregate(n=tg.count(), emit="changes")
        keyless = changes.select("n", "to")
        topic = {"topic": "t"}
        for stream, settings, reason in (
            (rows, {"format": "debezium", **topic}, "rows of this stream are only added"),
            (rows, {"format": "upsert", "key": "k", **topic}, "rows of this stream are only added"),
            (updates, {"format": "debezium", **topic}, "emits updates, which do not have the row before"),
            (keyless, {"format": "debezium", **topic}, "no key, because a step has dropped it"),
            (keyless, {"format": "upsert", **topic}, "no key, because a step has dropped it"),
            (total, {"format": "upsert", **topic}, "have no key; group by a column"),
            (changes, {"format": "debezium", "topic": pl.col("to")}, "a topic is a table"),
            (changes, {"format": "debezium", "key_format": "raw", **topic}, "remove key_format="),
            (changes, {"format": "debezium", "delivery": "at_least_once", **topic}, "events would come again"),
            (changes, {"format": "debezium", "value": ["n"], **topic}, "add 'k' to value="),
            (changes, {"format": "debezium", "key": "n", **topic}, "must include"),
            (changes, {"format": APPLY, **topic}, "remove truncates="),
            (changes, {"format": "upsert", "topic": pl.col("to")}, "add 'to' to key="),
            (changes, {"format": "upsert", "partition": "p", **topic}, "add 'p' to key="),
            (changes, {"format": "upsert", "partitioner": "random", **topic}, "choose another partitioner"),
            (changes, {"format": "changes", **topic}, "give one of 'json', .*'upsert', .*'debezium'"),
        ):
            with pytest.raises(tg.ConfigurationError, match=reason):
                stream.to_kafka("localhost:9092", **settings)  # type: ignore[arg-type]
