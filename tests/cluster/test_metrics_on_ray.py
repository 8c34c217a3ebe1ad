"""What Prometheus sees of a job that runs on Ray: each question of the dashboard has an answer, and no alert fires."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from prometheus_server import DASHBOARD, Prometheus, run_prometheus
from ray import cloudpickle
from waiting import until

import tidegate as tg
from tidegate.actors.ray.metrics import labels
from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.spark_bridge import RayDPSession

NAME = "watched"
KEYS = 11
# Processes of the job cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Keying(tg.BatchFunction):
    """Gives each row a key, and counts the rows."""

    def open(self, context: tg.BatchContext) -> None:
        self.seen = context.metrics.counter("rows_seen")
        self.sizes = context.metrics.histogram("batch_rows")

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        self.seen.inc(batch.num_rows)
        self.sizes.update(batch.num_rows)
        keys = pa.array([value % KEYS for value in batch["value"].to_pylist()], pa.int64())
        return pa.record_batch({"k": keys, "timestamp": batch["timestamp"]})


class Counting(tg.ProcessFunction):
    """Counts by key, with a timer for each row that is far away."""

    def open(self, context: tg.ProcessContext) -> None:
        self.rows = context.state(tg.ValueState("rows", pa.int64()))

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, int]]:
        self.rows.update(1 + (self.rows.value() or 0))
        assert context.timestamp is not None
        context.timer_service.register_event_time_timer(context.timestamp + 3_600_000)
        yield {"k": row["k"], "n": self.rows.value()}

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> None:
        """Does nothing. The job ends before."""


@pytest.fixture
def env(raydp_session: RayDPSession) -> Iterator[tg.StreamEnvironment]:
    """An environment over the session of all tests, which it does not stop."""
    runtime = RayRuntime(SlotPlacement.of_session(raydp_session), standbys=1)
    with tg.StreamEnvironment(runtime, parallelism=1) as environment:
        yield environment


def test_prometheus_sees_a_job_with_all_that_the_dashboard_asks_for(env: tg.StreamEnvironment, tmp_path: Path) -> None:
    """Also after a task was killed, whose metrics go on from the spare process under the task's name."""
    keys, counts = pa.schema([("k", pa.int64())]), pa.schema([("k", pa.int64()), ("n", pa.int64())])
    waits = tg.WatermarkAlignment("all", max_drift="1s", update_interval="100ms")
    rows = env.from_rate(200, splits=1).assign_timestamps("timestamp", alignment=waits)
    assert rows.schema is not None
    keyed = rows.map_batches(Keying(), schema=keys.append(rows.schema.field("timestamp")), name="key")
    keyed.key_by("k").process(Counting(), schema=counts, name="Zählung").to_table(str(tmp_path / "table"))
    config = tg.CheckpointConfig(interval="300ms", storage=str(tmp_path / "checkpoints"))
    job = env.execute(NAME, checkpoints=config, restart=tg.RestartStrategy.fixed_delay(3, 0))
    until("checkpoints", lambda: job.progress().completed_checkpoints > 0, job.progress)
    _, counter = job.processes()
    os.kill(counter.pid, signal.SIGKILL)
    vertex = job.vertices()[1].name
    until("rows after the restart", lambda: resumed(job), job.vertices)

    with run_prometheus(tmp_path, agents()) as prometheus:
        unanswered = questions()
        until("all answers", lambda: drop_answered(prometheus, unanswered), lambda: sorted(unanswered))
        told = json.dumps(labels({"vertex": vertex})["vertex"])
        of_counter = f'ray_tidegate_task_num_records_in_total{{job="{NAME}", vertex={told}, subtask="0"}}'
        assert prometheus.ask(of_counter), "the spare process has the name of the task that it took over"
        (status,) = prometheus.ask(f'ray_tidegate_job_status{{job="{NAME}"}} == 1')
        assert status["metric"]["status"] == "running"
        (restarts,) = prometheus.ask(f'ray_tidegate_job_num_restarts{{job="{NAME}"}}')
        assert restarts["value"][1] == "1"
        (recovery,) = prometheus.ask(f'ray_tidegate_job_last_recovery_ms{{job="{NAME}"}}')
        assert float(recovery["value"][1]) > 0
        (drift,) = prometheus.ask(f'ray_tidegate_task_watermark_alignment_drift_ms{{job="{NAME}"}}')
        assert float(drift["value"][1]) >= 0, "the coordinator tells the source how far its group is"
        rules = prometheus.rules()
        assert {rule["health"] for rule in rules} == {"ok"}
        # What jobs before it on this Ray have left may still be seen, and be old.
        alerts = [alert for rule in rules for alert in rule["alerts"] if alert["labels"].get("job") == NAME]
        assert [alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"] == []
    job.cancel()
    assert job.wait("4min") == "cancelled"


def resumed(job: tg.Job) -> bool:
    """Whether rows have come into the second vertex after the restart, and the function before it has counted."""
    seen = job.user_metrics().get("rows_seen", [])
    return job.progress().restarts == 1 and job.vertices()[1].records_in > 0 and sum(each.value for each in seen) > 0


def agents() -> list[str]:
    """Where the metrics of each node are; what Ray's dashboard writes into its file, if there is one."""
    return [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]


def questions() -> set[str]:
    """All queries of the dashboard, for this job and all of its vertices."""
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = {target["expr"] for panel in board["panels"] for target in panel.get("targets", ())}
    chosen = {"$job": NAME, "$vertex": ".*", "$__rate_interval": "1m"}
    for variable, value in chosen.items():
        queries = {query.replace(variable, value) for query in queries}
    assert len(queries) > 40
    return queries


def drop_answered(prometheus: Prometheus, unanswered: set[str]) -> bool:
    """Leave out the questions that have an answer now; whether none is left."""
    unanswered -= {query for query in unanswered if prometheus.ask(query)}
    return not unanswered
