"""Files and then Kafka as one source of a job on Ray: processes are killed around the switch, and each row counts."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from kafka_server import KafkaServer
from killed_rows import dies_at

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.spark_bridge import RayDPSession

FILES, ROWS_A_FILE = 8, 100
FIRST = FILES * ROWS_A_FILE
ROWS = FIRST + 600
KILLED_AT = (FIRST // 2, FIRST - 1, FIRST, FIRST + 300)
SCHEMA = pa.schema([("x", pa.int64())])


def test_the_loss_of_processes_around_the_switch_loses_no_row(
    raydp_session: RayDPSession, kafka_server: KafkaServer, tmp_path: Path
) -> None:
    """In the files, at the last row of them, at the first one of the topic, and behind it."""
    kafka_server.create("hybrid-on-ray", 3)
    for partition in range(3):
        values = [json.dumps({"x": x}).encode() for x in range(FIRST + partition, ROWS, 3)]
        kafka_server.add("hybrid-on-ray", partition, *values)
    for number in range(FILES):
        numbers = range(number * ROWS_A_FILE, (number + 1) * ROWS_A_FILE)
        pq.write_table(pa.table({"x": pa.array(numbers, pa.int64())}), tmp_path / f"{number}.parquet")

    runtime = RayRuntime(SlotPlacement.of_session(raydp_session), standbys=0)
    with tg.StreamEnvironment(runtime, parallelism=2, options=tg.DataPlaneOptions(source_rows_max=50)) as env:
        past = env.from_files(str(tmp_path / "*.parquet"))
        live = env.from_kafka(kafka_server.servers, topics=["hybrid-on-ray"], value={"x": int}, end="latest")
        rows = env.hybrid(past, then=live, uid="rows").map_batches(dies_at(KILLED_AT, tmp_path), schema=SCHEMA)
        table = rows.to_table(str(tmp_path / "table"), uid="table")
        config = tg.CheckpointConfig(interval="50ms", storage=str(tmp_path / "checkpoints"))
        job = env.execute("hybrid", checkpoints=config, restart=tg.RestartStrategy.fixed_delay(20, 0))
        assert job.wait("8min") == "finished"
    assert all((tmp_path / f"killed-{x}").exists() for x in KILLED_AT)
    assert sorted(table.to_arrow()["x"].to_pylist()) == list(range(ROWS))
