"""A program with expressions wherever a column may stand, and state of any width; and what it must write."""

from __future__ import annotations

from typing import Any

import polars as pl
import pyarrow as pa
from user_functions import Product

import tidegate as tg

ROWS = pa.table(
    {
        "k": [number * 7 % 6 for number in range(600)],
        "p": [number / 4 for number in range(600)],
        "s": [["b", "aa", None, "c"][number * 5 % 4] for number in range(600)],
    }
)
KEY = "half"


def totals(env: tg.StreamEnvironment, url: str, product: Product | None = None) -> tg.OutputTable:
    """Running aggregates, upserted: keys, inputs, conditions, orders and what is selected are expressions."""
    rows = env.from_batches(ROWS, splits=4, uid="rows", parallelism=2).select("k", "s", price=pl.col("p") * 4, uid="x")
    keyed = rows.key_by((pl.col("k") % 3).alias(KEY))
    found = keyed.aggregate(
        n=tg.count().where(pl.col("price") % 2 == 0),
        twice=tg.sum(pl.col("price") * 2),
        least=tg.min(pl.col("s") + "!"),
        dearest=tg.arg_max(pl.col("s").fill_null("none"), by=pl.col("price") + 1),
        prices=tg.collect_list(pl.col("price") + 1, limit=10_000),
        product=tg.udaf(product or Product(), (pl.col("k") + 1).alias("i")),
        uid="totals",
        parallelism=2,
    )
    shown = found.with_columns(prices=pl.col("prices").list.sum(), uid="shown", parallelism=2)
    return shown.to_table(url, mode="upsert", keys=[KEY], uid="table", parallelism=2)


def expected() -> list[dict[str, Any]]:
    """The same by polars."""
    price = pl.col("p") * 4
    found = (
        pl.DataFrame(ROWS)
        .group_by((pl.col("k") % 3).alias(KEY))
        .agg(
            n=(price % 2 == 0).sum().cast(pl.Int64),
            twice=(price * 2).sum(),
            least=(pl.col("s") + "!").min(),
            dearest=pl.col("s").fill_null("none").sort_by(price).last(),
            prices=(price + 1).sum(),
            product=pl.col("k"),
        )
        .sort(KEY)
    )
    return [{**row, "product": Product().of_rows([{"i": k + 1} for k in row["product"]])} for row in found.to_dicts()]


def written(table: tg.OutputTable) -> list[dict[str, Any]]:
    """What the table shows, by key."""
    found: list[dict[str, Any]] = table.to_polars().sort(KEY).to_dicts()
    return found
