"""The registry of metrics: the name, kind, tags, meaning, and Flink name of each metric.

Names are Flink's in snake case, with the prefix `tidegate_job_` or `tidegate_task_`, units last. A runtime publishes
only these metrics. The page of the docs and the test of the alert rules read the registry. This module does not depend
on Ray.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

JOB_TAGS = ("job",)
OPERATOR_TAGS = ("job", "vertex", "subtask", "operator", "operator_id", "quantile")
"""Tags of the metrics that users' functions define. `quantile` is empty except for histograms."""
TASK_TAGS = ("job", "vertex", "subtask")


class Kind(enum.Enum):
    """The kinds of metrics in Prometheus."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. `flink` is its name in Flink, if there is one. Flink's unit may differ."""

    name: str
    kind: Kind
    tags: tuple[str, ...]
    meaning: str
    flink: str | None = None

    @property
    def exported(self) -> tuple[str, ...]:
        """Returns the names under which Ray's metrics agent exports the metric to Prometheus."""
        exported = f"ray_{self.name}"
        match self.kind:
            case Kind.GAUGE:
                return (exported,)
            case Kind.COUNTER:
                return (f"{exported}_total",)
            case Kind.HISTOGRAM:
                return tuple(f"{exported}_{part}" for part in ("bucket", "sum", "count"))


def _job(tail: str, meaning: str, flink: str | None = None) -> Metric:
    return Metric(f"tidegate_job_{tail}", Kind.GAUGE, JOB_TAGS, meaning, flink)


def _task(tail: str, kind: Kind, meaning: str, flink: str | None = None) -> Metric:
    return Metric(f"tidegate_task_{tail}", kind, TASK_TAGS, meaning, flink)


def _state(tail: str, meaning: str) -> Metric:
    return Metric(f"tidegate_task_{tail}", Kind.GAUGE, (*TASK_TAGS, "operator"), meaning)


STATUS = Metric(
    "tidegate_job_status",
    Kind.GAUGE,
    (*JOB_TAGS, "status"),
    "1 for the status that the job is in, and 0 for every other one",
    "<jobStatus>State",
)
UPTIME = _job("uptime_ms", "For how long all tasks have run without interruption; 0 while they do not, -1 after the "
    "end", "uptime")  # fmt: skip
DOWNTIME = _job("downtime_ms", "For how long a job that has run does not; 0 while it runs, -1 after the end. A "
    "coordinator that takes over during an outage counts from then on", "downtime")  # fmt: skip
NUM_RESTARTS = _job("num_restarts", "Restarts, of the whole job or of a region", "numRestarts")
CHECKPOINT_AGE = _job("last_checkpoint_age_seconds", "Time since a checkpoint or savepoint completed, and before the "
    "first one since the job was submitted; -1 after the end")  # fmt: skip
CHECKPOINT_INTERVAL = _job(
    "checkpoint_interval_seconds", "The time between two periodic checkpoints; 0: there are none"
)
LAST_DURATION = _job("last_checkpoint_duration_ms", "From the trigger of the newest completed checkpoint to its "
    "completion; -1 before the first", "lastCheckpointDuration")  # fmt: skip
LAST_SIZE = _job("last_checkpoint_size_bytes", "Bytes that were written for the newest completed checkpoint, including "
    "data in flight; -1 before the first", "lastCheckpointSize")  # fmt: skip
LAST_FULL_SIZE = _job("last_checkpoint_full_size_bytes", "Size of everything that the newest completed "
    "checkpoint refers to; -1 before the first", "lastCheckpointFullSize")  # fmt: skip
LAST_IN_FLIGHT = _job("last_checkpoint_persisted_data_bytes", "Data in flight that was stored with the newest "
    "completed checkpoint; -1 before the first", "lastCheckpointPersistedData")  # fmt: skip
LAST_COMPLETED_ID = _job("last_completed_checkpoint_id", "Number of the newest completed checkpoint; -1 before the "
    "first", "lastCompletedCheckpointId")  # fmt: skip
LAST_RESTORE = _job("last_checkpoint_restore_timestamp_ms", "When an attempt began from a checkpoint last, since the "
    "epoch; -1 if none has", "lastCheckpointRestoreTimestamp")  # fmt: skip
IN_PROGRESS = _job("number_of_in_progress_checkpoints", "Checkpoints that were triggered and are not over",
    "numberOfInProgressCheckpoints")  # fmt: skip
COMPLETED = _job("number_of_completed_checkpoints", "Checkpoints and savepoints that have completed, over all attempts",
    "numberOfCompletedCheckpoints")  # fmt: skip
