"""The pairings of `coming-from.md` and `deduplication.md` hold: plain Python gives the rows of the other engine.

Each row of the page's tables of programs and of windows has a test here, or a reason why no rows could be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import local

import tidegate as tg

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()
NO_ROWS = {
    "a source": "connectors have tests of their own",
    "asking a service": "a service gives the rows",
    "a source that is idle": "of splits in real time",
    "a source that runs ahead": "it changes which source waits, and no rows",
    "early results": "they depend on batches",
    "state of a window": "a part of the function over a window",
}
ROWS = [
    {"k": "ab"[n % 2] if n % 5 else "c", "t": 100 * n + (250 if n % 4 == 1 else 0), "v": (7 * n) % 11}
    for n in range(24)
]
TABLE = pa.Table.from_pylist(ROWS)
OTHER = [{"k": "ab"[n % 2], "s": 350 * n, "w": n} for n in range(6)]
Row = dict[str, Any]


def _run(build: Callable[[Any, Any], Any]) -> list[Row]:
    with local(1, 5) as env:
        rows = env.from_batches(TABLE, timestamp="t", max_out_of_orderness="1s")
        other = env.from_batches(pa.Table.from_pylist(OTHER), timestamp="s", max_out_of_orderness="5s")
        found = build(rows, other).collect()
        env.execute("pairing").wait("4min")
    made: list[Row] = found.to_arrow().to_pylist()
    return made


def _sorted(rows: list[Row]) -> list[str]:
    return sorted(str(sorted(row.items())) for row in rows)


def _newest(rows: list[Row], *keys: str) -> list[Row]:
    return list({tuple(row[key] for key in keys): row for row in rows}.values())


def _added_up(rows: list[Row]) -> list[Row]:
    """What changes come to."""
    left: list[Row] = []
    for row in rows:
        kind = row.pop("row_kind")
        left.append(row) if kind in ("+I", "+U") else left.remove(row)
    return left


def _by_key(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["k"], []).append(row)
    return found


class Running(tg.ProcessFunction):
    """Bytewax's `stateful_map` with a running sum: one row for each row."""

    def open(self, context: tg.RuntimeContext) -> None:
        self.total = context.state(tg.ValueState("total", int))

    def process(self, row: Row, context: Any) -> Iterator[Row]:
        self.total.update((self.total.value() or 0) + row["v"])
        yield {"k": row["k"], "total": self.total.value()}


class Both(tg.CoProcessFunction):
    """Bytewax's `join`: the newest of each side, once both are there; then the key begins anew."""

    def open(self, context: tg.RuntimeContext) -> None:
        self.left = context.state(tg.ValueState("left", int))
        self.right = context.state(tg.ValueState("right", int))

    def process1(self, row: Row, context: Any) -> Iterator[Row]:
        self.left.update(row["v"])
        yield from self._complete(row["k"])

    def process2(self, row: Row, context: Any) -> Iterator[Row]:
        self.right.update(row["w"])
        yield from self._complete(row["k"])

    def _complete(self, key: str) -> Iterator[Row]:
        if self.left.value() is not None and self.right.value() is not None:
            yield {"k": key, "v": self.left.value(), "w": self.right.value()}
            self.left.clear()
            self.right.clear()


class Counted(tg.CoProcessFunction):
    """Counts the rows of both inputs, in one state."""

    def open(self, context: tg.RuntimeContext) -> None:
        self.n = context.state(tg.ValueState("n", int))

    def process1(self, row: Row, context: Any) -> Iterator[Row]:
        self.n.update((self.n.value() or 0) + 1)
        yield {"k": row["k"], "total": self.n.value()}

    def process2(self, row: Row, context: Any) -> Iterator[Row]:
        yield from self.process1(row, context)


SCHEMA = pa.schema({"k": pa.string(), "total": pa.int64()})


def _sums(rows: list[Row]) -> list[Row]:
    return [{"k": k, "total": sum(row["v"] for row in of)} for k, of in _by_key(rows).items()]


