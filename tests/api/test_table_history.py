"""Tables of running jobs keep what they showed within their history, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from local_jobs import NO_RESTART, GatedSource, config, local, opening

import tidegate as tg

COMMITS = 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("history", "bound"), [pytest.param("20ms", 25, id="short"), pytest.param(None, None, id="none")]
)
def test_a_job_deletes_what_its_table_does_not_show_any_more(tmp_path: Path, history: Any, bound: int | None) -> None:
    """All rows are there in the end, the checkpoints that are there can be restored, and older ones are refused."""
    rows = 4 * COMMITS
    gates = range(4, rows, 4)
    source, table = GatedSource(rows, gates=gates), str(tmp_path / "table")
    with local(1) as env, opening(source):
        env.from_source(source, uid="source").to_table(table, history=history, uid="table")
        job = env.execute("history", checkpoints=config(tmp_path / "c", num_retained=2), restart=NO_RESTART)
        source.await_gate(4)
        savepoint = job.savepoint(tmp_path / "s")
        for gate in gates:
            source.await_gate(gate) if gate > 4 else None
            job.trigger_checkpoint()
            source.open_gate(gate)
        assert job.wait("4min") == "finished"
    read = tg.open_table(table)
    assert sorted(read.to_arrow()["x"].to_pylist()) == list(range(rows))
    files = len(list((tmp_path / "table" / "data").rglob("*.parquet")))
    if bound is None:
        assert files > COMMITS
        return
    assert files < bound
    with local(1) as env, opening(GatedSource(rows)) as again:
        env.from_source(again, uid="source").to_table(table, uid="table")
        with pytest.raises(tg.TableError, match="a vacuum has cut the log"):
            env.execute("history", checkpoints=config(tmp_path / "c"), restore=savepoint, restart=NO_RESTART)
    assert sorted(read.to_arrow()["x"].to_pylist()) == list(range(rows))


@pytest.mark.parametrize("history", ["0s", "soon", -5])
def test_a_history_that_is_none_is_refused(tmp_path: Path, history: Any) -> None:
    """When the stream is made."""
    with local(1) as env, pytest.raises(tg.ConfigurationError, match=r"to_table 'to_table': history"):
        env.from_source(GatedSource(4)).to_table(str(tmp_path), history=history)
