"""Prints timelines of jobs for `tidegate events` (`events_command.py`): people read lines, programs JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime

import typer
from rich.console import Console

from tidegate.actors.coordinator.job_history import seconds_text
from tidegate.cli.terminal import make_console, time_text
from tidegate.recovery.state_processor.timeline import Timeline, TimelineLine
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.units import parse_duration_ms


@dataclass(frozen=True, slots=True)
class Choice:
    """Which lines are wanted: of one checkpoint, of restarts alone, or since a moment (ms since the epoch).

    Details are printed of one checkpoint alone.
    """

    checkpoint: int | None = None
    restarts: bool = False
    since_ms: int | None = None

    def takes(self, told: TimelineLine) -> bool:
        """Whether a line is wanted."""
        line = told.line
        if self.since_ms is not None and line.at_ms < self.since_ms:
            return False
        if self.checkpoint is not None:
            return line.checkpoint == self.checkpoint
        return line.restart if self.restarts else not line.detail


def moment_ms(text: str, option: str = "--since") -> int:
    """Returns the moment that an option names, in ms since the epoch: a duration ago, or a date and time in UTC.

    Raises ConfigurationError.
    """
    try:
        return now_ms() - parse_duration_ms(text)
    except ConfigurationError:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise ConfigurationError(
                f"{option} {text!r} is neither a duration, such as 10min, nor a date and time, such as 2026-11-23T16:27"
            ) from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1_000)


def print_timeline(timeline: Timeline, choice: Choice, as_json: bool) -> None:
    """Print the chosen lines of a timeline: one JSON object a line, or text."""
    lines = [told for told in timeline.lines if choice.takes(told)]
    if as_json:
        for told in lines:
            typer.echo(json.dumps(line_object(timeline, told)))
        return
    console = make_console()
    typer.echo(f"Job {timeline.job_id}")
    for note in timeline.notes:
        console.print(f"  ({note})", markup=False, soft_wrap=True)
    for told in lines:
        _print_line(console, told)
    if not lines:
        typer.echo("  nothing of what was asked for is in its log")
    elif choice.checkpoint is None and not choice.restarts:
        _print_pending(console, timeline)


def _print_line(console: Console, told: TimelineLine) -> None:
    style = "yellow" if told.line.trouble else None
    console.print(line_text(told), style=style, markup=False, highlight=False, soft_wrap=True)


def line_text(told: TimelineLine) -> str:
    """A line with the number of its event and its time."""
    number = "?" if told.number is None else str(told.number)
    return f"{number:>7}  {time_text(told.line.at_ms)}  {told.line.text}"


def _print_pending(console: Console, timeline: Timeline) -> None:
    """Say how far it has come where the log ends."""
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


def line_object(timeline: Timeline, told: TimelineLine) -> dict[str, object]:
    """A line for programs."""
    line = told.line
    return {
        "job": timeline.job_id,
        "event": told.number,
        "at_ms": line.at_ms,
        "text": line.text,
        "checkpoint": line.checkpoint,
        "attempt": line.attempt,
        "trouble": line.trouble,
    }
