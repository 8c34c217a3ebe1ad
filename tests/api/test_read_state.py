"""State read as data is what the program has kept, whichever backend wrote it and in whatever kind of checkpoint."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_jobs import NO_RESTART, GatedSource, local, opening

import tidegate as tg
from tidegate import recovery
from tidegate.state.common.options import StateBackendOptions

FIRST, SECOND = 150, 250
LATE = SECOND - 3
OUT = pa.schema({"k": pa.int64()})
KEYED = pa.schema({"day": pa.date32(), "name": pa.string(), "x": pa.int64()})
MOMENT_MS = 10**14

Key = tuple[dt.date, str | None]
Row = dict[str, Any]

KINDS: dict[str, dict[str, Any]] = {
    "columnar": {"inline_threshold": 0},
    "columnar, inlined": {},
    "columnar, layers": {"inline_threshold": 0, "incremental": True},
    "columnar, changelog": {"inline_threshold": 0, "changelog": True},
    "rocksdb": {"backend": "rocksdb"},
    "rocksdb, changelog": {"backend": "rocksdb", "changelog": True},
}


def key_of(x: int) -> Key:
    """The key of a row: a date, and a text that is null for some."""
    return dt.date(2024, 1, 1 + x % 7), None if x % 3 == 0 else f"n{x % 4}"


def with_keys(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows with their key columns."""
    days, names = zip(*map(key_of, batch.column("x").to_pylist()), strict=True)
    columns = [pa.array(days, pa.date32()), pa.array(names, pa.string()), batch.column("x")]
    return pa.record_batch(columns, schema=KEYED)


class AddAll:
    """Sums, as an aggregate function."""

    def create_accumulator(self) -> int:
        return 0

    def add(self, value: int, accumulator: int) -> int:
        return accumulator + value

    def get_result(self, accumulator: int) -> int:
        return accumulator


class Keeper(tg.ProcessFunction):
    """Keeps something in every kind of state by key; some of it goes again."""

    def open(self, context: tg.ProcessContext) -> None:
        self.last = context.state(tg.ValueState("last", int))
        self.seen = context.state(tg.ListState("seen", int))
        self.by = context.state(tg.MapState("by", str, float))
        self.most = context.state(tg.ReducingState("most", max, int))
        self.sum = context.state(tg.AggregatingState("sum", AddAll(), int))
        self.timed = context.state(tg.ValueState("timed", int, ttl=tg.StateTtl("10d")))

    def process(self, row: Row, context: tg.ProcessContext) -> None:
        x = row["x"]
        if x % 5 == 4:
            self.last.clear()
        else:
            self.last.update(x)
        self.seen.add(x)
        self.by.put(f"m{x % 3}", float(x))
        self.most.add(x)
        self.sum.add(x)
        self.timed.update(x)
        context.timer_service.register_event_time_timer(MOMENT_MS + x)

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> None:
        """Nothing to do."""


def model(rows: int) -> dict[str, dict[Key, Any]]:
    """What `Keeper` has kept after so many rows, and the aggregates beside it."""
    kept: dict[str, dict[Key, Any]] = {name: {} for name in ("last", "seen", "by", "most", "sum", "n", "avg", "late")}
    for x in range(rows):
        key = key_of(x)
        if x % 5 == 4:
            kept["last"].pop(key, None)
        else:
            kept["last"][key] = x
        kept["seen"].setdefault(key, []).append(x)
        kept["by"].setdefault(key, {})[f"m{x % 3}"] = float(x)
    for key, seen in kept["seen"].items():
        kept["most"][key], kept["sum"][key], kept["n"][key] = max(seen), sum(seen), len(seen)
        kept["avg"][key] = sum(seen) / len(seen)
        kept["late"][key] = next((x for x in seen if x > LATE), None)
    return kept


def read(path: str, uid: str, state: str) -> dict[Key, Any]:
    """A state as a dictionary; no key may come twice."""
    table = recovery.read_state(path, uid=uid, state=state)
    assert table.schema.names == ["day", "name", state]
    assert table.schema.types[:2] == [pa.date32(), pa.string()]
    found = {(row["day"], row["name"]): row[state] for row in table.to_pylist()}
    assert len(found) == table.num_rows
    return found


