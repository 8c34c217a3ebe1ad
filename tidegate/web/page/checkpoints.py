"""The checkpoints of a job on its page: counts, the newest of each kind, the strip, the history and the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.web.page import texts

STRIP_MAX = 60
_BAR_MIN, _BAR_MAX, _FOOT = 3.0, 50.0, 70.0
"""In pixels: the least and the largest height of a bar, and where bars stand."""

COLUMNS = ("min", "avg", "max", "p50", "p90", "p95", "p99", "p999")
COLUMN_NAMES = ("minimum", "average", "maximum", "p50", "p90", "p95", "p99", "p99.9")
ROWS = (
    ("end_to_end_duration", "End to end duration", "span"),
    ("checkpointed_size", "Checkpointed data size", "size"),
    ("state_size", "Full checkpoint data size", "size"),
    ("persisted_data", "Persisted in-flight data", "size"),
)
"""Flink's names on its page of checkpoints, without what is processed during an alignment, which nobody counts."""

_KINDS = {
    "CHECKPOINT": "checkpoint",
    "UNALIGNED_CHECKPOINT": "unaligned checkpoint",
    "SAVEPOINT": "savepoint",
    "SYNC_SAVEPOINT": "savepoint that ends the job",
}
_MARKS = {"COMPLETED": "✓", "FAILED": "✕", "IN_PROGRESS": "…"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint or savepoint. `status` is Flink's; `mark` is a character that stands for it."""

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
        """Its status in lower case, for people and for classes of CSS."""
        return self.status.lower().replace("_", "-")


def checkpoint_of(given: Mapping[str, Any]) -> Checkpoint:
    """A checkpoint of the model."""
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
    """A checkpoint in the strip. `x` and `width` are in percent, `y` and `height` in pixels."""

    checkpoint: Checkpoint
    x: float
    width: float
    y: float
    height: float

    @property
    def middle(self) -> float:
        """Where a mark over it stands, in percent."""
        return round(self.x + self.width / 2, 3)

    @property
    def words(self) -> str:
        """What the bar says."""
        c = self.checkpoint
        said = [f"{c.kind.capitalize()} {c.number}: {c.word.replace('-', ' ')}", texts.span(c.duration)]
        if c.status == "COMPLETED":
            said.append(texts.size(c.checkpointed_size))
        return ", ".join([*said, c.failure] if c.failure else said)


def strip(history: Sequence[Checkpoint]) -> list[Bar]:
    """The newest `STRIP_MAX` of a history (newest first), oldest first; the longest has the highest bar."""
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
    """All that the page shows of them."""

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
        """The newest completed one, savepoints included."""
        both = [c for c in (self.completed, self.savepoint) if c is not None and c.status == "COMPLETED"]
        return max(both, key=lambda c: c.number, default=None)

    @property
    def longest(self) -> float | None:
        """The duration of the highest bar."""
        return max((texts.number(bar.checkpoint.duration) or 0.0 for bar in self.bars), default=None)

    @property
    def strip_words(self) -> str:
        """What the strip shows, for those who do not see it."""
        failed = sum(bar.checkpoint.status == "FAILED" for bar in self.bars)
        return (
            f"The last {len(self.bars)} checkpoints: {failed} failed, the longest took {texts.span(self.longest)}. "
            "The table below has them all."
        )


def checkpoints_of(given: Mapping[str, Any]) -> Checkpoints:
    """The answer of the model, as the page shows it."""
    counts, latest = given["counts"], given["latest"]
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
    """Rows of the summary: a name, and a text for each of `COLUMNS`."""
    words = {"span": texts.span, "size": texts.size}
    return [
        (label, [words[kind](summary[key].get(column)) for column in COLUMNS])
        for key, label, kind in ROWS
        if key in summary
    ]
