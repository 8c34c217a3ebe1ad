"""One Ray and Spark session for every test of this folder: starting it costs about 20 seconds."""

from __future__ import annotations

from collections.abc import Iterator

import patient_ray
import pytest

from tidegate.spark_bridge import RayDPSession


@pytest.fixture(scope="session")
def raydp_session() -> Iterator[RayDPSession]:
    """Two executors of one core, two task slots beside each; one CPU and a GPU, which is only counted, are left over.

    Tests leave no actors and no cached data in it. Without RayDP, which takes no PySpark 4, its tests are skipped;
    those of Ray on Spark have sessions of their own.
    """
    pytest.importorskip("raydp", reason="RayDP is not installed: the tests of Ray on Spark run, those on RayDP do not")
    patient_ray.await_nodes()
    session = RayDPSession.start(
        "tidegate-tests",
        executors=2,
        executor_cores=1,
        executor_memory="768m",
        slots_per_executor=2,
        spark_configs={"spark.sql.shuffle.partitions": "2"},
        include_dashboard=False,
        start_timeout_s=patient_ray.SESSION_S,
        ray_options={
            "_system_config": {"metrics_report_interval_ms": 5_000},
            "num_cpus": 8,
            "num_gpus": 1,
        },
    )
    with session:
        yield session
