"""Jobs over topics of Kafka: stopped and restored, they have every record once."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, TypedDict

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition
from kafka_broker import Broker, broker
from kafka_server import KafkaServer
from local_jobs import NO_RESTART, config, local
from waiting import LIMIT_S, until

import tidegate as tg
from tidegate.actors.task import source_cursor
from tidegate.storage.schemas.row_schemas import SchemaLike

QUICK = {"fetch.wait.max.ms": 10, "fetch.queue.backoff.ms": 10}
SCHEMA = pa.schema([("x", pa.int64())])


@pytest.fixture
def kafka() -> Iterator[Broker]:
    """A broker of its own."""
    with broker() as found:
        yield found


def add(kafka: Broker, *xs: int) -> None:
    """Records in all partitions."""
    for x in xs:
        kafka.add("bids", x % 3, b'{"x": %d}' % x, at_ms=1_000 * x)


def test_a_topic_is_followed_across_restores(kafka: Broker, tmp_path: Path) -> None:
    """At another parallelism, with event time; then a bounded job reads the same from the begin."""
    path, written = None, 0
    for parallelism in (2, 1):
        add(kafka, *range(written, written + 20))
        written += 20
        with local(parallelism) as env:
            stream = env.from_kafka(
                kafka.servers, topics=["bids"], value=SCHEMA, timestamp="kafka", idleness="10ms", discover="1min",
                properties=QUICK, uid="bids",
            )  # fmt: skip
            table = stream.to_table(str(tmp_path / "out"), uid="out", if_exists="append" if path else "error")
            job = env.execute("job", checkpoints=config(tmp_path / "c", interval="20ms"), restore=path)
            until("rows", lambda: len(xs(table)) >= written, lambda: xs(table))  # noqa: B023
            add(kafka, written)
            written += 1
            path = job.stop(savepoint=str(tmp_path / f"savepoint-{parallelism}"))
            assert job.wait("4min") == "suspended"
    with local(2) as env:
        rows = env.from_kafka(kafka.servers, topics=["bids"], value=SCHEMA, end="latest", properties=QUICK).collect()
        assert env.execute("all", checkpoints=config(tmp_path / "all"), restart=NO_RESTART).wait("4min") == "finished"
    assert sorted(rows.to_arrow()["x"].to_pylist()) == list(range(written))
    assert xs(table) == list(range(len(xs(table))))
    assert len(xs(table)) in (written, written - 1), "the last record may have come after the savepoint"


@pytest.mark.slow
def test_a_partition_that_holds_event_time_back_is_logged(
    kafka: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By name. No window ends without `idleness=`, and without a line nobody would know why."""
    for x in (1, 2, 300):
        kafka.add("bids", 1, b'{"x": %d}' % x, at_ms=1_000 * x)
    with local(1) as env:
        stream = env.from_kafka(
            kafka.servers, topics=["bids"], value=SCHEMA, timestamp="kafka", properties=QUICK, uid="bids"
        )
        stream.key_by("x").window(tg.Tumbling("1min")).aggregate(n=tg.count()).to_table(str(tmp_path / "out"))
        job = env.execute("job", checkpoints=config(tmp_path / "c", interval="20ms"))
        # Only now: on a busy machine the rows of partition 1 may take longer than this silence to come.
        until("the rows", lambda: 3 in job.progress().rows_in.values(), job.progress)
        monkeypatch.setattr(source_cursor, "QUIET_MS", 100)
        until("the line", lambda: "stands still" in caplog.text, lambda: caplog.text)
        job.cancel()
    assert "from bids[0], bids[2], bids[3], so event time stands still at" in caplog.text


def xs(table: tg.OutputTable) -> list[int]:
    """What a table has, sorted."""
    return sorted(table.to_arrow()["x"].to_pylist())


