"""A program of exact distinct counts whose checkpoints are kept in `old_checkpoints/distinct/`, of both forms.

At first each condition had a table of values of its own (`DistinctRows`); now conditions share one (`DistinctViews`).
A file is made as those of `old_program.py` are, by `python -m old_distinct_program COMMIT FOLDER`.
Never change what the program keeps: add another one beside it.
"""

from __future__ import annotations

import sys

import polars as pl
from local_jobs import GatedSource
from old_archives import write_archives

import tidegate as tg

BACKENDS = ("columnar", "rocksdb")


def program(env: tg.StreamEnvironment, source: GatedSource) -> dict[str, tg.CollectedRows]:
    """Distinct values of each key by condition, with and without names of operators, and of everything."""
    rows = env.from_source(source, uid="source")
    counts = tg.count_distinct(pl.col("x") % 7)
    figures = {
        "n": tg.count(),
        "all": counts,
        "low": counts.where(pl.col("x") < 30),
        "odd": counts.where(pl.col("x") % 2 == 1),
        "again": counts.where(pl.col("x") < 30),
        "others": tg.count_distinct("x").where(pl.col("x") % 3 == 0),
    }
    named = rows.key_by("k").aggregate(emit="final", uid="figures", **figures)
    columns = rows.with_columns(lo=pl.col("x") < 30, od=pl.col("x") % 2 == 1, uid="columns")
    values = tg.count_distinct("x")
    by_column = {"all": values, "low": values.where("lo"), "odd": values.where("od")}
    unnamed = columns.key_by("k").aggregate(emit="final", **by_column).select("k", "all", "low", "odd")
    everything = rows.aggregate(emit="final", uid="everything", **figures)
    return {
        "named": named.collect(uid="collected"),
        "unnamed": unnamed.collect(uid="collected without a name"),
        "everything": everything.collect(),
    }


if __name__ == "__main__":
    write_archives(program, BACKENDS, *sys.argv[1:], inline_bytes=1 << 20)
