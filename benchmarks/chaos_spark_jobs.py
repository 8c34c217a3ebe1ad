"""The jobs beside which `chaos.py --spark` breaks Spark: one of a bounded, one of a streaming DataFrame.

- **staged**: its rows are those of a bounded DataFrame, which Spark has written to files at submission. The tasks take
  their time with them until the gate is there.
- **streamed**: a thread of the driver puts files into a folder, a few rows at a time, which a query of Spark follows.
  Beside the tables a function gets the rows of each checkpoint as a DataFrame, and collects them with Spark.

Both have keyed state, tables and stamps as the jobs of `chaos_job.py`, and the reference is computed in the same way.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from chaos_job import Plan, checkpoints, outputs, restarts

import tidegate as tg

EXECUTORS = 2
SLOTS_AN_EXECUTOR = 3
EXECUTOR_MEMORY = "512m"
ROWS_A_READ = 20
READ_S = 0.2
"""A batch of a staged job, while the gate is closed."""
FILE_ROWS = 50
FILE_S = 0.5
"""Between two files of the streamed job."""
TRIGGER = "500ms"
STAGING_PARTITIONS = 8
STAGING_ROWS = 40_000
SPARK_SETTINGS = {
    # Spark takes an executor for lost that has said nothing for so long; two minutes by default.
    "spark.network.timeout": "20s",
    "spark.network.timeoutInterval": "5s",
    "spark.executor.heartbeatInterval": "2s",
    "spark.tidegate.executorTimeout": "90s",
    "spark.sql.shuffle.partitions": "2",
}
COLUMNS = "id long, key long, value double"


@dataclass(frozen=True)
class Slowly:
    """Passes batches on, slowly until the gate is there."""

    gate: Path

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The same rows."""
        if not self.gate.exists():
            time.sleep(READ_S)
        return batch


class Feeder:
    """Puts the rows of a plan into a folder, file by file, until it is told to stop."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.folder = plan.local / "input"
        self.folder.mkdir()
        self.rows = 0
        """How many are there."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    def begin(self) -> None:
        """From now on. It may be called again."""
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """No more files."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(FILE_S) and self.rows + FILE_ROWS <= self._plan.rows:
            rows = self._plan.source.batch(self.rows, FILE_ROWS).to_pylist()
            hidden = self.folder / ".next"
            hidden.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            # It appears whole.
            os.replace(hidden, self.folder / f"{self.rows:09d}.json")
            self.rows += FILE_ROWS


@dataclass
class Received:
    """What the function for each checkpoint was given: ids of rows, by the id of the call. A repetition replaces."""

    calls: dict[int, list[int]] = field(default_factory=dict)

    def take(self, df: Any, checkpoint_id: int) -> None:
        """One call. It lets Spark work."""
        self.calls[checkpoint_id] = [row["id"] for row in df.select("id").collect()]

    @property
    def ids(self) -> list[int]:
        """Of all rows, in order."""
        return sorted(row for rows in self.calls.values() for row in rows)


@dataclass(frozen=True)
class Jobs:
    """Both jobs in one session."""

    env: tg.StreamEnvironment
    staged: tg.Job
    streamed: tg.Job
    tables: Mapping[str, Mapping[str, tg.OutputTable]]
    """By job and name."""


def session(standbys: int) -> tg.StreamEnvironment:
    """A session of Spark on Ray, for the main thread: processes of Ray end with the thread that has started them."""
    env = tg.StreamEnvironment.raydp(
        executors=EXECUTORS,
        executor_cores=1,
        executor_memory=EXECUTOR_MEMORY,
        slots_per_executor=SLOTS_AN_EXECUTOR,
        standbys=standbys,
        app_name="chaos",
        options=tg.DataPlaneOptions(source_rows_max=ROWS_A_READ),
        spark_configs=SPARK_SETTINGS,
        ray_options={"_system_config": {"worker_niceness": 0}, "log_to_driver": False},
        include_dashboard=False,
    )
    # Spark warns of every task that it does again, and of the batches that are late then.
    env.spark.sparkContext.setLogLevel("OFF")
    return env


def start(env: tg.StreamEnvironment, staged: Plan, streamed: Plan, feeder: Feeder, received: Received) -> Jobs:
    """Both jobs in a session; they go on where they were, if they have been."""
    rows = env.from_dataframe(_bounded(env, staged.rows, staged), uid="rows", parallelism=1)
    slowly = rows.map_batches(Slowly(staged.gate), schema=staged.source.schema, uid="slowly", parallelism=1)
    tables = {"staged": outputs(slowly, staged)}
    first = _execute(env, staged)
    feeder.begin()
    files = env.spark.readStream.schema(COLUMNS).json(str(feeder.folder))
    stream = env.from_dataframe(files, uid="rows", parallelism=1, trigger=TRIGGER)
    stream.for_each_checkpoint(received.take, uid="received")
    tables["streamed"] = outputs(stream, streamed)
    return Jobs(env, first, _execute(env, streamed), tables)


def _execute(env: tg.StreamEnvironment, plan: Plan) -> tg.Job:
    return env.execute(plan.name, checkpoints=checkpoints(plan), restart=restarts(), restore="latest")


def _bounded(env: tg.StreamEnvironment, rows: int, plan: Plan) -> Any:
    """The rows of a plan as a DataFrame, which executors compute in several tasks."""
    source = plan.source

    def generate(batches: Any) -> Any:
        for batch in batches:
            for first in batch.column(0).to_pylist():
                yield source.batch(first, min(share, rows - first))

    share = -(-rows // STAGING_PARTITIONS)
    firsts = env.spark.range(0, rows, share, STAGING_PARTITIONS)
    return firsts.mapInArrow(generate, COLUMNS)


def stage_another(jobs: Jobs, plan: Plan) -> list[int]:
    """Stage a DataFrame for one more job, and run it to its end; returns the ids of the rows in its table."""
    rows = jobs.env.from_dataframe(_bounded(jobs.env, STAGING_ROWS, plan), uid="rows", parallelism=1)
    table = rows.to_table(f"{plan.storage}/another-{time.time_ns()}", uid="table")
    job = jobs.env.execute(f"another-{plan.name}", checkpoints=checkpoints(plan), restart=restarts())
    job.wait()
    return sorted(table.to_arrow().column("id").to_pylist())