FAILED = _job("number_of_failed_checkpoints", "Failed checkpoints and savepoints over all attempts, including the "
    "ones that a restart has ended", "numberOfFailedCheckpoints")  # fmt: skip
COORDINATOR_LOSSES = _job("coordinator_losses", "Lost coordinators that another one has followed")
ADOPTIONS = _job("adoptions", "Takeovers after which all tasks have gone on")
STANDBYS_READY = _job("standbys_ready", "Spare processes that wait")
STANDBYS_STARTING = _job("standbys_starting", "Spare processes that start")
LAST_RECOVERY = _job("last_recovery_ms", "From the newest failure until all tasks of the attempt after it were "
    "ready, so far as they are; -1 before the first, and under another coordinator")  # fmt: skip
LAST_RECOVERY_DEPLOYMENT = _job("last_recovery_deployment_ms", "The part of it until the attempt was deployed: the "
    "decision, the delay of the restart strategy, and tasks that stop")  # fmt: skip
LAST_RECOVERY_RESTORE = _job("last_recovery_restore_ms", "The rest of it: start of processes, and restore of state")
SUSPECT_NODES = _job("suspect_nodes", "Nodes that may be lost: nothing is started there")

CHECKPOINT_DURATION = Metric(
    "tidegate_job_checkpoint_duration_ms",
    Kind.HISTOGRAM,
    JOB_TAGS,
    "From trigger to completion, of each checkpoint that completed under this coordinator",
)

RECORDS_IN = _task("num_records_in", Kind.COUNTER, "Rows that came into a task", "numRecordsIn")
RECORDS_OUT = _task("num_records_out", Kind.COUNTER, "Rows that a task sent to others, each receiver's counted",
    "numRecordsOut")  # fmt: skip
BYTES_IN = _task("num_bytes_in", Kind.COUNTER, "Size of the rows that a task took in", "numBytesIn")
BYTES_OUT = _task("num_bytes_out", Kind.COUNTER, "Size of the rows that left a task", "numBytesOut")
RECORDS_IN_RATE = _task("num_records_in_per_second", Kind.GAUGE, "Rows that came into a task in the last second",
    "numRecordsInPerSecond")  # fmt: skip
RECORDS_OUT_RATE = _task("num_records_out_per_second", Kind.GAUGE, "Rows that a task sent in the last second",
    "numRecordsOutPerSecond")  # fmt: skip
BYTES_IN_RATE = _task("num_bytes_in_per_second", Kind.GAUGE, "Bytes that a task took in during the last second",
    "numBytesInPerSecond")  # fmt: skip
BYTES_OUT_RATE = _task("num_bytes_out_per_second", Kind.GAUGE, "Bytes that left a task in the last second",
    "numBytesOutPerSecond")  # fmt: skip
BUSY_TIME = _task("busy_time_ms_per_second", Kind.GAUGE, "How much of the last second the task worked: rows, barriers, "
    "timers, and sending", "busyTimeMsPerSecond")  # fmt: skip
BACK_PRESSURED_TIME = _task("back_pressured_time_ms_per_second", Kind.GAUGE, "How much of the last second it took no "
    "input because its receivers had no room", "backPressuredTimeMsPerSecond")  # fmt: skip
IDLE_TIME = _task("idle_time_ms_per_second", Kind.GAUGE, "The rest of the last second", "idleTimeMsPerSecond")
BACK_PRESSURED = _task("is_back_pressured", Kind.GAUGE, "1 while a task may not take input, else 0", "isBackPressured")
QUEUED = _task("queued_bytes", Kind.GAUGE, "Bytes that wait in a task for credit")
INPUT_WATERMARK = _task("current_input_watermark_ms", Kind.GAUGE, "The watermark that a task has reached, since the "
    "epoch; not there before its inputs had one", "currentInputWatermark")  # fmt: skip
OUTPUT_WATERMARK = _task("current_output_watermark_ms", Kind.GAUGE, "The newest watermark behind its last operator, "
    "since the epoch; not there before the first", "currentOutputWatermark")  # fmt: skip
INPUT_WATERMARK_LAG = _task("current_input_watermark_lag_ms", Kind.GAUGE, "How far the watermark of the inputs is "
    "behind the clock of the process; 0 after the last watermark, and in a process that the task has left")  # fmt: skip
OUTPUT_WATERMARK_LAG = _task("current_output_watermark_lag_ms", Kind.GAUGE, "How far the watermark of the "
    "output is behind, for sources",
    "watermarkLag")  # fmt: skip
