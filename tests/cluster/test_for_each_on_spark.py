"""A function for each checkpoint where there is Spark: it gets DataFrames, and writes with Spark's writers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from pyspark.sql import DataFrame

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.spark_bridge import RayDPSession

ROWS = 2_000


class Borrowed:
    """The session of all tests, which an environment is not to stop."""

    def __init__(self, session: RayDPSession) -> None:
        self.spark = session.spark

    def stop(self) -> None:
        """It goes on."""


def test_a_function_writes_each_checkpoint_with_spark(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """A folder for each id, overwritten as a whole: every row is there once, though each call is made twice."""
    calls: list[tuple[int, bool]] = []

    def write(df: DataFrame, checkpoint_id: int) -> None:
        df.write.mode("overwrite").parquet(str(tmp_path / "out" / f"checkpoint={checkpoint_id}"))
        calls.append((checkpoint_id, isinstance(df, DataFrame)))
        if calls.count(calls[-1]) == 1:
            raise ValueError("the answer was lost")

    runtime = RayRuntime(SlotPlacement.of_session(raydp_session), standbys=0)
    session = cast(Any, Borrowed(raydp_session))
    rows = pa.table({"x": range(ROWS), "words": [["a", str(x)] for x in range(ROWS)]})
    options = tg.DataPlaneOptions(source_rows_max=100)
    with tg.StreamEnvironment(runtime, parallelism=1, options=options, session=session) as env:
        env.from_batches(rows).for_each_checkpoint(write, uid="out")
        checkpoints = tg.CheckpointConfig(interval="100ms", storage=str(tmp_path / "checkpoints"))
        assert env.execute("for each", checkpoints=checkpoints).wait("5min") == "finished"

    written = raydp_session.spark.read.parquet(str(tmp_path / "out"))
    found = {(row["x"], row["words"][1], row["checkpoint"]) for row in written.collect()}
    assert sorted(x for x, _, _ in found) == list(range(ROWS))
    assert all(word == str(x) for x, word, _ in found)
    assert {number for _, _, number in found} == {number for number, _ in calls}
    assert calls == [call for call in dict.fromkeys(calls) for _ in range(2)]
    assert all(is_dataframe for _, is_dataframe in calls)
