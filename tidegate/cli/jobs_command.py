"""The commands for jobs that run on Ray: `tidegate jobs`, and `tidegate job NAME …`.

Exit codes: 0 success, 1 the job has refused or failed, 2 wrong usage (no such job, no cluster), 3 timeout.

In JSON, times are in ms since the epoch, durations in ms and sizes in bytes. An unknown value is null.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from tidegate.cli.terminal import JsonOption, time_text
from tidegate.storage.errors import ConfigurationError, JobFailedError, JobTimeoutError, TidegateError

if TYPE_CHECKING:
    from tidegate.actors.runtimes.running_job import JobOverview, SilentJob
    from tidegate.api.environment import StreamEnvironment
    from tidegate.api.submission.job import Job

REFUSED = 1
WRONG_USAGE = 2
TIMED_OUT = 3
FOLLOW_S = 1.0
"""Seconds between two reads of the log with `--follow`."""
POLL_S = 0.3
"""Seconds between two requests for the status of a job that does not run yet."""

job_app = typer.Typer(help="Inspect or control one job that runs on Ray.", no_args_is_help=True)

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Address of Ray. Default: RAY_ADDRESS, or the only cluster of this user on this machine.",
    ),
]
FormatOption = Annotated[
    Literal["canonical", "native"],
    typer.Option(
        "--format", help="canonical: sorted rows, which every backend reads; native: the files of the backend."
    ),
]
TimeoutOption = Annotated[str, typer.Option("--timeout", help="How long to wait for it.")]


def jobs_command(address: AddressOption = None, as_json: JsonOption = False) -> None:
    """List the jobs on this Ray: name, state, uptime, attempt, last checkpoint."""
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
    """Inspect or control one job that runs on Ray."""
    context.obj = name


@job_app.command("status")
def status_command(context: typer.Context, address: AddressOption = None, as_json: JsonOption = False) -> None:
    """Show the state of the job, its checkpoints, and the rows each vertex has received."""

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
        left_ms = await_running(job, "checkpoint", timeout)
        _print_result(as_json, {"path": job.trigger_checkpoint(left_ms)}, "{path}")


@job_app.command("savepoint")
def savepoint_command(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="Parent folder of the savepoint. Default: state.savepoints.dir."),
    ] = None,
    address: AddressOption = None,
    timeout: TimeoutOption = "10min",
    savepoint_format: FormatOption = "canonical",
    as_json: JsonOption = False,
) -> None:
    """Take a savepoint now, or when the job runs again, and print its path. The job continues."""
    with _job(context, address) as job:
        left_ms = await_running(job, "savepoint", timeout)
        _print_result(as_json, {"path": job.savepoint(target, left_ms, savepoint_format)}, "{path}")


@job_app.command("stop")
def stop_command(
    context: typer.Context,
    drain: Annotated[
        bool, typer.Option("--drain", help="End the sources for good and let the operators finish.")
    ] = False,
    savepoint: Annotated[
        str | None, typer.Option("--savepoint", metavar="URL", help="Parent folder of the savepoint.")
    ] = None,
    address: AddressOption = None,
    timeout: TimeoutOption = "10min",
    savepoint_format: FormatOption = "canonical",
    as_json: JsonOption = False,
) -> None:
    """Stop the job with a savepoint, wait for both, and print the path of the savepoint."""
    with _job(context, address) as job:
        path = job.stop(drain, savepoint, timeout, savepoint_format)
        result = {"name": job.name, "status": job.status(), "path": path}
    _print_result(as_json, result, "{name} has stopped ({status}); its savepoint is {path}")


@job_app.command("cancel")
def cancel_command(
    context: typer.Context, address: AddressOption = None, timeout: TimeoutOption = "1min", as_json: JsonOption = False
) -> None:
    """Cancel the job and wait for its end. Its retention setting decides which checkpoints stay."""
    with _job(context, address) as job:
        job.cancel()
        result = {"name": job.name, "status": job.wait(timeout)}
    _print_result(as_json, result, "{name} is {status}")


@job_app.command("tasks")
def tasks_command(context: typer.Context, address: AddressOption = None, as_json: JsonOption = False) -> None:
    """List the tasks of the job: vertex, subtask, attempt, and the process that runs each, with its node and actor."""

    with _job(context, address) as job:
        tasks = tasks_of(job)
    for text in [as_json_text(tasks)] if as_json else task_lines(tasks):
        typer.echo(text)


@job_app.command("events")
def events_command(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job is over.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Print the events themselves, one a line.")] = False,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what happened to the job, a line for each decision, oldest first, as `tidegate events` does."""
    import threading

    with _job(context, address) as job:
        log = RawEvents(job, as_json) if raw else JobTimeline(job, as_json)
        while True:
            over = not follow or is_over(job)  # Checked before reading, so that the last events are printed.
            for text in log.news():
                typer.echo(text)
            if over:
                return
            threading.Event().wait(FOLLOW_S)


