"""Formats what `tidegate jobs` and `tidegate job` print (`jobs_command.py`).

Only `status_of`, `tasks_of`, `JobTimeline` and `RawEvents` ask a job; the rest is pure. JSON has times in ms since the
epoch, durations in ms and sizes in bytes. What is not known is null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import tidegate.actors.coordinator.messages.instructions
import tidegate.actors.coordinator.state.coordinator_state  # noqa: F401 (imported for the classes that they register)
from tidegate.actors.coordinator.messages.words import in_words
from tidegate.actors.runtimes.running_job import JobOverview, SilentJob
from tidegate.api.submission.job import Job
from tidegate.cli.checkpoint_printing import time_text
from tidegate.cli.timeline_printing import line_object, line_text
from tidegate.recovery.event_history import EventHistory
from tidegate.recovery.state_processor.timeline import TimelineReader
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.units import duration_text

Listing = Sequence[tuple[str, JobOverview | SilentJob]]
"""Jobs by name."""

_HEAD = ("NAME", "STATE", "UPTIME", "ATTEMPT", "LAST CHECKPOINT", "ID")


def job_lines(jobs: Listing, now_ms: int) -> list[str]:
    """The jobs as the lines of a table, or one line if there are none. `now_ms` is in ms since the epoch."""
    if not jobs:
        return ["No job runs on this Ray"]
    rows = [_HEAD, *(_row(name, overview, now_ms) for name, overview in jobs)]
    silent = [
        f"{name}: {overview.why}, since {time_text(overview.since_ms)}"
        for name, overview in jobs
        if isinstance(overview, SilentJob)
    ]
    return [*_columns(rows), *silent]


def _row(name: str, overview: JobOverview | SilentJob, now_ms: int) -> tuple[str, ...]:
    if isinstance(overview, SilentJob):
        return (name, "unreachable", "-", "-", "-", "-")
    card, progress = overview.card, overview.progress
    return (
        card.name,
        progress.status,
        duration_text(now_ms - card.submitted_at_ms),
        str(progress.attempt),
        _last_checkpoint(overview, now_ms),
        card.job_id,
    )


def _last_checkpoint(overview: JobOverview, now_ms: int) -> str:
    if overview.last_checkpoint_at_ms is None:
        return "-"
    ago = duration_text(now_ms - overview.last_checkpoint_at_ms)
    return f"{overview.progress.last_checkpoint}, {ago} ago"


def jobs_as_json(jobs: Listing, now_ms: int) -> str:
    """The jobs as one line of JSON: a list with one object for each job."""
    return as_json_text([_job_object(name, overview, now_ms) for name, overview in jobs])


def _job_object(name: str, overview: JobOverview | SilentJob, now_ms: int) -> dict[str, object]:
    if isinstance(overview, SilentJob):
        return {"name": name, "state": "unreachable", "since_ms": overview.since_ms, "why": overview.why}
    card, progress = overview.card, overview.progress
    return {
        "name": card.name,
        "id": card.job_id,
        "state": progress.status,
        "uptime_ms": max(0, now_ms - card.submitted_at_ms),
        "attempt": progress.attempt,
        "last_checkpoint": progress.last_checkpoint,
        "last_checkpoint_at_ms": overview.last_checkpoint_at_ms,
        "detached": card.detached,
        "root": card.root,
    }


def status_of(job: Job) -> dict[str, object]:
    """A job at a glance: its names, its progress, and the key figures of its checkpoints."""
    return {"name": job.name, "id": job.job_id, "root": job.root, **job.metrics()}


def status_lines(status: Mapping[str, object]) -> list[str]:
    """One line for each fact. Facts that are None or False are left out."""
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
    """The tasks of a job in the order of its graph, and their processes; none where all run in this process."""
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
    """The tasks as the lines of a table, of their nodes' ids the first characters; `-` where no process is known."""

    def text(task: Mapping[str, object], column: str) -> str:
        value = "-" if task[column] is None else str(task[column])
        return value[:NODE_CHARACTERS] if column == "node_id" else value

    columns = ("vertex", "subtask", "attempt", "pid", "node_id", "actor")
    return _columns([_TASK_HEAD, *(tuple(text(task, column) for column in columns) for task in tasks)])


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


class JobTimeline:
    """What happened to a job: each call of `news` has the lines since the one before."""

    def __init__(self, job: Job, as_json: bool) -> None:
        self._reader = TimelineReader(EventLog(job._open_store(job.root), job.job_id), job.job_id)
        self._as_json = as_json
        self._noted = 0

    def news(self) -> list[str]:
        """Lines of text, or objects of JSON."""
        lines = [told for told in self._reader.read() if not told.line.detail]
        timeline = self._reader.timeline()
        if self._as_json:
            return [as_json_text(line_object(timeline, told)) for told in lines]
        notes, self._noted = timeline.notes[self._noted :], len(timeline.notes)
        return [*(f"  ({note})" for note in notes), *map(line_text, lines)]


class RawEvents:
    """The events in the log of a job: each call of `news` has the lines since the one before."""

    def __init__(self, job: Job, as_json: bool) -> None:
        self._log = EventLog(job._open_store(job.root), job.job_id)
        self._job_id = job.job_id
        self._as_json = as_json
        self._index = 0

    def news(self) -> list[str]:
        """Lines of text, or objects of JSON, one for each event."""
        lines = []
        for at, entry, events, error in EventHistory.read(self._log, self._job_id, self._index).entries:
            self._index = at + 1
            if entry is None:
                lines.append(as_json_text({"entry": at, "error": error}) if self._as_json else f"{at:>7}  {error}")
                continue
            for logged in events:
                kind, text = type(logged.event).__name__, in_words(logged.event)
                if self._as_json:
                    facts = {"event": logged.number, "at_ms": logged.at_ms, "cause": logged.cause, "kind": kind}
                    lines.append(as_json_text(facts | {"text": text}))
                else:
                    number = "?" if logged.number is None else logged.number
                    lines.append(f"{number:>7}  {time_text(logged.at_ms)}  {text}")
        return lines


def as_json_text(value: object) -> str:
    """One line of JSON. Enumerations and ids are written as text."""
    return json.dumps(value, ensure_ascii=False, default=str)
