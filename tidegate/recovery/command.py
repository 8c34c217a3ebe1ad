"""The commands for what rests in storage: `tidegate checkpoints …` and `tidegate events …`.

Commands print and exit: 0 when all is well, 1 when a checkpoint is damaged or cannot be read, 2 for wrong
usage. An error of ours is shown as one sentence, never as a traceback.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.pretty import Pretty
from rich.table import Table

from tidegate.recovery.checkpoints import CheckpointSummary, inspect, is_of_job, list_checkpoints, verify
from tidegate.recovery.deletion import delete
from tidegate.recovery.sweeper import may_run, sweep, why_may_run
from tidegate.storage.checkpoints.event_log import EventLog, LogEntry
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, SectionRef, StateHandle, SubtaskState
from tidegate.storage.errors import CodecError, ConfigurationError, CorruptionError, TidegateError
from tidegate.storage.files.file_system_store import join_url, open_store
from tidegate.storage.ids import JobId
from tidegate.storage.units import parse_duration_ms

app = typer.Typer(
    help="Look at tidegate's checkpoints and event logs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
checkpoints_app = typer.Typer(
    help="Completed checkpoints and savepoints: which there are, what they hold, whether they are whole."
)
app.add_typer(checkpoints_app, name="checkpoints", no_args_is_help=True)

JobOption = Annotated[str | None, typer.Option("--job", help="Name or id of one job.")]
CheckpointArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="<root>/<job>/chk-<number> or <folder>/savepoint-<job>-<number>")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Also for a job that may be running, because you know that it is dead.")
]
RootArgument = Annotated[str, typer.Argument(metavar="PATH", help="Checkpoint root: a folder or s3://bucket/prefix")]


@checkpoints_app.command("list")
def list_command(path: RootArgument, job: JobOption = None) -> None:
    """List the completed checkpoints and savepoints under a root, oldest first."""
    with _explained():
        summaries = list_checkpoints(path, job)
    if not summaries:
        typer.echo(f"No completed checkpoint under {path}" + (f" of job {job}" if job else ""))
        return
    table = Table("checkpoint", "job", "triggered (UTC)", "state bytes", "subtasks", "condition")
    for summary in summaries:
        table.add_row(*(escape(cell) for cell in _row(summary)))
    _console().print(table)


@checkpoints_app.command("show")
def show_command(path: CheckpointArgument) -> None:
    """Show the operators, states and in-flight rows of one checkpoint or savepoint."""
    with _explained():
        metadata = inspect(path)
    console = _console()
    kind = "void (given up)" if metadata.void else "final" if metadata.final else "completed"
    what = "Savepoint" if metadata.origin_root is not None else "Checkpoint"
    console.print(
        f"{what} {metadata.checkpoint_id} of job {metadata.job_id}, {kind}, attempt {metadata.attempt}, "
        f"triggered {_time(metadata.triggered_at_ms)} UTC, {metadata.size_bytes:,} bytes of state",
        markup=False,
    )
    if metadata.restored_from:
        console.print(f"The job was restored from {metadata.restored_from}", markup=False)
    operators = Table("operator uid", "name", "vertex", "parallelism", "max", title="Operators", title_justify="left")
    for operator in metadata.operators:
        cells = (operator.uid, operator.name, operator.vertex, operator.parallelism, operator.max_parallelism)
        operators.add_row(*(escape(str(cell)) for cell in cells))
    console.print(operators)
    console.print(_states(metadata))


@checkpoints_app.command("verify")
def verify_command(path: CheckpointArgument) -> None:
    """Read every byte of a checkpoint or savepoint and compare checksums; exit code 1 if something is damaged."""
    with _explained():
        report = verify(path)
    if report.ok:
        typer.echo(f"{report.path} is whole: {report.files} files, {report.bytes:,} bytes verified")
        return
    for problem in report.problems:
        typer.echo(problem, err=True)
    typer.echo(f"{report.path} cannot be restored: {len(report.problems)} problem(s)", err=True)
    raise typer.Exit(1)


@checkpoints_app.command("delete")
def delete_command(path: CheckpointArgument, yes: YesOption = False, force: ForceOption = False) -> None:
    """Delete a checkpoint or savepoint; files that other checkpoints of its job use stay.

    A checkpoint of a job that may be running is refused.
    """
    if not yes:
        typer.confirm(f"Delete {path}?", abort=True)
    with _explained():
        files = delete(path, force=force)
    typer.echo(f"{path} is deleted: {files} files")


@checkpoints_app.command("sweep")
def sweep_command(
    path: RootArgument,
    job: JobOption = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete them; without it they are only listed.")] = False,
    force: ForceOption = False,
    grace: Annotated[str, typer.Option("--grace", help="Leave alone what was written within this time.")] = "1h",
    savepoints: Annotated[
        list[str] | None, typer.Option("--savepoints", help="Another folder in which there may be savepoints.")
    ] = None,
) -> None:
    """List, or delete, files of jobs under a root that no checkpoint, savepoint or table refers to.

    Exit code 1 if a job was left out because it may be running.
    """
    count, size_bytes, left_out = 0, 0, 0
    with _explained():
        grace_ms = parse_duration_ms(grace, setting="--grace")
        now_ms = int(time.time() * 1000)
        store = open_store(path)
        places = [open_store(url) for url in savepoints or ()]
        for job_id in [JobId(name) for name in store.list("") if is_of_job(store, JobId(name), job)]:
            dry_run = not delete
            if delete and not force and may_run(store, job_id, now_ms, grace_ms):
                dry_run, left_out = True, left_out + 1
                typer.echo(
                    f"Job {job_id} may be running, {why_may_run(store, job_id)}: nothing of it is deleted "
                    "(--force if you know that it is dead)",
                    err=True,
                )
            found = sweep(
                store, job_id, now_ms=now_ms, grace_ms=grace_ms, dry_run=dry_run, force=force, savepoints=places
            )
            for orphan in found:
                typer.echo(f"{orphan.size_bytes:>15,}  {join_url(store.url, orphan.path)}")
            if not (delete and dry_run):
                count += len(found)
                size_bytes += sum(orphan.size_bytes for orphan in found)
    if delete:
        typer.echo(f"{count} files, {size_bytes:,} bytes, were deleted")
    elif count:
        typer.echo(f"Nothing refers to {count} files, {size_bytes:,} bytes; --delete deletes them")
    else:
        typer.echo(f"Nothing is left behind under {path}" + (f" of job {job}" if job else ""))
    if left_out:
        raise typer.Exit(1)


@app.command("events")
def events_command(path: RootArgument, job: JobOption = None) -> None:
    """Print the event logs of the jobs under a checkpoint root; exit code 1 if an entry cannot be read."""
    unreadable = 0
    with _explained():
        store = open_store(path)
        jobs = [JobId(name) for name in store.list("") if is_of_job(store, JobId(name), job)]
        shown = 0
        for job_id in jobs:
            log = EventLog(store, job_id)
            indices = log.indices()
            shown += bool(indices)
            if indices:
                typer.echo(f"Job {job_id}")
            for index in indices:
                unreadable += not _print_entry(log, index)
    if not shown:
        typer.echo(f"No event log under {path}" + (f" of job {job}" if job else ""))
    if unreadable:
        typer.echo(f"{unreadable} entries cannot be read", err=True)
        raise typer.Exit(1)


def _print_entry(log: EventLog, index: int) -> bool:
    """Print one entry, or why it can't be read; whether it could."""
    try:
        entry: LogEntry = log.read(index)
    except (CodecError, CorruptionError) as error:
        typer.echo(f"{index:>6}  {error}", err=True)
        return False
    typer.echo(f"{index:>6}  {_time(entry.at_ms)}  generation {entry.generation}")
    console = _console()
    for event in entry.events:
        console.print("       ", Pretty(event, max_string=120, max_length=12))
    return True


