"""A program with Spark's own Delta beside jobs, in a process of its own: the jars come in when the JVM starts.

`python delta_spark_program.py JARS FOLDER` prints one JSON object. Each key is a question, each value what was seen.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

import tidegate as tg
from tidegate.spark_bridge import ensure_java


def session(jars: str) -> Any:
    """A local Spark with Delta."""
    ensure_java()
    from pyspark.sql import SparkSession

    settings = {
        "spark.jars": jars,
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "1",
        "spark.sql.shuffle.partitions": "1",
        "spark.ui.enabled": "false",
        "spark.driver.memory": "1g",
        "spark.pyspark.python": sys.executable,
    }
    builder = SparkSession.builder.master("local[1]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def append(url: str, rows: pa.Table, folder: Path, **options: Any) -> str:
    """A job that adds rows; its end, or the error that `execute` raises."""
    with tg.StreamEnvironment.local(1) as env:
        env.from_batches(rows, splits=1).to_delta(url, uid="delta", **options)
        try:
            job = env.execute("append", checkpoints=tg.CheckpointConfig(storage=str(folder / "ck")), progress="off")
            return str(job.wait("4min"))
        except tg.TableError as error:
            return str(error)


def upsert(url: str, rows: pa.Table, folder: Path) -> str:
    """A job that merges rows by `id`; its end."""
    with tg.StreamEnvironment.local(1) as env:
        env.from_batches(rows, splits=1).to_delta(url, mode="upsert", keys="id", uid="merge")
        checkpoints = tg.CheckpointConfig(storage=str(folder / "ck"))
        return str(env.execute("upsert", checkpoints=checkpoints, progress="off").wait("4min"))


def main(jars: str, folder: Path) -> dict[str, object]:
    """Everything that is asked, in turn."""
    spark = session(jars)
    found: dict[str, object] = {}

    def values(url: str) -> list[int]:
        return sorted(row[0] for row in spark.read.format("delta").load(url).select("id").collect())

    url = str(folder / "rows")
    with tg.StreamEnvironment.local(1) as env:
        env.from_rate(100, rows=100).select(id="value").to_delta(url, uid="delta", auto_compact=False)
        checkpoints = tg.CheckpointConfig(storage=str(folder / "ck"), interval="100ms")
        assert env.execute("rows", checkpoints=checkpoints, progress="off").wait("4min") == "finished"
    spark.sql(f"alter table delta.`{url}` set tblproperties('delta.enableDeletionVectors' = 'true')")
    spark.sql(f"delete from delta.`{url}` where id in (3, 14)")
    table = tg.open_table(url)
    found["compacted"] = table.compact().files_after
    found["after compact"] = values(url)
    table.vacuum(retain=0)
    found["after vacuum"] = values(url)
    append(url, pa.table({"id": range(100, 110)}), folder, if_exists="append", auto_compact=False)
    found["after another append"] = values(url)
    history = spark.sql(f"describe history delta.`{url}`").orderBy("version").collect()
    found["blind appends"] = [row["isBlindAppend"] for row in history if row["operation"] == "WRITE"]

    made = {
        "mapped": "(id bigint) using delta tblproperties('delta.columnMapping.mode' = 'name', "
        "'delta.minReaderVersion' = '2', 'delta.minWriterVersion' = '5')",
        "clustered": "(id bigint) using delta cluster by (id)",
        "tracked": "(id bigint) using delta tblproperties('delta.enableRowTracking' = 'true')",
        "timed": "(id bigint) using delta tblproperties('delta.enableInCommitTimestamps' = 'true')",
        "defaults": "(id bigint default 3) using delta "
        "tblproperties('delta.feature.allowColumnDefaults' = 'supported')",
        "checked": "(id bigint) using delta",
        "plain": "(id bigint) using delta "
        "tblproperties('delta.enableChangeDataFeed' = 'true', 'delta.appendOnly' = 'true')",
    }
    for name, columns in made.items():
        other = str(folder / name)
        spark.sql(f"create table delta.`{other}` {columns}")
        if name == "checked":
            spark.sql(f"alter table delta.`{other}` add constraint small check (id < 1000)")
        found[name] = append(other, pa.table({"id": [1]}), folder, if_exists="append")
    found["rows of plain"] = values(str(folder / "plain"))

    merged = str(folder / "merged")
    spark.sql(
        f"create table delta.`{merged}` (id bigint not null, v string, day date) using delta partitioned by (day) "
        "tblproperties('delta.enableChangeDataFeed' = 'true', 'delta.enableDeletionVectors' = 'true')"
    )
    spark.sql(f"insert into delta.`{merged}` select id, 'spark', date'2026-01-01' from range(20)")
    spark.sql(f"delete from delta.`{merged}` where id in (3, 14)")
    days = pa.array([20_454, 20_455, 20_455, None], pa.int32()).cast(pa.date32())
    rows = pa.table({"id": [1, 2, 3, 100], "v": ["a", "b", "c", "d"], "day": days})
    found["merge"] = upsert(merged, rows, folder)
    spark.sql(f"merge into delta.`{merged}` t using (select 1 id) s on t.id = s.id when matched then delete")
    found["second merge"] = upsert(merged, rows.slice(1, 1).set_column(1, "v", pa.array(["B"])), folder)
    read = spark.read.format("delta").load(merged).filter("v != 'spark'").orderBy("id")
    found["rows of merged"] = [[row["id"], row["v"], str(row["day"])] for row in read.collect()]
    found["ids of merged"] = values(merged)
    feed = spark.sql(f"select id, _change_type, _commit_version v from table_changes_by_path('{merged}', 3)")
    found["feed of merged"] = sorted([row["id"], row["_change_type"]] for row in feed.filter("v = 3").collect())
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