ALIGNMENT_DRIFT = _task("watermark_alignment_drift_ms", Kind.GAUGE, "How far a source task is ahead of the slowest "
    "member of its watermark group; not there without a group, and before all of it have a watermark",
    "watermarkAlignmentDrift")  # fmt: skip
START_DELAY = _task(
    "checkpoint_start_delay_ms",
    Kind.GAUGE,
    "From the trigger of the newest checkpoint that the task has acknowledged to its first barrier",
    "checkpointStartDelayNanos",
)
ALIGNMENT = _task(
    "checkpoint_alignment_time_ms",
    Kind.GAUGE,
    "From the first barrier of that checkpoint to the last one",
    "checkpointAlignmentTime",
)
SYNC = _task(
    "checkpoint_sync_duration_ms", Kind.GAUGE, "The part of its snapshot during which the task processes no rows"
)
ASYNC = _task(
    "checkpoint_async_duration_ms", Kind.GAUGE, "The part of its snapshot that is written while rows are processed"
)
SNAPSHOT_FULL_SIZE = _task("checkpoint_full_size_bytes", Kind.GAUGE, "Size of everything that this snapshot refers to, "
    "including data in flight")  # fmt: skip
SNAPSHOT_SIZE = _task("checkpoint_size_bytes", Kind.GAUGE, "The part of it that this snapshot wrote")
SNAPSHOT_IN_FLIGHT = _task("checkpoint_persisted_data_bytes", Kind.GAUGE, "Data in flight that was stored with it")
STATE_ROWS = _state("state_rows", "About how many rows its keyed state has; a key with two states has two")
STATE_TIMERS = _state("timers", "Timers that are registered; not there for RocksDB, which would have to look at each")
STATE_SIZE = _state("state_size_bytes", "Files and memtables of RocksDB; not there for state in memory: see the full "
    "size of its checkpoint")  # fmt: skip
RESTORES = Metric("tidegate_task_restores", Kind.COUNTER, (*TASK_TAGS, "origin"), "Restores of a task, by where its "
    "state was")  # fmt: skip
STANDBY_CHECKPOINT = _task("standby_checkpoint", Kind.GAUGE, "Number of the checkpoint whose state a spare process "
    "holds for a task, 0 for none")  # fmt: skip

JOB_VALUES = (
    UPTIME, DOWNTIME, NUM_RESTARTS, CHECKPOINT_AGE, CHECKPOINT_INTERVAL, LAST_DURATION, LAST_SIZE, LAST_FULL_SIZE,
    LAST_IN_FLIGHT, LAST_COMPLETED_ID, LAST_RESTORE, IN_PROGRESS, COMPLETED, FAILED, COORDINATOR_LOSSES, ADOPTIONS,
    LAST_RECOVERY, LAST_RECOVERY_DEPLOYMENT, LAST_RECOVERY_RESTORE, STANDBYS_READY,
    STANDBYS_STARTING, SUSPECT_NODES,
)  # fmt: skip
"""Gauges of a job. All are published from its first second on, because an alert needs an existing series."""

JOB_METRICS = (STATUS, *JOB_VALUES, CHECKPOINT_DURATION)
TASK_METRICS = (
    RECORDS_IN, RECORDS_OUT, BYTES_IN, BYTES_OUT, RECORDS_IN_RATE, RECORDS_OUT_RATE, BYTES_IN_RATE, BYTES_OUT_RATE,
    BUSY_TIME, BACK_PRESSURED_TIME, IDLE_TIME, BACK_PRESSURED, QUEUED, INPUT_WATERMARK, OUTPUT_WATERMARK,
    INPUT_WATERMARK_LAG, OUTPUT_WATERMARK_LAG, ALIGNMENT_DRIFT, START_DELAY, ALIGNMENT, SYNC, ASYNC,
    SNAPSHOT_FULL_SIZE, SNAPSHOT_SIZE, SNAPSHOT_IN_FLIGHT, STATE_ROWS, STATE_TIMERS, STATE_SIZE, RESTORES,
    STANDBY_CHECKPOINT,
)  # fmt: skip
S3_REQUESTS = Metric("tidegate_process_s3_requests", Kind.GAUGE, JOB_TAGS, "Requests to S3, repeated ones included")
STORAGE_RETRIES = Metric("tidegate_process_storage_retries", Kind.GAUGE, JOB_TAGS, "Requests to any storage that were "
    "made again after a fault")  # fmt: skip
PROCESS_METRICS = (S3_REQUESTS, STORAGE_RETRIES)
METRICS = (*JOB_METRICS, *TASK_METRICS, *PROCESS_METRICS)
