"""Programs in SQL under faults and rescales: the rows that polars' own SQL gives for the same tables."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache, partial
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pipelines import HARSH
from rescaled_runs import WIDTHS, run_and_rescale, short_checkpoints

import tidegate as tg
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.tables.table_files import read_table
from tidegate.testing.report import report_of
from tidegate.testing.runtime.run import Action, Simulation

TABLE = "sim://result"
FAULTS = replace(HARSH, crash=0.04, slow=0.0, storage=0.03, delay="0ms..20ms", duration="5s")
SEEDS = 8
ROWS = 40
WINDOW_S = 20


def _at(seconds: int) -> datetime:
    return datetime(2024, 3, 1) + timedelta(seconds=seconds)


_CHANCE = random.Random(5)
BIDS = pa.table(
    {
        "auction": [_CHANCE.randrange(6) for _ in range(ROWS)],
        "price": [*_CHANCE.sample(range(1, 200), ROWS - 1), None],
        "bidder": [_CHANCE.choice(["ann", "bob", "cy", None]) for _ in range(ROWS)],
        "ts": [_at(2 * n + _CHANCE.randrange(12)) for n in range(ROWS)],
    }
)
AUCTIONS = pa.table(
    {"id": [*range(8)], "seller": list("XYXZYXWZ"), "opened": [_at(_CHANCE.randrange(100)) for _ in range(8)]}
)
SELLERS = pa.table(
    {"seller": ["X", "Y", "Z"], "rank": pa.array([3, 2, 1], pa.uint32()), "city": ["Oslo", "Rome", "Bonn"]}
)
PARTS = pa.table({"bidder": ["ann", "ann", "bob", "cy"], "part": ["a", "", "bob", "cy"]})
"""Yields the gaps between the n of each bidder."""
MANY = "TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '20' SECONDS))"


@dataclass(frozen=True)
class Program:
    """A query with the arguments of `sql`, keys for an upserted table, and the same query for polars.

    For polars, the rows of `bids` have the bounds of their windows in the columns `ws` and `we`.
    """

    query: str
    same: str | None = None
    keys: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


UPDATES: dict[str, Any] = {"emit": "update"}
PROGRAMS = {
    "groups": Program(
        "SELECT auction, COUNT(*) AS n, SUM(price) AS total, COUNT(DISTINCT bidder) AS bidders FROM bids "
        "WHERE price IS NULL OR price > 20 GROUP BY auction",
        keys=("auction",),
        options=UPDATES,
    ),
    "groups of a left join": Program(
        "SELECT a.seller, COUNT(b.price) AS n, MAX(b.price) AS most FROM auctions AS a LEFT JOIN bids AS b "
        "ON a.id = b.auction GROUP BY a.seller",
        keys=("seller",),
    ),
    "three joined by WHERE": Program(
        "SELECT b.price, a.opened, s.city FROM bids AS b, auctions AS a, sellers AS s "
        "WHERE b.auction = a.id AND a.seller = s.seller AND s.rank > 1 AND b.bidder <> 'cy'",
    ),
    "windows by their bounds": Program(
        f"SELECT auction, window_end AS we, COUNT(*) AS n, MIN(price) AS low FROM {MANY} "
        "WHERE window_start >= '2024-03-01 00:00:20' AND bidder IS NOT NULL GROUP BY auction, window_start, window_end",
        "SELECT auction, we, COUNT(*) AS n, MIN(price) AS low FROM bids "
        "WHERE ws >= CAST('2024-03-01 00:00:20' AS TIMESTAMP) AND bidder IS NOT NULL GROUP BY auction, we",
    ),
    "the first rows of windows": Program(
        "SELECT price, window_end AS we, rn FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY window_start, window_end "
        f"ORDER BY price DESC) AS rn FROM {MANY} WHERE price IS NOT NULL) WHERE rn <= 2",
        "SELECT price, we, rn FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY ws ORDER BY price DESC) AS rn FROM bids "
        "WHERE price IS NOT NULL) WHERE rn <= 2",
    ),
    "an interval, and each row once": Program(
        "SELECT b.auction FROM bids AS b JOIN auctions AS a ON b.auction = a.id "
        "AND b.ts BETWEEN a.opened - INTERVAL '20' SECONDS AND a.opened + INTERVAL '5' SECONDS "
        "UNION SELECT id + 100 AS auction FROM auctions WHERE seller <> 'X'",
        "SELECT b.auction FROM bids AS b JOIN auctions AS a ON b.auction = a.id "
        "WHERE b.ts >= a.from_ AND b.ts <= a.to_ UNION SELECT id + 100 AS auction FROM auctions WHERE seller <> 'X'",
    ),
    "the first rows of an order": Program(
        "SELECT price, auction, bidder FROM bids WHERE price IS NOT NULL ORDER BY price DESC LIMIT 4",
        keys=("price",),
    ),
    "elements of a list, and a value of JSON": Program(
        "SELECT auction, CAST(get_json_object(j, '$.p') AS BIGINT) AS p, part FROM (SELECT auction, bidder, "
        "CONCAT('{\"p\": ', CAST(price AS STRING), '}') AS j FROM bids WHERE price > 20) "
        "LATERAL VIEW OUTER explode(split(bidder, 'n+')) parts AS part",
        "SELECT auction, price AS p, part FROM bids JOIN parts ON bids.bidder = parts.bidder WHERE price > 20 "
        "UNION ALL SELECT auction, price AS p, bidder AS part FROM bids WHERE price > 20 AND bidder IS NULL",
    ),
}


@cache
def expected(name: str) -> list[tuple[Any, ...]]:
    """Returns the rows that polars computes."""
    start = pl.col("ts").dt.truncate(f"{WINDOW_S}s")
    bids = pl.DataFrame(BIDS).with_columns(ws=start, we=start.dt.offset_by(f"{WINDOW_S}s"))
    opened = pl.col("opened")
    auctions = pl.DataFrame(AUCTIONS).with_columns(from_=opened.dt.offset_by("-20s"), to_=opened.dt.offset_by("5s"))
    tables = {"bids": bids, "auctions": auctions, "sellers": pl.DataFrame(SELLERS), "parts": pl.DataFrame(PARTS)}
    context = pl.SQLContext(tables, eager=True)
    program = PROGRAMS[name]
    return sorted(context.execute(program.same or program.query).rows(), key=repr)


def _build(name: str, env: tg.StreamEnvironment) -> None:
    program = PROGRAMS[name]
    for view, table, time, splits in (("bids", BIDS, "ts", 3), ("auctions", AUCTIONS, "opened", 2)):
        stream = env.from_batches(table, timestamp=time, max_out_of_orderness="10min", splits=splits, uid=view)
        env.create_temporary_view(view, stream)
    env.create_temporary_view("sellers", SELLERS)
    result = env.sql(program.query, uid="query", **program.options)
    if program.keys:
        result.to_table(TABLE, mode="upsert", keys=list(program.keys))
    else:
        result.to_table(TABLE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_query_gives_the_same_under_faults(seed: int) -> None:
    """Whatever crashes, and at another parallelism after a savepoint that comes in the midst of it."""
    chance = random.Random(seed)
    name = list(PROGRAMS)[seed % len(PROGRAMS)]
    widths = chance.sample(WIDTHS, 2)
    checkpoints = short_checkpoints(unaligned=chance.random() < 0.5)
    stop = Action(chance.randrange(50, 500), SnapshotKind.SUSPEND)
    simulation = Simulation(seed, FAULTS)
    runs = run_and_rescale(simulation, partial(_build, name), widths, checkpoints, stop, rows_max=1)
    violation = runs[-1].violation
    if violation is None:
        found = sorted(pl.DataFrame(read_table(simulation.open_store(TABLE))).rows(), key=repr)
        violation = None if found == expected(name) != [] else f"{found} in place of {expected(name)}"
    report = report_of(seed, FAULTS, simulation, runs, violation)
    assert report.ok, f"{name}: {report}\n{report.sequence()}"
    assert runs[-1].status == "finished"
