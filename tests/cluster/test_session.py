"""A session of Ray and Spark: executors and task slots in one reservation."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable

import pandas as pd
import pyarrow as pa
import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tidegate.spark_bridge import RayDPSession
from tidegate.storage.errors import ConfigurationError

CALL_TIMEOUT_S = 240


@ray.remote
class SlotProbe:
    """A stand-in for a task: says where it runs."""

    def placement(self) -> tuple[str, str]:
        """Ids of the placement group and of the node that it runs in."""
        context = ray.get_runtime_context()
        group = context.get_placement_group_id()
        assert group is not None
        return group, context.get_node_id()


def test_every_slot_runs_an_actor_beside_the_executor_of_its_bundle(raydp_session: RayDPSession) -> None:
    """Two fractional actors fill each slot while the executor of the same bundle answers Spark."""
    group = raydp_session.placement_group
    probes = [
        SlotProbe.options(  # type: ignore[attr-defined]
            num_cpus=0.5,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=raydp_session.bundle_of_slot(slot)
            ),
        ).remote()
        for slot in range(raydp_session.slots)
        for _ in range(2)
    ]
    try:
        placed = ray.get([probe.placement.remote() for probe in probes], timeout=CALL_TIMEOUT_S)
        nodes = {node["NodeID"] for node in ray.nodes()}
        assert all(group_id == group.id.hex() and node in nodes for group_id, node in placed)
        # The executors took one CPU of each bundle and the probes all that the slots have.
        free = ray.available_resources()
        for bundle in range(2):
            assert free.get(f"CPU_group_{bundle}_{group.id.hex()}", 0.0) == 0.0
        assert raydp_session.spark.range(1000, numPartitions=2).selectExpr("sum(id)").collect() == [(499_500,)]
    finally:
        for probe in probes:
            ray.kill(probe)


def test_a_second_session_in_the_process_is_refused(raydp_session: RayDPSession) -> None:
    """Spark allows one a process; the error names the one that runs, and that one goes on."""
    with pytest.raises(ConfigurationError, match="'tidegate-tests' is running in this process"):
        RayDPSession.start("another", executors=1, executor_cores=1, executor_memory="512m", slots_per_executor=1)
    assert raydp_session.spark.range(3).count() == 3


def test_spark_takes_and_gives_pandas_and_arrow(raydp_session: RayDPSession) -> None:
    """`createDataFrame`, `toPandas` and `mapInArrow` keep values, with Arrow and without falling back."""
    spark = raydp_session.spark
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    spark.conf.set("spark.sql.execution.arrow.pyspark.fallback.enabled", "false")
    try:
        frame = pd.DataFrame(
            {
                "n": [1, 2, 3],
                "x": [0.5, None, -1.0],
                "s": ["a", None, "c"],
                "t": pd.to_datetime(pd.Series([dt.datetime(2013, 1, 1, 5), None, dt.datetime(2013, 12, 31)])),
            }
        )
        df = spark.createDataFrame(frame)

        def double(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
            for batch in batches:
                doubled = pa.array([2 * n for n in batch.column("n").to_pylist()], pa.int64())
                yield batch.set_column(0, "n", doubled)

        result = df.mapInArrow(double, df.schema).orderBy("n").toPandas()
    finally:
        spark.conf.unset("spark.sql.execution.arrow.pyspark.fallback.enabled")
    frame["n"] *= 2
    # Arrow gives pandas Spark's own microseconds.
    frame["t"] = frame["t"].astype("datetime64[us]")
    pd.testing.assert_frame_equal(result, frame)


def test_the_driver_listens_on_loopback_only(raydp_session: RayDPSession) -> None:
    """With everything on this machine, Spark's driver is not reachable from outside."""
    context = raydp_session.spark.sparkContext
    assert context.getConf().get("spark.driver.bindAddress") == "127.0.0.1"
    assert context.uiWebUrl is None
