"""Checkpoints on the page of a job: counts, the newest of each kind, the bar chart, history, summary, and one by
subtask.

The time of a subtask is from the trigger to its acknowledgement: the start delay until its first barrier, the alignment
until the last one, then the synchronous and the asynchronous part of its snapshot. A line after them shows the rest:
the time of the barrier in the chain, and of the acknowledgement on the network. All subtasks of a checkpoint use the
same scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.web.page import texts

STRIP_MAX = 60

_BAR_MIN = 3.0
_BAR_MAX = 50.0
_FOOT = 70.0
"""In pixels: the smallest and the largest height of a bar, and the position of the line below the bars."""

COLUMNS = ("min", "avg", "max", "p50", "p90", "p95", "p99", "p999")
COLUMN_NAMES = ("minimum", "average", "maximum", "p50", "p90", "p95", "p99", "p99.9")

ROWS = (
    ("end_to_end_duration", "End to end duration", "span"),
    ("checkpointed_size", "Checkpointed data size", "size"),
    ("state_size", "Full checkpoint data size", "size"),
    ("persisted_data", "Persisted in-flight data", "size"),
)
"""The rows of the summary, with Flink's names, but without data processed during alignment, which is not measured."""

SUBTASKS_MAX = 60
"""How many subtasks of a vertex are shown at most. If there are more, the slowest are shown."""

ROWS_MAX = 600
"""How many subtasks of all vertices are shown at most. Each vertex shows at least `SUBTASKS_MIN`."""

SUBTASKS_MIN = 4
VERTICES_MAX = 100

PHASES = (
    ("start-delay", "start delay"),
    ("alignment", "alignment"),
    ("sync", "sync"),
    ("async", "async"),
)
"""CSS classes of the phases, and Flink's names."""

_KINDS = {
    "CHECKPOINT": "checkpoint",
    "UNALIGNED_CHECKPOINT": "unaligned checkpoint",
    "SAVEPOINT": "savepoint",
    "SYNC_SAVEPOINT": "savepoint that ends the job",
}

