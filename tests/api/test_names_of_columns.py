"""Columns may be called as they like: no name meets a column of the state, of combined rows, or of a table.

Each program runs twice, under plain names and under names that were drawn, with a savepoint in the middle. The rows are
the same but for their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import polars.selectors as cs
import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, local, opening

import tidegate as tg
from tidegate.storage.errors import ConfigurationError

NASTY = (
    *(
        "slice",
        "session",
        "sessions",
        "session_start_ms",
        "session_end_ms",
        "session_out",
        "open_window",
        "window_rows",
    ),
    *("x.sum", "x.count", "x.mean", "x.m2", "x.seen", "x.by", "x.as_bool", "x.values", "x", "x.sum.decimal(10,2).high"),
    *("x.decimal(10,2).high", "x.decimal(10,2).low", "x.sum.sum", "x%2Esum", "%", ".", "..", "x.", ".sum", ".count"),
    *("row.sequence", "join.time_ms", "top.time_ms", "window.place_ms", "window.start_ms", "window.out", "window.all"),
    *(
        "kept.seen",
        "kept.time_ms",
        "timer.domain",
        "timer.timestamp_ms",
        "changes.rows",
        "ttl.updated_ms",
        "everything",
    ),
    *("everything_", "rows", "all", "slot", "end", "live", "group", "value", "key", "updated_ms", "version", "late"),
    *("*", "^.*$", "^x$", "latest", "latest.row", "row", "deleted", "tidegate_slice", "tidegate"),
    *("name", "uid", "parallelism", "emit", "ttl", "ttl_time", "emit_every", "first", "first x", "seen under ['x']"),
    *("", " ", "größe", "日本", "a`b", 'a"b', "a'b", "a b", "a\nb", "$x", "=x", "literal", "left", "right", "x_right"),
)
PLAIN = ("k", "t", "v", "w", "a", "b", "c")
ROWS, GATE = 40, 22
PARTS = 6
"""The programs run in this number of jobs, because a job of its own for each would take several times as long."""

Names = dict[str, str]
"""The name of each column, and in programs the first part of the ids of steps as `uid`."""
Stream = Any
Program = Callable[[Stream, Stream, Names], Stream]


class Remembers(tg.ProcessFunction):
    """Counts the rows of each key, lists their values, and calls itself in event time."""

    def __init__(self, names: Names) -> None:
        self.names = names

    def open(self, context: tg.RuntimeContext) -> None:
        """States whose names are columns of tidegate's in other operators."""
        self.n = context.state(tg.ValueState("row.sequence.", int))
        self.every = context.state(tg.ListState("timers.", int))
        self.last = context.state(tg.MapState("value.", str, int))

    def process(self, row: dict[str, Any], context: Any) -> Iterator[dict[str, Any]]:
        """The number of the row, and what came before it."""
        n = self.names
        self.n.update((self.n.value() or 0) + 1)
        self.every.add(row[n["v"]])
        self.last.put("v", row[n["v"]])
        context.timer_service.register_event_time_timer(row[n["t"]] + 300)
        yield {n["k"]: row[n["k"]], n["a"]: self.n.value(), n["b"]: sum(self.every.get())}

    def on_timer(self, moment: int, context: Any) -> Iterator[dict[str, Any]]:
        """What the key has by then."""
        n = self.names
        yield {**context.current_key, n["a"]: moment, n["b"]: self.last.get("v")}


def _column(name: str) -> pl.Expr:
    """The column of this very name: `pl.col` takes some names for patterns."""
    return cs.by_name(name).as_expr()


def _what(n: Names) -> dict[str, Any]:
    """Aggregates whose state has several columns, beside one whose state has one."""
    money = _column(n["v"]).cast(pl.Decimal(10, 2))
    return {n["a"]: tg.mean(n["v"]), n["b"]: tg.sum(money), n["c"]: tg.last(n["w"], by=n["t"])}


def _more(n: Names) -> dict[str, Any]:
    odd = _column(n["v"]) % 2 == 1
    return {n["a"]: tg.bool_or(odd), n["b"]: tg.stddev_pop(n["v"]), n["c"]: tg.count().where(odd)}


def _distinct(n: Names) -> dict[str, Any]:
    odd = _column(n["v"]) % 2 == 1
    return {n["a"]: tg.count_distinct(n["v"]), n["b"]: tg.count_distinct(n["v"]).where(odd), n["c"]: tg.max(n["w"])}


