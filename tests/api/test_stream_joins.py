"""Joins of streams, as programs write them: whole local jobs, and what is refused when the program is written."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg

ORDERS = pa.table({"k": [i % 7 for i in range(300)], "t": [10 * i for i in range(300)], "v": list(range(300))})
BILLS = pa.table({"id": [i % 5 for i in range(200)], "t": [15 * i for i in range(200)], "v": list(range(200))})


def _streams(env: tg.StreamEnvironment) -> tuple[tg.Stream, tg.Stream]:
    orders = env.from_batches(ORDERS, timestamp="t", max_out_of_orderness=5_000, uid="orders", splits=3)
    bills = env.from_batches(BILLS, timestamp="t", max_out_of_orderness=5_000, uid="bills", splits=2)
    return orders, bills


def _rows(table: pa.Table) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.values()) for row in table.to_pylist())


@pytest.mark.parametrize("parallelism", [1, 3])
def test_window_join_of_a_job(parallelism: int) -> None:
    """Rows of both streams meet by key and window, whatever the keys are called; a window may follow."""
    with tg.StreamEnvironment.local(parallelism=parallelism) as env:
        orders, bills = _streams(env)
        joined = orders.join(bills, on=[("k", "id")], window=tg.Tumbling("1s"))
        rows = joined.collect()
        counted = joined.key_by("k").window(tg.Tumbling("1s")).aggregate(n=tg.count()).collect()
        env.execute("joins").wait()
    expected = Counter(
        (o["k"], o["t"], o["v"], b["t"], b["v"], o["t"] // 1000 * 1000, o["t"] // 1000 * 1000 + 1000)
        for o in ORDERS.to_pylist()
        for b in BILLS.to_pylist()
        if o["k"] == b["id"] and o["t"] // 1000 == b["t"] // 1000
    )
    assert rows.to_arrow().schema.names == ["k", "t", "v", "t_right", "v_right", "window_start", "window_end"]
    assert _rows(rows.to_arrow()) == expected
    assert sum(row["n"] for row in counted.to_arrow().to_pylist()) == expected.total()


def test_interval_join_of_a_job() -> None:
    """Pairs of both streams whose times are near; bounds are durations, which may be negative."""
    with tg.StreamEnvironment.local(parallelism=2) as env:
        orders, bills = _streams(env)
        rows = orders.interval_join(bills, on=[("k", "id")], between=("-200ms", 300)).collect()
        env.execute("joins").wait()
    expected = Counter(
        (o["k"], o["t"], o["v"], b["t"], b["v"])
        for o in ORDERS.to_pylist()
        for b in BILLS.to_pylist()
        if o["k"] == b["id"] and -200 <= b["t"] - o["t"] <= 300
    )
    assert _rows(rows.to_arrow()) == expected


@pytest.mark.parametrize("emit", ["complete", "always"])
def test_newest_rows_are_joined(emit: Any) -> None:
    """Keys that both sides have come once as a pair; with "always" each row comes, the first one of a key alone."""
    left = pa.table({"k": [1, 2, None, 4], "v": ["a", "b", "c", "d"]})
    right = pa.table({"id": [4, 1, None, 9], "v": ["w", "x", "y", "z"]})
    with tg.StreamEnvironment.local(2, options=tg.DataPlaneOptions(source_rows_max=1)) as env:
        sides = [env.from_batches(side, splits=2, uid=uid) for side, uid in ((left, "left"), (right, "right"))]
        found = sides[0].join_latest(sides[1], on=[("k", "id")], emit=emit, suffix="_2").collect()
        env.execute("newest").wait("4min")
    table = found.to_arrow()
    assert table.schema.names == ["k", "v", "v_2"]
    rows = _rows(table)
    pairs = sorted(row for row in rows if None not in row)
    assert pairs == [(1, "a", "x"), (4, "d", "w")]
    alone = [row for row in rows if row not in pairs]
    if emit == "complete":
        assert alone == []
    else:
        lonely = {(2, "b", None), (9, None, "z"), (None, "c", None), (None, None, "y")}
        assert lonely < set(alone)
        assert len(alone) == 6


def test_what_cannot_be_joined_is_refused() -> None:
    """Streams without event time or known columns, of other environments, and a wrong on=."""
    with tg.StreamEnvironment.local() as env:
        orders, bills = _streams(env)
        untimed = env.from_batches(BILLS)
        unknown = orders.map_batches(lambda batch: batch)
        window = tg.Tumbling("1s")
        with pytest.raises(tg.ConfigurationError, match="the right stream has no event time"):
            orders.join(untimed, on="v", window=window)
        with pytest.raises(tg.ConfigurationError, match="columns of the left stream are not known before"):
            unknown.interval_join(bills, on="v", between=(0, 1))
        with pytest.raises(tg.ConfigurationError, match="names of columns, or pairs"):
            orders.join(bills, on=[("k", "id", "v")], window=window)  # type: ignore[list-item]
        with pytest.raises(tg.ConfigurationError, match="on='id': the left stream has no column 'id'"):
            orders.join(bills, on="id", window=window)
        with pytest.raises(tg.ConfigurationError, match=r"a pair in a list: on=\[\('k', 'id'\)\]"):
            orders.join(bills, on=("k", "id"), window=window)
        with pytest.raises(tg.ConfigurationError, match="belong to different environments"):
            orders.join(_streams(tg.StreamEnvironment.local())[1], on="v", window=window)
