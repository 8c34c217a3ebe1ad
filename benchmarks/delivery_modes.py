"""What a failure does to rows in the two modes: exactly once, and at least once.

    python benchmarks/delivery_modes.py [--runs 5] [--kills 3] [--seed 1]

A keyed job on Ray whose second step is slower than its source, so that rows wait in every channel: barriers of one
checkpoint then arrive at different times. With exactly-once the channels whose barrier has come wait for the others;
with at-least-once they do not, so rows after the barrier are in the state already when they are read again after a
failure. The job is run with both modes, over the same rows, and at `--kills` random moments one or two of its task
processes are killed (SIGKILL), as in `exactly_once.py`.

Counted are rows that are missing or too many: in a table that every row goes into, and in the counts that the keyed
state holds at the end. Exactly-once must have none of both, at-least-once none that is missing; exit code 1 otherwise,
or if a run ended before its kills.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pyarrow as pa
from common import GeneratedSource, describe_machine, local_ray
from exactly_once import PARALLELISM, SOURCE, Chaos, Outcome
from rich.console import Console
from rich.table import Table

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayRuntime
from tidegate.actors.task.output_gate import BufferLimits

MODES = ("exactly_once", "at_least_once")
INTERVAL = "200ms"
QUEUE_BYTES = 32 * 1024


@dataclass(frozen=True)
class Slow:
    """Passes batches on, and takes so long a row."""

    row_s: float

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The same batch, later."""
        time.sleep(self.row_s * batch.num_rows)
        return batch


@dataclass(frozen=True)
class Counts:
    """One run. Rows that are not as often in the result as in the input; `kept`: by the counts of the keyed state."""

    outcome: Outcome
    missing: int = 0
    duplicates: int = 0
    kept_missing: int = 0
    kept_duplicates: int = 0
    problem: str | None = None


def one_run(mode: str, number: int, arguments: argparse.Namespace, folder: Path) -> Counts:
    """One job, its kills, and what is in its tables."""
    source = GeneratedSource(arguments.rows, arguments.keys, parts=2 * PARALLELISM)
    # The same moments and victims are drawn for both modes.
    rng = random.Random(f"{arguments.seed}/{number}")
    runtime = RayRuntime(standbys=2)
    # Short queues: checkpoints complete often, although each of their barriers waits in one.
    limits = BufferLimits(credit_bytes=QUEUE_BYTES, queue_bytes_max=QUEUE_BYTES)
    options = tg.DataPlaneOptions(limits, source_rows_max=arguments.batch_rows)
    env = tg.StreamEnvironment(runtime, PARALLELISM, options=options)
    rows = env.from_source(source, name=SOURCE, uid=SOURCE)
    slow = Slow(PARALLELISM / arguments.rows_a_second)
    passed = rows._by_keys(("key",)).map_batches(slow, schema=source.schema, name="slow", uid="slow")
    table = passed.to_table(str(folder / "rows"), uid="rows-table")
    counted = passed.key_by("key").aggregate(emit="final", name="counts", uid="counts", n=tg.count())
    counts = counted.to_table(str(folder / "counts"), uid="counts-table")
    submission = env.plan(
        f"{mode.replace('_', '-')}-{number}",
        checkpoints=tg.CheckpointConfig.model_validate(
            {"interval": INTERVAL, "mode": mode, "storage": str(folder / "checkpoints")}
        ),
        restart=tg.RestartStrategy.fixed_delay(attempts=1_000, delay=0),
    )
    outcome = Outcome()
    started = time.monotonic()
    try:
        chaos = Chaos(
            runtime.submit(submission),
            rng,
            arguments.rows // (arguments.kills + 1),
            started + arguments.timeout_s,
            outcome,
        )
        chaos.run(arguments.kills, coordinator=False)
    except (TimeoutError, tg.TidegateError) as error:
        return Counts(outcome, problem=f"{type(error).__name__}: {error}")
    finally:
        runtime.stop()
        outcome.seconds = time.monotonic() - started
    if outcome.end is None or outcome.end.status != "finished":
        return Counts(outcome, problem=f"the job did not finish: {outcome.end}")
    times = pl.DataFrame(table.to_arrow()).get_column("id").value_counts().get_column("count")
    expected = pl.DataFrame(source.batch(0, source.rows)).group_by("key").len("expected")
    kept = expected.join(pl.DataFrame(counts.to_arrow()), on="key", how="full", coalesce=True)
    too_many = kept.select(pl.col("n").fill_null(0).cast(pl.Int64) - pl.col("expected").fill_null(0).cast(pl.Int64))
    difference = too_many.get_column("n")
    return Counts(
        outcome,
        missing=source.rows - len(times),
        duplicates=int((times - 1).sum()),
        kept_missing=-int(difference.clip(upper_bound=0).sum()),
        kept_duplicates=int(difference.clip(lower_bound=0).sum()),
    )


