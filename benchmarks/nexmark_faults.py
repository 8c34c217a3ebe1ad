"""Queries of Nexmark in the simulator, with the faults of random jobs, stops and rescales.

    .venv/bin/python benchmarks/nexmark_faults.py [--queries q5,q7] [--seeds 0..1999] [--workers 2]

Each table must have the rows that polars computes, whatever crashes, and at any parallelism. Exit code 1 if one has
not, or an invariant of the protocol is broken. The last line of a violation says how to run its seed again.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import starmap
from pathlib import Path

from common import describe_machine
from rich.console import Console
from rich.table import Table

# Faults are drawn as for random jobs, which are in the folder of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from nexmark.faults import Outcome, run_seed
from nexmark.queries import QUERIES

GARBAGE = 50_000
"""So many objects more, and circles among them are looked for: 700 would cost a tenth of the time."""


@contextmanager
def outcomes(work: list[tuple[str, int]], workers: int) -> Iterator[Iterator[Outcome]]:
    """What came of all seeds, in order."""
    if workers == 1:
        _begin()
        yield starmap(run_seed, work)
        return
    # Spawned, not forked: a fork would copy locks that other threads of this process hold.
    with multiprocessing.get_context("spawn").Pool(workers, _begin) as pool:
        yield pool.imap(_run, work, 4)


def _run(work: tuple[str, int]) -> Outcome:
    found = run_seed(*work)
    report = found.report.without_history() if found.report.ok else found.report.portable()
    return Outcome(report, found.rescaled)


def _begin() -> None:
    """A simulation causes on purpose what tidegate warns of. It makes many objects and few circles of them."""
    logging.getLogger("tidegate").setLevel(logging.CRITICAL)
    gc.freeze()
    gc.set_threshold(GARBAGE)


def main() -> int:
    """Run all seeds of each query."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", default=",".join(QUERIES), help="names with commas between (default: all)")
    parser.add_argument("--seeds", default="0..99", help="a range FIRST..LAST, of each query (default 0..99)")
    parser.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    arguments = parser.parse_args()
    names = arguments.queries.split(",")
    if unknown := [name for name in names if name not in QUERIES]:
        parser.error(f"there is no query {', '.join(unknown)}; there are {', '.join(QUERIES)}")
    first, _, last = arguments.seeds.partition("..")
    seeds = range(int(first), int(last or first) + 1)
    console, violated = Console(), 0
    describe_machine(console)
    sums = {name: Counter[str]() for name in names}
    with outcomes([(name, seed) for name in names for seed in seeds], arguments.workers) as found:
        for number, outcome in enumerate(found):
            name, report = names[number // len(seeds)], outcome.report
            sums[name].update(
                seeds=1,
                violations=not report.ok,
                restarts=report.restarts,
                checkpoints=report.checkpoints,
                rescales=outcome.rescaled,
            )
            sums[name]["task crashes"] += report.crashes
            sums[name]["coordinator crashes"] += report.coordinator_crashes
            if not report.ok:
                violated += 1
                console.print(f"{name}: {report}", highlight=False, markup=False, soft_wrap=True)
                console.print(f"again: benchmarks/nexmark_faults.py --queries {name} --seeds {report.seed}")
            if (number + 1) % len(seeds) == 0:
                told = ", ".join(f"{count:,} {what}" for what, count in sums[name].items())
                console.print(f"{name}: {told}", highlight=False)
    columns = ("seeds", "violations", "rescales", "checkpoints", "restarts", "task crashes", "coordinator crashes")
    table = Table("query", *columns)
    for name, counts in sums.items():
        table.add_row(name, *(f"{counts[column]:,}" for column in columns))
    console.print(table)
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(main())
