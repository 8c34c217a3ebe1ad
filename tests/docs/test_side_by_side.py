"""The lines of the tables "Side by side" of `coming-from.md` give the rows which the other engine's pages describe.

The right side is run as the page has it. `tests/cluster/test_other_engines.py` runs both for PySpark and Ray Data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from side_by_side import ABOVE, NOT_THERE, Line, Rows, bag, data, lines, ours
from test_pairings import NO_ROWS, PAIRINGS

import tidegate as tg

LINES = list(lines())
RUN_THERE = {"PySpark", "Ray Data"}
ENGINES = {
    "PyFlink: DataStream",
    "PyFlink: Table API",
    "PyFlink: DataFrame",
    "Bytewax",
    "Quix Streams",
    "Pathway",
} | RUN_THERE
ORDERS, USERS = data()
MINUTE = timedelta(minutes=1)
METHOD = re.compile(r"(?:ds|t|df|sdf|orders)\.(\w+)\(")
Row = dict[str, Any]


def _with(**columns: Callable[[Row], Any]) -> Rows:
    return [{**row, **{name: of(row) for name, of in columns.items()}} for row in ORDERS]


def _only(rows: Iterable[Row], *names: str) -> Rows:
    return [{name: row[name] for name in names} for row in rows]


def _without(rows: Iterable[Row], *names: str) -> Rows:
    return [{name: value for name, value in row.items() if name not in names} for row in rows]


def _where(condition: Callable[[Row], object]) -> Rows:
    return [row for row in ORDERS if condition(row)]


def _by_user(rows: Rows | None = None) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for row in ORDERS if rows is None else rows:
        found.setdefault(row["user"], []).append(row)
    return found


def _of_users(**columns: Callable[[Rows], Any]) -> Rows:
    return [{"user": user, **{name: of(rows) for name, of in columns.items()}} for user, rows in _by_user().items()]


def _so_far(name: str) -> Rows:
    return [
        {"user": user, name: sum(row["price"] for row in rows[: n + 1])}
        for user, rows in _by_user().items()
        for n in range(len(rows))
    ]


def _greatest_so_far() -> Rows:
    return [
        max(rows[: n + 1], key=lambda row: int(row["price"]))  # the first of several
        for rows in _by_user().values()
        for n in range(len(rows))
    ]


def _start(time: datetime, minutes: int) -> datetime:
    return time - (time - datetime(1970, 1, 1)) % (minutes * MINUTE)


def _windows(
    starts: Callable[[datetime], list[tuple[datetime, datetime]]],
    by: tuple[str, ...] = ("user",),
    **columns: Callable[[Rows], Any],
) -> Rows:
    found: dict[tuple[Any, ...], Rows] = {}
    for row in ORDERS:
        for bounds in starts(row["at"]):
            found.setdefault((*(row[name] for name in by), *bounds), []).append(row)
    names = (*by, "window_start", "window_end")
    return [
        {**dict(zip(names, key, strict=True)), **{name: of(rows) for name, of in columns.items()}}
        for key, rows in found.items()
    ]


def _tumbling(time: datetime) -> list[tuple[datetime, datetime]]:
    return [(_start(time, 5), _start(time, 5) + 5 * MINUTE)]


def _sliding(time: datetime) -> list[tuple[datetime, datetime]]:
    return [(start, start + 10 * MINUTE) for start in (_start(time, 5) - 5 * MINUTE, _start(time, 5))]


def _cumulating(time: datetime) -> list[tuple[datetime, datetime]]:
    start = _start(time, 10)
    return [(start, end) for end in (start + 5 * MINUTE, start + 10 * MINUTE) if time < end]


def _sessions(gap: Callable[[Row], timedelta] = lambda row: 5 * MINUTE) -> Rows:
    found: Rows = []
    for user, rows in _by_user().items():
        last: Row | None = None
        for row in rows:
            end = row["at"] + gap(row)
            if last is not None and row["at"] <= last["window_end"]:
                last.update(window_end=max(end, last["window_end"]), n=last["n"] + 1)
            else:
                last = {"user": user, "window_start": row["at"], "window_end": end, "n": 1}
                found.append(last)
    return found


def _pairs(how: str, near: Callable[[Row, Row], bool] = lambda order, user: True) -> Rows:
    found, met = [], []
    for order in ORDERS:
        partners = [user for user in USERS if user["user"] == order["user"] and near(order, user)]
        met += partners
        found += [{**order, **partner} for partner in partners]
        if not partners and how in ("left", "full"):
            found.append({**order, "city": None, "since": None})
    nothing = dict.fromkeys(ORDERS[0])
    if how == "full":
        found += [{**nothing, **user} for user in USERS if user not in met]
    return found


def _in_windows(how: str) -> Rows:
    found = _pairs(how, lambda order, user: _start(order["at"], 5) == _start(user["since"], 5))
    for row in found:
        row["window_start"] = _start(row["at"] or row["since"], 5)
        row["window_end"] = row["window_start"] + 5 * MINUTE
    return found


def _as_of() -> Rows:
    found = []
    for order in ORDERS:
        before = [user for user in USERS if user["user"] == order["user"] and user["since"] <= order["at"]]
        newest = max(before, key=lambda user: user["since"], default={"city": None, "since": None})
        found.append({**order, **newest})
    return found


def _tags(*, outer: bool = False) -> Rows:
    return [{"id": row["id"], "tag": tag} for row in ORDERS for tag in row["tags"] or ([None] if outer else [])]


def _named(names: dict[str, str]) -> Rows:
    return [{names.get(name, name): value for name, value in row.items()} for row in ORDERS]


def _total(rows: Rows) -> int:
    return sum(row["price"] for row in rows)


def _first_of(column: str) -> Rows:
    return list({row[column]: row for row in reversed(ORDERS)}.values())


def _best_two() -> Rows:
    return _only(sorted(ORDERS, key=lambda row: (-row["price"], row["id"]))[:2], "id", "price")


def _last_of_user() -> Rows:
    return [rows[-1] for rows in _by_user().values()]


def _greatest_of_user() -> Rows:
    return [max(rows, key=lambda row: int(row["price"])) for rows in _by_user().values()]


SAME = ORDERS
DOUBLE = _only(_with(double=lambda row: row["price"] * 2), "id", "double")
WITH_DOUBLE = _with(double=lambda row: row["price"] * 2)
DOUBLED = _with(price=lambda row: row["price"] * 2)
OVER_4 = _where(lambda row: row["price"] > 4)
UNDER_5 = _where(lambda row: row["price"] < 5)
ID_TAGS = _tags()
EXPLODED = [{**row, "tags": tag} for row in ORDERS for tag in row["tags"]]
TAGS = _only(ID_TAGS, "tag")
ID_ITEM = _only(ORDERS, "id", "item")
ALL_USERS = _only([*ORDERS, *USERS], "user")
UNTAGGED = _without(ORDERS, "tags")
WHAT = _named({"item": "what"})
ITEMS = [{"item": item} for item in ("tea", "cup", "jam")]
TOTALS = _of_users(total=_total)
COUNTS = _of_users(n=len)
MOST = [{"most": 9}]
COLUMNS = list(ORDERS[0])
ONE_TWO = [{"id": 1}, {"id": 2}]
SO_FAR = _so_far("total")
TUMBLING = _windows(_tumbling, n=len)
SLIDING = _windows(_sliding, n=len)
SESSIONS = _sessions()
GREATEST = _greatest_of_user()
INNER = _pairs("inner")
LEFT = _pairs("left")
NEAR = _pairs("inner", lambda order, user: timedelta() <= order["at"] - user["since"] <= 10 * MINUTE)
FULL_TWOS = _of_users(total=lambda rows: _total(rows[:2]))[:2]
LAST_TWOS = [
    {"user": user, "total": _total(rows[max(0, n - 1) : n + 1])}
    for user, rows in _by_user().items()
    for n in range(len(rows))
]
FULL_LAST_TWOS = [
    {"user": user, "total": _total(rows[n : n + 2])} for user, rows in _by_user().items() for n in range(len(rows) - 1)
]
IDS_IN_WINDOWS = _windows(_tumbling, ids=lambda rows: [row["id"] for row in rows])
DESCRIBED: dict[str, Any] = {
    # PyFlink: DataStream
    "env.from_collection(ROWS)": SAME,
    "ds.map(F)": DOUBLE,
    "ds.flat_map(F)": TAGS,
    "ds.filter(F)": OVER_4,
    "ds.project(0, 2)": ID_ITEM,
    "ds.union(us)": ALL_USERS,
    "ds.key_by(K).reduce(F)": _so_far("price"),
    'ds.key_by(K).sum("price")': SO_FAR,
    'ds.key_by(K).max_by("price")': _greatest_so_far(),
    "ds.assign_timestamps_and_watermarks(WatermarkStrategy.for_bounded_out_of_orderness(D))": SAME,
    "ds.key_by(K).window(TumblingEventTimeWindows.of(MIN_5)).aggregate(F)": TUMBLING,
    "ds.key_by(K).window(SlidingEventTimeWindows.of(MIN_10, MIN_5)).aggregate(F)": SLIDING,
    "ds.key_by(K).window(EventTimeSessionWindows.with_gap(MIN_5)).aggregate(F)": SESSIONS,
    "ds.key_by(K).window(EventTimeSessionWindows.with_dynamic_gap(F)).aggregate(F)": _sessions(
        lambda row: row["price"] * MINUTE
    ),
    "ds.key_by(K).window(W).process(F)": TUMBLING,
    "ds.key_by(K).count_window(2).reduce(F)": FULL_TWOS,
    "ds.key_by(K).count_window(2, 1).reduce(F)": LAST_TWOS,
    "ds.window_all(TumblingEventTimeWindows.of(MIN_5)).aggregate(F)": _windows(_tumbling, by=(), n=len),
    "ds.rebalance()": SAME,
    "ds.print()": SAME,
    "ds.execute_and_collect()": SAME,
    # PyFlink: Table API
    't.select(col("id"), (col("price") * 2).alias("double"))': DOUBLE,
    't.where(col("price") > 4)': OVER_4,
    't.add_columns((col("price") * 2).alias("double"))': WITH_DOUBLE,
    't.add_or_replace_columns((col("price") * 2).alias("price"))': DOUBLED,
    't.drop_columns(col("tags"))': UNTAGGED,
    't.rename_columns(col("item").alias("what"))': WHAT,
    't.select(col("item")).distinct()': ITEMS,
    't.group_by(col("user")).select(col("user"), col("price").sum.alias("total"))': TOTALS,
    't.select(col("price").max.alias("most"))': MOST,
    't.window(Tumble.over(MIN_5).on(col("at")).alias("w")).group_by(col("user"), col("w"))': TUMBLING,
    't.window(Slide.over(MIN_10).every(MIN_5).on(col("at")).alias("w")).group_by(col("user"), col("w"))': SLIDING,
    't.window(Session.with_gap(MIN_5).on(col("at")).alias("w")).group_by(col("user"), col("w"))': SESSIONS,
    't.select(col("user")).union_all(u.select(col("user")))': ALL_USERS,
    't.join(u, col("user") == col("name"))': INNER,
    't.left_outer_join(u, col("user") == col("name"))': LEFT,
    't.join_lateral(SPLIT(col("tags")).alias("tag"))': ID_TAGS,
    't.left_outer_join_lateral(SPLIT(col("tags")).alias("tag"))': _tags(outer=True),
    't.order_by(col("price").desc, col("id")).fetch(2)': _best_two(),
    "t.fetch(2)": ORDERS[:2],
    "t.map(UDF)": DOUBLE,
    "t.flat_map(UDTF)": TAGS,
    't.group_by(col("user")).flat_aggregate(UDTAF)': [
        row for rows in _by_user().values() for row in _only(rows[:2], "user", "id")
    ],
    't_env.sql_query("SELECT id, price * 2 AS double FROM orders")': DOUBLE,
    't.over_window(OVER).select(col("user"), col("price").sum.over(col("w")))': SO_FAR,
    "t.get_schema().get_field_names()": COLUMNS,
    "t.to_pandas()": SAME,
    # PyFlink: DataFrame
    "pf.from_records(ROWS)": SAME,
    'pf.from_dict({"id": [1, 2]})': ONE_TWO,
    "pf.from_pandas(PANDAS)": ONE_TWO,
    "pf.from_arrow(ARROW)": ONE_TWO,
    "pf.range(2)": [{"id": 0}, {"id": 1}],
    'pf.sql("SELECT id, price * 2 AS double FROM df")': DOUBLE,
    'df.select("id", double=pf.col("price") * 2)': DOUBLE,
    'df[["id", "item"]]': ID_ITEM,
    'df.with_column("double", pf.col("price") * 2)': WITH_DOUBLE,
    'df.with_columns(double=pf.col("price") * 2)': WITH_DOUBLE,
    'df.drop_columns("tags")': UNTAGGED,
    'df.drop("tags")': UNTAGGED,
    'df.rename_columns({"item": "what"})': WHAT,
    "df.rename(str.upper)": [{"ID": row["id"], "ITEM": row["item"]} for row in ORDERS],
    'df.filter(pf.col("price") > 4)': OVER_4,
    'df.filter(item="tea")': _where(lambda row: row["item"] == "tea"),
    'df.where("price > 4")': OVER_4,
    'df.select("item").drop_duplicates()': ITEMS,
    'df.distinct("item")': _first_of("item"),
    'df.unique("user", order_by="at", keep="last")': _last_of_user(),
    'df.top_n(1, partition_by="user", order_by="price", descending=True)': GREATEST,
    'df.sort(["price", "id"], descending=[True, False]).limit(2)': _best_two(),
    "df.limit(2)": ORDERS[:2],
    "df.head(2)": ORDERS[:2],
    'df.filter(pf.col("tags").cardinality > 0).explode("tags")': EXPLODED,
    "df.flat_map(F)": TAGS,
    'df.join(us, on="user")': INNER,
    'df.join(us, left_on="user", right_on="name")': INNER,
    'df.join(us, on="user", how="left")': LEFT,
    'df.join(us, on="user", how="semi")': _where(lambda row: row["user"] != "cid"),
    'df.join(us, on="user", how="anti")': _where(lambda row: row["user"] == "cid"),
    "df.union(us)": [{"user": user} for user in ("ann", "bob", "cid", "dan")],
    "df.union_all(us)": ALL_USERS,
    'df.group_by("user").agg(total=pf.col("price").sum)': TOTALS,
    'df.agg(most=pf.col("price").max)': MOST,
    'df.tumble(on="at", size=MIN_5).group_by("user", "window_start", "window_end")': TUMBLING,
    'df.hop(on="at", size=MIN_10, slide=MIN_5).group_by("user", "window_start", "window_end")': SLIDING,
    'df.cumulate(on="at", size=MIN_10, step=MIN_5).group_by("user", "window_start", "window_end")': _windows(
        _cumulating, n=len
    ),
    'df.session(on="at", gap=MIN_5, partition_by="user").group_by("user", "window_start", "window_end")': SESSIONS,
    'pf.col("price").sum.over(partition_by="user", order_by="at")': SO_FAR,
    "df.pipe(F)": UNTAGGED,
    "df.columns": COLUMNS,
    "df.schema": COLUMNS,
    "df.collect()": SAME,
    "df.to_pandas()": SAME,
    "df.iter_rows()": SAME,
    "df.iter_batches()": SAME,
    'df.select("id", one=pf.lit(1))': [{"id": row["id"], "one": 1} for row in ORDERS],
    "df.write_parquet(PATH)": SAME,
    "@pf.udf": DOUBLE,
    "@pf.udtf": TAGS,
    # Bytewax
    'op.map("m", s, F)': DOUBLE,
    'op.map_value("m", ks, F)': DOUBLE,
    'op.flat_map("m", s, F)': TAGS,
    'op.flatten("m", s)': ID_TAGS,
    'op.filter("m", s, F)': OVER_4,
    'op.filter_map("m", s, F)': _only(_where(lambda row: row["tip"]), "id", "tip"),
    'op.branch("m", s, F).trues': OVER_4,
    'op.branch("m", s, F).falses': UNDER_5,
    'op.merge("m", s, us)': ALL_USERS,
    'op.key_on("m", s, F)': COUNTS,
    'op.count_final("m", s, F)': COUNTS,
    'op.max_final("m", ks)': _of_users(most=lambda rows: max(row["price"] for row in rows)),
    'op.min_final("m", ks)': _of_users(least=lambda rows: min(row["price"] for row in rows)),
    'op.reduce_final("m", ks, F)': TOTALS,
    'op.fold_final("m", ks, BUILDER, FOLDER)': COUNTS,
    'op.stateful_map("m", ks, F)': SO_FAR,
    'op.join("m", ks, kus)': [
        {**order, **user}
        for order in _first_of("user")
        for user in {row["user"]: row for row in reversed(USERS)}.values()
        if order["user"] == user["user"]
    ],
    'op.join("m", ks, kus, insert_mode="product", emit_mode="final")': _pairs("full"),
    'op.collect("m", ks, TIMEOUT, 2)': [
        {"user": user, "ids": ids} for user, ids in (("ann", [1, 3]), ("ann", [5]), ("bob", [2, 6]), ("cid", [4]))
    ],
    'op.inspect("m", s)': SAME,
    'op.redistribute("m", s)': SAME,
    'win.count_window("m", s, CLOCK, TumblingWindower(LENGTH, ALIGN_TO), F)': TUMBLING,
    'win.count_window("m", s, CLOCK, SlidingWindower(LENGTH, OFFSET, ALIGN_TO), F)': SLIDING,
    'win.count_window("m", s, CLOCK, SessionWindower(GAP), F)': _only(SESSIONS, "user", "n"),
    'win.max_window("m", ks, CLOCK, WINDOWER)': _windows(
        _tumbling, most=lambda rows: max(row["price"] for row in rows)
    ),
    'win.collect_window("m", ks, CLOCK, WINDOWER)': IDS_IN_WINDOWS,
    'win.fold_window("m", ks, CLOCK, WINDOWER, BUILDER, FOLDER, MERGER)': TUMBLING,
    'win.join_window("m", CLOCK, WINDOWER, ks, kus, insert_mode="product")': _in_windows("full"),
    # Quix Streams
    "sdf.apply(F)": DOUBLE,
    "sdf.apply(F, expand=True)": TAGS,
    "sdf.apply(F, stateful=True)": SO_FAR,
    "sdf.update(F)": DOUBLED,
    'sdf["double"] = sdf["price"] * 2': WITH_DOUBLE,
    'sdf[["id", "item"]]': ID_ITEM,
    'sdf[sdf["price"] > 4]': OVER_4,
    "sdf.filter(F)": OVER_4,
    'sdf[sdf["tip"].notnull()]': _where(lambda row: row["tip"] is not None),
    "sdf.fill(tip=0)": _with(tip=lambda row: row["tip"] or 0),
    'sdf.drop("tags")': UNTAGGED,
    'sdf.group_by("user")': COUNTS,
    "sdf.concat(us)": ALL_USERS,
    "sdf.set_timestamp(F)": SAME,
    "sdf.tumbling_window(300_000).agg(n=Count()).current()": TUMBLING,
    "sdf.tumbling_window(300_000).agg(n=Count()).final()": TUMBLING,
    "sdf.hopping_window(600_000, 300_000).agg(n=Count()).current()": SLIDING,
    'sdf.tumbling_count_window(2).agg(total=Sum("price")).final()': FULL_TWOS,
    'sdf.sliding_count_window(2).agg(total=Sum("price")).final()': FULL_LAST_TWOS,
    'sdf.tumbling_window(300_000).agg(ids=Collect("id")).final()': IDS_IN_WINDOWS,
    "sdf.tumbling_window(300_000).reduce(REDUCER, INITIALIZER).final()": TUMBLING,
    'sdf.join_asof(us, how="left")': _as_of(),
    "sdf.join_interval(us, backward_ms=600_000)": NEAR,
    "sdf.print()": SAME,
    "sdf.sink(SINK)": SAME,
    # Pathway
    "t.select(pw.this.id, double=pw.this.price * 2)": DOUBLE,
    "t.with_columns(double=pw.this.price * 2)": WITH_DOUBLE,
    "t.without(pw.this.tags)": UNTAGGED,
    "t.rename(what=pw.this.item)": WHAT,
    "t.cast_to_types(price=float)": _with(price=lambda row: float(row["price"])),
    "t.filter(pw.this.price > 4)": OVER_4,
    "t.split(pw.this.price > 4)[1]": UNDER_5,
    "t.flatten(pw.this.tags)": EXPLODED,
    "t.select(id=pw.this.id, double=pw.apply(F, pw.this.price))": DOUBLE,
    "t.groupby(pw.this.user).reduce(pw.this.user, total=pw.reducers.sum(pw.this.price))": TOTALS,
    "t.reduce(most=pw.reducers.max(pw.this.price))": MOST,
    "t.groupby(pw.this.user).reduce(pw.this.user, ids=pw.reducers.sorted_tuple(pw.this.id))": _of_users(
        ids=lambda rows: sorted(row["id"] for row in rows)
    ),
    "t.groupby(pw.this.user).reduce(pw.this.user, at=pw.reducers.latest(pw.this.at))": _of_users(
        at=lambda rows: rows[-1]["at"]
    ),
    "t.deduplicate(value=pw.this.price, instance=pw.this.user, acceptor=lambda new, old: new > old)": GREATEST,
    "t.concat_reindex(u)": ALL_USERS,
    "t.join(u, pw.left.user == pw.right.user)": INNER,
    "t.join_left(u, pw.left.user == pw.right.user)": LEFT,
    "t.asof_join(u, t.at, u.since, t.user == u.user, how=pw.JoinMode.LEFT)": _as_of(),
    "t.interval_join(u, t.at, u.since, pw.temporal.interval(-MIN_10, MIN_0), t.user == u.user)": NEAR,
    "t.window_join(u, t.at, u.since, pw.temporal.tumbling(MIN_5), t.user == u.user)": _in_windows("inner"),
    "t.windowby(t.at, window=pw.temporal.tumbling(duration=MIN_5), instance=t.user)": TUMBLING,
    "t.windowby(t.at, window=pw.temporal.sliding(duration=MIN_10, hop=MIN_5), instance=t.user)": SLIDING,
    "t.windowby(t.at, window=pw.temporal.session(max_gap=MIN_5), instance=t.user)": _only(_sessions(), "user", "n"),
    'pw.sql("SELECT id, price * 2 AS double FROM orders", orders=t)': DOUBLE,
    "pw.io.subscribe(t, on_change=F)": SAME,
    "pw.debug.compute_and_print(t)": SAME,
}
WITH_ROWS = [line for line in LINES if line.expression is not None and line.engine not in RUN_THERE]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all expressions of tidegate give, from one job."""
    return ours([str(line.expression) for line in WITH_ROWS], tmp_path_factory.mktemp("side-by-side"))


