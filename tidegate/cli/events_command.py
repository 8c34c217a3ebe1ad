"""The commands `events`, `checkpoints explain`, `checkpoints relocate`, `state read` and `state write`.

They interpret events and keys, and therefore need `tidegate.recovery.state_processor`. Their exit codes are the same as
in `checkpoints_command.py`.
"""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime
from typing import Annotated

import typer

from tidegate.cli.terminal import (
    CheckpointArgument,
    JobOption,
    JsonOption,
    explained,
    print_found,
    print_json,
)

PathArgument = Annotated[
    str,
    typer.Argument(
        metavar="PATH", help="Checkpoint root: a folder or s3://bucket/prefix; or one job's folder in it, <root>/<job>"
    ),
]
WhyOption = Annotated[
    int | None, typer.Option("--why", metavar="NUMBER", help="Print what led to this event of one job.")
]
ArrowOption = Annotated[
    str | None, typer.Option("--arrow", metavar="FILE", help="Write all events to this file, as an Arrow table (IPC).")
]
AllOption = Annotated[bool, typer.Option("--all", help="With --why: print a long chain whole.")]
RawOption = Annotated[bool, typer.Option("--raw", help="Print the events themselves, entry by entry.")]
TimelineCheckpointOption = Annotated[
    int | None, typer.Option("--checkpoint", metavar="NUMBER", help="Print all details of one checkpoint.")
]
RestartsOption = Annotated[bool, typer.Option("--restarts", help="Print failures and restarts alone.")]
StateAtOption = Annotated[
    str | None,
    typer.Option(
        "--state-at",
        metavar="WHEN",
        help="Print the coordinator's state after an event, by its number, or at 2026-11-23T16:27 (UTC), or 10min ago.",
    ),
]
SinceOption = Annotated[
    str | None,
    typer.Option("--since", metavar="WHEN", help="Print only newer lines: since 10min ago, or 2026-11-23T16:27 (UTC)."),
]


