"""Jobs that write more columns than their table has: own tables and Delta tables, in all readers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from local_jobs import finish, local

import tidegate as tg

_OLD = pa.table({"k": ["a"], "v": [1]})
_NEW = pa.table({"k": ["b"], "v": [2], "w": [2.5]})


def write(folder: Path, rows: pa.Table, kind: str, evolution: Literal["add_columns"] | None = None) -> tg.OutputTable:
    """A job adds rows to the table."""
    with local(1) as env:
        stream = env.from_batches(rows, uid="in")
        to = stream.to_delta if kind == "delta" else stream.to_table
        table = to(folder / "out", if_exists="append", schema_evolution=evolution)
        finish(env, folder / "checkpoints")
    return table


@pytest.mark.parametrize("kind", ["own", "delta"])
def test_a_table_gets_the_columns_of_the_next_job(tmp_path: Path, kind: str) -> None:
    """Only if it is told to; older rows have nulls, and a job with the columns of before is refused afterwards."""
    write(tmp_path, _OLD, kind)
    with pytest.raises(tg.TableError, match="only the job has a column 'w'"):
        write(tmp_path, _NEW, kind)
    table = write(tmp_path, _NEW, kind, "add_columns")
    expected = [{"k": "a", "v": 1, "w": None}, {"k": "b", "v": 2, "w": 2.5}]
    assert table.to_arrow().to_pylist() == expected
    assert tg.open_table(tmp_path / "out").to_polars().to_dicts() == expected
    assert table.to_arrow(as_of=table.history()[0].number).to_pylist() == [{"k": "a", "v": 1}]
    if kind == "delta":
        found = pa.table(DeltaTable(str(tmp_path / "out")).to_pyarrow_table()).sort_by("v")
        assert found.to_pylist() == expected
    write(tmp_path, _NEW, kind)
    with pytest.raises(tg.TableError, match="only the table has a column 'w'"):
        write(tmp_path, _OLD, kind, "add_columns")


def test_a_delta_table_that_was_left_behind_gets_the_columns_of_ours(tmp_path: Path) -> None:
    """Whoever added them was killed before the Delta table had them."""
    table = write(tmp_path, _OLD, "delta")
    ours = table.log.snapshot().info
    wider = tg.open_table(tmp_path / "out").log
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tidegate.storage.tables.table_log.LogMirror.create", lambda *_: None)
        wider.create(type(ours).of(_NEW.schema, "append", delta_id=ours.delta_id), evolves=True)
    assert len(DeltaTable(str(tmp_path / "out")).schema().fields) == 2
    write(tmp_path, _NEW, "delta")
    assert len(DeltaTable(str(tmp_path / "out")).schema().fields) == 3


def test_an_evolution_that_is_none_is_refused(tmp_path: Path) -> None:
    """In the call that says it."""
    with local() as env:
        stream = env.from_batches(_OLD)
        with pytest.raises(tg.ConfigurationError, match="schema_evolution='merge' is not known"):
            stream.to_table(tmp_path / "out", schema_evolution="merge")  # type: ignore[arg-type]
