"""`explain` and `history`: why the coordinator of a job made a decision, and all events of the job, as data.

They only use the event log. Old events are folded into a snapshot and cut. They can no longer be explained, and the
result states that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tidegate.actors.coordinator import events as ev
from tidegate.recovery.event_history import EventHistory, LoggedEvent
from tidegate.recovery.state_processor.job_states import logs_under, no_log, only_one
from tidegate.storage.checkpoints.layout import parse_checkpoint_name
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import JobId

HISTORY = pa.schema(
    [
        ("job", pa.string()),
        ("entry", pa.int64()),
        ("event", pa.int64()),
        ("cause", pa.int64()),
        ("at", pa.timestamp("ms", "UTC")),
        ("logged_at", pa.timestamp("ms", "UTC")),
        ("generation", pa.int64()),
        ("kind", pa.string()),
        ("text", pa.string()),
        ("checkpoint", pa.int64()),
        ("attempt", pa.int64()),
        ("task", pa.string()),
    ]
)
"""The columns of `history`. Columns that do not apply to an event are null."""


@dataclass(frozen=True, slots=True)
class Step:
    """One event of a chain: its number in the log, its time (ms since the epoch), its kind, and its description."""

    event: int
    at_ms: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The events that led to a decision: `steps`, the first cause first.

    `missing` is why the chain does not begin earlier. It is empty if the chain is complete.
    """

    job_id: JobId
    decision: str
    steps: tuple[Step, ...]
    missing: str = ""

    def __str__(self) -> str:
        """Returns the explanation as text, one line for each event."""
        lines = [f"{self.decision}, because:"]
        lines += [f"  (what came before {self.missing})"] if self.missing else []
        lines += [f"  {step.event:>6}  {step.text}" for step in self.steps]
        return "\n".join(lines)


def explain(
    path: str,
    *,
    checkpoint: int | None = None,
    attempt: int | None = None,
    event: int | None = None,
    job: str | None = None,
    open_store: OpenStore = open_store,
) -> Explanation:
    """Returns the events that led to a decision, as a readable chain (`print(explain(...))`).

    `path` is a checkpoint root, a job's folder in it, or `<root>/<job>/chk-17`, which is short for `checkpoint=17`.
    Give one of these:

    - `checkpoint`: why this checkpoint was completed or aborted.
    - `attempt`: why this attempt was started.
    - `event`: why the event with this number happened.

    `job` is a name or id, needed if there are several jobs.

    Raises ConfigurationError if none or several of these are given, if the job has no log, or if the log does not
    contain the event. Raises StorageError.
    """
    folder, _, name = path.rstrip("/").rpartition("/")
    number = parse_checkpoint_name(name)
    if number is not None and (checkpoint, attempt, event) == (None, None, None):
        path, checkpoint = folder, number
    if sum(choice is not None for choice in (checkpoint, attempt, event)) != 1:
        raise ConfigurationError(
            f"explain({path!r}): give exactly one of checkpoint=, attempt= and event=, not checkpoint={checkpoint}, "
            f"attempt={attempt} and event={event}"
        )
    history = EventHistory.read(*only_one(logs_under(path, job, open_store), path, job))
    events = [logged for _, _, entry_events, _ in history.entries for logged in entry_events]
    if checkpoint is not None:
        decided, decision = _about_checkpoint(history, events, checkpoint)
    elif attempt is not None:
        decided, decision = _about_attempt(history, events, attempt)
    else:
        assert event is not None
        decided, decision = event, f"event {event} happened"
    chain = history.why(decided)
    first = chain.events[0]
    missing = chain.cut_why
    if not missing and not first.event.begins:
        missing = "was not recorded"
    return Explanation(history.job_id, decision, tuple(_step(logged) for logged in chain.events), missing)


def history(path: str, job: str | None = None, *, open_store: OpenStore = open_store) -> pa.Table:
    """Returns all events of the jobs under a root, or of one job, as an Arrow table with columns `HISTORY`.

    Each row is one event. Entries that cannot be read are omitted; `tidegate events` lists them. Raises
    ConfigurationError if there is no log; StorageError.
    """
    logs = logs_under(path, job, open_store)
    if not logs:
        raise ConfigurationError(no_log(path, job))
    rows = [row for job_id, log in logs.items() for row in _rows(EventHistory.read(log, job_id))]
    return pa.Table.from_pylist(rows, HISTORY)


def _rows(found: EventHistory) -> Iterator[dict[str, Any]]:
    for index, entry, events, _ in found.entries:
        for logged in events:
            assert entry is not None, "events of an entry that cannot be read"
            task = getattr(logged.event, "task", None)
            yield {
                "job": found.job_id,
                "entry": index,
                "event": logged.number,
                "cause": logged.cause,
                "at": logged.at_ms,
                "logged_at": logged.logged_at_ms,
                "generation": entry.generation,
                "kind": type(logged.event).__name__,
                "text": logged.event.describe(),
                "checkpoint": getattr(logged.event, "checkpoint_id", None),
                "attempt": getattr(logged.event, "attempt", None),
                "task": None if task is None else str(task),
            }


def _about_checkpoint(found: EventHistory, events: list[LoggedEvent], checkpoint: int) -> tuple[int, str]:
    """Returns the number of the event that decided about a checkpoint, and the decision as text."""
    about = [logged for logged in events if getattr(logged.event, "checkpoint_id", None) == checkpoint]
    about += [
        logged
        for logged in events
        if isinstance(logged.event, ev.TimerFired) and logged.event.timer == f"timeout:{checkpoint}"
    ]
    for kinds, words in (
        ((ev.MetadataWritten,), "was completed"),
        ((ev.CheckpointVoided, ev.CheckpointDeclined, ev.TimerFired), "was given up"),
        ((object,), "was undecided when the log ends"),
    ):
        decided = [logged for logged in about if isinstance(logged.event, kinds)]
        if decided:
            number = decided[0].number if kinds != (object,) else decided[-1].number
            return number, f"checkpoint {checkpoint} of job {found.job_id} {words}"
    raise ConfigurationError(_nothing(found, f"checkpoint {checkpoint}", "checkpoint_id", events))


def _about_attempt(found: EventHistory, events: list[LoggedEvent], attempt: int) -> tuple[int, str]:
    for logged in events:
        if getattr(logged.event, "attempt", None) == attempt:
            return logged.number, f"attempt {attempt} of job {found.job_id} was started"
    raise ConfigurationError(_nothing(found, f"attempt {attempt}", "attempt", events))


def _nothing(found: EventHistory, what: str, field: str, events: list[LoggedEvent]) -> str:
    known = sorted({getattr(logged.event, field) for logged in events if hasattr(logged.event, field)})
    there = f"it has events of {known[0]} to {known[-1]}" if known else "it has no such events"
    return (
        f"the event log of job {found.job_id} has no event of {what}: {there}. Older events were folded into a "
        f"snapshot and cut, or {what} never existed"
    )


def _step(logged: LoggedEvent) -> Step:
    return Step(logged.number, logged.at_ms, type(logged.event).__name__, logged.event.describe())