def events_command(
    path: PathArgument,
    job: JobOption = None,
    why: WhyOption = None,
    whole: AllOption = False,
    arrow: ArrowOption = None,
    checkpoint: TimelineCheckpointOption = None,
    restarts: RestartsOption = False,
    since: SinceOption = None,
    raw: RawOption = False,
    state_at: StateAtOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what happened to jobs, a line for each decision; or with --why the causes of one event.

    Each checkpoint has one line. The numbers are the numbers of events. Exit code 1 if an entry cannot be read.
    """
    # Imported here, so that `--help` is fast.
    from tidegate.cli.event_printing import LineFilter, moment_ms, print_chain, print_history, print_timeline
    from tidegate.recovery.event_history import EventHistory
    from tidegate.recovery.state_processor.job_states import logs_under, only_one
    from tidegate.recovery.state_processor.timeline import read_timeline

    if arrow is not None:
        _write_history(path, job, arrow)
        return
    if state_at is not None:
        _print_state(path, job, state_at, as_json)
        return
    with explained():
        logs = logs_under(path, job)
        if why is not None:
            print_chain(EventHistory.read(*only_one(logs, path, job)).why(why), whole)
            return
        if raw:
            unreadable = sum(print_history(EventHistory.read(log, job_id)) for job_id, log in logs.items())
        else:
            choice = LineFilter(checkpoint, restarts, None if since is None else moment_ms(since))
            found = [read_timeline(log, job_id) for job_id, log in logs.items()]
            for timeline in found:
                print_timeline(timeline, choice, as_json)
            unreadable = sum(timeline.unreadable for timeline in found)
    if not logs and not as_json:
        typer.echo(f"No event log under {path}" + (f" of job {job}" if job else ""))
    if unreadable:
        typer.echo(f"{unreadable} entries cannot be read", err=True)
        raise typer.Exit(1)


def explain_command(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="<root>/<job>/chk-<number>; or a root or job's folder and an option")
    ],
    job: JobOption = None,
    checkpoint: Annotated[int | None, typer.Option("--checkpoint", help="Why this one was completed, or not.")] = None,
    attempt: Annotated[int | None, typer.Option("--attempt", help="Why this attempt was started.")] = None,
    event: Annotated[int | None, typer.Option("--event", help="Why this event happened.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the events that led to a decision of a job's coordinator, the first cause first."""
    from tidegate.recovery.state_processor.explanations import explain

    with explained():
        found = explain(path, checkpoint=checkpoint, attempt=attempt, event=event, job=job)
    print_found(found, as_json, lambda chain: typer.echo(str(chain)))


def relocate_command(
    path: CheckpointArgument,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The folder in which it gets a folder of its own.")],
    as_json: JsonOption = False,
) -> None:
    """Copy a savepoint to another place with all that it needs: staged rows, collected rows, sink files.

    Every byte is verified. The old savepoint stays.
    """
    from tidegate.recovery.inspection import inspect
    from tidegate.recovery.state_processor.relocation import relocate

    with explained():
        moved = relocate(path, target)
        needs = inspect(moved).needs
    if as_json:
        print_json({"path": moved, "needs": list(needs)})
        return
    typer.echo(moved)
    for url in needs:
        typer.echo(f"It names files of {url}, which stays where it is", err=True)


def read_command(
    path: CheckpointArgument,
    uid: Annotated[str, typer.Option("--uid", help="The operator.")],
    state: Annotated[str | None, typer.Option("--state", help="Its state. Not needed if it has only one.")] = None,
    rows: Annotated[int, typer.Option("--rows", min=0, help="Print at most this many rows.")] = 20,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Write all rows to this file: .parquet, else Arrow IPC.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read one state of one operator in a checkpoint or savepoint: print some rows, or write all of them to a file."""
    from tidegate.cli.row_files import print_rows, write_rows
    from tidegate.recovery.state_reader import read_state_batches

    with explained(), read_state_batches(path, uid=uid, state=state) as reader:
        if out is not None:
            typer.echo(f"{write_rows(reader, out)} rows are in {out}")
        else:
            print_rows(reader, rows, as_json)


def write_command(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The folder in which it gets a folder of its own.")],
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Rows: .parquet, else Arrow IPC.")],
    uid: Annotated[str, typer.Option("--uid", help="The operator that gets the state.")],
    state: Annotated[str, typer.Option("--state", help="Its state. Rows have the form that `state read` prints.")],
    key: Annotated[list[str] | None, typer.Option("--key", help="A key column. Repeat the option for more.")] = None,
    job: Annotated[
        str | None, typer.Option("--job", help="Begin with an empty savepoint, for a job of this name.")
    ] = None,
    base: Annotated[str | None, typer.Option("--base", metavar="PATH", help="Begin with a savepoint.")] = None,
    max_parallelism: Annotated[int | None, typer.Option("--max-parallelism", help="Key groups.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a savepoint with one keyed state from files, and print its path.

    The operator keeps the key columns that it has in the base.
    """
    from tidegate.cli.row_files import rows_of_files
    from tidegate.recovery.state_processor.savepoint_writer import SavepointWriter

    with explained():
        writer = SavepointWriter(target, job=job, base=base, max_parallelism=max_parallelism)
        writer.with_keyed_state(uid=uid, keys=key or writer.keys_of(uid), state=state, rows=rows_of_files(files))
        path = writer.write()
    if as_json:
        print_json({"path": path})
    else:
        typer.echo(path)


def _print_state(path: str, job: str | None, when: str, as_json: bool) -> None:
    from tidegate.cli.event_printing import moment_ms
    from tidegate.cli.terminal import time_text
    from tidegate.recovery.state_processor.job_states import job_state

    with explained():
        at = int(when) if when.isdecimal() else datetime.fromtimestamp(moment_ms(when, "--state-at") / 1000, UTC)
        state = job_state(path, at=at, job=job)
    facts = {field.name: getattr(state, field.name) for field in fields(state) if field.name != "coordinator"}
    if as_json:
        print_json(facts)
        return
    for name, value in (facts | {"at_ms": time_text(state.at_ms)}).items():
        typer.echo(f"{name.removesuffix('_ms'):<22} {value}")


def _write_history(path: str, job: str | None, file: str) -> None:
    from tidegate.cli.row_files import write_rows
    from tidegate.recovery.state_processor.explanations import history

    with explained():
        found = history(path, job)
        typer.echo(f"{write_rows(found.to_reader(), file)} events are in {file}")