def await_running(job: Job, what: str, timeout: str) -> int:
    """Waits until a job that starts or restarts runs. Returns the rest of the timeout in ms."""
    import threading
    import time

    from tidegate.actors.runtimes.running_job import NOT_YET
    from tidegate.storage.units import parse_duration_ms

    end_s = time.monotonic() + parse_duration_ms(timeout, setting="--timeout") / 1_000
    printed = False
    while (status := job.status()) in NOT_YET:
        if time.monotonic() >= end_s:
            raise JobTimeoutError(
                f"job {job.name!r} is still {status} after {timeout}; no {what} was triggered. Give a longer --timeout"
            )
        if not printed:
            typer.echo(f"{job.name} is {status}; the {what} is taken when it runs", err=True)
            printed = True
        threading.Event().wait(POLL_S)
    return max(0, round((end_s - time.monotonic()) * 1_000))


def is_over(job: Job) -> bool:
    """Returns whether the job has ended and its log records the end."""
    try:
        job.wait(0)
    except JobTimeoutError:
        return False
    except JobFailedError:
        return True
    return True


def open_environment(address: str | None) -> StreamEnvironment:
    """Returns an environment that is connected to the Ray cluster at `address`."""
    from tidegate.api.environment import StreamEnvironment

    return StreamEnvironment.ray(address)


@contextmanager
def _environment(address: str | None) -> Iterator[StreamEnvironment]:
    """Opens an environment for a command.

    A TidegateError in the block is printed as one sentence, and ends the command with an exit code (`exit_code`).
    """
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
    """Returns the exit code for an error: 3 for a timeout, 2 for wrong usage, otherwise 1."""
    if isinstance(error, JobTimeoutError):
        return TIMED_OUT
    return WRONG_USAGE if isinstance(error, ConfigurationError) else REFUSED


def _print_result(as_json: bool, result: Mapping[str, object], text: str) -> None:

    typer.echo(as_json_text(result) if as_json else text.format(**result))


Listing: TypeAlias = "Sequence[tuple[str, JobOverview | SilentJob]]"
"""The jobs on a cluster, each with its name."""

_HEAD = ("NAME", "STATE", "UPTIME", "ATTEMPT", "LAST CHECKPOINT", "ID")


def job_lines(jobs: Listing, now_ms: int) -> list[str]:
    """Returns a table of the jobs as lines, or one line if there are none. `now_ms` is in ms since the epoch."""
    from tidegate.actors.runtimes.running_job import SilentJob

    if not jobs:
        return ["No job runs on this Ray"]
    rows: list[tuple[str, ...]] = [_HEAD]
    notes = []
    for name, overview in jobs:
        if isinstance(overview, SilentJob):
            rows.append((name, "unreachable", "-", "-", "-", "-"))
            notes.append(f"{name}: {overview.why}, since {time_text(overview.since_ms)}")
        else:
            rows.append(_row(overview, now_ms))
    return [*_columns(rows), *notes]


def _row(overview: JobOverview, now_ms: int) -> tuple[str, ...]:
    from tidegate.storage.units import duration_text

    last_checkpoint = "-"
    if overview.last_checkpoint_at_ms is not None:
        ago = duration_text(now_ms - overview.last_checkpoint_at_ms)
        last_checkpoint = f"{overview.progress.last_checkpoint}, {ago} ago"
    return (
        overview.card.name,
        overview.progress.status,
        duration_text(now_ms - overview.card.submitted_at_ms),
        str(overview.progress.attempt),
        last_checkpoint,
        overview.card.job_id,
    )


def jobs_as_json(jobs: Listing, now_ms: int) -> str:
    """Returns the jobs as one line of JSON: a list with one object for each job."""
    return as_json_text([_job_object(name, overview, now_ms) for name, overview in jobs])


def _job_object(name: str, overview: JobOverview | SilentJob, now_ms: int) -> dict[str, object]:
    from tidegate.actors.runtimes.running_job import SilentJob

    if isinstance(overview, SilentJob):
        return {"name": name, "state": "unreachable", "since_ms": overview.since_ms, "why": overview.why}
    return {
        "name": overview.card.name,
        "id": overview.card.job_id,
        "state": overview.progress.status,
        "uptime_ms": max(0, now_ms - overview.card.submitted_at_ms),
        "attempt": overview.progress.attempt,
        "last_checkpoint": overview.progress.last_checkpoint,
        "last_checkpoint_at_ms": overview.last_checkpoint_at_ms,
        "detached": overview.card.detached,
        "root": overview.card.root,
    }


