"""What one setting costs: a job again and again over the same rows, which differs in that setting alone.

    .venv/bin/python benchmarks/tuning.py [--settings interval backend] [--rounds 3]

Generated rows go over a keyed edge into a count and four sums for each key: 48 bytes of state, the key included. The
job runs on the local runtime, so all that it does is in this process, and its cost is told as time of the processor for
each row: other work on the machine changes that least. The variants of a setting take turns, round after round; ratios
are those within a round, to the first variant. Every result is checked. Exit code 1 if one is wrong.

    interval     checkpoints that are asked for, one for so many rows, each of which writes the whole state
    increments   a checkpoint writes all of it, what has changed, or changes are written all the time (changelog)
    compression  of state files
    backend      keyed state in columns in memory, or in RocksDB
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from common import ENDED, GeneratedSource, describe_machine
from rich.console import Console
from rich.table import Table

import tidegate as tg

ROWS, TOTALS = "rows", "totals"
PARALLELISM, PARTS, BATCH_ROWS = 2, 8, 65_536
POLL_S = 0.02
TABLE_CHARACTERS = 110
CHECKPOINTS = "checkpoints"
"""How many checkpoints a job takes, if its variant does not say it."""
DEFAULT_CHECKPOINTS = 8

Variant = Mapping[str, Any]

SETTINGS: Mapping[str, Mapping[str, Variant]] = {
    "interval": {"no checkpoint": {CHECKPOINTS: 0}, "8": {}, "32": {CHECKPOINTS: 32}},
    "increments": {"whole": {}, "incremental": {"incremental": True}, "changelog": {"changelog": True}},
    "compression": {"none": {}, "lz4": {"compression": "lz4"}, "zstd": {"compression": "zstd"}},
    "backend": {"columnar": {}, "rocksdb": {"backend": "rocksdb"}},
}


@dataclass(frozen=True)
class Seen:
    """What came of one job: processor time a row, in ns, and what each of its checkpoints has written, in bytes."""

    ns_a_row: float
    written_bytes: list[int]
    exact: bool

    @property
    def median_bytes(self) -> float:
        """What one checkpoint has written; 0 where there was none."""
        return statistics.median(self.written_bytes or [0])


def measure(variant: Variant, arguments: argparse.Namespace, folder: Path) -> Seen:
    """One job, from its submission to its end."""
    shutil.rmtree(folder, ignore_errors=True)
    settings = dict(variant)
    wanted = settings.pop(CHECKPOINTS, DEFAULT_CHECKPOINTS)
    with tg.StreamEnvironment.local(PARALLELISM, options=tg.DataPlaneOptions(source_rows_max=BATCH_ROWS)) as env:
        rows = env.from_source(GeneratedSource(arguments.rows, arguments.keys, PARTS), name=ROWS, uid=ROWS)
        sums: dict[str, Any] = {f"sum{number}": tg.sum("value") for number in range(4)}
        totals = rows.key_by("key").aggregate(emit="final", name=TOTALS, uid=TOTALS, n=tg.count(), **sums)
        table = totals.to_table(str(folder / "table"), uid="table")
        config = tg.CheckpointConfig(storage=str(folder / "state"), history=1_000, **settings)
        began_s = time.process_time()
        job = env.execute("tuned", checkpoints=config, progress="off")
        taken = 0
        while (progress := job.progress()).status not in ENDED:
            # All in the first three quarters: nobody takes one of a job that is about to end.
            due = arguments.rows * 3 * (taken + 1) // (4 * (wanted + 1))
            if taken < wanted and progress.rows_in.get(TOTALS, 0) >= due:
                taken += 1
                job.trigger_checkpoint()
            time.sleep(POLL_S)
        cpu_s = time.process_time() - began_s
        if progress.status != "finished":
            raise RuntimeError(f"the job {progress.status}: {progress.reason}")
        # The last checkpoint is the one that ends the job, which every variant has.
        records = [record for record in job.statistics().history if record.reason is None][:-1]
        exact = pc.sum(table.to_arrow()["n"]).as_py() == arguments.rows
    shutil.rmtree(folder, ignore_errors=True)
    return Seen(cpu_s / arguments.rows * 1e9, [record.incremental_bytes for record in records], exact)


def show(setting: str, rounds: Sequence[Mapping[str, Seen]], console: Console) -> None:
    """A line for each variant: medians of the rounds."""
    table = Table(title=f"{setting}: medians; x is the ratio to the first line, within a round (least to greatest)")
    for column in (setting, "CPU ns/row", "x", "chk", "MB each", "x"):
        table.add_column(column, justify="right", no_wrap=True)
    first = next(iter(rounds[0]))
    for name in rounds[0]:
        cpu = [seen[name].ns_a_row for seen in rounds]
        written = [seen[name].median_bytes for seen in rounds]
        table.add_row(
            name,
            f"{statistics.median(cpu):.0f}",
            _ratios(cpu, [seen[first].ns_a_row for seen in rounds]),
            f"{statistics.median(len(seen[name].written_bytes) for seen in rounds):.0f}",
            f"{statistics.median(written) / 1e6:.1f}",
            _ratios(written, [seen[first].median_bytes for seen in rounds]),
        )
    console.print(table)


def _ratios(values: Sequence[float], firsts: Sequence[float]) -> str:
    found = [value / first for value, first in zip(values, firsts, strict=True) if first]
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})" if found else "-"


def main() -> int:
    """All rounds of all settings. Exit code 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", choices=SETTINGS, nargs="+", default=list(SETTINGS), help="(default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="of each setting (default 3)")
    parser.add_argument("--rows", type=int, default=40_000_000, help="of the stream (default 40 million)")
    parser.add_argument("--keys", type=int, default=200_000, help="distinct keys (default 200,000)")
    parser.add_argument("--folder", type=Path, default=Path(".bench/tuning"), help="where files go")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else TABLE_CHARACTERS)
    describe_machine(console)
    folder = arguments.folder.resolve()
    exact = measure({}, arguments, folder).exact  # Kernels are loaded, which is paid once by a process.
    for setting in arguments.settings:
        rounds: list[dict[str, Seen]] = []
        for number in range(arguments.rounds):
            found = {}
            for name, variant in SETTINGS[setting].items():
                found[name] = seen = measure(variant, arguments, folder)
                exact = exact and seen.exact
                console.print(
                    f"{number + 1}: {setting} {name}: {seen.ns_a_row:.0f} ns of CPU a row, "
                    f"{[round(size / 1e6, 1) for size in seen.written_bytes]} MB, {'exact' if seen.exact else 'WRONG'}",
                    highlight=False,
                    soft_wrap=True,
                )
            rounds.append(found)
        show(setting, rounds, console)
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
