"""Jobs over events of Debezium: their table equals the source table after every event, whatever is restarted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from debezium_events import FILES, TABLE, Event, apply, events
from kafka_broker import Broker, broker
from kafka_server import KafkaServer
from local_jobs import NO_RESTART, config, local
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


def follow(servers: str, name: str, add: Callable[[Event], None], folder: Path) -> None:
    """Add one event after the other, wait for the table after each, and restart the job after some."""
    model: dict[int, dict[str, Any]] = {}
    path: str | None = None
    waiting = events(name)
    for parallelism, count in ((2, 6), (1, 6), (2, 5), (1, 99)):
        with local(parallelism) as env:
            items = env.from_kafka(
                servers, topics=["items"], value=TABLE, format=APPLY, keys=["id"], properties=QUICK, uid="items"
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
    follow(kafka.servers, name, lambda event: kafka.add("items", 0, event.value, key=event.key), tmp_path)


def test_the_table_equals_the_source_with_apache_kafka(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """A topic of one partition ends in the same table."""
    kafka_server.create("items")
    producer = Producer({"bootstrap.servers": kafka_server.servers, "log_level": 0})

    def add(event: Event) -> None:
        producer.produce("items", value=event.value, key=event.key, partition=0)
        assert producer.flush(LIMIT_S) == 0

    follow(kafka_server.servers, FILES[0], add, tmp_path)


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
            ({"format": "xml"}, "give 'json', 'debezium'"),
            ({"keys": []}, "needs keys="),
            ({"keys": ["no"]}, "not 'no'"),
            ({"value": "bytes"}, "needs the columns of the table"),
            ({"key": "bytes"}, "key= does not apply"),
            ({"topics": ["a", "b"]}, "a topic is a table"),
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
