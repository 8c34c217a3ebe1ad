"""A subtask whose splits only find others has no rows, and other subtasks do not wait for its event time."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from local_jobs import NO_RESTART, config, local
from waiting import until

import tidegate as tg

ROWS = 200


class OnePartition:
    """A partition, and two splits that look for others. With two subtasks one of them has only such a split."""

    schema = pa.schema([("t", pa.int64()), ("k", pa.int64())])
    unbounded = True

    def splits(self) -> list[tg.SourceSplit]:
        """The one that finds others is alone in its subtask."""
        return [tg.SourceSplit("partition", b""), tg.SourceSplit("finder", b"", rows=0)]

    def reader(self) -> OnePartition:
        """Returns this object, because it has no state."""
        return self

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """One row a second of event time. It never ends."""
        stop = min(offset + rows_max, ROWS)
        if split.rows == 0 or stop <= offset:
            return tg.ReadResult(None, offset, at_end=False)
        times = [1_000 * row for row in range(offset, stop)]
        batch = pa.record_batch({"t": times, "k": [1] * len(times)}, schema=self.schema)
        return tg.ReadResult(batch, stop, at_end=False)

    def close(self) -> None:
        """Nothing to release."""


def test_windows_fire_while_a_subtask_only_looks_for_splits(tmp_path: Path) -> None:
    """Although the source has no end, and no idleness is given."""
    with local(2) as env:
        rows = env.from_source(OnePartition()).assign_timestamps("t")
        windows = rows.key_by("k").window(tg.Tumbling("10s")).aggregate(n=tg.count()).collect()
        job = env.execute("job", checkpoints=config(tmp_path, interval="20ms"), restart=NO_RESTART)
        until("all windows but the last", lambda: len(windows.to_arrow(wait=False)) == ROWS // 10 - 1)
        job.cancel()
        job.wait("4min")
    assert set(windows.to_arrow()["n"].to_pylist()) == {10}