@contextmanager
def running(folder: Path, kind: str) -> Iterator[tuple[tg.Job, GatedSource]]:
    """The program of these tests, with gates after the first and the second part of its rows."""
    more = {"backend_directory": folder / "work"} if kind.startswith("rocksdb") else {}
    config = tg.CheckpointConfig(storage=folder / "ckpt", num_retained=3, **KINDS[kind], **more)
    options = tg.DataPlaneOptions(source_rows_max=50, backend=StateBackendOptions(segment_bytes=2_000))
    source = GatedSource(SECOND + 1, gates=(FIRST, SECOND))
    with opening(source), tg.StreamEnvironment.local(2, options=options) as env:
        rows = (
            env.from_source(source, uid="source").map_batches(with_keys, schema=KEYED, uid="keys").key_by("day", "name")
        )
        rows.process(Keeper(), schema=OUT, uid="keeper").collect()
        late = tg.first("x").where(pl.col("x") > LATE)
        rows.aggregate(n=tg.count(), avg=tg.mean("x"), late=late, spread=tg.var_pop("x"), uid="totals").collect()
        job = env.execute("job", checkpoints=config, restart=NO_RESTART)
        source.await_gate(FIRST)
        yield job, source
        source.open_all()
        job.cancel()


def check(path: str, rows: int) -> None:
    """Everything in a checkpoint is what the model says."""
    expected = model(rows)
    for state in ("last", "seen", "most", "sum"):
        assert read(path, "keeper", state) == expected[state], state
    assert {key: dict(by) for key, by in read(path, "keeper", "by").items()} == expected["by"]
    assert {key: timed["value"] for key, timed in read(path, "keeper", "timed").items()} == {
        key: seen[-1] for key, seen in expected["seen"].items()
    }
    timers = recovery.read_state(path, uid="keeper", state="_tidegate_timers").to_pylist()
    assert sorted(row["_tidegate_timer_timestamp_ms"] - MOMENT_MS for row in timers) == list(range(rows))
    assert all((row["day"], row["name"]) == key_of(row["_tidegate_timer_timestamp_ms"] - MOMENT_MS) for row in timers)
    assert None in expected["late"].values(), "no key without a late row"
    for state in ("n", "avg", "late"):
        assert read(path, "totals", state) == pytest.approx(expected[state]), state
    assert recovery.read_state(path, uid="totals").schema.names == [
        *(
            "day",
            "name",
            "n",
            "_tidegate_avg.sum",
            "_tidegate_avg.count",
            "late",
            "_tidegate_late.seen",
            "_tidegate_spread.count",
            "_tidegate_spread.mean",
            "_tidegate_spread.m2",
        ),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_state_is_what_the_program_has_kept(tmp_path: Path, kind: str) -> None:
    """In a first checkpoint, in one that is built on it, and in a savepoint: the model's state, each key once."""
    with running(tmp_path, kind) as (job, source):
        first = job.trigger_checkpoint("4min")
        source.open_gate(FIRST)
        source.await_gate(SECOND)
        second = job.trigger_checkpoint("4min")
        savepoint = job.savepoint(str(tmp_path / "savepoints"))
        layers = [len(subtask.layers) for subtask in recovery.inspect(second).metadata.subtasks]
        assert (max(layers) >= 2) == ("layers" in kind or "changelog" in kind)
        check(first, FIRST)
        check(second, SECOND)
        check(savepoint, SECOND)


@pytest.mark.parametrize("kind", ["columnar", "columnar, layers", "rocksdb"])
def test_key_groups_are_read_apart(tmp_path: Path, kind: str) -> None:
    """Parts of the key groups are together all rows, none twice; that is how several read at once."""
    with running(tmp_path, kind) as (job, source):
        job.trigger_checkpoint("4min")
        source.open_gate(FIRST)
        source.await_gate(SECOND)
        path = job.trigger_checkpoint("4min")
        whole = recovery.read_state(path, uid="keeper", state="sum")
        cuts = (0, 1, 50, 64, 65, 128)
        parts = [
            recovery.read_state(path, uid="keeper", state="sum", key_groups=range(start, stop))
            for start, stop in pairwise(cuts)
        ]
        assert sum(part.num_rows > 0 for part in parts) > 2
        found = [row for part in parts for row in part.to_pylist()]
        assert sorted(found, key=repr) == sorted(whole.to_pylist(), key=repr)


def test_a_wrong_name_is_answered_with_what_there_is(tmp_path: Path) -> None:
    """One error lists operators and states, and names the nearest."""
    with running(tmp_path, "columnar, inlined") as (job, _):
        path = job.trigger_checkpoint("4min")
        asked = {
            ("keper", "sum"): "has no operator of uid 'keper'; did you mean 'keeper'\\? It holds: .*'totals' with",
            ("keeper", "sums"): "no state 'sums' with rows in .*; did you mean 'sum'\\? It holds: .*'seen' \\(keyed\\)",
            (
                "keeper",
                None,
            ): "has several states: choose one with state=, from 'last' \\(keyed\\), .*'_tidegate_timers'",
            ("keys", None): "has no state with rows",
            ("totals", "median"): "no state 'median'",
            ("totals", "spread"): "no state 'spread'",
            ("totals", "day"): "no state 'day'",
        }
        for (uid, state), text in asked.items():
            with pytest.raises(tg.ConfigurationError, match=text):
                recovery.read_state(path, uid=uid, state=state)


class Parts(tg.ProcessFunction):
    """Keeps rows in state of the subtask."""

    def open(self, context: tg.ProcessContext) -> None:
        self.rows = context.list_state(tg.ListState("rows", pa.struct({"k": pa.int64(), "x": pa.int64()})))
        self.counts = context.union_list_state(tg.ListState("counts", pa.int64()))

    def process(self, row: Row, context: tg.ProcessContext) -> None:
        self.rows.add(row)
        self.counts.update([len(self.rows)])


class Rules(tg.KeyedBroadcastProcessFunction):
    """Keeps rules."""

    def open(self, context: tg.ProcessContext) -> None:
        self.rules = context.broadcast_state(tg.MapState("rules", pa.int64(), pa.string()))

    def process(self, row: Row, context: tg.ProcessContext) -> None:
        """Nothing."""

    def process_broadcast(self, row: Row, context: tg.BroadcastContext) -> None:
        self.rules.put(row["x"], f"rule {row['x']}")


def test_state_of_subtasks_is_read_as_it_was_put_in(tmp_path: Path) -> None:
    """Lists of all subtasks, what each has put into a union, and a broadcast map once."""
    source, rules = GatedSource(FIRST + 1, gates=[FIRST]), GatedSource(9, gates=[8])
    with opening(source), opening(rules), local(3) as env:
        rows = env.from_source(source, uid="source")
        rows.rebalance().process(Parts(), schema=OUT, uid="parts").collect()
        broadcast = env.from_source(rules, uid="rules", parallelism=1).broadcast()
        rows.key_by("k").connect(broadcast).process(Rules(), schema=OUT, uid="ruled").collect()
        job = env.execute("job", checkpoints=tg.CheckpointConfig(storage=tmp_path), restart=NO_RESTART)
        source.await_gate(FIRST)
        rules.await_gate(8)
        path = job.savepoint(str(tmp_path))
        source.open_all()
        rules.open_all()
        job.cancel()

    kept = recovery.read_state(path, uid="parts", state="rows").column("rows").to_pylist()
    assert sorted(row["x"] for row in kept) == list(range(FIRST))
    counts = recovery.read_state(path, uid="parts", state="counts").column("counts").to_pylist()
    assert sum(counts) == FIRST
    found = recovery.read_state(path, uid="ruled", state="rules").to_pylist()
    assert found == [{"key": x, "value": f"rule {x}"} for x in range(8)]


KEYS = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=60),
    st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=60),
    st.lists(st.floats(allow_nan=True), min_size=1, max_size=60),
    st.lists(st.none() | st.binary(max_size=5), min_size=1, max_size=60),
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(keys=KEYS, kind=st.sampled_from(["columnar", "columnar, layers", "rocksdb"]), cut=st.floats(0, 1))
def test_random_keys_are_read_as_a_dictionary_has_them(
    tmp_path_factory: pytest.TempPathFactory, keys: list[Any], kind: str, cut: float
) -> None:
    """Whatever the keys are: how often each came is what a dictionary counts."""
    folder = tmp_path_factory.mktemp("state")
    column = pa.array(keys)
    gates = sorted({max(1, int(len(keys) * cut)), len(keys)})
    source = GatedSource(len(keys) + 1, gates=gates)

    schema = pa.schema({"key": column.type, "x": pa.int64()})

    def keyed(batch: pa.RecordBatch) -> pa.RecordBatch:
        numbers = pa.array([x % len(keys) for x in batch.column("x").to_pylist()], pa.int64())
        return pa.record_batch([column.take(numbers), batch.column("x")], schema=schema)

    more = {"backend_directory": folder / "work"} if kind == "rocksdb" else {}
    with opening(source), local(2) as env:
        rows = env.from_source(source, uid="source").map_batches(keyed, schema=schema, uid="keys").key_by("key")
        rows.aggregate(n=tg.count(), uid="totals").collect()
        config = tg.CheckpointConfig(storage=folder / "ckpt", num_retained=3, **KINDS[kind], **more)
        job = env.execute("job", checkpoints=config, restart=NO_RESTART)
        for gate in gates:
            source.await_gate(gate)
            path = job.trigger_checkpoint("4min")
            source.open_gate(gate)
        source.open_all()
        job.cancel()

    counted: dict[str, int] = {}
    for key in column.to_pylist():
        counted[named(key)] = counted.get(named(key), 0) + 1
    table = recovery.read_state(path, uid="totals", state="n")
    assert table.schema.field("key").type == column.type
    found = {named(row["key"]): row["n"] for row in table.to_pylist()}
    assert len(found) == table.num_rows
    assert found == counted


def named(key: Any) -> str:
    """A key so that equal ones are equal: one zero, one NaN."""
    return repr(key + 0.0 if isinstance(key, float) else key)
