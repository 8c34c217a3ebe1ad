"""The folder of a job of which one task has failed once: what people ask the event log about."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from local_jobs import config, local

import tidegate as tg


def job_that_failed_once(folder: Path) -> Path:
    """Where the job `watched` has its event log, below `folder`: row 150 was odd, attempt 1 finished.

    Its one checkpoint is the final one, so that what happened is the same however slow the machine is.
    """
    flag = folder / "failed"

    def fails_once(row: dict[str, int]) -> dict[str, int]:
        if row["x"] == 150 and not flag.exists():
            flag.touch()
            raise ValueError("row 150 is odd")
        return row

    data = pa.table({"x": list(range(300))})
    with local(1) as env:
        env.from_batches(data).map(fails_once, schema=data.schema, uid="map").collect()
        restart = tg.RestartStrategy.fixed_delay(2, "10ms")
        job = env.execute("watched", checkpoints=config(folder / "checkpoints"), restart=restart)
        assert job.wait("4min") == "finished"
    (found,) = (folder / "checkpoints").glob("watched-*")
    return found
