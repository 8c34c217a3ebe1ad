"""The commands for jobs that run on Ray: `tidegate jobs`, and `tidegate job NAME …`.

Exit codes: 0 done, 1 the job refused or failed, 2 wrong usage (no such job, no cluster), 3 timed out. A TidegateError
is shown as one sentence, never as a traceback.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tidegate.cli.checkpoints_command import JsonOption
from tidegate.storage.errors import ConfigurationError, JobFailedError, JobTimeoutError, TidegateError

# A command imports what it needs when it runs, so that `--help` is fast.

if TYPE_CHECKING:
    from tidegate.api.environment import StreamEnvironment
    from tidegate.api.submission.job import Job

REFUSED, WRONG_USAGE, TIME_IS_OVER = 1, 2, 3
FOLLOW_S = 1.0
"""Seconds between two reads of the log with `--follow`."""
LOOK_S = 0.3
"""Seconds between two looks at a job that does not run yet."""

job_app = typer.Typer(help="One job that runs on Ray: what it does, and what it is to do.", no_args_is_help=True)

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address", metavar="HOST:PORT", help="Of Ray; else RAY_ADDRESS, or the one cluster of this user here."
    ),
]
FormatOption = Annotated[
    Literal["canonical", "native"],
    typer.Option("--format", help="Sorted rows, alike for all backends; or what the backend writes."),
]
TimeoutOption = Annotated[str, typer.Option("--timeout", help="How long to wait for it.")]


def jobs_command(address: AddressOption = None, as_json: JsonOption = False) -> None:
    """List the jobs on this Ray: name, state, uptime, attempt, last checkpoint."""
    from tidegate.cli.job_printing import job_lines, jobs_as_json
    from tidegate.storage.clock import now_ms

    with _environment(address) as env:
        jobs = env._runtime.overviews()
    if as_json:
        typer.echo(jobs_as_json(jobs, now_ms()))
        return
    for line in job_lines(jobs, now_ms()):
        typer.echo(line)


@job_app.callback()
def job_command(
    context: typer.Context, name: Annotated[str, typer.Argument(metavar="NAME", help="Name or id of the job.")]
) -> None:
    """One job that runs on Ray: what it does, and what it is to do."""
    context.obj = name


@job_app.command("status")
def status_command(context: typer.Context, address: AddressOption = None, as_json: JsonOption = False) -> None:
    """Show the state of the job, its checkpoints, and the rows that have come into each vertex."""
    from tidegate.cli.job_printing import as_json_text, status_lines, status_of

    with _job(context, address) as job:
        status = status_of(job)
    if as_json:
        typer.echo(as_json_text(status))
        return
    for line in status_lines(status):
        typer.echo(line)


@job_app.command("checkpoint")
def checkpoint_command(
    context: typer.Context, address: AddressOption = None, timeout: TimeoutOption = "10min", as_json: JsonOption = False
) -> None:
    """Take a checkpoint now, or when the job runs again, and print its path."""
    with _job(context, address) as job:
        left_ms = _once_it_runs(job, "checkpoint", timeout)
        _say(as_json, {"path": job.trigger_checkpoint(left_ms)}, "{path}")


@job_app.command("savepoint")
def savepoint_command(
    context: typer.Context,
    target: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="The folder for its folder; else state.savepoints.dir.")
    ] = None,
    address: AddressOption = None,
    timeout: TimeoutOption = "10min",
    savepoint_format: FormatOption = "canonical",
    as_json: JsonOption = False,
) -> None:
    """Take a savepoint now, or when the job runs again, and print its path. The job goes on."""
    with _job(context, address) as job:
        left_ms = _once_it_runs(job, "savepoint", timeout)
        _say(as_json, {"path": job.savepoint(target, left_ms, savepoint_format)}, "{path}")


@job_app.command("stop")
def stop_command(
    context: typer.Context,
    drain: Annotated[bool, typer.Option("--drain", help="Let the sources end for good, and operators finish.")] = False,
    savepoint: Annotated[
        str | None, typer.Option("--savepoint", metavar="URL", help="The folder for its folder.")
    ] = None,
    address: AddressOption = None,
    timeout: TimeoutOption = "10min",
    savepoint_format: FormatOption = "canonical",
    as_json: JsonOption = False,
) -> None:
    """End the job with a savepoint, wait for both, and print the savepoint's path."""
    with _job(context, address) as job:
        path = job.stop(drain, savepoint, timeout, savepoint_format)
        told = {"name": job.name, "status": job.status(), "path": path}
    _say(as_json, told, "{name} has stopped ({status}); its savepoint is {path}")