@pytest.mark.slow
@pytest.mark.parametrize("line", WITH_ROWS, ids=lambda line: line.theirs)
def test_a_line_gives_the_rows_that_the_other_engine_describes(line: Line, found: dict[str, Any]) -> None:
    """The right side as the page has it, beside plain Python after the pages of the other engine."""
    assert bag(found[str(line.expression)]) == bag(DESCRIBED[line.theirs])


@pytest.mark.parametrize("line", [line for line in LINES if line.expression is None], ids=lambda line: line.theirs)
def test_a_line_without_an_expression_names_a_line_above_or_a_reason(line: Line) -> None:
    """A line above is one of the tables that `test_pairings.py` tests."""
    if line.ours == NOT_THERE:
        assert line.note
    else:
        above = line.ours.removeprefix(ABOVE)
        assert line.ours.startswith(ABOVE)
        assert above in {*PAIRINGS, *NO_ROWS, "rules for all keys", "with a table"}


def test_each_engine_has_a_table() -> None:
    """And each result that is described belongs to a line."""
    assert {line.engine for line in LINES} == ENGINES
    assert set(DESCRIBED) == {line.theirs for line in WITH_ROWS}


@pytest.mark.parametrize(
    "name",
    [
        line.theirs.removeprefix("df.").partition("(")[0]
        for line in LINES
        if line.engine == "PyFlink: DataFrame" and line.ours == NOT_THERE and line.theirs.startswith("df.")
    ],
)
def test_a_method_of_pyflinks_dataframe_that_is_not_there_is_not_a_method_of_a_stream(name: str) -> None:
    """A method that comes in must come into the table, but for joins of a kind and `to_table`, which differs."""
    assert name in ("join", "to_table") or not hasattr(tg.Stream, name)


def test_methods_of_other_engines_name_the_method_that_they_are_here() -> None:
    """A method of the left side that a stream does not have is an error with the word that it has here."""
    methods = {found[1] for line in LINES if line.expression and (found := METHOD.match(line.theirs))}
    with tg.StreamEnvironment.local(1) as env:
        stream = env.from_rows([1])
        others = {name for name in methods if not hasattr(stream, name)}
        assert len(others) > 50
        for name in sorted(others):
            with pytest.raises(AttributeError, match=f"no attribute '{name}'; in tidegate it is "):
                getattr(stream, name)


def test_settled_rows_are_what_changes_come_to(tmp_path: Path) -> None:
    """A row that is taken back is in no result."""
    expression = 'orders.key_by("user").top_n(1, by="price")'
    assert bag(ours([expression], tmp_path)[expression]) == bag(GREATEST)