def show(results: dict[str, list[Counts]], rows: int, console: Console) -> None:
    """A line for each mode: sums over its runs."""
    table = Table(title=f"rows after kills, of {rows:,} rows a run")
    columns = ("mode", "runs", "killed", "restarts", "checkpoints", "missing", "twice", "in state: missing", "twice")
    for column in (*columns, "share"):
        table.add_column(column, justify="right", no_wrap=True)
    for mode, runs in results.items():
        finished = [run.outcome.end for run in runs if run.outcome.end is not None]
        duplicates = sum(run.duplicates for run in runs)
        table.add_row(
            mode,
            str(len(runs)),
            str(sum(len(run.outcome.kills) for run in runs)),
            str(sum(end.restarts for end in finished)),
            str(sum(end.completed_checkpoints for end in finished)),
            str(sum(run.missing for run in runs)),
            str(duplicates),
            str(sum(run.kept_missing for run in runs)),
            str(sum(run.kept_duplicates for run in runs)),
            f"{duplicates / (rows * len(runs)):.3%}",
        )
    console.print(table)


def main() -> int:
    """All runs of both modes, taking turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each mode (default 5)")
    parser.add_argument("--kills", type=int, default=3, help="moments at which tasks are killed, a run (default 3)")
    parser.add_argument("--seed", type=int, default=1, help="decides moments and victims (default 1)")
    parser.add_argument("--rows", type=int, default=200_000, help="rows of each run (default 200,000)")
    parser.add_argument("--rows-a-second", type=float, default=40_000, help="of the slow step (default 40,000)")
    parser.add_argument("--keys", type=int, default=1_009, help="distinct keys (default 1,009)")
    parser.add_argument("--batch-rows", type=int, default=500, help="rows of a batch of the source (default 500)")
    parser.add_argument("--timeout-s", type=float, default=180.0, help="limit of one run in seconds (default 180)")
    parser.add_argument("--folder", type=Path, default=Path(".bench/delivery-modes"), help="where files go")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    describe_machine(console)
    results: dict[str, list[Counts]] = {mode: [] for mode in MODES}
    with local_ray():
        for number in range(1, arguments.runs + 1):
            for mode in MODES:
                folder = (arguments.folder / f"{mode}-{number}").resolve()
                shutil.rmtree(folder, ignore_errors=True)
                counts = one_run(mode, number, arguments, folder)
                results[mode].append(counts)
                shutil.rmtree(folder, ignore_errors=True)
                _tell(console, mode, number, counts)
    show(results, arguments.rows, console)
    wrong = [c for c in results["exactly_once"] if c.missing or c.duplicates or c.kept_missing or c.kept_duplicates]
    wrong += [c for c in results["at_least_once"] if c.missing or c.kept_missing]
    wrong += [c for runs in results.values() for c in runs if c.problem or c.outcome.moments < arguments.kills]
    return 1 if wrong else 0


def _tell(console: Console, mode: str, number: int, counts: Counts) -> None:
    console.print(
        f"run {number}, {mode}: {counts.missing} missing, {counts.duplicates} twice; in state {counts.kept_missing} "
        f"and {counts.kept_duplicates}; {counts.outcome.seconds:.1f} s; killed: {', '.join(counts.outcome.kills)}"
        f"{'' if counts.problem is None else '; ' + counts.problem}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(main())