def _row(summary: CheckpointSummary) -> Iterator[str]:
    readable = summary.verified is not False
    yield summary.path
    yield summary.job_name
    yield _time(summary.triggered_at_ms) if readable else "?"
    yield f"{summary.size_bytes:,}" if readable else "?"
    yield str(summary.subtasks) if readable else "?"
    yield "readable" if readable else f"damaged: {summary.reason}"


def _states(metadata: CheckpointMetadata) -> Table:
    table = Table("vertex", "subtask", "operator uid or edge", "state", "kind", "rows", "bytes", "where", title="State")
    table.title_justify = "left"
    for subtask in metadata.subtasks:
        for cells in _state_rows(subtask):
            table.add_row(*(escape(str(cell)) for cell in (subtask.vertex, subtask.subtask, *cells)))
    return table


def _state_rows(subtask: SubtaskState) -> Iterator[tuple[str, ...]]:
    layers = [(f", layer {number}", handle) for number, handle in enumerate(subtask.layers)]
    whole = [] if subtask.handle is None else [("", subtask.handle)]
    for note, handle in (*layers, *whole):
        for section in handle.sections:
            kind = f"{section.kind.value}{note}{', removed keys' if section.removed else ''}"
            yield _section_row(section, kind, handle)
    for native in subtask.native:
        yield native.uid, "", f"keyed, {native.backend}", "?", f"{native.size_bytes:,}", f"{len(native.files)} files"
    if subtask.in_flight is not None:
        for section in subtask.in_flight.sections:
            yield _section_row(section, "in flight", subtask.in_flight)


def _section_row(section: SectionRef, kind: str, handle: StateHandle) -> tuple[str, ...]:
    rows, size = f"{section.rows:,}", f"{section.length_bytes:,}"
    return section.uid, section.state, kind, rows, size, handle.path or "inlined"


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00")


def _console() -> Console:
    """A console on the present standard output; wide enough for whole paths when that is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=240)


@contextmanager
def _explained() -> Iterator[None]:
    """Errors of ours become one sentence and an exit code."""
    try:
        yield
    except ConfigurationError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    except TidegateError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
