"""The commands `tidegate checkpoints …`: list, show, compare, verify, delete checkpoints and savepoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidegate.cli.terminal import (
    CheckpointArgument,
    JobOption,
    JsonOption,
    RootArgument,
    add_row,
    explained,
    make_console,
    make_table,
    plain_value,
    print_found,
    print_json,
    time_text,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tidegate.recovery.checkpoints import CheckpointSummary
    from tidegate.recovery.differences import CheckpointDiff, OperatorDiff, SplitDiff, StateDiff
    from tidegate.recovery.inspection import CheckpointReport, OperatorReport, StateInfo
    from tidegate.storage.checkpoints.metadata import (
        CheckpointMetadata,
        SectionRef,
        StateHandle,
        StoredSplit,
        SubtaskState,
    )

_SPLITS_SHOWN = 3
"""How many splits of a source a table lists at most."""

checkpoints_app = typer.Typer(help="List, inspect, compare, verify and delete completed checkpoints and savepoints.")
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Also for a job that may be running, because you know that it is dead.")
]


@checkpoints_app.command("list")
def list_command(path: RootArgument, job: JobOption = None, as_json: JsonOption = False) -> None:
    """List the completed checkpoints and savepoints under a root, oldest first."""
    from tidegate.recovery.checkpoints import list_checkpoints

    with explained():
        summaries = list_checkpoints(path, job)
    if as_json:
        print_json(summaries)
        return
    if not summaries:
        typer.echo(f"No completed checkpoint under {path}" + (f" of job {job}" if job else ""))
        return
    print_checkpoints(summaries)


@checkpoints_app.command("show")
def show_command(path: CheckpointArgument, as_json: JsonOption = False) -> None:
    """Show the operators of one checkpoint or savepoint, and each file of each subtask: states, rows, bytes.

    Also shows splits that are not assigned yet, for sources that assign them while the job runs.
    """
    from tidegate.recovery.inspection import inspect

    with explained():
        report = inspect(path)
    if as_json:
        print_json(report_object(report))
    else:
        print_checkpoint(report.metadata)


@checkpoints_app.command("inspect")
def inspect_command(path: CheckpointArgument, as_json: JsonOption = False) -> None:
    """Show the operators of one checkpoint or savepoint in short: parallelism, sizes, what has finished, states."""
    from tidegate.recovery.inspection import inspect

    with explained():
        report = inspect(path)
    if as_json:
        print_json(report_object(report))
    else:
        print_report(report)


@checkpoints_app.command("diff")
def diff_command(
    old: CheckpointArgument,
    new: CheckpointArgument,
    keys: Annotated[
        bool, typer.Option("--keys", help="Read keyed states, and count keys that were added, removed and changed.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what has changed from one checkpoint or savepoint to another: operators, parallelism, sizes, states."""
    from tidegate.recovery.differences import diff

    with explained():
        found = diff(old, new, keys=keys)
    print_found(found, as_json, print_diff)


