"""Prints the events of jobs for `tidegate events` and `tidegate job NAME events`: timelines, whole logs, and causes.

A timeline has a line for each decision of a coordinator. A chain of causes leads to one event. `--raw` prints a whole
log, entry by entry. The output is lines of text, or JSON for programs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime

import typer
from rich.console import Console
from rich.pretty import pretty_repr

from tidegate.actors.coordinator.job_history import seconds_text
from tidegate.cli.terminal import make_console, time_text
from tidegate.recovery.event_history import Chain, EventHistory, LoggedEvent
from tidegate.recovery.state_processor.timeline import Timeline, TimelineLine
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.units import parse_duration_ms

LINES_MAX = 40
"""How many lines of a chain of causes are printed at most. One line replaces the middle of a longer chain."""
FIRST_LINES = 5


@dataclass(frozen=True, slots=True)
class LineFilter:
    """Selects lines of a timeline: for one checkpoint, only restarts, or since a time in ms since the epoch.

    Details are printed only for a single checkpoint.
    """

    checkpoint: int | None = None
    restarts: bool = False
    since_ms: int | None = None

    def matches(self, entry_line: TimelineLine) -> bool:
        """Returns whether the filter selects a line."""
        line = entry_line.line
        if self.since_ms is not None and line.at_ms < self.since_ms:
            return False
        if self.checkpoint is not None:
            return line.checkpoint == self.checkpoint
        return line.restart if self.restarts else not line.detail


def moment_ms(text: str, option: str = "--since") -> int:
    """Returns the time given by an option, in ms since the epoch: a duration before now, or a date and time in UTC.

    Raises ConfigurationError if it is neither.
    """
    try:
        return now_ms() - parse_duration_ms(text)
    except ConfigurationError:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise ConfigurationError(
                f"{option} {text!r} is neither a duration, such as 10min, nor a date and time, such as 2026-11-23T16:27"
                "; write one of these"
            ) from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1_000)


def print_timeline(timeline: Timeline, choice: LineFilter, as_json: bool) -> None:
    """Prints the selected lines of a timeline, as text or as one JSON object for each line."""
    lines = [entry_line for entry_line in timeline.lines if choice.matches(entry_line)]
    if as_json:
        for entry_line in lines:
            typer.echo(json.dumps(line_object(timeline, entry_line)))
        return
    console = make_console()
    typer.echo(f"Job {timeline.job_id}")
    for note in timeline.notes:
        console.print(f"  ({note})", markup=False, soft_wrap=True)
    for entry_line in lines:
        _print_line(console, entry_line)
    if not lines:
        typer.echo("  its log has no such lines")
    elif choice.checkpoint is None and not choice.restarts:
        _print_pending(console, timeline)


def _print_line(console: Console, entry_line: TimelineLine) -> None:
    style = "yellow" if entry_line.line.trouble else None
    console.print(line_text(entry_line), style=style, markup=False, highlight=False, soft_wrap=True)


def line_text(entry_line: TimelineLine) -> str:
    """Returns a line as text, with the number of its event and its time."""
    return f"{entry_line.number:>7}  {time_text(entry_line.line.at_ms)}  {entry_line.line.text}"


def _print_pending(console: Console, timeline: Timeline) -> None:
    """Prints the status of the job and its pending checkpoints and savepoints at the end of the log."""
    state = timeline.state
    if state is None or state.status.terminal or not timeline.lines:
        return
    end_ms = timeline.lines[-1].line.at_ms
    for pending in state.pending.values():
        kind, waiting = pending.properties.kind.words, len(pending.waiting)
        age = seconds_text(end_ms - pending.triggered_at_ms)
        text = f"where the log ends, {kind} {pending.checkpoint_id} is {age} old and waits for {waiting} tasks"
        console.print(f"         {text}", markup=False, highlight=False, soft_wrap=True)
    for savepoint in state.copies.values():
        age = seconds_text(end_ms - savepoint.triggered_at_ms)
        text = f"where the log ends, savepoint {savepoint.checkpoint_id} is {age} old and is being copied"
        console.print(f"         {text}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"         where the log ends, the job is {state.status.value}", markup=False, highlight=False)


def line_object(timeline: Timeline, entry_line: TimelineLine) -> dict[str, object]:
    """Returns a line as an object for JSON."""
    line = entry_line.line
    return {
        "job": timeline.job_id,
        "event": entry_line.number,
        "at_ms": line.at_ms,
        "text": line.text,
        "checkpoint": line.checkpoint,
        "attempt": line.attempt,
        "trouble": line.trouble,
    }


# --- logs and chains of causes ----------------------------------------------------------------------------------------


def print_history(history: EventHistory) -> int:
    """Prints all entries of a log. Returns how many of them cannot be read."""
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
    cause = "" if logged.cause is None else f"because of {logged.cause}  "
    return f"        event {logged.number}  {cause}"


def print_chain(chain: Chain, whole: bool) -> None:
    """Prints a chain of causes, one event on each line, the first cause first.

    `whole`: long chains are not shortened.
    """
    events, first = chain.events, chain.events[0]
    if chain.cut is not None:
        typer.echo(f"{chain.cut:>7}  {chain.cut_why}")
    elif not first.event.begins or first.event.answers:
        typer.echo("         The log does not have the cause")
    skipped = 0 if whole else max(0, len(events) - LINES_MAX)
    for place, logged in enumerate(events):
        if skipped and place == FIRST_LINES:
            typer.echo(f"         ... {skipped} events between them (--all prints them)")
        if not skipped or not FIRST_LINES <= place < FIRST_LINES + skipped:
            typer.echo(f"{logged.number:>7}  {time_text(logged.at_ms)}  {logged.event.describe()}")
