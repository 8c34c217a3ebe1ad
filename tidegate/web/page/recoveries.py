"""The recoveries of a job on its page: what failed, from what it went on, and where the time went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.web.page import texts

RECOVERIES_MAX = 20

PARTS = {
    "detect": "until it was noticed, at most",
    "wait": "until the deployment",
    "restore": "restore",
    "first-row": "until the first row",
}
"""What the parts are called, by their names in the model, in the order in which they follow each other."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a recovery. `x` and `width` are in percent of the scale; `duration` is None while it lasts."""

    name: str
    duration: object
    kind: str
    x: float
    width: float

    @property
    def words(self) -> str:
        """What it says."""
        return f"{self.name} {texts.span(self.duration)}"


@dataclass(frozen=True, slots=True)
class Recovery:
    """From a failure until the job ran again. `over`: whether it does."""

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
        """Its timeline in words."""
        whole = f"{texts.span(self.duration)} in all" if self.over else "still going on"
        return ": ".join([whole, ", ".join(part.words for part in self.parts)] if self.parts else [whole])


def recoveries_of(given: Mapping[str, Any]) -> list[Recovery]:
    """The answer of the model, newest first, all on one scale."""
    found: Sequence[Mapping[str, Any]] = given["recoveries"][:RECOVERIES_MAX]
    scale_ms = max((max(_known(r["total"]), sum(map(_known, r["parts"].values()))) for r in found), default=0.0)
    return [_recovery(recovery, scale_ms or 1.0) for recovery in found]


def part_names(recoveries: Iterable[Recovery]) -> list[tuple[str, str]]:
    """The legend: the name of each part that occurs, and the class of its colour."""
    kinds = {part.kind: part.name for recovery in recoveries for part in recovery.parts}
    return [(kinds[kind], kind) for kind in PARTS if kind in kinds]


def _recovery(given: Mapping[str, Any], scale_ms: float) -> Recovery:
    parts, begin = [], 0.0
    for kind, name in PARTS.items():
        if kind in given["parts"]:
            duration_ms = given["parts"][kind]
            length = _known(duration_ms)
            x, width = round(100 * begin / scale_ms, 3), round(100 * length / scale_ms, 3)
            parts.append(Part(name, duration_ms, kind, x, width))
            begin += length
    restarted, tasks = given["tasks-restarted"], given["tasks"]
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
