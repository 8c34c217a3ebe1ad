"""`breakdown_of`: one checkpoint by subtask, with the four phases of each as a timeline.

A subtask's time runs from the trigger to its acknowledgement: the start delay until its first barrier, the alignment
until the last, the synchronous and the asynchronous part of its snapshot. What is left of it, the barrier's way through
the chain and that of the acknowledgement, is the line behind them. All subtasks of a checkpoint share one scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tidegate.web.page import texts

SUBTASKS_MAX = 60
"""Of one vertex; of more, the slowest are shown."""

ROWS_MAX = 600
"""Of all vertices together: with many of them, each shows fewer subtasks, but `SUBTASKS_MIN`."""

SUBTASKS_MIN = 4
VERTICES_MAX = 100

PHASES = (
    ("start-delay", "start delay"),
    ("alignment", "alignment"),
    ("sync", "sync"),
    ("async", "async"),
)
"""Classes of CSS, and Flink's words."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A phase of a subtask. `x` and `width` are in percent of the scale."""

    kind: str
    words: str
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class Subtask:
    """A subtask's part of a checkpoint. Without `segments` it has not acknowledged."""

    number: int
    acknowledged: bool
    acknowledged_at: object
    duration: object
    phases: tuple[object, ...]
    segments: tuple[Segment, ...]
    end: float
    """Where its time ends, in percent of the scale."""
    checkpointed_size: object
    state_size: object
    persisted: object
    unaligned: bool

    @property
    def words(self) -> str:
        """Its timeline in words."""
        if not self.acknowledged:
            return "not acknowledged"
        parts = ", ".join(f"{name} {texts.span(ms)}" for (_, name), ms in zip(PHASES, self.phases, strict=True))
        return f"{texts.span(self.duration)} in all: {parts}"


@dataclass(frozen=True, slots=True)
class VertexPart:
    """One vertex' part of a checkpoint. `known`: whether its subtasks are still remembered."""

    name: str
    acknowledged: int
    total: int
    duration: object
    state_size: object
    subtasks: tuple[Subtask, ...]
    known: bool

    @property
    def left_out(self) -> int:
        """Subtasks that are not shown."""
        return max(0, self.total - len(self.subtasks)) if self.known else 0


@dataclass(frozen=True, slots=True)
class Breakdown:
    """One checkpoint by vertices. `scale_ms`: what the whole width of a timeline stands for."""

    vertices: tuple[VertexPart, ...]
    scale_ms: float
    left_out: int
    """Vertices that are not shown."""

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Where the scale has marks, in percent, and what they say."""
        return [(percent, texts.span(self.scale_ms * percent / 100)) for percent in (0.0, 50.0, 100.0)]


def breakdown_of(
    details: Mapping[str, Any], subtasks: Mapping[str, Mapping[str, Any] | None], names: Mapping[str, str]
) -> Breakdown:
    """A checkpoint of the model. `subtasks`: by vertex id; None where they are not remembered. `names`: of vertices."""
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
        # Those that have not acknowledged are what a checkpoint waits for: they come first.
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
    segments, begin = [], 0.0
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