def status_of(job: Job) -> dict[str, object]:
    """Returns the names, the progress and the checkpoint figures of a job."""
    return {"name": job.name, "id": job.job_id, "root": job.root, **job.metrics()}


def status_lines(status: Mapping[str, object]) -> list[str]:
    """Returns one line for each fact. Facts that are None or False are omitted."""
    lines = []
    for name, value in status.items():
        if isinstance(value, Mapping):
            lines += [f"{name + '.' + str(key):<28} {_text(part)}" for key, part in value.items()]
        elif value is not None and value is not False:
            lines.append(f"{name:<28} {_text(value)}")
    return lines


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def tasks_of(job: Job) -> list[dict[str, object]]:
    """Returns the tasks of a job in the order of its graph, each with its process, which is None in a local job."""
    processes = {(str(p.task.vertex), int(p.task.subtask)): p for p in job.processes()}
    found: list[dict[str, object]] = []
    for vertex in job.vertices():
        for subtask in range(vertex.parallelism):
            process = processes.get((vertex.vertex, subtask))
            task: dict[str, object] = {"vertex": vertex.vertex, "name": vertex.name, "subtask": subtask}
            known = ("attempt", "pid", "node_id", "actor")
            found.append(task | {name: None if process is None else getattr(process, name) for name in known})
    return found


NODE_CHARACTERS = 12
_TASK_HEAD = ("VERTEX", "SUBTASK", "ATTEMPT", "PID", "NODE", "ACTOR")


def task_lines(tasks: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns a table of the tasks as lines. Ids of nodes are shortened; `-` means an unknown process."""

    def text(task: Mapping[str, object], column: str) -> str:
        value = "-" if task[column] is None else str(task[column])
        return value[:NODE_CHARACTERS] if column == "node_id" else value

    columns = ("vertex", "subtask", "attempt", "pid", "node_id", "actor")
    return _columns([_TASK_HEAD, *(tuple(text(task, column) for column in columns) for task in tasks)])


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


class JobTimeline:
    """Reads the decisions of a job from its event log, for `tidegate job NAME events`."""

    def __init__(self, job: Job, as_json: bool) -> None:
        from tidegate.recovery.state_processor.timeline import TimelineReader
        from tidegate.storage.checkpoints.event_log import EventLog

        self._reader = TimelineReader(EventLog(job._open_store(job.root), job.job_id), job.job_id)
        self._as_json = as_json
        self._noted = 0

    def news(self) -> list[str]:
        """Returns the decisions since the previous call, as lines of text or of JSON."""
        from tidegate.cli.event_printing import line_object, line_text

        lines = [line for line in self._reader.read() if not line.line.detail]
        timeline = self._reader.timeline()
        if self._as_json:
            return [as_json_text(line_object(timeline, line)) for line in lines]
        notes, self._noted = timeline.notes[self._noted :], len(timeline.notes)
        return [*(f"  ({note})" for note in notes), *map(line_text, lines)]


class RawEvents:
    """Reads the events of a job from its event log, for `tidegate job NAME events --raw`."""

    def __init__(self, job: Job, as_json: bool) -> None:
        from tidegate.storage.checkpoints.event_log import EventLog

        self._log = EventLog(job._open_store(job.root), job.job_id)
        self._job_id = job.job_id
        self._as_json = as_json
        self._index = 0

    def news(self) -> list[str]:
        """Returns the events since the previous call, as lines of text or of JSON."""
        # Importing these modules registers the classes of events that a log may hold.
        import tidegate.actors.coordinator.coordinator_state  # noqa: F401
        from tidegate.recovery.event_history import EventHistory

        lines = []
        for at, entry, events, error in EventHistory.read(self._log, self._job_id, self._index).entries:
            self._index = at + 1
            if entry is None:
                lines.append(as_json_text({"entry": at, "error": error}) if self._as_json else f"{at:>7}  {error}")
                continue
            for logged in events:
                kind = type(logged.event).__name__
                text = logged.event.describe()
                if self._as_json:
                    facts = {"event": logged.number, "at_ms": logged.at_ms, "cause": logged.cause, "kind": kind}
                    lines.append(as_json_text(facts | {"text": text}))
                else:
                    lines.append(f"{logged.number:>7}  {time_text(logged.at_ms)}  {text}")
        return lines


def as_json_text(value: object) -> str:
    """Returns a value as one line of JSON. Enumerations and ids are written as text."""
    return json.dumps(value, ensure_ascii=False, default=str)