@job_app.command("cancel")
def cancel_command(
    context: typer.Context, address: AddressOption = None, timeout: TimeoutOption = "1min", as_json: JsonOption = False
) -> None:
    """Cancel the job, and wait for its end; its checkpoints stay as its retention says."""
    with _job(context, address) as job:
        job.cancel()
        told = {"name": job.name, "status": job.wait(timeout)}
    _say(as_json, told, "{name} is {status}")


@job_app.command("tasks")
def tasks_command(context: typer.Context, address: AddressOption = None, as_json: JsonOption = False) -> None:
    """List the tasks of the job: vertex, subtask, attempt, and the process that runs each, with its node and actor."""
    from tidegate.cli.job_printing import as_json_text, task_lines, tasks_of

    with _job(context, address) as job:
        tasks = tasks_of(job)
    for text in [as_json_text(tasks)] if as_json else task_lines(tasks):
        typer.echo(text)


@job_app.command("events")
def events_command(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is over.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Print the events themselves, one a line.")] = False,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what happened to the job, a line for each decision, oldest first, as `tidegate events` does."""
    import threading

    from tidegate.cli.job_printing import JobTimeline, RawEvents

    with _job(context, address) as job:
        told = RawEvents(job, as_json) if raw else JobTimeline(job, as_json)
        while True:
            over = not follow or _is_over(job)  # asked before reading, so that the last events are printed
            for text in told.news():
                typer.echo(text)
            if over:
                return
            threading.Event().wait(FOLLOW_S)


def _once_it_runs(job: Job, what: str, timeout: str) -> int:
    """Wait until a job that starts or restarts runs, and say so; returns what is left of the time, in ms."""
    import threading
    import time

    from tidegate.actors.runtimes.running_job import NOT_YET
    from tidegate.storage.units import parse_duration_ms

    end_s = time.monotonic() + parse_duration_ms(timeout, setting="--timeout") / 1_000
    said = False
    while (status := job.status()) in NOT_YET:
        if time.monotonic() >= end_s:
            raise JobTimeoutError(f"job {job.name!r} is still {status} after {timeout}: no {what} was asked for")
        if not said:
            typer.echo(f"{job.name} is {status}; the {what} is taken when it runs", err=True)
            said = True
        threading.Event().wait(LOOK_S)
    return max(0, round((end_s - time.monotonic()) * 1_000))


def _is_over(job: Job) -> bool:
    """Whether the job has ended, and its log says so."""
    try:
        job.wait(0)
    except JobTimeoutError:
        return False
    except JobFailedError:
        return True
    return True


def open_environment(address: str | None) -> StreamEnvironment:
    """An environment on the Ray cluster at `address`, to find its jobs."""
    from tidegate.api.environment import StreamEnvironment

    return StreamEnvironment.ray(address)


@contextmanager
def _environment(address: str | None) -> Iterator[StreamEnvironment]:
    """An environment. A TidegateError in the block becomes one sentence and an exit code."""
    try:
        with open_environment(address) as env:
            yield env
    except TidegateError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(exit_code(error)) from error


@contextmanager
def _job(context: typer.Context, address: str | None) -> Iterator[Job]:
    with _environment(address) as env:
        yield env.attach(context.obj)


def exit_code(error: TidegateError) -> int:
    """The exit code for an error."""
    if isinstance(error, JobTimeoutError):
        return TIME_IS_OVER
    return WRONG_USAGE if isinstance(error, ConfigurationError) else REFUSED


def _say(as_json: bool, told: Mapping[str, object], text: str) -> None:
    from tidegate.cli.job_printing import as_json_text

    typer.echo(as_json_text(told) if as_json else text.format(**told))
