"""The command `tidegate simulate`: runs one pipeline, or random ones, with each seed of a range."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from tidegate.storage.errors import ConfigurationError


def simulate_command(
    pipeline: Annotated[
        str | None, typer.Argument(help="MODULE:FUNC or FILE.py:FUNC; the function gets an environment")
    ] = None,
    seeds: Annotated[str, typer.Option(help="a seed, or a range FIRST..LAST")] = "0..99",
    random: Annotated[bool, typer.Option("--random", help="draw pipeline, settings and faults from the seed")] = False,
    workers: Annotated[int, typer.Option(help="processes; 0: one a core")] = 1,
    crash: Annotated[float, typer.Option(help="a task's process dies, per element")] = 0.01,
    coordinator_crash: Annotated[float, typer.Option(help="the coordinator dies, per message")] = 0.01,
    storage: Annotated[float, typer.Option(help="a storage operation fails")] = 0.05,
    slow: Annotated[float, typer.Option(help="a storage operation is slow")] = 0.05,
    duplicate: Annotated[float, typer.Option(help="a message comes twice")] = 0.03,
    drop: Annotated[float, typer.Option(help="a message is lost")] = 0.003,
    damage: Annotated[float, typer.Option(help="a completed checkpoint is damaged")] = 0.0,
    delay: Annotated[str, typer.Option(help="how long messages take")] = "0ms..100ms",
    parallelism: Annotated[int, typer.Option(help="of the environment")] = 2,
    trace: Annotated[int, typer.Option(help="lines of history to show of a seed that fails")] = 60,
) -> None:
    """Run a pipeline, or random ones, under seeded faults; exit code 1 if an invariant is violated.

    It is 1 as well if the pipeline's output differs without any fault: then it depends on the order of rows.

    Ends with a table of what the seeds exercised. The first violation is shown with its messages.
    """
    # Imported here, so that `--help` is fast.
    from rich.console import Console
    from rich.progress import track

    from tidegate.cli.seed_runs import Work, quiet, reports_of
    from tidegate.testing import Faults
    from tidegate.testing.oracle.coverage import coverage_table

    if random == (pipeline is not None):
        raise ConfigurationError("give a pipeline, or --random for pipelines that the seeds draw: one of the two")
    console = Console()
    first, last = _range(seeds)
    faults = Faults(
        crash=crash,
        coordinator_crash=coordinator_crash,
        storage=storage,
        slow=slow,
        duplicate=duplicate,
        drop=drop,
        damage=damage,
        delay=delay,
    )
    work = Work(pipeline, faults, parallelism)
    totals: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    times: Counter[str] = Counter()
    violated: list[int] = []
    ordered: list[int] = []
    numbers = range(first, last + 1)
    with quiet(), reports_of(work, numbers, workers) as reports:
        for report in track(reports, f"seeds {first}..{last}", total=len(numbers), console=console):
            totals["checkpoints"] += report.checkpoints
            totals["restarts"] += report.restarts
            totals["task crashes"] += report.crashes
            totals["coordinator crashes"] += report.coordinator_crashes
            runs.update(report.coverage.keys())
            times.update(report.coverage)
            if report.order_dependence is not None:
                ordered.append(report.seed)
                if len(ordered) == 1:
                    console.print(f"[bold yellow]{report}", highlight=False)
            elif not report.ok:
                violated.append(report.seed)
                console.print(f"[bold red]{report}", highlight=False)
                if len(violated) == 1:
                    console.print(report.sequence(trace), highlight=False, markup=False, soft_wrap=True)
    console.print(coverage_table(runs, times), highlight=False, markup=False, soft_wrap=True)
    summary = ", ".join(f"{count:,} {what}" for what, count in totals.items())
    console.print(f"{len(numbers)} seeds, {len(violated)} violations; {summary}")
    if ordered:
        console.print(
            f"{len(ordered)} of these seeds have other rows because the output of the pipeline depends on the order of "
            "rows: it differs without any fault"
        )
    if violated:
        what = "--random" if pipeline is None else pipeline
        console.print(f"replay with: tidegate simulate {what} --seeds {min(violated)}")
    if violated or ordered:
        raise typer.Exit(1)


def _range(text: str) -> tuple[int, int]:
    first, separator, last = text.partition("..")
    try:
        bounds = int(first), int(last) if separator else int(first)
    except ValueError:
        raise ConfigurationError(f"--seeds {text!r}: write a seed such as 7, or a range such as 0..999") from None
    if bounds[0] > bounds[1]:
        raise ConfigurationError(f"--seeds {text!r}: the range is empty")
    return bounds
