"""Each aggregate of columns of each type, in each place where aggregates may stand, beside Polars' of the same rows."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from change_view import ChangeView
from local_jobs import finish, local

import tidegate as tg

ROWS = 90
TYPES: dict[str, pa.DataType] = {
    "i": pa.int32(),
    "u": pa.uint64(),
    "f": pa.float64(),
    "b": pa.bool_(),
    "d": pa.decimal128(12, 2),
    "day": pa.date32(),
    "time": pa.time64("us"),
    "stamp": pa.timestamp("us", "UTC"),
    "span": pa.duration("ms"),
    "text": pa.string(),
    "wide": pa.large_string(),
    "raw": pa.binary(),
    "view": pa.string_view(),
    "name": pa.dictionary(pa.int8(), pa.string()),
}
"""Columns of values, by name."""
_MADE: dict[str, Callable[[int], Any]] = {
    "i": lambda n: n - 3,
    "u": lambda n: 2**63 + n,
    "f": lambda n: n / 4,
    "b": lambda n: n > 3,
    "d": lambda n: Decimal(n * 7 - 20).scaleb(-2),
    "day": lambda n: dt.date(2024, 2, 25) + dt.timedelta(n),
    "time": lambda n: dt.time(n, 59 - n, 7, n),
    "stamp": lambda n: dt.datetime(1969, 12, 31, 20 + n % 4, tzinfo=dt.UTC) + dt.timedelta(days=n),
    "span": lambda n: dt.timedelta(milliseconds=n - 3),
    "text": lambda n: "ä" * (n % 3) + "zyxwvutsrq"[n],
    "wide": lambda n: "zyxwvutsrq"[n] * n,
    "raw": lambda n: bytes([255 - n, 0]) * (n % 2 + 1),
    "view": lambda n: f"a text of more than twelve bytes, {n}",
    "name": lambda n: "nmlkjihgfe"[n],
}
_SUMS = ("i", "f", "b", "d", "span")
_MEANS = ("i", "f", "b")


def made(seed: int = 1) -> pa.Table:
    """Rows of three keys, in the order of event time, with nulls."""
    random = Random(seed)
    columns: dict[str, pa.Array] = {
        "k": pa.array([random.choice(["x", "y", None]) for _ in range(ROWS)]),
        "t": pa.array(sorted(n * 3 + (50 if n % 20 > 15 else 0) for n in range(ROWS))).cast(pa.timestamp("ms")),
        "o": pa.array(random.sample(range(1000), ROWS)),
        "p": pa.array([random.choice([True, True, False, None]) for _ in range(ROWS)]),
    }
    for name, data_type in TYPES.items():
        # The first nulls come late: until then nothing keeps track of them.
        null = [n >= 30 and random.random() < 0.3 for n in range(ROWS)]
        values = [None if null[n] else _MADE[name](random.randrange(8)) for n in range(ROWS)]
        columns[name] = pa.array(values, data_type)
    return pa.table(columns)


Case = tuple[tg.Aggregate, pl.Expr]


def _pairs(changing: bool) -> dict[str, Case]:
    """Aggregates by name, and what Polars gives. `changing`: those that may follow changes."""
    found: dict[str, Case] = {"n": (tg.count(), pl.len())}
    for c in TYPES:
        column = pl.col(c)
        known = column.drop_nulls()
        found[f"count_{c}"] = (tg.count(c), column.count())
        found[f"distinct_{c}"] = (tg.count_distinct(c), known.n_unique())
        found[f"min_{c}"] = (tg.min(c), column.min())
        found[f"max_{c}"] = (tg.max(c).where("p"), column.filter(pl.col("p")).max())
        if changing:
            continue
        found[f"first_{c}"] = (tg.first(c), column.first())
        found[f"last_{c}"] = (tg.last(c, by="o", ignore_nulls=True), column.sort_by("o").drop_nulls().last())
        found[f"least_{c}"] = (tg.arg_min(c, by="o"), column.sort_by("o").first())
        found[f"list_{c}"] = (tg.collect_list(c, limit=99), known)
    for c in _SUMS:
        column = pl.col(c)
        found[f"sum_{c}"] = (tg.sum(c), pl.when(column.count() > 0).then(column.sum()))
    for c in _MEANS:
        found[f"mean_{c}"] = (tg.mean(c), pl.col(c).cast(pl.Float64).mean())
        found[f"var_{c}"] = (tg.var_pop(c), pl.col(c).cast(pl.Float64).var(ddof=0)) if c != "b" else found["n"]
    found["every"] = (tg.bool_and("b"), pl.col("b").min())
    found["some"] = (tg.bool_or(pl.col("i") > 2), (pl.col("i") > 2).max())
    twice, condition = pl.col("i") * 2, pl.col("f") > 1.0
    found["twice"] = (tg.sum(twice), pl.when(twice.count() > 0).then(twice.sum()))
    found["twice_where"] = (tg.max(twice).where(condition), twice.filter(condition).max())
    found["rows_where"] = (tg.count().where(condition), condition.sum())
    found["letters"] = (
        tg.count_distinct(pl.col("text").str.slice(0, 1)),
        pl.col("text").str.slice(0, 1).drop_nulls().n_unique(),
    )
    return found


EVERY, CHANGING = _pairs(False), _pairs(True)


def _aggregates(cases: Mapping[str, Case]) -> dict[str, tg.Aggregate]:
    return {name: aggregate for name, (aggregate, _) in cases.items()}


def _plain(value: Any) -> Any:
    """A value as it can be compared: floats to six digits, decimals without their scale, lists as they are."""
    if isinstance(value, float) and not math.isnan(value):
        return round(value, 6) + 0.0
    if isinstance(value, pl.Series | list):
        return tuple(_plain(each) for each in value)
    return value


def _rows(table: pa.Table | pl.DataFrame, by: str, cases: Mapping[str, Case]) -> dict[str, list[Any]]:
    """By aggregate, its results with the keys, in an order of their own."""
    found = table.to_pylist() if isinstance(table, pa.Table) else table.to_arrow().to_pylist()
    return {name: sorted(((repr(row[by]), _plain(row[name])) for row in found), key=repr) for name in cases}


def _expected(rows: pa.Table, by: list[Any], cases: Mapping[str, Case]) -> dict[str, list[Any]]:
    frame = pl.DataFrame(pl.from_arrow(rows))
    return _rows(
        frame.group_by(*by, maintain_order=True).agg(**{name: result for name, (_, result) in cases.items()}),
        "k",
        cases,
    )


_BUCKET = (pl.col("t").dt.epoch("ms") // 60).alias("w")


def _sliding(rows: pa.Table) -> pa.Table:
    """Each row in both of its windows of 60 ms that slide by 30."""
    frame = pl.DataFrame(pl.from_arrow(rows))
    slot = pl.col("t").dt.epoch("ms") // 30
    return pl.concat([frame.with_columns(w=slot), frame.with_columns(w=slot - 1)]).sort("o").sort("t").to_arrow()


def _cumulating(rows: pa.Table) -> pa.Table:
    """Each row in those of its windows, which grow by 30 ms up to 60, that end after it."""
    frame = pl.DataFrame(pl.from_arrow(rows)).with_columns(w=pl.col("t").dt.epoch("ms") // 30)
    late = frame.filter(pl.col("w") % 2 == 0).with_columns(w=pl.col("w") + 1)
    # A window comes out for keys that have rows in it, also where its last step brings none.
    return pl.concat([frame, late]).sort("o").sort("t").to_arrow()


def _sessions(rows: pa.Table) -> pa.Table:
    """Rows of a key that follow each other within 40 ms."""
    frame = pl.DataFrame(pl.from_arrow(rows))
    begins = (pl.col("t").diff().dt.total_milliseconds() >= 40).fill_null(False)
    return frame.with_columns(w=begins.cum_sum().over("k")).to_arrow()


def _tens(rows: pa.Table) -> pa.Table:
    """Rows of a key, ten by ten, as far as they make ten."""
    frame = pl.DataFrame(pl.from_arrow(rows)).with_columns(w=pl.int_range(pl.len()).over("k") // 10)
    return frame.filter(pl.len().over("k", "w") == 10).to_arrow()


Windowed = Callable[[tg.KeyedStream], Any]
PLACES: dict[str, tuple[Windowed, Callable[[pa.Table], pa.Table], list[Any]]] = {
    "tumbling": (lambda keyed: keyed.window(tg.Tumbling(60)), lambda rows: rows, ["k", _BUCKET]),
    "sliding": (lambda keyed: keyed.window(tg.Sliding(60, 30)), _sliding, ["k", "w"]),
    "cumulating": (lambda keyed: keyed.window(tg.Cumulating(30, 60)), _cumulating, ["k", "w"]),
    "session": (lambda keyed: keyed.window(tg.Session(40)), _sessions, ["k", "w"]),
    "count": (lambda keyed: keyed.window(tg.Count(10)), _tens, ["k", "w"]),
    "clock": (
        lambda keyed: keyed.window(tg.Tumbling("9000d"), time="processing", fire_at_end=True),
        lambda rows: rows,
        ["k"],
    ),
    "clock sessions": (
        lambda keyed: keyed.window(tg.Session("9000d"), time="processing", fire_at_end=True),
        lambda rows: rows,
        ["k"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "backend"), [*((place, "columnar") for place in PLACES), ("sliding", "rocksdb"), ("session", "rocksdb")]
)
def test_in_windows(place: str, backend: str, tmp_path: Path) -> None:
    """Windows of all kinds, with expressions where columns stand, on both backends."""
    windows, in_windows, by = PLACES[place]
    rows = made()
    with local(1, rows_max=20) as env:
        keyed = env.from_batches(rows, splits=1, timestamp="t").key_by("k")
        found = windows(keyed).aggregate(**_aggregates(EVERY)).collect()
        finish(env, tmp_path, settings={"backend": backend})
    assert _rows(found.to_arrow(), "k", EVERY) == _expected(in_windows(rows), by, EVERY)


@pytest.mark.slow
def test_of_keys_and_of_everything(tmp_path: Path) -> None:
    """Running aggregates, as they end; with a time to live that nothing reaches; and those of all rows."""
    rows = made()
    with local(1, rows_max=20) as env:
        stream = env.from_batches(rows, splits=1, timestamp="t")
        keyed = stream.key_by("k").aggregate(**_aggregates(EVERY), emit="final", name="keyed").collect()
        living = stream.key_by("k").aggregate(**_aggregates(EVERY), ttl="1d", name="living")
        living_rows = living.to_table(tmp_path / "living", mode="upsert", keys=["k"])
        one = stream.with_columns(k=pl.lit(1)).aggregate(k=tg.max("k"), **_aggregates(EVERY), emit="final", name="one")
        of_all = one.collect()
        finish(env, tmp_path / "chk")
    expected = _expected(rows, ["k"], EVERY)
    assert _rows(keyed.to_arrow(), "k", EVERY) == expected
    assert _rows(living_rows.to_arrow(), "k", EVERY) == expected
    everything = rows.set_column(0, "k", pa.array([1] * ROWS))
    assert _rows(of_all.to_arrow(), "k", EVERY) == _expected(everything, ["k"], EVERY)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
def test_as_changes_and_behind_them(backend: str, tmp_path: Path) -> None:
    """Changes come to what Polars gives of all rows, and behind changes to what it gives of those that are left."""
    rows, gone = made(), made(2)
    kinds = lambda table, kind: table.append_column("row_kind", pa.array([kind] * table.num_rows))  # noqa: E731
    changes = pa.concat_tables([kinds(gone, "+I"), kinds(rows, "+I"), kinds(gone, "-D")])
    with local(1, rows_max=20) as env:
        stream = env.from_batches(rows, splits=1)
        emitted = stream.key_by("k").aggregate(**_aggregates(EVERY), emit="changes", name="changes").collect()
        source = env.from_batches(changes, splits=1).as_changes(keys=["k"])
        left = source.key_by("k").aggregate(**_aggregates(CHANGING), emit="final", name="left").collect()
        finish(env, tmp_path, settings={"backend": backend})
    view = ChangeView()
    view.apply({name: _plain(value) for name, value in row.items()} for row in emitted.to_arrow().to_pylist())
    names = [name for name in emitted.to_arrow().column_names if name != "row_kind"]
    last = [dict(zip(names, row, strict=True)) for row in view.rows]
    assert {name: sorted(((repr(row["k"]), row[name]) for row in last), key=repr) for name in EVERY} == _expected(
        rows, ["k"], EVERY
    )
    assert _rows(left.to_arrow(), "k", CHANGING) == _expected(rows, ["k"], CHANGING)


@pytest.mark.slow
def test_combined_before_they_are_sent(tmp_path: Path) -> None:
    """Rows of a batch that are combined by key and slice come to the same, also when the first null comes late."""
    kinds = ("n", "count", "min", "max", "sum", "every", "some", "twice", "rows")
    cases = {name: EVERY[name] for name in EVERY if name.split("_")[0] in kinds and name != "sum_f"}
    rows = made()
    with local(2, rows_max=20) as env:
        keyed = env.from_batches(rows, splits=1, timestamp="t").key_by("k")
        running = keyed.aggregate(**_aggregates(cases), emit="final", name="running").collect()
        windowed = {
            place: PLACES[place][0](keyed).aggregate(**_aggregates(cases), name=place).collect()
            for place in ("tumbling", "sliding", "cumulating")
        }
        assert [edge.combines is not None for edge in env.plan("p").context.graph.edges].count(True) == 4
        finish(env, tmp_path, local_aggregation="on")
    assert _rows(running.to_arrow(), "k", cases) == _expected(rows, ["k"], cases)
    for place, found in windowed.items():
        _, in_windows, by = PLACES[place]
        assert _rows(found.to_arrow(), "k", cases) == _expected(in_windows(rows), by, cases)
