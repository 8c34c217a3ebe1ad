"""`DroppedRowReports`: logs how many rows a job has dropped, and at which step.

Rows are dropped if they are late, if a source cannot read them, if a function fails for them and its side output has no
reader, and if records were deleted before a source read them. Rows in windows that are not full at the end of the input
are reported too. Rules:

- A step is reported when it has dropped rows since its last report: at most once a minute, and when the job ends.
- A step whose dropped rows are read (`late_rows()`, `bad_rows()`, `side_output(...)`) loses no rows, and is not
  reported.
- Decisions depend only on the given time and counts, which begin with the present attempt.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.runtimes.task_metrics import VertexMetrics
from tidegate.connectors.bad_rows import BAD_ROWS, RECORDS_LOST
from tidegate.operators.watermarks.late_rows import LATE, LATE_RECORDS, LEFT_RECORDS
from tidegate.protocol.edges import RECORDS_IN_ERRORS
from tidegate.storage.ids import OperatorUid

EVERY_MS = 60_000
_REPORTED = (LATE_RECORDS, LEFT_RECORDS, RECORDS_IN_ERRORS, RECORDS_LOST)
_Kind: TypeAlias = tuple[OperatorUid, str]
"""The uid of a step, and the name of the metric that counts its dropped rows."""


class DroppedRowReports:
    """Decides which lines about dropped rows to log for one job."""

    def __init__(self, graph: JobGraph) -> None:
        read = {(edge.side.operator, edge.side.tag) for edge in graph.edges if edge.side is not None}
        self._read: set[_Kind] = {(uid, LATE_RECORDS) for uid, tag in read if tag == LATE}
        self._sources = {vertex.source.uid for vertex in graph.vertices if vertex.source is not None}
        self._read |= {(uid, RECORDS_IN_ERRORS) for uid, tag in read if tag == BAD_ROWS and uid in self._sources}
        self._unread: dict[OperatorUid, str] = {}
        """For each step, its first side output of failed rows that no other step reads."""
        for vertex in graph.vertices:
            for operator in vertex.operators:
                unread = [tag for tag in operator.error_tags if (operator.uid, tag) not in read]
                if unread:
                    self._unread[operator.uid] = unread[0]
                else:
                    self._read.add((operator.uid, RECORDS_IN_ERRORS))
        self._reported: dict[_Kind, int] = {}
        self._due_ms: dict[_Kind, int] = {}

    def lines(self, at_ms: int, vertices: Iterable[VertexMetrics], over: bool = False) -> list[str]:
        """Returns the log lines about dropped rows that are due.

        `at_ms` is the present time in ms by any clock. `over`: the job has ended.
        """
        names: dict[_Kind, str] = {}
        counts: dict[_Kind, int] = {}
        for vertex in vertices:
            for subtask in vertex.subtasks:
                for metric in subtask.user:
                    kind = metric.uid, metric.name
                    if metric.name in _REPORTED and kind not in self._read:
                        names[kind] = metric.operator
                        counts[kind] = counts.get(kind, 0) + int(metric.value)
        found = []
        for kind, count in counts.items():
            before = self._reported.get(kind, 0)
            if count == before or count == 0 or not (over or at_ms >= self._due_ms.get(kind, at_ms)):
                continue
            self._reported[kind] = count
            self._due_ms[kind] = at_ms + EVERY_MS
            found.append(self._line(kind, names[kind], count))
        return found

    def _line(self, kind: _Kind, name: str, count: int) -> str:
        uid, metric = kind
        rows = "1 row was" if count == 1 else f"{count:,} rows were"
        if metric == LATE_RECORDS:
            return (
                f"{rows} late at {name} (uid {uid!r}) and dropped; see late_rows(), or give a larger "
                "max_out_of_orderness"
            )
        if metric == LEFT_RECORDS:
            return (
                f"{rows} left at {name} (uid {uid!r}) in windows that were not full when the input ended; "
                "tg.Count(..., fire_at_end=True) gives them"
            )
        if metric == RECORDS_LOST:
            return f"{rows} lost at {name} (uid {uid!r}): they were deleted before they were read; see on_missing="
        if uid in self._sources:
            return (
                f"{rows} not readable at {name} (uid {uid!r}) and dropped; read them with "
                'bad_rows="side" and bad_rows()'
            )
        return (
            f"{rows} dropped at {name} (uid {uid!r}), because its function failed for them; read them with "
            f"side_output({self._unread.get(uid, '')!r})"
        )