@checkpoints_app.command("verify")
def verify_command(path: CheckpointArgument, as_json: JsonOption = False) -> None:
    """Read every byte of a checkpoint or savepoint and compare checksums; exit code 1 if something is damaged."""
    from tidegate.recovery.checkpoints import verify

    with explained():
        report = verify(path)
    if as_json:
        print_json(report)
        raise typer.Exit(0 if report.ok else 1)
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
    from tidegate.recovery import deletion

    if not yes:
        typer.confirm(f"Delete {path}?", abort=True)
    with explained():
        files = deletion.delete(path, force=force)
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
    """List, or delete, files in the folders of jobs under a root to which no checkpoint, savepoint or table refers.

    Exit code 1 if a job was skipped because it may be running.
    """
    from tidegate.recovery.checkpoints import is_of_job
    from tidegate.recovery.deletion_permits import may_run, why_may_run
    from tidegate.recovery.sweeper import sweep
    from tidegate.storage.clock import now_ms
    from tidegate.storage.files.file_system_store import join_url, open_store
    from tidegate.storage.ids import JobId
    from tidegate.storage.units import parse_duration_ms

    count = 0
    size_bytes = 0
    skipped = 0
    with explained():
        grace_ms = parse_duration_ms(grace, setting="--grace")
        at_ms = now_ms()
        store = open_store(path)
        places = [open_store(url) for url in savepoints or ()]
        for job_id in [JobId(name) for name in store.list("") if is_of_job(store, JobId(name), job)]:
            dry_run = not delete
            if delete and not force and may_run(store, job_id, at_ms, grace_ms):
                dry_run = True
                skipped += 1
                typer.echo(
                    f"Job {job_id} may be running, {why_may_run(store, job_id)}: none of its files is deleted "
                    "(--force if you know that it is dead)",
                    err=True,
                )
            found = sweep(
                store, job_id, now_ms=at_ms, grace_ms=grace_ms, dry_run=dry_run, force=force, savepoints=places
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
        typer.echo(f"No orphaned file under {path}" + (f" of job {job}" if job else ""))
    if skipped:
        raise typer.Exit(1)


def report_object(report: CheckpointReport) -> dict[str, Any]:
    """Returns the report for JSON, without the complete metadata, which may contain state."""
    metadata = report.metadata
    return {
        "path": report.path,
        "job_id": metadata.job_id,
        "job_name": metadata.job_name,
        "checkpoint_id": metadata.checkpoint_id,
        "kind": metadata.kind.value,
        "savepoint_format": None if metadata.savepoint_format is None else metadata.savepoint_format.value,
        "void": metadata.void,
        "final": metadata.final,
        "attempt": metadata.attempt,
        "triggered_at_ms": metadata.triggered_at_ms,
        "restored_from": metadata.restored_from,
        "size_bytes": report.size_bytes,
        "in_flight_bytes": report.in_flight_bytes,
        "needs": list(report.needs),
        "operators": plain_value(report.operators),
    }


def print_checkpoints(summaries: Iterable[CheckpointSummary]) -> None:
    """Prints a table of checkpoints and savepoints."""
    table = make_table("checkpoint", "job", "triggered (UTC)", "state bytes", "subtasks", "condition")
    for summary in summaries:
        add_row(table, *_row(summary))
    make_console().print(table)


def print_checkpoint(metadata: CheckpointMetadata) -> None:
    """Prints the operators of a checkpoint or savepoint, and each file of their state."""
    console = make_console()
    kind = "void (given up)" if metadata.void else "final" if metadata.final else "completed"
    what = "Savepoint" if metadata.origin_root is not None else "Checkpoint"
    console.print(
        f"{what} {metadata.checkpoint_id} of job {metadata.job_id}, {kind}, attempt {metadata.attempt}, "
        f"triggered {time_text(metadata.triggered_at_ms)} UTC, {metadata.size_bytes:,} bytes of state",
        markup=False,
    )
    if metadata.restored_from:
        console.print(f"The job was restored from {metadata.restored_from}", markup=False)
    operators = make_table("operator uid", "name", "vertex", "parallelism", "max", title="Operators")
    for operator in metadata.operators:
        add_row(
            operators,
            operator.uid,
            operator.name,
            operator.vertex,
            operator.parallelism,
            operator.max_parallelism,
        )
    console.print(operators)
    console.print(_states(metadata))
    _print_splits(console, metadata)


def _print_splits(console: Console, metadata: CheckpointMetadata) -> None:
    """Prints the splits of sources that are not in the state of a subtask."""
    from tidegate.recovery.inspection import read_splits

    waiting = [(pool.uid, pool.splits) for pool in metadata.pools]
    read = read_splits(metadata)
    if waiting:
        console.print(_splits("Splits that no subtask had taken", waiting))
    if read:
        console.print(_splits("Splits that finished subtasks had read to the end", read.items()))


def _format(metadata: CheckpointMetadata) -> str:
    return "" if metadata.savepoint_format is None else f"{metadata.savepoint_format.value} savepoint of "


def print_report(report: CheckpointReport) -> None:
    """Prints the operators of a checkpoint and their states, without its files."""
    console = make_console()
    metadata = report.metadata
    console.print(
        f"{report.path}: {_format(metadata)}job {metadata.job_name}, "
        f"triggered {time_text(metadata.triggered_at_ms)} UTC, "
        f"{report.size_bytes:,} bytes of state, {report.in_flight_bytes:,} of them in flight",
        markup=False,
        soft_wrap=True,
    )
    for url in report.needs:
        console.print(f"It needs {url}", markup=False, soft_wrap=True)
    table = make_table(
        "operator uid", "parallelism", "max", "keys", "finished", "bytes", "state", "kind", "rows", "bytes"
    )
    for operator in report.operators:
        for number, state in enumerate(operator.states or (None,)):
            cells = (*(_operator_cells(operator) if number == 0 else [""] * 6), *_state_cells(state))
            add_row(table, *cells)
    console.print(table)
    _print_splits(console, metadata)


def print_diff(diff: CheckpointDiff) -> None:
    """Prints the differences of two checkpoints. Operators without differences are only counted."""
    console = make_console()
    old_bytes, new_bytes = diff.size_bytes
    console.print(
        f"{diff.old}: {old_bytes:,} bytes\n{diff.new}: {new_bytes:,} bytes ({new_bytes - old_bytes:+,})",
        markup=False,
        soft_wrap=True,
    )
    table = make_table("operator uid", "", "parallelism", "max", "bytes", "state", "", "bytes", "keys")
    for operator in diff.changed:
        for number, state in enumerate(operator.states or (None,)):
            cells = (*(_changed_cells(operator) if number == 0 else [""] * 5), *_changed_state(state))
            add_row(table, *cells)
    if diff.changed:
        console.print(table)
    for positions in _positions(diff):
        console.print(positions)
    same = len(diff.operators) - len(diff.changed)
    console.print(f"{same} operators are the same", markup=False)


def _positions(diff: CheckpointDiff) -> Iterator[Table]:
    """Yields a table of the splits whose position has changed, up to `_SPLITS_SHOWN` of each source, or nothing."""
    table = make_table("operator uid", "split", "next row", title="Positions of sources")
    for operator in diff.changed:
        for split in operator.splits[:_SPLITS_SHOWN]:
            add_row(table, operator.uid, split.split_id, _moved(split))
        if len(operator.splits) > _SPLITS_SHOWN:
            add_row(table, operator.uid, f"and {len(operator.splits) - _SPLITS_SHOWN} more", "")
        if any(operator.waiting_splits):
            add_row(table, operator.uid, "splits that no subtask had taken", _pair(*operator.waiting_splits))
        if any(operator.read_splits):
            add_row(table, operator.uid, "splits read to the end", _pair(*operator.read_splits))
    if table.row_count:
        yield table


def _moved(split: SplitDiff) -> str:
    """Returns as text the number of the next row of a split in both checkpoints.

    "read" means that a finished subtask has read the split to its end.
    """
    old, new = ("read" if read else _number(offset) for offset, read in zip(split.next_offset, split.read, strict=True))
    return f"{old} -> {new}"


def _operator_cells(operator: OperatorReport) -> list[str]:
    finished = f"{operator.finished_subtasks} of {operator.parallelism}" if operator.finished_subtasks else ""
    sizes = (str(operator.parallelism), str(operator.max_parallelism))
    return [operator.uid, *sizes, ", ".join(operator.keys), finished, f"{operator.size_bytes:,}"]


def _state_cells(state: StateInfo | None) -> list[str]:
    if state is None:
        return ["", "", "", ""]
    kind = state.kind.value
    kind += f", {state.backend}" if state.backend else f", {state.layers} layers" if state.layers else ""
    return [state.state, kind, _number(state.rows), _number(state.size_bytes)]


def _changed_cells(operator: OperatorDiff) -> list[str]:
    pairs = (operator.parallelism, operator.max_parallelism, operator.size_bytes)
    return [operator.uid, operator.change, *(_pair(*pair) for pair in pairs)]


def _changed_state(state: StateDiff | None) -> list[str]:
    if state is None:
        return ["", "", "", ""]
    keys = state.keys
    counts = "" if keys is None else f"+{keys.added:,} -{keys.removed:,} ~{keys.changed:,} ={keys.same:,}"
    counts += "".join(f", new column {name}" for name in state.added_columns)
    counts += "".join(f", without column {name}" for name in state.removed_columns)
    return [state.state, state.change, _pair(*state.size_bytes), counts]


def _pair(old: int | None, new: int | None) -> str:
    return _number(old) if old == new else f"{_number(old)} -> {_number(new)}"


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _row(summary: CheckpointSummary) -> Iterator[str]:
    readable = summary.verified is not False
    yield summary.path
    yield summary.job_name
    yield time_text(summary.triggered_at_ms) if readable else "?"
    yield f"{summary.size_bytes:,}" if readable else "?"
    yield str(summary.subtasks) if readable else "?"
    yield "readable" if readable else f"damaged: {summary.reason}"


def _states(metadata: CheckpointMetadata) -> Table:
    table = make_table(
        "vertex", "subtask", "operator uid or edge", "state", "kind", "rows", "bytes", "where", title="State"
    )
    for subtask in metadata.subtasks:
        for cells in _state_rows(subtask):
            add_row(table, subtask.vertex, subtask.subtask, *cells)
    return table


def _splits(title: str, sources: Iterable[tuple[str, Sequence[StoredSplit]]]) -> Table:
    table = make_table("operator uid", "splits", "rows", "the first of them", title=title)
    for uid, splits in sources:
        rows = None if any(split.rows < 0 for split in splits) else sum(split.rows for split in splits)
        first = ", ".join(split.split_id for split in splits[:_SPLITS_SHOWN])
        more = ", ..." if len(splits) > _SPLITS_SHOWN else ""
        add_row(table, uid, _number(len(splits)), _number(rows), first + more)
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
    rows = f"{section.rows:,}"
    size = f"{section.length_bytes:,}"
    return section.uid, section.state, kind, rows, size, handle.path or "inlined"
