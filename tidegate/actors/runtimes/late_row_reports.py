"""`LateRowReports`: says in the log how many rows were late at a step and dropped, so that nobody loses rows unseen.

Rules:

- A step is reported when it has dropped rows since its last report: at most once a minute, and when the job ends.
- A step whose late rows are read (`late_rows()`) loses none, and is not reported.
- The decision depends on the given time and counts alone. Counts are those of the present attempt.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.operators.watermarks.late_rows import LATE, LATE_RECORDS
from tidegate.actors.runtimes.vertex_metrics import VertexMetrics
from tidegate.storage.ids import OperatorUid

EVERY_MS = 60_000


class LateRowReports:
    """The reports of one job."""

    def __init__(self, graph: JobGraph) -> None:
        sides = [edge.side for edge in graph.edges if edge.side is not None]
        self._read = {side.operator for side in sides if side.tag == LATE}
        self._reported: dict[OperatorUid, int] = {}
        self._due_ms: dict[OperatorUid, int] = {}

    def lines(self, at_ms: int, vertices: Iterable[VertexMetrics], over: bool = False) -> list[str]:
        """Returns what is to be logged now. `at_ms`: milliseconds of any clock; `over`: the job has ended."""
        names: dict[OperatorUid, str] = {}
        counts: dict[OperatorUid, int] = {}
        for vertex in vertices:
            for subtask in vertex.subtasks:
                for metric in subtask.user:
                    if metric.name == LATE_RECORDS and metric.uid not in self._read:
                        names[metric.uid] = metric.operator
                        counts[metric.uid] = counts.get(metric.uid, 0) + int(metric.value)
        found = []
        for uid, count in counts.items():
            before = self._reported.get(uid, 0)
            if count == before or count == 0 or not (over or at_ms >= self._due_ms.get(uid, at_ms)):
                continue
            self._reported[uid] = count
            self._due_ms[uid] = at_ms + EVERY_MS
            rows = "1 row was" if count == 1 else f"{count:,} rows were"
            found.append(
                f"{rows} late at {names[uid]} (uid {uid!r}) and dropped; see late_rows(), or give a larger "
                "max_out_of_orderness"
            )
        return found
