"""What the limit on turns makes of a function with a fixed cost a call: rows a call, and rows a second.

A local job calls a function that sleeps for `--call-ms`, whatever it gets. For comparison a second job has no limit on
the time of its turns: `batch_rows` with a least that no batch reaches. The ratio of the two rates is what counts; with
turns that were cut in proportion to their time it fell below a thousandth within half a minute.

    .venv/bin/python benchmarks/fixed_cost.py --call-ms 100 --seconds 25
"""

from __future__ import annotations

import argparse
import sys
import time

import pyarrow as pa
from common import describe_machine
from rich.console import Console

import tidegate as tg

ROWS_A_READ = 262_144
BATCH = pa.record_batch({"x": pa.array(range(ROWS_A_READ), pa.int64())})


class Endless:
    """A source and its reader, of numbers without an end."""

    schema = BATCH.schema

    def splits(self) -> tuple[tg.SourceSplit, ...]:
        """One."""
        return (tg.SourceSplit("0", b""),)

    def reader(self) -> Endless:
        """Itself: there is nothing to open."""
        return self

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """As many rows as are wanted."""
        rows = min(rows_max, ROWS_A_READ)
        return tg.ReadResult(BATCH.slice(0, rows), offset + rows, at_end=False)

    def close(self) -> None:
        """Nothing is open."""


def measure(call_ms: float, seconds: float, batch_rows: tuple[int, int] | None) -> tuple[float, list[int]]:
    """Rows a second in the last fifth of a run, and the rows of every call."""
    calls: list[tuple[float, int]] = []

    def call(batch: pa.RecordBatch) -> None:
        time.sleep(call_ms / 1000)
        calls.append((time.monotonic(), batch.num_rows))

    with tg.StreamEnvironment.local() as env:
        env.from_source(Endless()).rebalance().map_batches(call, schema=BATCH.schema, batch_rows=batch_rows).collect()
        job = env.execute("fixed-cost")
        time.sleep(seconds)
        job.cancel()
        job.wait()
    since = calls[-1][0] - seconds / 5
    last = [rows for at, rows in calls if at > since]
    return sum(last) / (seconds / 5), [rows for _, rows in calls]


def main() -> int:
    """Both jobs. Exit code 1 if the limit costs more than a fifth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--call-ms", type=float, default=100.0, help="what a call takes (default 100)")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each job (default 25)")
    arguments = parser.parse_args()
    console = Console()
    describe_machine(console)
    limited, rows = measure(arguments.call_ms, arguments.seconds, None)
    whole, _ = measure(arguments.call_ms, arguments.seconds, (ROWS_A_READ, ROWS_A_READ))
    console.print(f"rows a call, the first ten: {rows[:10]}; the last ten: {rows[-10:]}", highlight=False)
    console.print(f"M rows/s: {limited / 1e6:.3f} with the limit, {whole / 1e6:.3f} in whole batches", highlight=False)
    console.print(f"ratio: {limited / whole:.4f}", highlight=False)
    return 0 if limited > 0.8 * whole else 1


if __name__ == "__main__":
    sys.exit(main())
