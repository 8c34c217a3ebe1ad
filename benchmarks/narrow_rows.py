"""Rows a second and core of narrow rows: q1 and q2 of Nexmark over four numbers, and tumbling windows of many keys.

    .venv/bin/python benchmarks/narrow_rows.py [--rows 20000000] [--rounds 3] [--interval 1s] [--runtimes local,ray]

`q1` and `q2` are the programs of Nexmark over auction, bidder, price and time; `W3` counts and sums in tumbling windows
of ten seconds over 100,000 keys. Rows are made once in memory, and handed out again and again with later times, so what
the source costs stands in a line of its own (`source`). A checkpoint each `--interval`. How it is measured on either
runtime says `rates.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl
import pyarrow as pa
from common import describe_machine
from nexmark.queries.stateless import EURO, euros
from rates import RUNTIMES, Program, Settings, measure_all, parser_of
from ray import cloudpickle
from rich.console import Console

import tidegate as tg

SCHEMA = pa.schema(
    [("auction", pa.int64()), ("bidder", pa.int64()), ("price", pa.int64()), ("date_time", pa.timestamp("ms"))]
)
# Processes of a job cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
KEYS = 100_000
BLOCK = 1 << 17
ROWS_A_MS = 1_000
"""Of event time: a window of ten seconds has ten million rows."""


@dataclass(frozen=True)
class Narrow:
    """`rows` rows in each of two splits."""

    rows: int
    unbounded: Literal[True] = True

    @property
    def schema(self) -> pa.Schema:
        """Four numbers."""
        return SCHEMA

    def splits(self) -> Sequence[tg.SourceSplit]:
        """Two, which are read side by side."""
        return [tg.SourceSplit(f"part-{part}", str(part).encode(), self.rows) for part in range(2)]

    def reader(self) -> tg.SourceReader:
        """A reader for one subtask."""
        return _Reader()


class _Reader:
    def __init__(self) -> None:
        chance = np.random.default_rng(1)
        self._columns = [
            pa.array(chance.integers(0, KEYS, BLOCK)),
            pa.array(chance.integers(0, 1_000, BLOCK)),
            pa.array(chance.integers(100, 1_000_000, BLOCK)),
        ]
        self._times = np.arange(BLOCK, dtype=np.int64) // (ROWS_A_MS // 2)

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """The block again, as far as it goes, at the time of its place in the split."""
        start = offset % BLOCK
        rows = min(rows_max, BLOCK - start, split.rows - offset)
        if not rows:
            return tg.ReadResult(None, offset, at_end=True)
        times = self._times[start : start + rows] + (offset - start) // (ROWS_A_MS // 2)
        columns = [column.slice(start, rows) for column in self._columns]
        batch = pa.RecordBatch.from_arrays([*columns, pa.array(times).view(pa.timestamp("ms"))], schema=SCHEMA)
        return tg.ReadResult(batch, offset + rows, at_end=offset + rows == split.rows)

    def close(self) -> None:
        """Nothing to let go of."""


def _q1(rows: tg.Stream) -> tg.Stream:
    return rows.select("auction", "bidder", euros().cast(EURO).alias("price"), "date_time")


def _q2(rows: tg.Stream) -> tg.Stream:
    return rows.filter(pl.col("auction") % 123 == 0).select("auction", "price")


def _windows(rows: tg.Stream) -> tg.Stream:
    return rows.key_by("auction").window(tg.Tumbling("10s")).aggregate(n=tg.count(), total=tg.sum("price"))


STEPS: dict[str, Callable[[tg.Stream], tg.Stream]] = {
    "source": lambda rows: rows,
    "q1": _q1,
    "q2": _q2,
    "W3": _windows,
}


def program(step: Callable[[tg.Stream], tg.Stream]) -> Program:
    """The step behind the source."""
    return lambda env, rows: step(env.from_source(Narrow(rows // 2)).assign_timestamps("date_time"))


def main() -> int:
    """Measure."""
    parser = parser_of(__doc__, STEPS, ".bench/narrow", 20_000_000)
    arguments = parser.parse_args()
    console = Console()
    describe_machine(console)
    names, runtimes = arguments.programs.split(","), arguments.runtimes.split(",")
    if unknown := [name for name in (*names, *runtimes) if name not in (*STEPS, *RUNTIMES)]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join((*STEPS, *RUNTIMES))}")
    settings = Settings(arguments.rows, arguments.interval, arguments.folder.resolve())
    figures: dict[str, float] = {}
    for runtime in runtimes:
        programs = {name: (program(STEPS[name]), settings) for name in names}
        figures |= measure_all(programs, runtime, arguments.rounds, console)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
