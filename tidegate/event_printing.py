"""Finds and prints what `tidegate events` shows: it knows what the kinds of events mean.

The modules whose classes appear in logs are imported for that: only then can their events be read.
"""

from __future__ import annotations

import typer
from rich.pretty import pretty_repr

import tidegate.actors.coordinator.messages.instructions
import tidegate.actors.coordinator.state.coordinator_state  # noqa: F401 (imported for the classes that they register)
from tidegate.actors.coordinator.messages.causes import BEGINS, orders_answered
from tidegate.actors.coordinator.messages.words import in_words
from tidegate.recovery.checkpoints import is_of_job
from tidegate.recovery.event_history import Chain, EventHistory, LoggedEvent
from tidegate.recovery.printing import make_console, time_text
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import Store
from tidegate.storage.ids import JobId

LINES_MAX = 40
"""Of a chain; what is left out of its middle is said."""
FIRST_LINES = 5


def logs_under(path: str, job: str | None) -> dict[JobId, EventLog]:
    """The logs of the jobs under a root, or of the job whose folder it is."""
    store, job = _root_of(path, job)
    logs = {JobId(name): EventLog(store, JobId(name)) for name in store.list("") if is_of_job(store, JobId(name), job)}
    return {job_id: log for job_id, log in logs.items() if log.indices()}


def _root_of(path: str, job: str | None) -> tuple[Store, str | None]:
    """The root that a path means, and the job; the path may be that of a job's folder."""
    store = open_store(path)
    root, _, name = store.url.rpartition("/")
    if job is None and root and name and any(entry.isdigit() for entry in store.list("events")):
        return open_store(root), name
    return store, job


def only_one(logs: dict[JobId, EventLog], path: str, job: str | None) -> tuple[EventLog, JobId]:
    """The log of the one job that is meant. ConfigurationError if there is none, or more than one."""
    of_job = f" of job {job}" if job else ""
    if not logs:
        raise ConfigurationError(f"there is no event log under {path}{of_job}")
    if len(logs) > 1:
        names = ", ".join(sorted(logs))
        raise ConfigurationError(f"there are several event logs under {path}{of_job}: choose one by --job ({names})")
    return next((log, job_id) for job_id, log in logs.items())


def print_history(history: EventHistory) -> int:
    """Print all entries; how many of them cannot be read."""
    typer.echo(f"Job {history.job_id}")
    console = make_console()
    for index, entry, events, error in history.entries:
        if entry is None:
            typer.echo(f"{index:>6}  {error}", err=True)
            continue
        typer.echo(f"{index:>6}  {time_text(entry.at_ms)}  generation {entry.generation}")
        for logged in events:
            text = pretty_repr(logged.event, max_width=console.width - 40, max_string=120, max_length=12)
            console.print(_head(logged) + text.replace("\n", "\n" + " " * 8), markup=False, soft_wrap=True)
    return history.unreadable


def _head(logged: LoggedEvent) -> str:
    number = "?" if logged.number is None else f"{logged.number}"
    cause = "" if logged.cause is None else f"because of {logged.cause}  "
    return f"        event {number}  {cause}"


def print_chain(chain: Chain, whole: bool) -> None:
    """Print a line an event, the first one first."""
    events, first = chain.events, chain.events[0]
    if chain.cut is not None:
        typer.echo(f"{chain.cut:>7}  {chain.cut_why}")
    elif not first.tells:
        typer.echo("         What led to it the log does not tell: it was written by an older version")
    elif not isinstance(first.event, BEGINS) or orders_answered(first.event):
        typer.echo("         What led to it the log does not tell")
    left_out = 0 if whole else max(0, len(events) - LINES_MAX)
    for place, logged in enumerate(events):
        if left_out and place == FIRST_LINES:
            typer.echo(f"         ... {left_out} events between them (--all prints them)")
        if not left_out or not FIRST_LINES <= place < FIRST_LINES + left_out:
            typer.echo(f"{logged.number:>7}  {time_text(logged.at_ms)}  {in_words(logged.event)}")
