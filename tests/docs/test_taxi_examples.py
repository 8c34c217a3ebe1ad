"""The taxi examples, Flink's training exercises, give what polars gives for the same rides and fares."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from taxi_data import rides_and_fares
from taxi_exercises import EXERCISES

import tidegate as tg


@pytest.mark.slow
@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_gives_its_reference(name: str, tmp_path: Path) -> None:
    """In a local job at parallelism 2 with checkpoints."""
    rides, fares = rides_and_fares(400, drivers=5)
    with tg.StreamEnvironment.local(2, options=tg.DataPlaneOptions(source_rows_max=100)) as env:
        found = EXERCISES[name].build(env, rides, fares).collect()
        checkpoints = tg.CheckpointConfig(storage=str(tmp_path), interval="20ms")
        assert env.execute("taxi", checkpoints=checkpoints, progress="off").wait("4min") == "finished"
        EXERCISES[name].check(pl.DataFrame(found.to_arrow()), pl.DataFrame(rides), pl.DataFrame(fares))
