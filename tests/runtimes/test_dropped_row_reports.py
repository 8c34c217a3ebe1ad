"""Rows that a job drops are reported: what is said, and when."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.runtimes.dropped_row_reports import EVERY_MS, DroppedRowReports
from tidegate.actors.runtimes.task_metrics import SubtaskMetrics, VertexMetrics
from tidegate.operators.user_metrics import UserMetric
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
    reports = DroppedRowReports(JobGraph((), ()))
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
    rows = pa.table({"k": [1] * 4, "ts": [0, 50_000, 100_000, 1_000]})
    with tg.StreamEnvironment.local(1, options=tg.DataPlaneOptions(source_rows_max=1)) as env:
        counts = (
            env.from_batches(rows, timestamp="ts")
            .key_by("k")
            .window(tg.Tumbling("1s"))
            .aggregate(n=tg.count(), uid="counts")
        )
        counts.collect()
        if read:
            counts.late_rows().collect()
        with caplog.at_level(logging.WARNING):
            assert env.execute("late", progress="off").wait() == "finished"
    said = [record.getMessage() for record in caplog.records if "late at" in record.getMessage()]
    assert [line.split(";")[0] for line in said] == (
        [] if read else ["late: 1 row was late at window (uid 'counts') and dropped"]
    )


UNREADABLE = "2 rows were not readable at in (uid 'in') and dropped; read them with bad_rows=\"side\" and bad_rows()"


@pytest.mark.parametrize(
    ("policy", "read", "said"),
    [
        ("skip", False, [UNREADABLE]),
        ("side", False, [UNREADABLE]),
        ("side", True, []),
    ],
)
def test_rows_that_a_source_leaves_out_are_reported(
    tmp_path: Path, policy: Literal["skip", "side"], read: bool, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Unless the program reads them."""
    (tmp_path / "a.json").write_text('{"x": 1}\n{"x": \n{"x": 2}\nno\n')
    with tg.StreamEnvironment.local(1) as env:
        rows = env.from_files(
            f"{tmp_path}/*.json", schema=pa.schema([("x", pa.int64())]), bad_rows=policy, name="in", uid="in"
        )
        rows.collect()
        if read:
            rows.bad_rows().collect()
        with caplog.at_level(logging.WARNING):
            assert env.execute("job", progress="off").wait() == "finished"
    assert _reported(caplog) == said


@pytest.mark.parametrize(("reads", "said"), [("bad", []), ("other", ["4 rows were dropped at map (uid 'map')"])])
def test_rows_for_which_a_function_fails_are_reported(
    reads: str, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Unless the program reads them; another side output of the step makes no difference."""
    rows = pa.table({"x": range(8)})

    class Halves(tg.ProcessFunction):
        def process(self, row: dict[str, int], context: tg.ProcessContext) -> list[dict[str, int]]:
            if row["x"] % 2:
                raise ValueError("odd")
            return [row]

    other = tg.OutputTag("other", rows.schema)
    with tg.StreamEnvironment.local(1) as env:
        halves = env.from_batches(rows).process(
            Halves(), schema=rows.schema, side_outputs=[other], errors_to="bad", name="map", uid="map"
        )
        halves.side_output(reads).collect()
        halves.collect()
        with caplog.at_level(logging.WARNING):
            job = env.execute("job", progress="off")
            assert job.wait() == "finished"
        counted = [(m.uid, m.name, m.value) for found in job.user_metrics().values() for m in found]
    assert counted == [("map", "numRecordsInErrors", 4)]
    assert [line.split(",")[0] for line in _reported(caplog)] == said


def test_lost_records_are_reported() -> None:
    """They have no stream in which they could be."""
    uid = OperatorUid("in")
    user = (UserMetric("in", uid, "numRecordsLost", "counter", 3),)
    vertices = (VertexMetrics("in", "in", 1, (SubtaskMetrics(0, 0, 0, user=user),)),)
    (line,) = DroppedRowReports(JobGraph((), ())).lines(0, vertices)
    assert line.startswith("3 rows were lost at in (uid 'in'): they were deleted before they were read")


def _reported(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    return [line.removeprefix("job: ") for line in lines]
