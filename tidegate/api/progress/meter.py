"""`ProgressMeter`: how far a bounded job is: rows, splits, the part that is done, the rate, and the time that is left.

It counts what the coordinator knows anyway (`JobProgress`). Rules:

- Rows are those that the sources have read, since the job's first checkpoint of all. After a failure they go back to
  what the checkpoint has, and the rate is measured anew.
- The part that is done is that of the rows if the length of every split is known, else that of the splits, if all
  sources are assigned theirs. Otherwise nobody knows it.
- The rate is that of the last `WINDOW_S` seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from tidegate.actors.runtimes.running_job import JobProgress, Submission
from tidegate.connectors.source import is_unbounded
from tidegate.storage.units import duration_text

WINDOW_S = 30.0
"""The rate is measured over this time."""


@dataclass(frozen=True, slots=True)
class BoundedInput:
    """What a bounded job has to read. `rows` is None where a split does not say how many it has."""

    vertices: frozenset[str]
    """The sources."""
    rows: int | None
    splits: int
    assigned: frozenset[str]
    """Sources whose splits are assigned while the job runs."""


def bounded_input(submission: Submission) -> BoundedInput | None:
    """What a job has to read; None if it may never end."""
    sources = [vertex for vertex in submission.context.graph.vertices if vertex.source is not None]
    if any(vertex.source is None or is_unbounded(vertex.source.source) for vertex in sources):
        return None
    splits = [
        position.split
        for vertex in sources
        if vertex.source is not None
        for position in submission.context.splits[vertex.source.uid]
    ]
    return BoundedInput(
        vertices=frozenset(vertex.vertex for vertex in sources),
        rows=None if any(split.rows < 0 for split in splits) else sum(split.rows for split in splits),
        splits=len(splits),
        assigned=frozenset(source.vertex for source in submission.spec.assigned_sources),
    )


@dataclass(frozen=True, slots=True)
class Reading:
    """How far a job is at one moment. What nobody knows is None."""

    status: str
    rows: int
    rows_total: int | None
    splits_begun: int | None
    splits: int
    part: float | None
    """From 0 to 1."""
    rows_per_s: float | None
    left_s: float | None

    def __str__(self) -> str:
        """One line for people."""
        rows = f"{self.rows:,} rows" if self.rows_total is None else f"{self.rows:,} of {self.rows_total:,} rows"
        begun = f"{self.splits:,}" if self.splits_begun is None else f"{self.splits_begun:,} of {self.splits:,}"
        shown = [
            self.status,
            *([] if self.part is None else [f"{100 * self.part:.0f} %"]),
            rows,
            f"{begun} split{'' if self.splits == 1 else 's'}{'' if self.splits_begun is None else ' begun'}",
            *([] if self.rows_per_s is None else [f"{self.rows_per_s:,.0f} rows/s"]),
            *([] if self.left_s is None else [f"{duration_text(round(self.left_s) * 1_000)} left"]),
        ]
        return ", ".join(shown)


class ProgressMeter:
    """Of one job. The time that it is given only grows."""

    def __init__(self, given: BoundedInput) -> None:
        self._input = given
        self._seen: deque[tuple[float, int]] = deque()
        """Rows at moments of the window, and at the last one before it."""

    def read(self, now_s: float, progress: JobProgress) -> Reading:
        """How far the job is, by what the coordinator says at this moment."""
        given = self._input
        rows = self._of_sources(progress.rows_before) + self._of_sources(progress.rows_in)
        if given.rows is not None:
            rows = min(rows, given.rows)
        begun = None
        if given.assigned == given.vertices and given.splits:
            begun = given.splits - sum(progress.splits_left.get(vertex, 0) for vertex in given.assigned)
        part = None
        if progress.status == "finished":
            part = 1.0
        elif given.rows is not None:
            part = rows / given.rows if given.rows else 1.0
        elif begun is not None:
            part = begun / given.splits
        rate = self._rate(now_s, rows)
        left_s = None
        if rate and given.rows is not None:
            left_s = (given.rows - rows) / rate
        return Reading(progress.status, rows, given.rows, begun, given.splits, part, rate, left_s)

    def _of_sources(self, rows: Mapping[str, int]) -> int:
        return sum(count for vertex, count in rows.items() if vertex in self._input.vertices)

    def _rate(self, now_s: float, rows: int) -> float | None:
        """Rows a second over the window; None until there is something to measure."""
        if self._seen and rows < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now_s, rows))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()
        since_s, before = self._seen[0]
        return (rows - before) / (now_s - since_s) if now_s > since_s else None