def run_until(
    server: KafkaServer, folder: Path, rows: int, restore: str | None = None, **settings: object
) -> tuple[list[int], str]:
    """Run a job over the topic "orders" until its table has so many rows; the rows, and a savepoint."""
    with local(1) as env:
        stream = env.from_kafka(
            server.servers, topics=["orders"], value=SCHEMA, properties=QUICK, uid="orders", **settings  # type: ignore[arg-type]
        )  # fmt: skip
        table = stream.to_table(str(folder / "out"), uid="out", if_exists="append" if restore else "error")
        job = env.execute("job", checkpoints=config(folder / "c", interval="20ms"), restore=restore)
        until("rows", lambda: len(xs(table)) >= rows, lambda: xs(table))
        path = job.stop(savepoint=str(folder / "savepoints"))
        assert job.wait("4min") == "suspended"
    return xs(table), path


def mixed(numbers: range) -> list[bytes]:
    """Records, of which every third is cut."""
    return [b'{"x": %d' % x if x % 3 == 0 else b'{"x": %d}' % x for x in numbers]


def letters_once(servers: str, add: Callable[[range], None], folder: Path) -> None:
    """Read a topic of 4 partitions with failures of the job, and a restore at another parallelism."""
    flags = folder / "flags"
    flags.mkdir()

    def fails_sometimes(row: dict[str, int]) -> dict[str, int]:
        flag = flags / str(row["x"])
        if row["x"] % 50 == 25 and not flag.exists():
            flag.touch()
            raise ValueError(f"row {row['x']} fails once")
        return row

    path = None
    for number, parallelism in enumerate((2, 1)):
        add(range(number * 150, number * 150 + 150))
        with local(parallelism, rows_max=7) as env:
            stream = env.from_kafka(
                servers, topics=["mixed"], value=SCHEMA, bad_rows="side", discover="1min", properties=QUICK, uid="in"
            )
            exists = "append" if path else "error"
            table = stream.map(fails_sometimes, schema=SCHEMA, uid="map").to_table(
                str(folder / "out"), uid="out", if_exists=exists
            )
            dead = stream.bad_rows().to_table(str(folder / "dead"), uid="dead", if_exists=exists)
            job = env.execute(
                "job",
                checkpoints=config(folder / "c", interval="20ms"),
                restart=tg.RestartStrategy.fixed_delay(20, "10ms"),
                restore=path,
            )
            all_rows = 150 * (number + 1)
            until("rows", lambda: len(xs(table)) + len(dead.to_arrow()) >= all_rows, lambda: xs(table))  # noqa: B023
            path = job.stop(savepoint=str(folder / f"savepoint-{number}"))
            assert job.wait("4min") == "suspended"
    assert len(list(flags.iterdir())) == 4, "4 rows failed once"
    assert xs(table) == [x for x in range(300) if x % 3]
    found = dead.to_arrow().to_pylist()
    assert sorted((row["partition"], row["offset"], row["raw"]) for row in found) == sorted(
        (x % 4, x // 4, b'{"x": %d' % x) for x in range(0, 300, 3)
    )
    assert {(row["topic"], row["error"]) for row in found} == {("mixed", "the JSON object does not end")}


@pytest.mark.slow
def test_dead_letters_of_a_topic_come_once(kafka: Broker, tmp_path: Path) -> None:
    """Over failures of the job and a restore: in one table or in the other."""

    def add(numbers: range) -> None:
        for number, value in zip(numbers, mixed(numbers), strict=True):
            kafka.add("mixed", number % 4, value)

    letters_once(kafka.servers, add, tmp_path)


@pytest.mark.slow
def test_dead_letters_of_a_topic_of_apache_kafka_come_once(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """As from the mock broker."""
    kafka_server.create("mixed", 4)

    def add(numbers: range) -> None:
        values = dict(zip(numbers, mixed(numbers), strict=True))
        for partition in range(4):
            kafka_server.add("mixed", partition, *(value for x, value in values.items() if x % 4 == partition))

    letters_once(kafka_server.servers, add, tmp_path)


@pytest.mark.slow
def test_a_topic_that_changes_while_its_job_is_stopped(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """New partitions and a new topic are refused before anything starts; with a word for each all rows come, once."""
    kafka_server.create("orders", 1)
    kafka_server.add("orders", 0, *(b'{"x": %d}' % x for x in range(10)))
    rows, path = run_until(kafka_server, tmp_path, 10)
    assert rows == list(range(10))
    kafka_server.grow("orders", 3)
    kafka_server.add("orders", 2, b'{"x": 10}')
    with pytest.raises(tg.ConfigurationError, match="new partitions, 1, 2, which would not be read"):
        run_until(kafka_server, tmp_path, 11, path)
    rows, path = run_until(kafka_server, tmp_path, 11, path, discover="20ms")
    assert rows == list(range(11))
    kafka_server.delete("orders")
    kafka_server.create("orders", 3)
    kafka_server.add("orders", 1, *(b'{"x": %d}' % x for x in range(11, 30)))
    with pytest.raises(tg.ConfigurationError, match="another topic of this name"):
        run_until(kafka_server, tmp_path, 30, path, discover="1min")
    rows, path = run_until(kafka_server, tmp_path, 30, path, on_missing="earliest")
    assert rows == list(range(30))


def test_a_topic_that_is_made_again_under_a_job_fails_it(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """Once and for all: a restart would not change it."""
    kafka_server.create("remade", 2)
    kafka_server.add("remade", 0, b'{"x": 1}')
    with local(1) as env:
        stream = env.from_kafka(kafka_server.servers, topics=["remade"], value=SCHEMA, properties=QUICK)
        table = stream.to_table(str(tmp_path / "out"))
        job = env.execute("job", checkpoints=config(tmp_path / "c", interval="20ms"))
        until("the row", lambda: xs(table) == [1])
        kafka_server.delete("remade")
        kafka_server.create("remade", 2)
        with pytest.raises(tg.JobFailedError, match="another topic of this name"):
            job.wait("4min")


def test_a_job_commits_the_offsets_of_its_checkpoints_and_shows_its_lag(
    kafka_server: KafkaServer, tmp_path: Path
) -> None:
    """The group is at the savepoint when the job has stopped. The next job begins there, without a checkpoint."""
    kafka_server.create("lagging", 2)
    kafka_server.add("lagging", 0, *(b'{"x": %d}' % x for x in range(10)))

    def lag() -> dict[str, float]:
        found = job.user_metrics()
        return {name: sum(metric.value for metric in found[name]) for name in found if name.startswith("pending")}

    with local(1, rows_max=4) as env:
        stream = env.from_kafka(
            kafka_server.servers, topics=["lagging"], value=SCHEMA, properties=QUICK, uid="in", group="lagging",
            commit_offsets=True,
        )  # fmt: skip
        table = stream.to_table(str(tmp_path / "out"), uid="out")
        job = env.execute("job", checkpoints=config(tmp_path / "c", interval="20ms"))
        until("rows", lambda: len(xs(table)) == 10, lambda: xs(table))
        until(
            "the offsets",
            lambda: committed(kafka_server, "lagging") == [10, 0],
            lambda: committed(kafka_server, "lagging"),
        )
        until("no lag", lambda: lag() == {"pendingRecords": 0, "pendingRecordsMax": 0}, lag)
        kafka_server.add("lagging", 1, *(b'{"x": %d}' % x for x in range(10, 16)))
        until("rows", lambda: len(xs(table)) == 16, lambda: xs(table))
        job.stop(savepoint=str(tmp_path / "savepoint"))
        assert job.wait("4min") == "suspended"
    assert committed(kafka_server, "lagging") == [10, 6]
    kafka_server.add("lagging", 1, b'{"x": 16}')
    with local(1) as env:
        rows = env.from_kafka(
            kafka_server.servers, topics=["lagging"], value=SCHEMA, properties=QUICK, group="lagging", start="group",
            end="latest",
        ).collect()  # fmt: skip
        assert env.execute("all", checkpoints=config(tmp_path / "all"), restart=NO_RESTART).wait("4min") == "finished"
    assert rows.to_arrow()["x"].to_pylist() == [16]


def committed(server: KafkaServer, group: str) -> list[int]:
    """The offsets that a group has committed in the topic of its name, which has two partitions."""
    asked = Consumer({"bootstrap.servers": server.servers, "group.id": group, "log_level": 0})
    found = asked.committed([TopicPartition(group, number) for number in range(2)], timeout=LIMIT_S)
    asked.close()
    return [place.offset for place in found]


@dataclass
class BidClass:
    """Columns as a dataclass."""

    user: str
    n: int | None


class BidDict(TypedDict):
    """Columns as a TypedDict."""

    user: str
    n: int


class BidTuple(NamedTuple):
    """Columns as a NamedTuple."""

    user: str
    n: int


@pytest.mark.parametrize(
    "value", [{"user": str, "n": int}, {"user": pa.string(), "n": int}, BidClass, BidDict, BidTuple]
)
def test_columns_as_python_types(kafka: Broker, tmp_path: Path, value: SchemaLike) -> None:
    """With event time of the records, which is a column beside them."""
    kafka.add("bids", 0, b'{"user": "a", "n": 1}', b'{"n": 2}', at_ms=5)
    with local(1) as env:
        stream = env.from_kafka(
            kafka.servers, topics=["bids"], value=value, timestamp="kafka", end="latest", properties=QUICK
        )
        rows = stream.collect()
        assert env.execute("all", checkpoints=config(tmp_path / "all"), restart=NO_RESTART).wait("4min") == "finished"
    found = rows.to_arrow()
    assert found.schema.field("user").type == pa.string()
    assert found.schema.field("n").type == pa.int64()
    assert found.select(["user", "n"]).to_pylist() == [{"user": "a", "n": 1}, {"user": None, "n": 2}]
    assert "kafka_timestamp" in found.schema.names


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"topics": "bids"}, "give a list"),
        ({"start": "first"}, "give 'earliest', 'latest', 'group', .* a time"),
        ({"start": {"bids": 7}}, "7 for topic 'bids' may be an offset or a time"),
        ({"start": {"bids": {0: -1}}}, "-1 for partition 0 of 'bids' is not an offset"),
        ({"start": {"bids": {"0": 1}}}, "'0' is not a partition of 'bids'"),
        ({"start": datetime(2026, 1, 1)}, "give the time zone"),
        ({"start": "group"}, r"from_kafka\(start='group'\) needs a consumer group"),
        ({"start": {"bids": {0: "group_or_latest"}}}, "needs a consumer group"),
        ({"commit_offsets": True}, "needs a consumer group"),
        ({"group": "a", "properties": {"group.id": "b"}}, r"properties= has another group\.id"),
        ({"topics": ["bids", "bids"]}, "'bids' is there twice"),
        ({"topics": ["bids", "all bids"]}, "'all bids' is not the name of a topic; a name has 1 to 249 letters"),
        ({"topics": ["bids-.*"]}, "'bids-.*' is not the name of a topic; .* give re.compile"),
        ({"metadata": "topic"}, r"metadata='topic'\): give a list of names, as in \['topic'\]"),
        ({"format": "upsert", "keys": "id"}, r"keys='id'\): give a list of names, as in \['id'\]"),
        ({"topics": re.compile(b"bids")}, "compile it from a string"),
        ({"value": "json"}, "give a schema, for JSON objects"),
        ({"value": None}, "give a schema, for JSON objects"),
        ({"value": int}, "takes a pa.schema, a dict of types"),
        ({"value": {}}, "give the columns"),
        ({"value": {"n": complex}}, "'n': complex is not a type of a column"),
        ({"end": "latest", "discover": "1min"}, "remove end= or discover="),
        ({"properties": {"enable.auto.commit": True}}, r"'enable\.auto\.commit' is set by the source"),
        ({"bad_rows": "ignore"}, "one of 'fail', 'skip', 'side'"),
        ({"end": "earliest"}, "give 'latest', a time"),
        ({"end": {"bids": {0: "earliest"}}}, "for partition 0 of 'bids': give 'latest', an offset"),
        ({"value": pa.schema([("u", pa.month_day_nano_interval())])}, "which is not read from JSON"),
        ({"on_missing": "skip"}, "'fail', 'earliest' or 'latest'"),
        ({"key": "avro"}, "'bytes' or 'string'"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], named: str) -> None:
    """When the stream is made; nobody asks a broker for that."""
    with local(1) as env, pytest.raises(tg.ConfigurationError, match=named):
        env.from_kafka("127.0.0.1:1", **{"topics": ["bids"], **settings})  # type: ignore[arg-type]


def test_without_the_client_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra."""
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with local(1) as env, pytest.raises(tg.ConfigurationError, match=r"pip install 'tidegate\[kafka\]'"):
        env.from_kafka("127.0.0.1:1", topics=["bids"])
