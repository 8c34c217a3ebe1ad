"""A job on its page, the list of jobs, its charts, exceptions, decisions, recoveries, tasks and settings.

All charts of a page use the same time axis, from the first sample to the last one. A vertical axis starts at zero. A
line has a gap where nothing was reported, for example during a restart of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.web.page import texts

JOBS_MAX = 200
EXCEPTIONS_MAX = 20
CONCURRENT_MAX = 20
DECISIONS_MAX = 100
SETTINGS_MAX = 200
TASKS_MAX = 200

NODE_CHARACTERS = 13
"""How many characters of a node id are shown: 12 characters and an ellipsis."""

STALE_MS = 5_000
"""From this age on, in ms, the page shows the age of its data. A coordinator answers every second or two."""

WIDTH = 360
HEIGHT = 64
"""The size of a chart in units of its SVG. The page stretches it."""

_TOP = 4
"""The vertical position of the largest value, so that its line is not cut off."""

SERIES: tuple[tuple[str, str, str, Callable[[object], str]], ...] = (
    ("rows", "Rows a second", "rows-per-second", texts.rate),
    ("lag", "Lag of event time", "lag", texts.span),
    ("duration", "Checkpoint duration", "checkpoint-duration", texts.span),
)
"""For each chart: CSS class of the colour, title, name in the samples, and function that formats its values."""

RECOVERIES_MAX = 20

PARTS = {
    "detect": "until it was noticed, at most",
    "wait": "until the deployment",
    "restore": "restore",
    "first-row": "until the first row",
}
"""The texts of the parts by their names in the model, in their order."""

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
"""Characters that represent states, in addition to their colours. Other states have a circle."""


@dataclass(frozen=True, slots=True)
class State:
    """A job's state: Flink's name, the CSS class of its colour, and a character."""

    word: str

    @property
    def mark(self) -> str:
        return _MARKS.get(self.word, "○")

    @property
    def kind(self) -> str:
        """Returns the CSS class of its colour: good, bad, over or waiting."""
        if self.word == "RUNNING":
            return "good"
        if self.word in {"FAILED", "FAILING"}:
            return "bad"
        return "over" if self.word in OVER else "waiting"

    @property
    def over(self) -> bool:
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
    """Returns the first `JOBS_MAX` jobs in the result of `jobs_overview` of the model."""
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
    """Returns a text with counts of tasks by state, such as `2 running, 2 deploying`."""
    parts = [f"{number:,} {state}" for state, number in tasks.items() if number and state != "total"]
    return ", ".join(parts) or "none"


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a job's page. `note`: a problem that needs attention, or empty."""

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
        return self.stale_ms >= STALE_MS and not self.state.over


def header_of(details: Mapping[str, Any]) -> Header:
    """Returns the header of the page from the result of `job_details` of the model."""
    ours = details["tidegate"]
    state = _state(details["state"])
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
        return f"Waiting: {ours['waits-for']}"
    return f"Restarting: {ours['failure-cause']}" if ours["failure-cause"] and state.kind != "good" else ""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a task: name, place, time, last line, and the complete stack trace."""

    name: str
    at: object
    task: str
    place: str
    said: str
    trace: str
    others: tuple[tuple[str, str], ...] = ()
    """Tasks that failed at the same time, with their messages."""


def failures_of(given: Mapping[str, Any]) -> list[Failure]:
    """Converts the result of `exceptions` of the model, newest first."""
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
    """Returns the message of a stack trace: the last line of Python's, the first line of tidegate's."""
    lines = [line for line in trace.splitlines() if line.strip()] or [""]
    return texts.line(lines[-1] if lines[0].startswith("Traceback") else lines[0])


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of the coordinator, for the page. `trouble`: whether a user should look at it."""

    at: object
    text: str
    checkpoint: int | None
    trouble: bool


def decisions_of(given: Mapping[str, Any]) -> list[Decision]:
    """Converts the result of `timeline` of the model, newest first."""
    return [
        Decision(entry["timestamp"], texts.line(entry["text"]), entry["checkpoint"], bool(entry["trouble"]))
        for entry in given["entries"][:DECISIONS_MAX]
    ]


@dataclass(frozen=True, slots=True)
class TaskLine:
    """A task with its process. Texts are empty for a task without a process."""

    task: str
    status: str
    attempt: int
    actor: str
    pid: str
    node: str


def task_lines(given: Sequence[Mapping[str, Any]]) -> list[TaskLine]:
    """Converts the first `TASKS_MAX` entries of the result of `task_processes` of the model."""
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
    """Converts the result of `configuration` of the model to names and values, as in YAML."""
    return [(texts.name(entry["key"]), texts.line(entry["value"])) for entry in given[:SETTINGS_MAX]]


