"""Prints event logs and chains of causes for `tidegate events` (`events_command.py`).

What it prints comes from `tidegate/recovery/event_history.py`, which knows no kinds of events. Here they are put into
words.
"""

from __future__ import annotations

import typer
from rich.pretty import pretty_repr

from tidegate.cli.terminal import make_console, time_text
from tidegate.recovery.event_history import Chain, EventHistory, LoggedEvent

LINES_MAX = 40
"""Lines printed of a chain. Of a longer chain the middle is left out, and one line says so."""
FIRST_LINES = 5


def print_history(history: EventHistory) -> int:
    """Print all entries of a log. Returns how many of them cannot be read."""
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
    """Print a chain of causes, one event a line, the first cause first. `whole` prints long chains in full."""
    events, first = chain.events, chain.events[0]
    if chain.cut is not None:
        typer.echo(f"{chain.cut:>7}  {chain.cut_why}")
    elif not first.tells:
        typer.echo("         What led to it the log does not tell: it was written by an older version")
    elif not first.event.begins or first.event.answers:
        typer.echo("         What led to it the log does not tell")
    left_out = 0 if whole else max(0, len(events) - LINES_MAX)
    for place, logged in enumerate(events):
        if left_out and place == FIRST_LINES:
            typer.echo(f"         ... {left_out} events between them (--all prints them)")
        if not left_out or not FIRST_LINES <= place < FIRST_LINES + left_out:
            typer.echo(f"{logged.number:>7}  {time_text(logged.at_ms)}  {logged.event.describe()}")
