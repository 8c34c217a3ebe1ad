"""A program of exact distinct counts whose checkpoints are kept in `old_checkpoints/distinct/`, of both forms.

At first each condition had a table of values of its own (`DistinctRows`); now conditions share one (`DistinctViews`).
A file is made as those of `old_program.py` are, by `python -m old_distinct_program COMMIT FOLDER`.
Never change what the program keeps: add another one beside it.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

import local_jobs
import polars as pl
from local_jobs import NO_RESTART, GatedSource, config, local, opening

import tidegate as tg

ROWS = 60
FIRST, SECOND = 20, 40
"""Rows of each split before the first checkpoint, and before the second."""
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


def write(root: Path, backend: str) -> None:
    """A job that takes two checkpoints, the second on top of the first, and is cancelled: what it leaves."""
    work = tempfile.TemporaryDirectory()
    with work, opening(GatedSource(ROWS, ROWS, gates=[FIRST, SECOND])) as source, local(2, 7) as env:
        program(env, source)
        settings = {"backend_directory": work.name} if backend == "rocksdb" else {}
        kept = config(root, backend=backend, incremental=True, inline_bytes=1 << 20, **settings)
        job = env.execute("old job", checkpoints=kept, restart=NO_RESTART)
        for gate in (FIRST, SECOND):
            source.await_gate(gate)
            job.trigger_checkpoint("10min")
            if gate == FIRST:
                source.open_gate(gate)
        job.cancel()
        assert job.wait("10min") == "cancelled"


def main(commit: str, folder: str) -> None:
    """One archive for each backend."""
    local_jobs.WAIT_S = 600  # kernels may have to be compiled first
    for backend in BACKENDS:
        with tempfile.TemporaryDirectory() as root:
            write(Path(root), backend)
            with zipfile.ZipFile(Path(folder, f"{commit}-{backend}.zip"), "w", zipfile.ZIP_DEFLATED) as archive:
                for path in sorted(Path(root).rglob("*")):
                    if path.is_file():
                        archive.write(path, path.relative_to(root))


if __name__ == "__main__":
    main(*sys.argv[1:])