@dataclass(frozen=True, slots=True)
class Chart:
    """A line chart. `path` is empty if nothing was reported. `words` is a description for users who cannot see the
    chart.
    """

    kind: str
    title: str
    path: str
    latest: str
    least: str
    most: str
    words: str


@dataclass(frozen=True, slots=True)
class Charts:
    """The charts of a job. `since` and `until` are in ms since the epoch; None if there are no samples."""

    charts: tuple[Chart, ...]
    since: object
    until: object


def charts_of(samples: Sequence[Mapping[str, Any]]) -> Charts:
    """Returns the charts from the result of `last_hour` of the model."""
    if not samples:
        return Charts((), None, None)
    times = [sample["timestamp"] for sample in samples]
    charts = tuple(
        _chart(kind, title, times, [texts.number(sample[name]) for sample in samples], text)
        for kind, title, name, text in SERIES
    )
    return Charts(charts, times[0], times[-1])


def _chart(
    kind: str, title: str, times: Sequence[int], values: Sequence[float | None], text: Callable[[object], str]
) -> Chart:
    known = [value for value in values if value is not None]
    if not known:
        return Chart(kind, title, "", texts.UNKNOWN, texts.UNKNOWN, texts.UNKNOWN, f"{title}: nothing was reported.")
    latest, least, most = (text(value) for value in (known[-1], min(known), max(known)))
    words = f"{title}, latest {latest}, minimum {least}, maximum {most}, over {texts.span(times[-1] - times[0])}."
    return Chart(kind, title, _path(times, values, max(known)), latest, least, most, words)


def _path(times: Sequence[int], values: Sequence[float | None], most: float) -> str:
    """Returns a line as an SVG path. A value between two gaps is a short dash."""
    whole = max(1, times[-1] - times[0])
    parts = []
    drawing = False
    for at_ms, value in zip(times, values, strict=True):
        if value is None:
            drawing = False
            continue
        x = round(WIDTH * (at_ms - times[0]) / whole, 1)
        y = round(HEIGHT - (HEIGHT - _TOP) * value / (most or 1.0), 1)
        parts.append(f"L{x},{y}" if drawing else f"M{x},{y}h1")
        drawing = True
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a recovery, for the page. `x` and `width` are in percent of the scale. `duration` is None until the
    part has ended.
    """

    name: str
    duration: object
    kind: str
    x: float
    width: float

    @property
    def words(self) -> str:
        return f"{self.name} {texts.span(self.duration)}"


@dataclass(frozen=True, slots=True)
class Recovery:
    """The time from a failure until the job ran again. `over`: whether it runs again."""

    attempt: int
    failed_at: object
    duration: object
    tasks: str
    task: str
    cause: str
    checkpoint: int | None
    over: bool
    parts: tuple[Part, ...]

    @property
    def words(self) -> str:
        whole = f"{texts.span(self.duration)} in all" if self.over else "not over yet"
        return ": ".join([whole, ", ".join(part.words for part in self.parts)] if self.parts else [whole])


def recoveries_of(given: Mapping[str, Any]) -> list[Recovery]:
    """Converts the result of `recoveries` of the model, newest first. All use the same scale."""
    found: Sequence[Mapping[str, Any]] = given["recoveries"][:RECOVERIES_MAX]
    scale_ms = max((max(_known(r["total"]), sum(map(_known, r["parts"].values()))) for r in found), default=0.0)
    return [_recovery(recovery, scale_ms or 1.0) for recovery in found]


def part_names(recoveries: Iterable[Recovery]) -> list[tuple[str, str]]:
    """Returns the legend: text and CSS class of each part that occurs."""
    kinds = {part.kind: part.name for recovery in recoveries for part in recovery.parts}
    return [(kinds[kind], kind) for kind in PARTS if kind in kinds]


def _recovery(given: Mapping[str, Any], scale_ms: float) -> Recovery:
    parts = []
    begin = 0.0
    for kind, name in PARTS.items():
        if kind in given["parts"]:
            duration_ms = given["parts"][kind]
            length = _known(duration_ms)
            x = round(100 * begin / scale_ms, 3)
            width = round(100 * length / scale_ms, 3)
            parts.append(Part(name, duration_ms, kind, x, width))
            begin += length
    restarted = given["tasks-restarted"]
    tasks = given["tasks"]
    return Recovery(
        attempt=given["attempt"],
        failed_at=given["started-at"],
        duration=given["total"],
        tasks=f"all {tasks:,} tasks" if restarted == tasks else f"{restarted:,} of {tasks:,} tasks",
        task=texts.name(given["task"] or ""),
        cause=texts.line(given["cause"] or ""),
        checkpoint=given["checkpoint"],
        over=given["running-at"] is not None,
        parts=tuple(parts),
    )


def _known(duration_ms: object) -> float:
    return texts.number(duration_ms) or 0.0
