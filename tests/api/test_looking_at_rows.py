"""Rows as people look at them: those so far, all at the end, as grids of text and tables of HTML."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, local

import tidegate as tg
from tidegate.api.tables.output_tables import CollectedRows
from tidegate.api.tables.shown_rows import grid, html_rows
from tidegate.storage.errors import ConfigurationError, JobFailedError, JobTimeoutError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.ids import CheckpointId, JobId, OperatorUid
from tidegate.storage.tables.table_files import write_data_file
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

ROWS = pa.table({"k": ["a", "b", None], "n": [1, 20, 300]})
GRID = """\
+------+-----+
| k    |   n |
+------+-----+
| a    |   1 |
| b    |  20 |
| null | 300 |
+------+-----+
"""


def fails(row: dict[str, int]) -> dict[str, int]:
    """Raises for the last rows."""
    if row["x"] >= 90:
        raise ValueError("row 90 is odd")
    return row


def test_all_rows_wait_for_the_end_of_a_bounded_job() -> None:
    """Without a call of `wait`; rows so far are there on request."""
    source = GatedSource(100, gates=(50,))
    with local(1) as env:
        rows = env.from_source(source).collect()
        env.execute("bounded")
        source.await_gate(50)
        assert rows.to_arrow(wait=False).num_rows == 0
        source.open_gate(50)
        assert rows.to_arrow().num_rows == 100
        assert (len(rows.to_polars()), len(rows.to_pandas())) == (100, 100)


def test_rows_of_a_cancelled_job_are_not_taken_for_all() -> None:
    """A script that leaves its environment before the job has ended gets an error, and no table without rows."""
    source = GatedSource(100, gates=(50,))
    with local(1) as env:
        rows = env.from_source(source).collect(uid="rows")
        env.execute("left")
        source.await_gate(50)
    with pytest.raises(ConfigurationError, match=r"uid 'rows'\): the job was cancelled before its input had ended"):
        rows.to_arrow()
    assert rows.to_arrow(wait=False).num_rows == 0


@pytest.mark.slow
def test_a_job_without_an_end_has_no_last_row(tmp_path: Path) -> None:
    """To wait for it is refused. Rows come while the job runs, each once, and all of them once it is over."""
    with local(1) as env:
        rows = env.from_rate(1_000.0, name="clock", uid="clock").collect(uid="rows")
        job = env.execute("endless", checkpoints=config(tmp_path / "c", interval="20ms"))
        with pytest.raises(ConfigurationError, match=r"'clock' \(uid 'clock'\), which never ends.*rows\(\)"):
            rows.to_arrow()
        seen = []
        for row in rows.rows():
            seen.append(row["value"])
            if len(seen) == 500:
                break
        assert sorted(seen) == list(range(500))
        assert rows.head(3).num_rows == 3
        job.stop(savepoint=str(tmp_path / "savepoints"))
        assert len(list(rows.rows())) == rows.to_arrow().num_rows >= 500


def test_rows_of_a_failed_job_are_not_taken_for_all(tmp_path: Path) -> None:
    """Committed rows are returned on request; a loop yields them before it raises the error."""
    with local(1) as env:
        source = env.from_batches(pa.table({"x": range(100)}), splits=1)
        rows = source.map(fails, schema=pa.schema({"x": pa.int64()}), traced=False).collect()
        env.execute("failed", restart=NO_RESTART)
        with pytest.raises(JobFailedError, match="row 90 is odd"):
            rows.to_arrow()
        with pytest.raises(JobFailedError, match="row 90 is odd"):
            list(rows.rows())
        assert rows.to_arrow(wait=False).num_rows == 0


def test_rows_that_are_taken_back_do_not_come_twice(memory_store: FileSystemStore) -> None:
    """A job whose newest checkpoints are damaged makes their rows again. A loop that had them ends with an error."""
    info = TableInfo.of(pa.schema({"x": pa.int64()}), "append")
    rows = CollectedRows(OperatorUid("rows"), info, lambda _: memory_store)
    rows.bind(memory_store.url)
    log, job = TableLog(memory_store), JobId("a-1")
    log.create(info)
    log.claim(job)

    def commit(number: int, value: int) -> None:
        file = write_data_file(memory_store, f"data/{number}.parquet", [pa.record_batch({"x": [value]})])
        log.commit(job, CheckpointId(number), (file,))

    def wait(_: int | None) -> object:
        raise JobTimeoutError("it runs")

    rows.follow(lambda: "running", wait)
    found = rows.rows()
    commit(1, 10)
    commit(2, 20)
    assert [next(found), next(found)] == [{"x": 10}, {"x": 20}]
    log.claim(job, (job, CheckpointId(1)), next_checkpoint_id=3)
    for number in (3, 4):
        commit(number, 10 * number)
    with pytest.raises(tg.TableError, match=r"uid 'rows'\): the job has returned to an older checkpoint"):
        next(found)
    again = rows.rows()
    assert [next(again)["x"] for _ in range(3)] == [10, 30, 40]


def test_there_are_no_rows_before_the_job() -> None:
    """Every way to them says so."""
    with local(1) as env:
        rows = env.from_batches(ROWS).collect(uid="rows")
        for look in (rows.to_arrow, rows.rows, rows.head, rows.show):
            with pytest.raises(ConfigurationError, match=r"uid 'rows'\): there are no rows before the job runs"):
                look()
        assert "not executed yet" in rows._repr_html_()


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_tables_show_their_first_rows(tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As a grid of text, as dicts, as Arrow, and in a notebook."""
    keys = ["n"] if mode == "upsert" else []
    with local(1) as env:
        table = env.from_batches(ROWS, splits=1).to_table(str(tmp_path / "t"), mode=mode, keys=keys)  # type: ignore[arg-type]
        job = env.execute("shown")
        job.wait("4min")
        assert "<td>finished</td>" in job._repr_html_()
    capsys.readouterr()
    table.show()
    assert capsys.readouterr().out == GRID
    table.show(2)
    assert capsys.readouterr().out.splitlines()[-1] == "only the first 2 rows"
    assert list(table.rows()) == ROWS.to_pylist()
    assert table.head(1).to_pylist() == [{"k": "a", "n": 1}]
    assert "<td>300</td>" in table._repr_html_()
    with pytest.raises(ConfigurationError, match="show: the number of rows must be a whole number from 0 on, not -1"):
        table.show(-1)


