"""What tests of SQL share: an environment with small views, and queries that run to their end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import polars as pl
import pyarrow as pa

import tidegate as tg

START = datetime(2024, 3, 1)


def at(seconds: float) -> datetime:
    """A moment."""
    return START + timedelta(seconds=seconds)


BIDS = pa.table(
    {
        "auction": [1, 2, 1, 2, 3, 1, 2, 4],
        "price": [10, 20, 30, 40, None, 30, 5, 7],
        "bidder": ["ann", "bob", "ann", None, "cy", "bob", "ann", "bob"],
        "ts": [at(s) for s in (1, 2, 12, 13, 21, 22, 27, 44)],
    }
)
AUCTIONS = pa.table(
    {
        "id": [1, 2, 3, 9],
        "seller": ["X", "Y", "X", "Z"],
        "opened": [at(s) for s in (0, 1, 15, 30)],
    }
)
SELLERS = pa.table({"seller": ["X", "Y"], "city": ["Oslo", "Kyiv"]})


@contextmanager
def environment() -> Iterator[tg.StreamEnvironment]:
    """Views `bids` and `auctions`, and `sellers`, a table; read in small batches by two subtasks."""
    with tg.StreamEnvironment.local(2, options=tg.DataPlaneOptions(source_rows_max=3)) as env:
        for name, table, time in (("bids", BIDS, "ts"), ("auctions", AUCTIONS, "opened")):
            stream = env.from_batches(table, timestamp=time, max_out_of_orderness="1h", splits=2, uid=name)
            env.create_temporary_view(name, stream)
        env.create_temporary_view("sellers", SELLERS)
        yield env


def result_of(query: str, **options: Any) -> pl.DataFrame:
    """What a query gives. Of changes, the rows that have not been taken back."""
    with environment() as env:
        rows = env.sql(query, **options).collect()
        assert env.execute("sql").wait("4min") == "finished"
    found = pl.DataFrame(rows.to_arrow())
    if "row_kind" not in found.columns:
        return found
    names = [name for name in found.columns if name != "row_kind"]
    comes = pl.when(pl.col("row_kind").is_in(["+I", "+U"])).then(1).otherwise(-1)
    counts = found.group_by(names).agg(comes.sum().alias("count of rows"))
    return counts.select(pl.exclude("count of rows").repeat_by("count of rows").explode())