_MARKS = {"COMPLETED": "✓", "FAILED": "✕", "IN_PROGRESS": "…"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint or savepoint. `status` is Flink's name; `mark` is a character that represents it."""

    number: int
    status: str
    mark: str
    kind: str
    savepoint: bool
    triggered_at: object
    acknowledged_at: object
    duration: object
    checkpointed_size: object
    state_size: object
    persisted: object
    tasks: str
    path: str
    failed_at: object
    failure: str

    @property
    def word(self) -> str:
        """Returns the status of the checkpoint in lower case, for text and for CSS classes."""
        return self.status.lower().replace("_", "-")


def checkpoint_of(given: Mapping[str, Any]) -> Checkpoint:
    """Converts a checkpoint from the model's dict to a `Checkpoint`."""
    status = str(given["status"])
    kind = str(given.get("checkpoint_type", "CHECKPOINT"))
    return Checkpoint(
        number=given["id"],
        status=status,
        mark=_MARKS.get(status, "?"),
        kind=_KINDS.get(kind, texts.line(kind.lower(), 40)),
        savepoint=bool(given["is_savepoint"]),
        triggered_at=given["trigger_timestamp"],
        acknowledged_at=given["latest_ack_timestamp"],
        duration=given["end_to_end_duration"],
        checkpointed_size=given["checkpointed_size"],
        state_size=given["state_size"],
        persisted=given["persisted_data"],
        tasks=f"{given['num_acknowledged_subtasks']:,} of {given['num_subtasks']:,}",
        path=texts.line(given.get("external_path") or ""),
        failed_at=given.get("failure_timestamp"),
        failure=texts.line(given.get("failure_message") or ""),
    )


@dataclass(frozen=True, slots=True)
class Bar:
    """The bar of one checkpoint in the duration chart. `x` and `width` are in percent, `y` and `height` in pixels."""

    checkpoint: Checkpoint
    x: float
    width: float
    y: float
    height: float

    @property
    def middle(self) -> float:
        """Returns the horizontal position of a mark above the bar, in percent."""
        return round(self.x + self.width / 2, 3)

    @property
    def words(self) -> str:
        c = self.checkpoint
        parts = [f"{c.kind.capitalize()} {c.number}: {c.word.replace('-', ' ')}", texts.span(c.duration)]
        if c.status == "COMPLETED":
            parts.append(texts.size(c.checkpointed_size))
        return ", ".join([*parts, c.failure] if c.failure else parts)


def strip(history: Sequence[Checkpoint]) -> list[Bar]:
    """Returns bars for the newest `STRIP_MAX` checkpoints of a history, oldest first.

    The longest duration has the highest bar.
    """
    shown = list(reversed(history[:STRIP_MAX]))
    longest = max((texts.number(c.duration) or 0.0 for c in shown), default=0.0) or 1.0
    pitch = 100 / STRIP_MAX
    bars = []
    for place, checkpoint in enumerate(shown):
        height = _BAR_MIN + (_BAR_MAX - _BAR_MIN) * (texts.number(checkpoint.duration) or 0.0) / longest
        x = round((STRIP_MAX - len(shown) + place) * pitch, 3)
        bars.append(Bar(checkpoint, x, round(pitch * 0.78, 3), round(_FOOT - height, 1), round(height, 1)))
    return bars


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of a job in the form that its page shows."""

    counts: list[tuple[str, int]]
    completed: Checkpoint | None
    failed: Checkpoint | None
    savepoint: Checkpoint | None
    restored: Mapping[str, Any] | None
    history: list[Checkpoint]
    bars: list[Bar]
    summary: list[tuple[str, list[str]]]

    @property
    def newest(self) -> Checkpoint | None:
        """Returns the newest completed checkpoint or savepoint, or None if there is none."""
        both = [c for c in (self.completed, self.savepoint) if c is not None and c.status == "COMPLETED"]
        return max(both, key=lambda c: c.number, default=None)

    @property
    def longest(self) -> float | None:
        """Returns the duration of the highest bar in ms, or None if there are no bars."""
        return max((texts.number(bar.checkpoint.duration) or 0.0 for bar in self.bars), default=None)

    @property
    def strip_words(self) -> str:
        """Returns a description of the bar chart, for users who cannot see it."""
        failed = sum(bar.checkpoint.status == "FAILED" for bar in self.bars)
        return (
            f"The last {len(self.bars)} checkpoints: {failed} failed, the longest took {texts.span(self.longest)}. "
            "The table below lists them."
        )


def checkpoints_of(given: Mapping[str, Any]) -> Checkpoints:
    """Converts the result of the model's function `checkpoints`."""
    counts = given["counts"]
    latest = given["latest"]
    history = [checkpoint_of(c) for c in given["history"][:STRIP_MAX]]
    return Checkpoints(
        counts=[
            ("Triggered", counts["total"]),
            ("In progress", counts["in_progress"]),
            ("Completed", counts["completed"]),
            ("Failed", counts["failed"]),
            ("Restored", counts["restored"]),
        ],
        completed=_latest(latest, "completed"),
        failed=_latest(latest, "failed"),
        savepoint=_latest(latest, "savepoint"),
        restored=latest.get("restored"),
        history=history,
        bars=strip(history),
        summary=summary_rows(given["summary"]),
    )


def _latest(latest: Mapping[str, Any], kind: str) -> Checkpoint | None:
    return None if latest.get(kind) is None else checkpoint_of(latest[kind])


def summary_rows(summary: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Returns the rows of the summary: a label, and one text for each of `COLUMNS`."""
    words = {"span": texts.span, "size": texts.size}
    return [
        (label, [words[kind](summary[key].get(column)) for column in COLUMNS])
        for key, label, kind in ROWS
        if key in summary
    ]


@dataclass(frozen=True, slots=True)
class Segment:
    """A phase of a subtask's checkpoint in the timeline. `x` and `width` are in percent of the scale."""

    kind: str
    words: str
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class Subtask:
    """The part of a subtask in a checkpoint. `segments` is empty until the subtask has acknowledged it."""

    number: int
    acknowledged: bool
    acknowledged_at: object
    duration: object
    phases: tuple[object, ...]
    segments: tuple[Segment, ...]
    end: float
    """The end of its time, in percent of the scale."""
    checkpointed_size: object
    state_size: object
    persisted: object
    unaligned: bool

    @property
    def words(self) -> str:
        if not self.acknowledged:
            return "not acknowledged"
        parts = ", ".join(f"{name} {texts.span(ms)}" for (_, name), ms in zip(PHASES, self.phases, strict=True))
        return f"{texts.span(self.duration)} in all: {parts}"


@dataclass(frozen=True, slots=True)
class VertexPart:
    """The part of a vertex in a checkpoint, for the page. `known`: whether its subtasks are still stored."""

    name: str
    acknowledged: int
    total: int
    duration: object
    state_size: object
    subtasks: tuple[Subtask, ...]
    known: bool

    @property
    def hidden(self) -> int:
        """Returns how many subtasks of the vertex the page does not show."""
        return max(0, self.total - len(self.subtasks)) if self.known else 0


@dataclass(frozen=True, slots=True)
class Breakdown:
    """One checkpoint by vertex. `scale_ms` is the duration that corresponds to the full width of a timeline."""

    vertices: tuple[VertexPart, ...]
    scale_ms: float
    hidden: int
    """How many vertices are not shown."""

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Returns the labels of the scale: position in percent, and text."""
        return [(percent, texts.span(self.scale_ms * percent / 100)) for percent in (0.0, 50.0, 100.0)]


def breakdown_of(
    details: Mapping[str, Any], subtasks: Mapping[str, Mapping[str, Any] | None], names: Mapping[str, str]
) -> Breakdown:
    """Converts a checkpoint from the form of the model.

    `subtasks`: the subtasks of each vertex id, None if they are no longer stored. `names`: the name of each vertex id.
    """
    parts = [part for part in subtasks.values() if part is not None]
    scale_ms = max((_longest(part["subtasks"]) for part in parts), default=0.0) or 1.0
    tasks = list(details["tasks"].items())[:VERTICES_MAX]
    subtasks_max = max(SUBTASKS_MIN, min(SUBTASKS_MAX, ROWS_MAX // max(1, len(tasks))))
    vertices = tuple(
        _vertex(texts.name(names.get(vertex, vertex)), task, subtasks.get(vertex), scale_ms, subtasks_max)
        for vertex, task in tasks
    )
    return Breakdown(vertices, scale_ms, len(details["tasks"]) - len(tasks))


def _longest(subtasks: Iterable[Mapping[str, Any]]) -> float:
    return max((max(_duration(subtask), sum(_phases(subtask))) for subtask in subtasks), default=0.0)


def _vertex(
    name: str, task: Mapping[str, Any], part: Mapping[str, Any] | None, scale_ms: float, subtasks_max: int
) -> VertexPart:
    given = [] if part is None else list(part["subtasks"])
    if len(given) > subtasks_max:
        # Subtasks without acknowledgement come first: the checkpoint waits for them.
        given = sorted(given, key=lambda s: (not _is_pending(s), -_duration(s), s["index"]))[:subtasks_max]
    return VertexPart(
        name=name,
        acknowledged=task["num_acknowledged_subtasks"],
        total=task["num_subtasks"],
        duration=task["end_to_end_duration"],
        state_size=task["state_size"],
        subtasks=tuple(_subtask(subtask, scale_ms) for subtask in given),
        known=part is not None,
    )


def _subtask(given: Mapping[str, Any], scale_ms: float) -> Subtask:
    if _is_pending(given):
        return Subtask(given["index"] + 1, False, None, None, (), (), 0.0, None, None, None, False)
    segments = []
    begin = 0.0
    phases = _phases(given)
    for (kind, word), duration_ms in zip(PHASES, phases, strict=True):
        if duration_ms > 0:
            width = round(100 * duration_ms / scale_ms, 3)
            segments.append(Segment(kind, f"{word} {texts.span(duration_ms)}", round(100 * begin / scale_ms, 3), width))
        begin += duration_ms
    return Subtask(
        number=given["index"] + 1,
        acknowledged=True,
        acknowledged_at=given["ack_timestamp"],
        duration=given["end_to_end_duration"],
        phases=tuple(phases),
        segments=tuple(segments),
        end=round(100 * max(begin, _duration(given)) / scale_ms, 3),
        checkpointed_size=given["checkpointed_size"],
        state_size=given["state_size"],
        persisted=given["alignment"]["persisted"],
        unaligned=bool(given["unaligned_checkpoint"]),
    )


def _is_pending(subtask: Mapping[str, Any]) -> bool:
    return "checkpoint" not in subtask


def _duration(subtask: Mapping[str, Any]) -> float:
    return texts.number(subtask.get("end_to_end_duration")) or 0.0


def _phases(subtask: Mapping[str, Any]) -> list[float]:
    if _is_pending(subtask):
        return []
    parts = (
        subtask["start_delay"],
        subtask["alignment"]["duration"],
        subtask["checkpoint"]["sync"],
        subtask["checkpoint"]["async"],
    )
    return [texts.number(part) or 0.0 for part in parts]
