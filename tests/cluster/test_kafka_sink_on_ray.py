"""Rows go to Apache Kafka from jobs on Ray: processes are killed again and again, and each row is written once."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
from kafka_commits import read
from kafka_server import KafkaServer
from killed_rows import dies_at

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.spark_bridge import RayDPSession

ROWS = pa.table({"k": [f"{x % 5}" for x in range(6_000)], "x": list(range(6_000))})
KILLED_AT = (1_000, 2_500, 4_000, 5_500)


def test_rows_are_written_once_through_the_loss_of_processes(
    raydp_session: RayDPSession, kafka_server: KafkaServer, tmp_path: Path
) -> None:
    """Commits of the process may be under way when it is killed."""
    kafka_server.create("on-ray", 3)

    runtime = RayRuntime(SlotPlacement.of_session(raydp_session), standbys=0)
    with tg.StreamEnvironment(runtime, parallelism=2, options=tg.DataPlaneOptions(source_rows_max=50)) as env:
        rows = env.from_batches(ROWS, splits=4).map_batches(dies_at(KILLED_AT, tmp_path), schema=ROWS.schema)
        rows.to_kafka(kafka_server.servers, topic="on-ray", key="k", uid="kafka")
        config = tg.CheckpointConfig(interval="50ms", storage=str(tmp_path / "checkpoints"))
        job = env.execute("kafka sink", checkpoints=config, restart=tg.RestartStrategy.fixed_delay(20, 0))
        assert job.wait("8min") == "finished"
    assert all((tmp_path / f"killed-{x}").exists() for x in KILLED_AT)
    values = [json.loads(value)["x"] for _, value in read(kafka_server.servers, "on-ray") if value is not None]
    assert sorted(values) == list(range(6_000))
