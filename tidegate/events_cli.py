"""The command `tidegate events`: what is in event logs, and why something happened."""

from __future__ import annotations

from typing import Annotated

import typer

from tidegate.recovery.command import JobOption, explained

PathArgument = Annotated[
    str,
    typer.Argument(
        metavar="PATH", help="Checkpoint root: a folder or s3://bucket/prefix; or one job's folder in it, <root>/<job>"
    ),
]
WhyOption = Annotated[
    int | None, typer.Option("--why", metavar="NUMBER", help="Print what led to this event of one job.")
]
AllOption = Annotated[bool, typer.Option("--all", help="With --why: print a long chain whole.")]


def events_command(path: PathArgument, job: JobOption = None, why: WhyOption = None, whole: AllOption = False) -> None:
    """Print the event logs of jobs, or with --why the chain of events that led to one of them.

    Exit code 1 if an entry cannot be read.
    """
    # Here, so that `--help` does not wait for the whole house.
    from tidegate.event_printing import logs_under, only_one, print_chain, print_history
    from tidegate.recovery.event_history import EventHistory

    with explained():
        logs = logs_under(path, job)
        if why is not None:
            print_chain(EventHistory.read(*only_one(logs, path, job)).why(why), whole)
            return
        unreadable = sum(print_history(EventHistory.read(log, job_id)) for job_id, log in logs.items())
    if not logs:
        typer.echo(f"No event log under {path}" + (f" of job {job}" if job else ""))
    if unreadable:
        typer.echo(f"{unreadable} entries cannot be read", err=True)
        raise typer.Exit(1)