def _windows(bounds: Callable[[int], list[tuple[int, int]]]) -> list[Row]:
    found: dict[tuple[str, int, int], int] = {}
    for row in ROWS:
        for start, end in bounds(row["t"]):
            found[row["k"], start, end] = found.get((row["k"], start, end), 0) + 1
    return [{"k": k, "window_start": start, "window_end": end, "n": n} for (k, start, end), n in found.items()]


def _sessions(gap: Callable[[Row], int]) -> list[Row]:
    found: list[Row] = []
    for k, of in _by_key(ROWS).items():
        last: Row | None = None
        for row in sorted(of, key=lambda row: row["t"]):
            end = row["t"] + gap(row)
            if last is not None and row["t"] <= last["window_end"]:
                last.update(window_end=max(end, last["window_end"]), n=last["n"] + 1)
            else:
                last = {"k": k, "window_start": row["t"], "window_end": end, "n": 1}
                found.append(last)
    return found


def _last_rows(size: int, slide: int) -> list[Row]:
    found: list[Row] = []
    for k, of in _by_key(ROWS).items():
        ends = range(slide, len(of) + 1, slide)
        found += [{"k": k, "total": sum(row["v"] for row in of[max(0, end - size) : end])} for end in ends]
    return found


def _counted(size: int) -> list[Row]:
    found: list[Row] = []
    for k, of in _by_key(ROWS).items():
        starts = range(0, len(of) - size + 1, size)
        found += [{"k": k, "total": sum(row["v"] for row in of[start : start + size])} for start in starts]
    return found


def _pairs(near: Callable[[Row, Row], bool]) -> list[Row]:
    return [
        {**left, "s": right["s"], "w": right["w"]}
        for left in ROWS
        for right in OTHER
        if left["k"] == right["k"] and near(left, right)
    ]


def _as_of() -> list[Row]:
    found = []
    for left in ROWS:
        before = [right for right in OTHER if right["k"] == left["k"] and right["s"] <= left["t"]]
        newest = max(before, key=lambda right: right["s"], default={"s": None, "w": None})
        found.append({**left, "s": newest["s"], "w": newest["w"]})
    return found