def _schema(n: Names) -> pa.Schema:
    return pa.schema([(n["k"], pa.int64()), (n["a"], pa.int64()), (n["b"], pa.int64())])


def _applied(n: Names) -> Callable[[pa.Table], dict[str, Any]]:
    return lambda rows: {n["a"]: rows.num_rows, n["b"]: sum(rows.column(n["v"]).to_pylist())}


def _twice(s: Stream, n: Names) -> Stream:
    """Changes, and aggregates that take them back."""
    once = s.key_by(n["k"], n["w"]).aggregate(
        {n["a"]: tg.sum(n["v"]), n["b"]: tg.count()}, emit="changes", uid=n["uid"] + " once"
    )
    what = {n["v"]: tg.sum(n["a"]), n["c"]: tg.mean(n["b"]), n["t"]: tg.count()}
    return once.key_by(n["k"]).aggregate(what, emit="final", uid=n["uid"] + " twice")


_RETURNED = ("a", "b")
REPLACING = ("expiring", "deduplicate by")
"""Programs whose rows replace earlier ones of their key."""
PROGRAMS: dict[str, Program] = {
    "running": lambda s, o, n: s.key_by(n["k"]).aggregate(_what(n), emit="final", uid=n["uid"]),
    "running more": lambda s, o, n: s.key_by(n["k"]).aggregate(_more(n), emit="final", uid=n["uid"]),
    "distinct": lambda s, o, n: s.key_by(n["k"]).aggregate(_distinct(n), emit="final", uid=n["uid"]),
    "everything": lambda s, o, n: s.aggregate(_what(n), emit="final", uid=n["uid"]),
    "expiring": lambda s, o, n: s.key_by(n["k"]).aggregate({**_what(n), n["c"]: tg.count()}, ttl="1h", uid=n["uid"]),
    "twice": lambda s, o, n: _twice(s, n),
    "changes of everything": lambda s, o, n: (
        s.key_by(n["k"])
        .aggregate({n["a"]: tg.sum(n["v"])}, emit="changes", uid=n["uid"] + " once")
        .aggregate({n["b"]: tg.sum(n["a"]), n["c"]: tg.count()}, emit="changes", uid=n["uid"])
    ),
    "tumbling": lambda s, o, n: s.key_by(n["k"]).window(tg.Tumbling("1s")).aggregate(_what(n), uid=n["uid"]),
    "tumbling distinct": lambda s, o, n: (
        s.key_by(n["k"]).window(tg.Tumbling("1s")).aggregate(_distinct(n), uid=n["uid"])
    ),
    "sliding": lambda s, o, n: s.key_by(n["k"]).window(tg.Sliding("2s", "1s")).aggregate(_more(n), uid=n["uid"]),
    "cumulating": lambda s, o, n: s.key_by(n["k"]).window(tg.Cumulating("1s", "2s")).aggregate(_what(n), uid=n["uid"]),
    "sessions": lambda s, o, n: s.key_by(n["k"]).window(tg.Session("300ms")).aggregate(_what(n), uid=n["uid"]),
    "late sessions": lambda s, o, n: (
        s.key_by(n["k"]).window(tg.Session("300ms")).allowed_lateness("1h").aggregate(_what(n), uid=n["uid"])
    ),
    "windows of all": lambda s, o, n: s.window(tg.Tumbling("1s")).aggregate(_what(n), uid=n["uid"]),
    "counts": lambda s, o, n: s.key_by(n["k"]).window(tg.Count(3)).aggregate(_what(n), uid=n["uid"]),
    "apply": lambda s, o, n: (
        s.key_by(n["k"])
        .window(tg.Tumbling("1s"))
        .apply(_applied(n), schema=pa.schema([(n[role], pa.int64()) for role in _RETURNED]), uid=n["uid"])
    ),
    "apply to sessions": lambda s, o, n: (
        s.key_by(n["k"])
        .window(tg.Session("300ms"))
        .allowed_lateness("1h")
        .apply(_applied(n), schema=pa.schema([(n[role], pa.int64()) for role in _RETURNED]), uid=n["uid"])
    ),
    "apply to all": lambda s, o, n: s.window(tg.Tumbling("1s")).apply(
        _applied(n), schema=pa.schema([(n[role], pa.int64()) for role in _RETURNED]), uid=n["uid"]
    ),
    "top of windows": lambda s, o, n: (
        s.key_by(n["k"]).window(tg.Tumbling("1s")).top_n(2, by=n["v"], rank=n["a"], uid=n["uid"])
    ),
    "top": lambda s, o, n: s.key_by(n["k"]).top_n(2, by=[n["v"], n["t"]], rank=n["a"], ttl="1h", uid=n["uid"]),
    "deduplicate": lambda s, o, n: s.key_by(n["k"], n["w"]).deduplicate(uid=n["uid"]),
    "deduplicate by": lambda s, o, n: s.key_by(n["k"]).deduplicate(n["v"], keep="last", ttl="1h", uid=n["uid"]),
    "process": lambda s, o, n: s.key_by(n["k"]).process(Remembers(n), schema=_schema(n), uid=n["uid"]),
    "join": lambda s, o, n: s.join(o, on=n["k"], ttl="1h", uid=n["uid"]),
    "left join": lambda s, o, n: s.join(o, on=n["k"], how="left", uid=n["uid"]),
    "join of windows": lambda s, o, n: s.join(o, on=n["k"], window=tg.Tumbling("1s"), how="full", uid=n["uid"]),
    "interval join": lambda s, o, n: s.interval_join(o, on=n["k"], between=("-1s", "1s"), uid=n["uid"]),
    "join of newest rows": lambda s, o, n: (
        s.key_by(n["k"])
        .deduplicate(uid=n["uid"] + " first")
        .join_latest(o.key_by(n["k"]).deduplicate(uid=n["uid"] + " first of other"), on=n["k"], uid=n["uid"])
    ),
    "join as of": lambda s, o, n: s.join_asof(o, on=n["k"], uid=n["uid"]),
    "map": lambda s, o, n: s.map(
        lambda row: {n["k"]: row[n["k"]], n["a"]: row[n["v"]] + 1, n["b"]: row[n["t"]]}, schema=_schema(n), uid=n["uid"]
    ),
    "filter": lambda s, o, n: s.filter(lambda row: row[n["v"]] > 3, uid=n["uid"]),
    "select": lambda s, o, n: s.select({n["a"]: n["v"], n["b"]: n["t"]}, uid=n["uid"]),
}


