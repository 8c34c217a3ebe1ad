"""Windows with functions in whole jobs: rows that wait for their window come through a restart."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from local_jobs import GatedSource, config, local, opening

import tidegate as tg

COUNTED = pa.schema({"n": pa.int64()})


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
def test_rows_of_an_open_window_come_through_a_restart(tmp_path: Path, backend: str) -> None:
    """Also where a backend on disk can only estimate how many there are: most rows have come and gone by then."""
    rows, failed = 5_010, tmp_path / "failed"

    def fails_once(batch: pa.RecordBatch) -> pa.RecordBatch:
        """The last row of all comes to no window: nothing but the end makes the last one give what it has."""
        wanted = pc.less(batch["x"], rows)
        if pc.any(pc.invert(wanted)).as_py() and not failed.exists():
            failed.touch()
            raise ValueError("odd")
        return batch.filter(wanted)

    source = GatedSource(rows + 1, gates=(rows,))
    with opening(source), local(1, 500) as env:
        passed = env.from_source(source).map_batches(fails_once, schema=source.schema)
        timed = passed.with_columns(t=pl.col("x").cast(pl.Datetime("ms"))).assign_timestamps("t")
        windows = timed.key_by("k").window(tg.Tumbling("1s"))
        counts = windows.apply(lambda table: {"n": table.num_rows}, schema=COUNTED).collect()
        checkpoints = config(tmp_path / "checkpoints", backend=backend)
        job = env.execute("windows", checkpoints=checkpoints, restart=tg.RestartStrategy.fixed_delay(1, "1ms"))
        source.await_gate(rows)
        job.trigger_checkpoint()
        source.open_all()
        assert job.wait("4min") == "finished"
    assert failed.exists()
    assert sum(counts.to_arrow()["n"].to_pylist()) == rows
