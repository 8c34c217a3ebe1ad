"""What a sliding or cumulating window that ends costs: with one key and with many, with and without rows in between.

Processor time of a local job, divided by the number of rows that come out. A short job of the same kind runs before, so
that imports and compiled kernels do not count. `apply` over the same windows is shown beside it.
"""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa
from common import describe_machine
from rich.console import Console

import tidegate as tg

CASES = (("one key", 1, None), ("one key, a row a second", 1, 1_000), ("50 keys", 50, None))
SPECS = (tg.Sliding("1h", "1s"), tg.Cumulating("1s", "1h"))


def rows(keys: int, every_ms: int | None) -> pa.Table:
    """Two rows of each key, hours apart, or a row of each key at each step of two hours."""
    times = [0, 10_000_000] if every_ms is None else range(0, 7_200_000, every_ms)
    names = np.array([f"key-{number}" for number in range(keys)])
    return pa.table({"k": np.tile(names, len(times)), "ts": np.repeat(list(times), keys)})


def measured(spec: tg.Sliding | tg.Cumulating, how: str, data: pa.Table, name: str) -> tuple[int, float]:
    """How many rows of windows came out, and the milliseconds of processor time of each."""
    begin = time.process_time()
    options = tg.DataPlaneOptions(source_rows_max=1_000)
    with tg.StreamEnvironment.local(1, options=options) as env:
        windows = env.from_batches(data, timestamp="ts", splits=1).key_by("k").window(spec)
        if how == "aggregate":
            out = windows.aggregate(n=tg.count()).collect()
        else:
            out = windows.apply(lambda r: {"n": r.num_rows}, schema=pa.schema({"n": pa.int64()})).collect()
        env.execute(name, progress="off").wait()
        found = out.to_arrow().num_rows
    return found, 1_000 * (time.process_time() - begin) / found


def main() -> None:
    """Print one line for each case: the better of two runs, after a short one that loads kernels."""
    console = Console()
    describe_machine(console)
    for spec in SPECS:
        for title, keys, every_ms in CASES:
            data = rows(keys, every_ms)
            for how in ("aggregate", "apply"):
                measured(spec, how, rows(1, None), "warm")
                runs = [measured(spec, how, data, f"firing-{run}") for run in range(2)]
                cost_ms = min(cost for _, cost in runs)
                console.print(f"{spec} {how:9} {title:24} {runs[0][0]:8,} windows, {cost_ms:.3f} ms each")


if __name__ == "__main__":
    main()