def _run(kinds: Sequence[str], names: Names, folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Runs programs in one job. Returns the rows of each result, in an order of their own."""
    path: str | None = None
    for part in range(2):
        with opening(GatedSource(ROWS, gates=[GATE])) as source, local(2, 9) as env:
            rows = env.from_source(source, uid="rows")
            at = pl.col("x") * 100
            text = pl.format("w{}", pl.col("x") % 3)
            columns = {names["k"]: pl.col("k") % 3, names["t"]: at, names["v"]: pl.col("x") % 7, names["w"]: text}
            left = rows.select(columns, uid="left").assign_timestamps(names["t"], uid="times")
            other = env.from_batches(
                pa.table({names["k"]: [0, 1, 1], names["a"]: [500, 900, 2_700], names["v"]: [7, 8, 9]}),
                timestamp=names["a"],
                uid="other",
            )
            found = {
                kind: PROGRAMS[kind](left, other, {**names, "uid": kind}).collect(uid=f"{kind} found") for kind in kinds
            }
            job = env.execute("names", checkpoints=config(folder / "checkpoints"), restart=NO_RESTART, restore=path)
            if part == 0:
                source.await_gate(GATE)
                path = job.stop(savepoint=str(folder / "savepoints"))
                continue
            source.open_all()
            assert job.wait("4min") == "finished"
            return {
                kind: sorted(_settled(made.to_arrow(), keyed_by=1 if kind in REPLACING else 0), key=repr)
                for kind, made in found.items()
            }
    raise AssertionError("unreachable")


def _settled(table: pa.Table, keyed_by: int) -> list[tuple[Any, ...]]:
    """Rows that count in the end: changes are added up, and of updates the newest row of each key is taken."""
    rows = [tuple(map(_comparable, row)) for row in zip(*(c.to_pylist() for c in table.columns), strict=True)]
    if table.column_names[-1] == "row_kind":
        counts = Counter[tuple[Any, ...]]()
        for *row, row_kind in rows:
            counts[tuple(row)] += 1 if row_kind in ("+I", "+U") else -1
        assert min(counts.values()) >= 0
        return [*counts.elements()]
    return list({row[:keyed_by]: row for row in rows}.values()) if keyed_by else rows


def _comparable(value: Any) -> Any:
    return round(value, 9) if isinstance(value, float) else str(value) if isinstance(value, Decimal) else value


def _drawn(random: Random) -> Names:
    return dict(zip(PLAIN, random.sample(NASTY, len(PLAIN)), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_any_names_give_the_same_rows(part: int, tmp_path: Path) -> None:
    """Under names that were drawn the rows are those under plain names."""
    random = Random(part)
    kinds = sorted(PROGRAMS)[part::PARTS]
    expected = _run(kinds, dict(zip(PLAIN, PLAIN, strict=True)), tmp_path / "plain")
    assert all(expected.values()), expected
    for number in range(4):
        names = _drawn(random)
        assert _run(kinds, names, tmp_path / str(number)) == expected, names


WINDOW_NAMES = (
    "slice",
    "session",
    "sessions",
    "session_end_ms",
    "open_window",
    "price.sum",
    "price.count",
    "name",
    "emit",
)
SPECS = {"tumbling": tg.Tumbling("1d"), "session": tg.Session("1d"), "count": tg.Count(2)}


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_aggregates_and_keys_of_windows_may_be_called_as_columns_of_the_state(spec: str) -> None:
    """They were written over columns of the state, and the other way round."""
    table = pa.table({"k": [1, 1], "t": [0, 1], "v": [1, 3]})
    found, by_name = {}, {}
    with local(1) as env:
        rows = env.from_batches(table, timestamp="t")
        for name in WINDOW_NAMES:
            what = {"price": tg.mean("v"), name: tg.max("v")}
            found[name] = rows.key_by("k").window(SPECS[spec]).aggregate(what).collect()
            keyed = rows.select({name: "k", "t": "t", "v": "v"}).key_by(name)
            by_name[name] = keyed.window(SPECS[spec]).aggregate(price=tg.mean("v")).collect()
        env.execute("windows").wait("4min")
    for name in WINDOW_NAMES:
        (row,), (other,) = found[name].to_arrow().to_pylist(), by_name[name].to_arrow().to_pylist()
        assert (row["price"], row[name]) == (2.0, 3)
        assert (other["price"], other[name]) == (2.0, 1)


@pytest.mark.parametrize("name", ["sessions", "session_end_ms", "price.sum"])
def test_a_query_names_its_columns_freely(name: str) -> None:
    """SQL makes the same steps."""
    with local(1) as env:
        env.create_temporary_view(
            "r", env.from_batches(pa.table({"k": [1, 1], "t": [0, 1], "v": [1, 3]}), timestamp="t")
        )
        found = env.sql(
            f"SELECT k, AVG(v) AS price, SUM(v) AS `{name}` FROM TABLE(SESSION(TABLE r PARTITION BY k, DESCRIPTOR(t), "
            "INTERVAL '1' SECOND)) GROUP BY k, window_start, window_end"
        ).collect()
        env.execute("query").wait("4min")
    assert found.to_arrow().to_pylist() == [{"k": 1, "price": 2.0, name: 4}]


@pytest.mark.parametrize("key", ["*", "latest", "row", "^x$"])
def test_keys_of_upserts_are_called_freely(key: str, tmp_path: Path) -> None:
    """The newest row of each key is read."""
    with local(1, 2) as env:
        rows = env.from_batches(pa.table({"x": [1, 2, 1], "v": [1, 2, 3]}), splits=1).select({key: "x", "v": "v"})
        table = rows.to_table(tmp_path / "table", mode="upsert", keys=[key])
        env.execute("upserts", checkpoints=config(tmp_path / "checkpoints")).wait("4min")
    assert sorted(map(tuple, map(dict.values, table.to_arrow().to_pylist()))) == [(1, 3), (2, 2)]


def test_a_column_that_is_called_as_a_pattern_is_one_column() -> None:
    """Functions get it, and a name by keyword is never taken for a pattern."""
    with local(1) as env:
        rows = env.from_batches(pa.table({"k": [1], "*": [2]}))
        added = rows.map(lambda row: {"y": row["*"] + 1}, schema=pa.schema({"y": pa.int64()})).collect()
        kept = rows.filter(lambda row: row["*"] > 1).collect()
        copied = rows.select("k", y="*").collect()
        summed = rows.key_by("k").aggregate(y=tg.sum(cs.by_name("*").as_expr() * 2), emit="final").collect()
        with pytest.raises(ConfigurationError, match=r"select\('\*'\) may be several columns, or the one"):
            rows.select("*")
        with pytest.raises(ConfigurationError, match=r"select\('\^k\$'\) may be several columns, or the one"):
            rows.select({"^k$": "k"}).select("^k$")
        env.execute("pattern").wait("4min")
    assert added.to_arrow().to_pylist() == [{"y": 3}]
    assert kept.to_arrow().to_pylist() == [{"k": 1, "*": 2}]
    assert copied.to_arrow().to_pylist() == [{"k": 1, "y": 2}]
    assert summed.to_arrow().to_pylist() == [{"k": 1, "y": 4}]


@pytest.mark.parametrize("name", ["_tidegate_slice", "_tidegate_x.sum", "_tidegate_everything", "_tidegate_combined"])
def test_names_of_the_engine_are_refused_wherever_they_come_in(name: str) -> None:
    """Also where columns are known only when the job runs."""
    with local(1) as env:
        rows = env.from_batches(pa.table({"k": [1], "t": [0], "v": [2]}), timestamp="t")
        unknown = rows.map_batches(lambda batch: batch)
        refused: list[Callable[[], object]] = [
            lambda: env.from_batches(pa.table({name: [1]})),
            lambda: rows.select({name: "v"}),
            lambda: rows.with_columns(pl.col("v").alias(name)),
            lambda: rows.map(lambda row: row, schema=pa.schema([(name, pa.int64())])),
            lambda: rows.key_by((pl.col("v") + 1).alias(name)),
            lambda: unknown.key_by(name),
            lambda: unknown.key_by("k").aggregate({name: tg.count()}),
            lambda: unknown.aggregate({name: tg.count()}),
            lambda: rows.key_by("k").aggregate({name: tg.count()}, ttl="1h"),
            lambda: rows.key_by("k").window(tg.Session("1h")).aggregate({name: tg.count()}),
            lambda: rows.key_by("k").top_n(1, by="v", rank=name),
            lambda: rows.aggregate(n=tg.count()).with_columns(pl.lit(1).alias(name)),
        ]
        for step in refused:
            with pytest.raises(ConfigurationError, match=r"names that begin with '_tidegate_' are tidegate's own"):
                step()


def test_a_column_that_a_result_would_have_twice_is_refused() -> None:
    """Keys, bounds and aggregates are columns of one row."""
    with local(1) as env:
        keyed = env.from_batches(pa.table({"k": [1], "t": [0]}), timestamp="t").key_by("k")
        with pytest.raises(ConfigurationError, match=r"all are columns of the result; rename \['k'\], used twice"):
            keyed.aggregate(k=tg.count())
        with pytest.raises(ConfigurationError, match=r"all are columns of the result; rename \['window_end'\]"):
            keyed.window(tg.Tumbling("1h")).aggregate(window_end=tg.count())
        with pytest.raises(ConfigurationError, match=r"all are columns of the result; rename \['row_kind'\]"):
            keyed.window(tg.Session("1h")).aggregate(row_kind=tg.count(), emit="changes")


def test_a_column_row_kind_of_plain_rows_is_a_column_like_others(tmp_path: Path) -> None:
    """A join of plain rows keeps it. A join that makes changes refuses it, whichever side has it."""
    marked = pa.table({"k": [1, 2], "row_kind": ["-D", "sold"]})
    unmarked = pa.table({"k": [1, 2], "w": [5, 6]})
    with local(1) as env:
        rows, others = env.from_batches(marked, splits=1), env.from_batches(unmarked, splits=1)
        counted = others.key_by("k").aggregate(n=tg.count(), emit="changes")
        refused: list[Callable[[], object]] = [
            lambda: rows.join(others, on="k", how="left"),
            lambda: others.join(rows, on="k", how="full"),
            lambda: rows.join(counted, on="k"),
            lambda: counted.join(rows, on="k"),
        ]
        for join in refused:
            with pytest.raises(ConfigurationError, match="a column of the rows is called 'row_kind'"):
                join()
    with local(1) as env:
        rows, others = env.from_batches(marked, splits=1), env.from_batches(unmarked, splits=1)
        kept = rows.join(others, on="k").collect()
        twice = rows.join(env.from_batches(marked, splits=1), on="row_kind").collect()
        assert env.execute("join", checkpoints=config(tmp_path / "c"), restart=NO_RESTART).wait("4min") == "finished"
    assert sorted(kept.to_arrow().to_pylist(), key=str) == [
        {"k": 1, "row_kind": "-D", "w": 5},
        {"k": 2, "row_kind": "sold", "w": 6},
    ]
    assert sorted(twice.to_arrow().to_pylist(), key=str) == [
        {"k": 1, "row_kind": "-D", "k_right": 1},
        {"k": 2, "row_kind": "sold", "k_right": 2},
    ]
