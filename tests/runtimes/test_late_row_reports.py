"""Rows that were late and dropped are reported: what is said, and when."""

from __future__ import annotations

import logging

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.operators.user_metrics import UserMetric
from tidegate.actors.runtimes.late_row_reports import EVERY_MS, LateRowReports
from tidegate.actors.runtimes.vertex_metrics import SubtaskMetrics, VertexMetrics
from tidegate.storage.ids import OperatorUid


def _vertices(*counts: int) -> tuple[VertexMetrics, ...]:
    """A window in as many subtasks."""
    uid = OperatorUid("window-1")
    subtasks = tuple(
        SubtaskMetrics(number, 0, 0, user=(UserMetric("window", uid, "numLateRecordsDropped", "counter", count),))
        for number, count in enumerate(counts)
    )
    return (VertexMetrics("window-1", "window", len(counts), subtasks),)


def test_a_step_is_reported_once_a_minute_and_at_the_end() -> None:
    """With the rows of all subtasks, and only if there are new ones."""
    reports = LateRowReports(JobGraph((), ()))
    assert reports.lines(0, _vertices(0, 0)) == []
    (line,) = reports.lines(1, _vertices(5_000, 226))
    assert line.startswith("5,226 rows were late at window (uid 'window-1') and dropped; see late_rows()")
    assert reports.lines(EVERY_MS, _vertices(5_000, 300)) == []
    assert len(reports.lines(EVERY_MS + 1, _vertices(5_000, 300))) == 1
    assert reports.lines(9 * EVERY_MS, _vertices(5_000, 300)) == []
    assert len(reports.lines(9 * EVERY_MS, _vertices(5_000, 301), over=True)) == 1
    assert reports.lines(9 * EVERY_MS, _vertices(5_000, 301), over=True) == []


@pytest.mark.parametrize("read", [False, True])
def test_a_job_that_dropped_rows_says_so_when_it_ends(read: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Unless somebody reads the late rows."""
    rows = pa.table({"k": [1] * 4, "ts": [0, 50_000, 100_000, 100_000], "late_ms": [0, 0, 0, 99_000]})
    with tg.StreamEnvironment.local(1, options=tg.DataPlaneOptions(source_rows_max=1)) as env:
        stream = env.from_batches(rows, splits=1, timestamp="ts").map(
            lambda row: {**row, "ts": row["ts"] - row["late_ms"]}, schema=rows.schema
        )
        counts = stream.key_by("k").window(tg.Tumbling("1s")).aggregate(n=tg.count(), uid="counts")
        counts.collect()
        if read:
            counts.late_rows().collect()
        with caplog.at_level(logging.WARNING):
            assert env.execute("late", progress="off").wait() == "finished"
    said = [record.getMessage() for record in caplog.records if "late at" in record.getMessage()]
    assert [line.split(";")[0] for line in said] == (
        [] if read else ["late: 1 row was late at window (uid 'counts') and dropped"]
    )