def _of_window(pair: tuple[Row, Row], size: int) -> bool:
    return bool(pair[0]["t"] // size == pair[1]["s"] // size)


def _joined_in_windows(size: int) -> list[Row]:
    def bounds(time: int) -> Row:
        return {"window_start": time // size * size, "window_end": time // size * size + size}

    return [{**pair, **bounds(pair["t"])} for pair in _pairs(lambda a, b: _of_window((a, b), size))]


def _first(rows: list[Row]) -> list[Row]:
    return [of[0] for of in _by_key(rows).values()]


def _best(rows: list[Row], n: int) -> list[Row]:
    return [row for of in _by_key(rows).values() for row in sorted(of, key=lambda row: -row["v"])[:n]]


S: Any = pl.col
PAIRINGS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[list[Row]], Any], Callable[[], list[Row]]]] = {
    "row by row": (
        lambda s, o: s.map(lambda row: {"k": row["k"], "total": row["v"] * 2}, schema=SCHEMA).filter(
            lambda row: row["total"] > 4
        ),
        list,
        lambda: [{"k": row["k"], "total": row["v"] * 2} for row in ROWS if row["v"] > 2],
    ),
    "columns": (
        lambda s, o: s.filter(pl.col("v") > 2).select("k", total=pl.col("v") * 2),
        list,
        lambda: [{"k": row["k"], "total": row["v"] * 2} for row in ROWS if row["v"] > 2],
    ),
    "whole batches": (
        lambda s, o: s.map_batches(lambda batch: batch.select(["k", "v"]), schema=TABLE.select(["k", "v"]).schema),
        list,
        lambda: [{"k": row["k"], "v": row["v"]} for row in ROWS],
    ),
    "by key": (
        lambda s, o: s.key_by("k").aggregate(total=tg.sum("v"), emit="final"),
        list,
        lambda: _sums(ROWS),
    ),
    "running sums": (
        lambda s, o: s.key_by("k").aggregate(total=tg.sum("v")),
        lambda rows: _newest(rows, "k"),
        lambda: _sums(ROWS),
    ),
    "a total for each row": (
        lambda s, o: s.key_by("k").aggregate(total=tg.sum("v"), emit="each"),
        list,
        lambda: [
            {"k": k, "total": sum(row["v"] for row in of[: n + 1])}
            for k, of in _by_key(ROWS).items()
            for n in range(len(of))
        ],
    ),
    "sums that take back": (
        lambda s, o: s.key_by("k").aggregate(total=tg.sum("v"), emit="changes"),
        _added_up,
        lambda: _sums(ROWS),
    ),
    "a running value for each row": (
        lambda s, o: s.key_by("k").process(Running(), schema=SCHEMA),
        list,
        lambda: [
            {"k": k, "total": sum(row["v"] for row in of[: n + 1])}
            for k, of in _by_key(ROWS).items()
            for n in range(len(of))
        ],
    ),
    "state and timers": (
        lambda s, o: s.key_by("k").process(Running(), schema=SCHEMA),
        lambda rows: _newest(rows, "k"),
        lambda: _sums(ROWS),
    ),
    "two inputs": (
        lambda s, o: s.key_by("k").connect(o.key_by("k")).process(Counted(), schema=SCHEMA),
        lambda rows: _newest(sorted(rows, key=lambda row: row["total"]), "k"),
        lambda: [
            {"k": k, "total": len(of) + sum(other["k"] == k for other in OTHER)} for k, of in _by_key(ROWS).items()
        ],
    ),
    "rows put aside": (
        lambda s, o: (
            s.map(lambda row: {"k": row["k"], "total": 10 // row["v"]}, schema=SCHEMA, errors_to="bad")
            .side_output("bad")
            .select("k", "v")
        ),
        list,
        lambda: [{"k": row["k"], "v": row["v"]} for row in ROWS if row["v"] == 0],
    ),
    "all of several": (
        lambda s, o: s.select("k", v="v").union(o.select(v="w", k="k").select("v", "k"), by_name=True),
        list,
        lambda: [{"k": row["k"], "v": row["v"]} for row in ROWS] + [{"k": row["k"], "v": row["w"]} for row in OTHER],
    ),
    "event time": (
        lambda s, o: s.key_by("k").window(tg.Tumbling(1_000)).aggregate(n=tg.count()),
        list,
        lambda: _windows(lambda time: [(time // 1_000 * 1_000, time // 1_000 * 1_000 + 1_000)]),
    ),
    "tumbling": (
        lambda s, o: s.key_by("k").window(tg.Tumbling(700)).aggregate(n=tg.count()),
        list,
        lambda: _windows(lambda time: [(time // 700 * 700, time // 700 * 700 + 700)]),
    ),
    "sliding": (
        lambda s, o: s.key_by("k").window(tg.Sliding(900, 300)).aggregate(n=tg.count()),
        list,
        lambda: _windows(
            lambda time: [(start, start + 900) for start in range(time // 300 * 300 - 600, time // 300 * 300 + 1, 300)]
        ),
    ),
    "cumulating": (
        lambda s, o: s.key_by("k").window(tg.Cumulating(300, 900)).aggregate(n=tg.count()),
        list,
        lambda: _windows(
            lambda time: [
                (time // 900 * 900, end)
                for end in range(time // 900 * 900 + 300, time // 900 * 900 + 901, 300)
                if time < end
            ]
        ),
    ),
    "sessions": (
        lambda s, o: s.key_by("k").window(tg.Session(300)).aggregate(n=tg.count()),
        list,
        lambda: _sessions(lambda row: 300),
    ),
    "sessions, a gap of each row": (
        lambda s, o: s.key_by("k").window(tg.Session((pl.col("v") + 1) * 60)).aggregate(n=tg.count()),
        list,
        lambda: _sessions(lambda row: (row["v"] + 1) * 60),
    ),
    "a number of rows": (
        lambda s, o: s.key_by("k").window(tg.Count(3)).aggregate(total=tg.sum("v")),
        list,
        lambda: _counted(3),
    ),
    "the last rows, after every few": (
        lambda s, o: s.key_by("k").window(tg.Count(5, slide=2)).aggregate(total=tg.sum("v")),
        list,
        lambda: _last_rows(5, 2),
    ),
    "late rows": (
        lambda s, o: s.assign_timestamps("t").key_by("k").window(tg.Tumbling(100)).aggregate(n=tg.count()).late_rows(),
        list,
        lambda: [row for n, row in enumerate(ROWS) if any(b["t"] > row["t"] // 100 * 100 + 99 for b in ROWS[:n])],
    ),
    "a function over a window": (
        lambda s, o: (
            s.key_by("k")
            .window(tg.Tumbling(700))
            .apply(lambda rows: {"n": rows.num_rows}, schema=pa.schema({"n": pa.int64()}))
        ),
        list,
        lambda: _windows(lambda time: [(time // 700 * 700, time // 700 * 700 + 700)]),
    ),
    "the best of each": (
        lambda s, o: s.key_by("k").top_n(2, by="v"),
        _added_up,
        lambda: _best(ROWS, 2),
    ),
    "the first or last of each": (
        lambda s, o: s.key_by("k").deduplicate(),
        list,
        lambda: _first(ROWS),
    ),
    "join in a window": (
        lambda s, o: s.join(o, on="k", window=tg.Tumbling(700)),
        list,
        lambda: _joined_in_windows(700),
    ),
    "join of near times": (
        lambda s, o: s.interval_join(o, on="k", between=(-200, 300)),
        list,
        lambda: _pairs(lambda left, right: -200 <= right["s"] - left["t"] <= 300),
    ),
    "as of a time": (lambda s, o: s.join_asof(o, on="k"), list, _as_of),
    "of newest values": (
        lambda s, o: s.key_by("k").deduplicate().join_latest(o.key_by("k").deduplicate(), on="k"),
        list,
        lambda: [{**left, **right} for left in _first(ROWS) for right in _first(OTHER) if left["k"] == right["k"]],
    ),
    "without a bound": (lambda s, o: s.join(o, on="k"), list, lambda: _pairs(lambda left, right: True)),
}


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_pairing_gives_the_rows_of_the_other_engine(pairing: str) -> None:
    """As the other engine's pages say what they are."""
    build, settle, expected = PAIRINGS[pairing]
    assert _sorted(settle(_run(build))) == _sorted(expected())


def test_each_pairing_on_the_page_is_tested() -> None:
    """A row of the page's tables of programs and of windows that is not tested has a reason."""
    part = PAGE[PAGE.index("## Programs") : PAGE.index("## Jobs")]
    named = [line.split("|")[1].strip() for line in part.splitlines() if line.startswith("| ")]
    named = [name for name in named if name and set(name) != {"-"}]
    assert named
    tested = {*PAIRINGS, *NO_ROWS, "rules for all keys", "with a table"}
    assert [name for name in named if name not in tested] == []
    assert [name for name in tested if name not in named] == []


def test_rules_for_all_keys() -> None:
    """Broadcast rows are known to every subtask, as with Flink's broadcast state."""

    class Limits(tg.BroadcastProcessFunction):
        def open(self, context: tg.RuntimeContext) -> None:
            self.limits = context.broadcast_state(tg.MapState("limits", str, int))

        def process(self, row: Row, context: Any) -> Iterator[Row]:
            yield {"k": row["k"], "total": row["v"]}

        def process_broadcast(self, row: Row, context: Any) -> Iterator[Row]:
            self.limits.put(row["k"], row["w"])
            yield {"k": row["k"], "total": -row["w"]}

    found = _run(lambda s, o: s.connect(o.broadcast()).process(Limits(), schema=SCHEMA))
    assert _sorted(found) == _sorted(
        [{"k": r["k"], "total": r["v"]} for r in ROWS] + [{"k": r["k"], "total": -r["w"]} for r in OTHER]
    )


def test_a_table_is_looked_up(tmp_path: Path) -> None:
    """Spark's stream-static join: each row meets the row of its key in a table at rest."""
    import pyarrow.parquet as pq

    names = [{"k": "a", "name": "ann"}, {"k": "b", "name": "bob"}]
    pq.write_table(pa.Table.from_pylist(names), tmp_path / "names.parquet")
    found = _run(lambda s, o: s.lookup_join(tmp_path / "names.parquet", on="k", how="inner"))
    by_key = {row["k"]: row["name"] for row in names}
    assert _sorted(found) == _sorted([{**row, "name": by_key[row["k"]]} for row in ROWS if row["k"] in by_key])


def _joined_by_bytewax(rows: list[tuple[int, int]], emit_mode: str) -> list[Row]:
    """`op.join` with `insert_mode="last"` for one key: rows are a side and a value."""
    values: list[int | None] = [None, None]
    found = []
    for side, value in rows:
        values[side] = value
        if emit_mode == "running" or None not in values:
            found.append({"k": "x", "v": values[0], "w": values[1]})
        if emit_mode == "complete" and None not in values:
            values = [None, None]
    return found


@pytest.mark.parametrize(("emit", "emit_mode"), [("complete", "complete"), ("always", "running")])
def test_the_join_of_bytewax_is_one_of_newest_rows(emit: Any, emit_mode: str) -> None:
    """Rows of the two inputs meet in any order, so it gives what Bytewax gives for one of these orders."""
    sides = ([1, 2, 3], [7, 8])
    with local(1) as env:
        lefts, rights = (
            env.from_batches(pa.table({"k": ["x"] * len(values), name: values}), splits=1)
            for name, values in zip("vw", sides, strict=True)
        )
        found = lefts.join_latest(rights, on="k", emit=emit).collect()
        env.execute("joins").wait("4min")
    orders = set(permutations([0] * len(sides[0]) + [1] * len(sides[1])))
    given = [
        _joined_by_bytewax(
            [(side, sides[side][order[:place].count(side)]) for place, side in enumerate(order)], emit_mode
        )
        for order in orders
    ]
    assert _sorted(found.to_arrow().to_pylist()) in [_sorted(rows) for rows in given]


def _spark_within_watermark(rows: list[tuple[str, int]], delay: int) -> list[tuple[str, int]]:
    """`dropDuplicatesWithinWatermark`, one row a micro-batch: a key is known until the watermark passes its expiry."""
    expires: dict[str, int] = {}
    watermark, newest, found = 0, 0, []
    for key, time in rows:
        if time < watermark:
            continue
        if key not in expires:
            found.append((key, time))
            expires[key] = time + delay
        newest = max(newest, time)
        watermark = max(watermark, newest - delay)
        expires = {known: until for known, until in expires.items() if until > watermark}
    return found


def _within(rows: list[tuple[str, int]], ttl: int) -> list[tuple[str, int]]:
    with local(1, 1) as env:
        table = pa.table({"k": [key for key, _ in rows], "t": [time for _, time in rows]})
        stream = env.from_batches(table, timestamp="t", max_out_of_orderness=ttl)
        found = stream.key_by("k").deduplicate(ttl=ttl).collect()
        env.execute("duplicates").wait("4min")
    return [(row["k"], row["t"]) for row in found.to_arrow().to_pylist()]


def test_duplicates_within_the_delay_are_dropped_as_spark_drops_them() -> None:
    """Rows whose duplicates come within the delay, or long after it."""
    rows = [
        ("a", 0),
        ("b", 1_000),
        ("a", 5_000),
        ("c", 8_000),
        ("b", 9_000),
        ("d", 38_000),
        ("c", 40_000),
        ("a", 41_000),
    ]
    assert _within(rows, 10_000) == _spark_within_watermark(rows, 10_000)


def test_duplicates_after_the_delay_differ_from_spark() -> None:
    """Spark goes by its watermark, and drops a duplicate that comes between the delay and twice the delay."""
    rows = [("a", 0), ("a", 15_000)]
    assert _spark_within_watermark(rows, 10_000) == [("a", 0)]
    assert _within(rows, 10_000) == rows
