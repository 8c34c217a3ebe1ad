"""The commands for what is stored: `tidegate checkpoints …`. `tidegate/cli/main.py` adds the others.

Commands print and exit: 0 if all is well, 1 if a checkpoint is damaged or cannot be read, 2 for wrong usage. A
TidegateError is shown as one sentence, never as a traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, TypeVar

import typer

from tidegate.storage.errors import ConfigurationError, TidegateError

# A command imports what it needs when it runs, so that `--help` is fast.

_Found = TypeVar("_Found")

app = typer.Typer(
    help="Look at tidegate's checkpoints and event logs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes around the help cost more time than all the rest
)
checkpoints_app = typer.Typer(
    help="Completed checkpoints and savepoints: which there are, what they hold, whether they are whole."
)
app.add_typer(checkpoints_app, name="checkpoints", no_args_is_help=True)

state_app = typer.Typer(help="The state in completed checkpoints and savepoints, as data.")
app.add_typer(state_app, name="state", no_args_is_help=True)

JobOption = Annotated[str | None, typer.Option("--job", help="Name or id of one job.")]
CheckpointArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="<root>/<job>/chk-<number> or <folder>/savepoint-<job>-<number>")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Also for a job that may be running, because you know that it is dead.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
RootArgument = Annotated[str, typer.Argument(metavar="PATH", help="Checkpoint root: a folder or s3://bucket/prefix")]


@checkpoints_app.command("list")
def list_command(path: RootArgument, job: JobOption = None, as_json: JsonOption = False) -> None:
    """List the completed checkpoints and savepoints under a root, oldest first."""
    from tidegate.cli.checkpoint_printing import print_checkpoints
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

    Of sources whose splits are assigned while the job runs also the splits that no subtask had taken.
    """
    from tidegate.cli.checkpoint_printing import print_checkpoint
    from tidegate.recovery.contents.inspection import inspect

    with explained():
        report = inspect(path)
    print_found(report, as_json, lambda found: print_checkpoint(found.metadata))


@checkpoints_app.command("inspect")
def inspect_command(path: CheckpointArgument, as_json: JsonOption = False) -> None:
    """Show the operators of one checkpoint or savepoint in short: parallelism, sizes, what has finished, states."""
    from tidegate.cli.checkpoint_printing import print_report
    from tidegate.recovery.contents.inspection import inspect

    with explained():
        report = inspect(path)
    print_found(report, as_json, print_report)


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
    from tidegate.cli.checkpoint_printing import print_diff
    from tidegate.recovery.contents.differences import diff

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
    from tidegate.recovery.cleanup import deletion

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
    """List, or delete, files of jobs under a root that no checkpoint, savepoint or table refers to.

    Exit code 1 if a job was left out because it may be running.
    """
    from tidegate.recovery.checkpoints import is_of_job
    from tidegate.recovery.cleanup.decisions import may_run, why_may_run
    from tidegate.recovery.cleanup.sweeper import sweep
    from tidegate.storage.clock import now_ms
    from tidegate.storage.files.file_system_store import join_url, open_store
    from tidegate.storage.ids import JobId
    from tidegate.storage.units import parse_duration_ms

    count, size_bytes, left_out = 0, 0, 0
    with explained():
        grace_ms = parse_duration_ms(grace, setting="--grace")
        at_ms = now_ms()
        store = open_store(path)
        places = [open_store(url) for url in savepoints or ()]
        for job_id in [JobId(name) for name in store.list("") if is_of_job(store, JobId(name), job)]:
            dry_run = not delete
            if delete and not force and may_run(store, job_id, at_ms, grace_ms):
                dry_run, left_out = True, left_out + 1
                typer.echo(
                    f"Job {job_id} may be running, {why_may_run(store, job_id)}: nothing of it is deleted "
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
        typer.echo(f"Nothing is left behind under {path}" + (f" of job {job}" if job else ""))
    if left_out:
        raise typer.Exit(1)


def print_found(found: _Found, as_json: bool, print_text: Callable[[_Found], None]) -> None:
    """Print what a command has found: for programs, or for people."""
    if as_json:
        print_json(found)
    else:
        print_text(found)


def print_json(value: object) -> None:
    """Print what a function of this room returns as one line of JSON."""
    from tidegate.cli.json_text import to_json

    typer.echo(to_json(value))


@contextmanager
def explained() -> Iterator[None]:
    """Turn a TidegateError in the block into one sentence and an exit code."""
    try:
        yield
    except ConfigurationError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    except TidegateError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