def test_a_table_that_is_not_there_yet_is_shown_by_its_columns(tmp_path: Path) -> None:
    """A notebook shows a table after the line that makes it, before the job has begun."""
    with local(1) as env:
        stream = env.from_batches(ROWS)
        table = stream.to_table(str(tmp_path / "t"))
        assert "<th>n</th><td>int64</td>" in table._repr_html_()
        assert "<th>k</th><td>string</td>" in stream._repr_html_()
        assert "KeyedStream by k" in stream.key_by("k")._repr_html_()


def test_values_cannot_break_a_table() -> None:
    """Line breaks, markup and long texts stay values."""
    hostile = pa.table({"<b>": ["a\nb", "x" * 100, "<script>"], "at": [None, [1, 2], []]})
    lines = grid(hostile).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert r"| a\nb " in lines[3]
    assert f"{'x' * 39}…" in lines[4]
    html = html_rows(hostile)
    assert "<script>" not in html
    assert "&lt;b&gt;" in html
    assert grid(ROWS.slice(0, 0)).splitlines()[1] == "| k | n |"
    assert html_rows(pa.table({f"c{n}": [1] for n in range(60)})).count("<td>") == 50


def test_a_table_reads_no_more_files_than_its_head_needs(tmp_path: Path) -> None:
    """Also where a later file is gone."""
    with local(1) as env:
        table = env.from_batches(ROWS, splits=3).to_table(str(tmp_path / "t"))
        env.execute("three").wait("4min")
    with local(1) as env:
        again = env.from_batches(ROWS, splits=1).to_table(str(tmp_path / "t"), if_exists="append")
        env.execute("more").wait("4min")
    *_, last = table.log.snapshot().files
    (tmp_path / "t" / last.path).unlink()
    assert again.head(3).num_rows == 3
    with pytest.raises(tg.TidegateError):
        again.head(4)
