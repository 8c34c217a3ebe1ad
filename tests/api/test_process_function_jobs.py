"""Jobs with process functions, timers, connected streams and event time, on the local runtime."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from local_jobs import GatedSource, config, finish, local, opening, rows
from programs import nodes_of

import tidegate as tg
from tidegate.actors.graph.stream_graph import translate
from tidegate.protocol.edges import PartitioningKind

SESSION = pa.schema({"k": pa.int64(), "first": pa.int64(), "last": pa.int64(), "n": pa.int64()})
GAP_MS = 100


class Sessions(tg.ProcessFunction):
    """Rows of a key that are less than a gap apart belong together; a session is told when event time is past it."""

    def open(self, context: tg.ProcessContext) -> None:
        self.times = context.state(tg.ListState("times", pa.int64()))

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        assert context.timestamp == row["t"]
        self.times.add(row["t"])
        context.timer_service.register_event_time_timer(row["t"] + GAP_MS)

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        session = sorted(t for t in self.times.get() if t < timestamp)
        if session and session[-1] + GAP_MS == timestamp:
            self.times.update(t for t in self.times.get() if t >= timestamp)
            yield {**context.current_key, "first": session[0], "last": session[-1], "n": len(session)}


def clicks(count: int) -> pa.Table:
    """Rows in order of time, but for a little disorder."""
    random = Random(7)
    times = sorted(random.randrange(count * 40) for _ in range(count))
    disordered = sorted(times, key=lambda t: t + random.randrange(30))
    return pa.table({"k": [random.randrange(5) for _ in range(count)], "t": pa.array(disordered, pa.int64())})


def sessions(table: pa.Table) -> list[tuple[object, ...]]:
    """What a batch computation finds."""
    times = defaultdict(list)
    for row in table.to_pylist():
        times[row["k"]].append(row["t"])
    found: list[tuple[object, ...]] = []
    for key, of_key in times.items():
        session: list[int] = []
        for t in [*sorted(of_key), None]:
            if session and (t is None or t - session[-1] >= GAP_MS):
                found.append((key, session[0], session[-1], len(session)))
                session = []
            if t is not None:
                session.append(t)
    return sorted(found, key=repr)


@pytest.mark.parametrize("parallelism", [1, 2])
def test_sessions_by_event_time_equal_a_batch_computation(tmp_path: Path, parallelism: int) -> None:
    """Timers fire when the watermarks of all sources have passed, the last ones at the end of the input."""
    table = clicks(600)
    with local(parallelism) as env:
        stream = env.from_batches(table, timestamp="t", max_out_of_orderness="30ms", splits=4)
        found = stream.key_by("k").process(Sessions(), schema=SESSION).collect()
        finish(env, tmp_path)

    assert rows(found.to_arrow()) == sessions(table)


class Running(tg.ProcessFunction):
    """Numbers the rows of each key, and tells the count of each key at the end, from a timer."""

    def open(self, context: tg.ProcessContext) -> None:
        self.count = context.state(tg.ValueState("count", pa.int64()))

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        self.count.update((self.count.value() or 0) + 1)
        context.timer_service.register_event_time_timer(10**15)
        context.timer_service.register_processing_time_timer(2**60)
        yield {"k": row["k"], "n": self.count.value()}

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        assert context.time_domain is tg.TimeDomain.EVENT_TIME
        assert context.current_watermark == tg.MAX_WATERMARK_MS
        yield {"k": context.current_key["k"], "n": -(self.count.value() or 0)}


def test_a_restored_job_goes_on_with_state_and_timers(tmp_path: Path) -> None:
    """From a checkpoint in the middle, at another parallelism: counts go on, and the old timers fire once."""
    schema = pa.schema({"k": pa.int64(), "n": pa.int64()})

    def job(env: tg.StreamEnvironment, source: GatedSource) -> tg.CollectedRows:
        stream = env.from_source(source, uid="source")
        return stream.key_by("k").process(Running(), schema=schema, uid="running").collect(uid="collected")

    with opening(GatedSource(60, 60, gates=[30])) as source, local(2) as env:
        job(env, source)
        first = env.execute("test job", checkpoints=config(tmp_path))
        source.await_gate(30)
        path = first.trigger_checkpoint("4min")
        first.cancel()
    with opening(GatedSource(60, 60)) as source, local(3) as env:
        found = job(env, source)
        finish(env, tmp_path, restore=path)

    expected = [(k, n) for k in range(5) for n in (*range(1, 25), -24)]
    assert rows(found.to_arrow()) == sorted(expected, key=repr)


class Flushed(tg.ProcessFunction):
    """Keeps the rows of a key until its timer fires, which only the end of the input can bring about."""

    def open(self, context: tg.ProcessContext) -> None:
        self.count = context.state(tg.ValueState("count", pa.int64()))

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        self.count.update((self.count.value() or 0) + 1)
        context.timer_service.register_processing_time_timer(2**60)

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        assert context.current_processing_time == timestamp
        yield {"k": context.current_key["k"], "n": self.count.value()}


@pytest.mark.parametrize("fires", [True, False])
def test_timers_of_processing_time_at_the_end_of_the_input(fires: bool, tmp_path: Path) -> None:
    """They fire once if that is asked for, else they are dropped. A stop that is not for good leaves them in its
    savepoint, and a restore at another parallelism has them."""
    schema = pa.schema({"k": pa.int64(), "n": pa.int64()})

    def job(env: tg.StreamEnvironment, source: GatedSource) -> tg.CollectedRows:
        keyed = env.from_source(source, uid="source").key_by("k")
        return keyed.process(Flushed(), schema=schema, uid="flushed", fire_at_end=fires).collect(uid="collected")

    with opening(GatedSource(60, 60, gates=[30])) as source, local(2) as env:
        stopped = job(env, source)
        first = env.execute("test job", checkpoints=config(tmp_path))
        source.await_gate(30)
        path = first.stop(savepoint=str(tmp_path / "savepoints"))
        assert rows(stopped.to_arrow()) == []
    with opening(GatedSource(60, 60)) as source, local(3) as env:
        found = job(env, source)
        finish(env, tmp_path, restore=path)

    assert rows(found.to_arrow()) == ([(k, 24) for k in range(5)] if fires else [])


def test_a_drained_stop_is_an_end_of_the_input(tmp_path: Path) -> None:
    """What waits for the clock comes out before the savepoint, as it does for a bounded input."""
    schema = pa.schema({"k": pa.int64(), "n": pa.int64()})
    with opening(GatedSource(60, 60, gates=[30])) as source, local(2) as env:
        keyed = env.from_source(source).key_by("k")
        found = keyed.process(Flushed(), schema=schema, fire_at_end=True).collect()
        job = env.execute("test job", checkpoints=config(tmp_path))
        source.await_gate(30)
        job.stop(drain=True, savepoint=str(tmp_path / "savepoints"))
    counts = found.to_arrow()
    assert sorted(counts["k"].to_pylist()) == list(range(5))
    assert sum(counts["n"].to_pylist()) >= 60  # 2 splits of 30 rows before the gate


class Enrich(tg.CoProcessFunction):
    """Gives each order the name of its customer, whichever of the two comes first."""

    def open(self, context: tg.ProcessContext) -> None:
        self.name = context.state(tg.ValueState("name", pa.string()))
        self.orders = context.state(tg.MapState("orders", pa.int64(), pa.int64()))

    def process1(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        if self.name.value() is None:
            self.orders.put(row["order"], row["price"])
        else:
            yield {"order": row["order"], "price": row["price"], "name": self.name.value()}

    def process2(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        self.name.update(row["name"])
        for order, price in self.orders.items():
            yield {"order": order, "price": price, "name": row["name"]}
        self.orders.clear()


ENRICHED = pa.schema({"order": pa.int64(), "price": pa.int64(), "name": pa.string()})


def test_connected_streams_join_by_key(tmp_path: Path) -> None:
    """Two streams of different columns and different key names meet in one operator."""
    orders = pa.table(
        {"order": range(200), "customer": [n % 20 for n in range(200)], "price": [n * 3 for n in range(200)]}
    )
    customers = pa.table({"id": range(20), "name": [f"customer {n}" for n in range(20)]})
    with local() as env:
        connected = env.from_batches(orders).connect(env.from_batches(customers))
        found = connected.key_by("customer", "id").process(Enrich(), schema=ENRICHED).collect()
        finish(env, tmp_path)

    assert rows(found.to_arrow()) == sorted(((n, n * 3, f"customer {n % 20}") for n in range(200)), key=repr)


class Both(tg.CoProcessFunction):
    """Counts what comes by either input."""

    def open(self, context: tg.ProcessContext) -> None:
        self.counts = [context.state(tg.ValueState(name, pa.int64())) for name in ("first", "second")]

    def process1(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        self._count(0, context)

    def process2(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        self._count(1, context)

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        yield {**context.current_key, "first": self.counts[0].value(), "second": self.counts[1].value()}

    def _count(self, index: int, context: tg.ProcessContext) -> None:
        self.counts[index].update((self.counts[index].value() or 0) + 1)
        context.timer_service.register_event_time_timer(0)


def test_a_stream_can_be_connected_with_itself(tmp_path: Path) -> None:
    """Read twice by one operator, every row comes by both inputs, over channels of their own."""
    table = pa.table({"k": [n % 7 for n in range(140)]})
    schema = pa.schema({"k": pa.int64(), "first": pa.int64(), "second": pa.int64()})
    with local() as env:
        stream = env.from_batches(table)
        found = stream.key_by("k").connect(stream.key_by("k")).process(Both(), schema=schema).collect()
        finish(env, tmp_path)

    assert rows(found.to_arrow()) == [(k, 20, 20) for k in range(7)]


def test_union_rebalance_and_broadcast_deliver_every_row(tmp_path: Path) -> None:
    """A union has the rows of all, also one with itself; rebalanced rows come once, broadcast ones to each subtask."""
    one, two = pa.table({"x": list(range(50))}), pa.table({"x": list(range(50, 80))})
    with local(2) as env:
        a, b = env.from_batches(one), env.from_batches(two)
        united = a.union(b, a).filter(lambda row: True).collect()
        dealt = b.rebalance().map(lambda row: row, schema=two.schema).collect()
        everywhere = b.broadcast().map(lambda row: row, schema=two.schema).collect()
        finish(env, tmp_path)

    assert rows(united.to_arrow()) == sorted([(x,) for x in (*range(50), *range(50), *range(50, 80))], key=repr)
    assert rows(dealt.to_arrow()) == [(x,) for x in range(50, 80)]
    assert rows(everywhere.to_arrow()) == sorted([(x,) for x in (*range(50, 80), *range(50, 80))], key=repr)


def test_a_function_without_keys_needs_no_partitioning(tmp_path: Path) -> None:
    """It is chained, like a map, and may say something at the end, once for each subtask."""

    class Tagged(tg.ProcessFunction):
        def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
            yield {"x": row["x"], "t": context.timestamp}

        def finish(self, context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
            yield {"x": -1, "t": context.timestamp}

    with local(2) as env:
        stream = env.from_batches(pa.table({"x": [1, 2], "at": [10, 20]}), timestamp="at")
        found = stream.process(Tagged(), schema=pa.schema({"x": pa.int64(), "t": pa.int64()})).collect()
        assert [vertex.name for vertex in translate(nodes_of(env)).vertices] == [
            "from_batches -> assign_timestamps -> process -> collect"
        ]
        finish(env, tmp_path)

    assert rows(found.to_arrow()) == [(-1, None), (-1, None), (1, 10), (2, 20)]


def test_event_time_stays_with_the_stream() -> None:
    """Through filters and keys, as long as the column is there; a union has it where all have the same."""
    table = pa.table({"k": [1], "t": [1], "u": [1]})
    with local() as env:
        timed = env.from_batches(table, timestamp="t")
        assert timed.timestamp == "t"
        assert timed.filter(lambda row: True).rebalance().map(lambda row: row).timestamp == "t"
        assert timed.select("k", "u").timestamp is None
        assert timed.assign_timestamps("u").timestamp == "u"
        assert timed.union(timed).timestamp == "t"
        assert timed.union(timed.assign_timestamps("u")).timestamp is None
        assert timed.key_by("k").process(Sessions(), schema=SESSION).timestamp is None


def test_edges_of_connected_streams_know_their_input() -> None:
    """A union may come by one of the inputs; without keys each stream keeps its own partitioning."""
    with local() as env:
        a, b = (env.from_batches(pa.table({"x": [1]}), name=name) for name in "ab")
        a.union(b).connect(b.broadcast()).process(Both())
        graph = translate(nodes_of(env))

    assert [(edge.upstream[0], edge.input, edge.partitioning.kind) for edge in graph.edges] == [
        ("a", 0, PartitioningKind.FORWARD),
        ("b", 0, PartitioningKind.FORWARD),
        ("b", 1, PartitioningKind.BROADCAST),
    ]


def test_what_cannot_work_is_refused_at_once() -> None:
    """Before anything runs, with the names that the program uses."""
    table = pa.table({"k": [1], "s": ["a"], "t": [1]})
    with local() as env, local() as other:
        stream = env.from_batches(table)
        with pytest.raises(tg.ConfigurationError, match="timestamp='when': there is no such column"):
            env.from_batches(table, timestamp="when")
        with pytest.raises(tg.ConfigurationError, match="type string cannot be event time"):
            stream.assign_timestamps("s")
        with pytest.raises(tg.ConfigurationError, match="max_out_of_orderness: cannot read 'soon'"):
            stream.assign_timestamps("t", "soon")
        with pytest.raises(tg.ConfigurationError, match="key 'k' of the first stream is int64 and 's' of the second"):
            stream.connect(stream).key_by("k", "s")
        with pytest.raises(tg.ConfigurationError, match="the same number of key columns"):
            stream.connect(stream).key_by(["k", "s"], ["k"])
        with pytest.raises(tg.ConfigurationError, match="there is no column 'z'"):
            stream.connect(stream).key_by("k", "z")
        with pytest.raises(tg.ConfigurationError, match="different environments"):
            stream.connect(other.from_batches(table))
        with pytest.raises(tg.ConfigurationError, match="different columns"):
            stream.union(env.from_batches(pa.table({"k": [1]})))
        with pytest.raises(tg.ConfigurationError, match=r"derived from tg\.CoProcessFunction"):
            stream.connect(stream).process(Sessions())  # type: ignore[arg-type]
        with pytest.raises(tg.ConfigurationError, match=r"derived from tg\.ProcessFunction"):
            stream.key_by("k").process(Sessions)  # type: ignore[arg-type]
