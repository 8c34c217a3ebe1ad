"""A job at a glance on its page, the list of jobs, its exceptions, its decisions and its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.web.page import texts

JOBS_MAX = 200
EXCEPTIONS_MAX = 20
CONCURRENT_MAX = 20
DECISIONS_MAX = 100
SETTINGS_MAX = 200
TASKS_MAX = 200

OVER = frozenset({"FINISHED", "FAILED", "CANCELED", "SUSPENDED"})
_MARKS = {
    "RUNNING": "●",
    "FINISHED": "✓",
    "FAILED": "✕",
    "FAILING": "✕",
    "CANCELED": "■",
    "CANCELLING": "■",
    "SUSPENDED": "❚❚",
    "RESTARTING": "↻",
}
"""A character that stands for a state, so that its colour does not say it alone. Of others: a circle."""


@dataclass(frozen=True, slots=True)
class State:
    """A job's state: Flink's word, the class of its colour, and a character."""

    word: str

    @property
    def mark(self) -> str:
        """A character that stands for it."""
        return _MARKS.get(self.word, "○")

    @property
    def kind(self) -> str:
        """The class of its colour: good, bad, over or waiting."""
        if self.word == "RUNNING":
            return "good"
        if self.word in {"FAILED", "FAILING"}:
            return "bad"
        return "over" if self.word in OVER else "waiting"

    @property
    def over(self) -> bool:
        """Whether nothing changes any more."""
        return self.word in OVER


def _state(word: object) -> State:
    return State(texts.name(word))


@dataclass(frozen=True, slots=True)
class JobLine:
    """A job in the list."""

    jid: str
    name: str
    state: State
    started_at: object
    duration: object
    tasks: str


def job_lines(given: Mapping[str, Any]) -> list[JobLine]:
    """The list of the model (`jobs_overview`), bounded."""
    return [
        JobLine(
            jid=str(job["jid"]),
            name=texts.name(job["name"]),
            state=_state(job["state"]),
            started_at=job["start-time"],
            duration=job["duration"],
            tasks=tasks_text(job["tasks"]),
        )
        for job in given["jobs"][:JOBS_MAX]
    ]


def tasks_text(tasks: Mapping[str, int]) -> str:
    """How many tasks are in which state: `4 running`, `2 running, 2 deploying`."""
    parts = [f"{number:,} {state}" for state, number in tasks.items() if number and state != "total"]
    return ", ".join(parts) or "none"


NODE_CHARACTERS = 13
"""How much of a node's id is shown: 12 characters and an ellipsis."""

STALE_MS = 5_000
"""From here on the page says how old it is: a coordinator that answers does so every second or two."""


@dataclass(frozen=True, slots=True)
class Header:
    """A job at a glance. `note`: what somebody has to know of it now; empty if all is well."""

    jid: str
    name: str
    state: State
    started_at: object
    duration: object
    uptime: object
    attempt: object
    restarts: object
    coordinator_losses: object
    tasks: str
    note: str
    root: str
    stale_ms: float

    @property
    def stale(self) -> bool:
        """Whether what the page shows is old."""
        return self.stale_ms >= STALE_MS and not self.state.over


def header_of(details: Mapping[str, Any]) -> Header:
    """The head of the page, of `job_details` of the model."""
    ours, state = details["tidegate"], _state(details["state"])
    tasks: dict[str, int] = {}
    for vertex in details["vertices"]:
        for word, number in vertex["tasks"].items():
            tasks[word.lower()] = tasks.get(word.lower(), 0) + number
    return Header(
        jid=str(details["jid"]),
        name=texts.name(details["name"]),
        state=state,
        started_at=details["start-time"],
        duration=details["duration"],
        uptime=ours["uptime"],
        attempt=ours["attempt"],
        restarts=ours["restarts"],
        coordinator_losses=ours["coordinator-losses"],
        tasks=tasks_text(tasks),
        note=texts.line(_note(ours, state)),
        root=texts.line(ours["root"]),
        stale_ms=texts.number(ours["stale-ms"]) or 0.0,
    )


def _note(ours: Mapping[str, Any], state: State) -> str:
    if ours["reason"]:
        return str(ours["reason"])
    if ours["waits-for"]:
        return f"It waits: {ours['waits-for']}"
    return f"It restarts: {ours['failure-cause']}" if ours["failure-cause"] and state.kind != "good" else ""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a task: its name, where and when, what it said at last, and the whole of it."""

    name: str
    at: object
    task: str
    place: str
    said: str
    trace: str
    others: tuple[tuple[str, str], ...] = ()
    """Tasks that failed at the same time, and what they said."""


def failures_of(given: Mapping[str, Any]) -> list[Failure]:
    """`exceptions` of the model, newest first."""
    return [_failure(entry) for entry in given["exceptionHistory"]["entries"][:EXCEPTIONS_MAX]]


def _failure(entry: Mapping[str, Any]) -> Failure:
    trace = texts.trace(entry["stacktrace"] or "")
    return Failure(
        name=texts.name(entry["exceptionName"] or "failure"),
        at=entry["timestamp"],
        task=texts.name(entry["taskName"] or ""),
        place=texts.name(entry["endpoint"] or ""),
        said=_headline(trace),
        trace=trace,
        others=tuple(
            (texts.name(other["taskName"] or ""), _headline(texts.trace(other["stacktrace"] or "")))
            for other in entry["concurrentExceptions"][:CONCURRENT_MAX]
        ),
    )


def _headline(trace: str) -> str:
    """What a trace comes down to: Python prints it last, and tidegate above the frames of the user's code."""
    lines = [line for line in trace.splitlines() if line.strip()] or [""]
    return texts.line(lines[-1] if lines[0].startswith("Traceback") else lines[0])


@dataclass(frozen=True, slots=True)
class Decision:
    """A line of what the coordinator has decided. `trouble`: somebody should look at it."""

    at: object
    text: str
    checkpoint: int | None
    trouble: bool


def decisions_of(given: Mapping[str, Any]) -> list[Decision]:
    """`timeline` of the model, newest first."""
    return [
        Decision(entry["timestamp"], texts.line(entry["text"]), entry["checkpoint"], bool(entry["trouble"]))
        for entry in given["entries"][:DECISIONS_MAX]
    ]


@dataclass(frozen=True, slots=True)
class TaskLine:
    """A task, and the process in which it is. Empty texts if it has none."""

    task: str
    status: str
    attempt: int
    actor: str
    pid: str
    node: str


def task_lines(given: Sequence[Mapping[str, Any]]) -> list[TaskLine]:
    """`task_processes` of the model, bounded."""
    return [
        TaskLine(
            task=f"{texts.name(task['vertex'])} ({task['subtask'] + 1}/{task['parallelism']})",
            status=texts.name(task["status"]).lower(),
            attempt=task["attempt"],
            actor=texts.name(task["actor"] or ""),
            pid="" if task["pid"] is None else str(task["pid"]),
            node=texts.line(task["node"] or "", NODE_CHARACTERS),
        )
        for task in given[:TASKS_MAX]
    ]


def settings_of(given: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """`configuration` of the model as names and values, as they are written in YAML."""
    return [(texts.name(entry["key"]), texts.line(entry["value"])) for entry in given[:SETTINGS_MAX]]
