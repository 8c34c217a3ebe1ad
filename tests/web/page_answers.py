"""Answers of the model for tests of the page, in Flink's shapes: what a job that runs would say."""

from __future__ import annotations

from typing import Any

from tidegate.web.page.pages import JobAnswers

NOW_MS = 1_795_459_200_000
"""A Tuesday in November 2026."""

Json = dict[str, Any]


def overview(*states: str, name: str = "main") -> Json:
    """A list with a job in each of these states."""
    return {
        "jobs": [
            {
                "jid": f"main-{place}",
                "name": name,
                "state": state,
                "start-time": NOW_MS - 61_000,
                "end-time": -1,
                "duration": 61_000,
                "last-modification": NOW_MS,
                "tasks": {"total": 4, "created": 0, "running": 4, "finished": 0},
            }
            for place, state in enumerate(states)
        ]
    }


def vertex(vertex_id: str, name: str, parallelism: int = 2, status: str = "RUNNING") -> Json:
    """A vertex of `details`."""
    return {
        "id": vertex_id,
        "name": name,
        "slotSharingGroupId": "default",
        "maxParallelism": 128,
        "parallelism": parallelism,
        "status": status,
        "start-time": NOW_MS - 61_000,
        "end-time": -1,
        "duration": 61_000,
        "tasks": {"CREATED": 0, status: parallelism},
        "metrics": {"read-records": 91_234, "read-records-complete": True, "write-records": 12},
    }


def task(subtask: int = 0, actor: str | None = "main/sum by key (1/4)#0", vertex: str = "sum by key") -> Json:
    """A task in its process; without an actor it waits for one."""
    there = actor is not None
    return {
        "vertex": vertex,
        "subtask": subtask,
        "parallelism": 4,
        "status": "RUNNING" if there else "SCHEDULED",
        "attempt": 2,
        "actor": actor,
        "pid": 4_711 if there else None,
        "node": "a1b2c3d4e5f6" * 4 if there else None,
    }


def node(vertex_id: str, *inputs: str) -> Json:
    """A node of the plan, and where its rows come from."""
    found: Json = {"id": vertex_id, "parallelism": 2, "operator": "", "operator_strategy": "", "description": vertex_id}
    if inputs:
        found["inputs"] = [
            {"num": place, "id": source, "ship_strategy": "HASH", "exchange": "pipelined_bounded"}
            for place, source in enumerate(inputs)
        ]
    return found


def details(state: str = "RUNNING", name: str = "main", vertex_name: str = "sum by key", **ours: object) -> Json:
    """A job: two sources that meet in a keyed vertex."""
    status = "RUNNING" if state == "RUNNING" else "CREATED"
    return {
        "jid": "main-0",
        "name": name,
        "isStoppable": False,
        "state": state,
        "job-type": "STREAMING",
        "start-time": NOW_MS - 61_000,
        "end-time": -1,
        "duration": 61_000,
        "maxParallelism": 128,
        "now": NOW_MS,
        "timestamps": {"RUNNING": NOW_MS - 60_000},
        "vertices": [
            vertex("orders", "source: orders", status=status),
            vertex("rates", "source: rates", 1, status=status),
            vertex("keyed", vertex_name, 4, status=status),
        ],
        "status-counts": {"RUNNING": 3},
        "plan": {
            "jid": "main-0",
            "name": name,
            "type": "STREAMING",
            "nodes": [node("orders"), node("rates"), node("keyed", "orders", "rates")],
        },
        "tidegate": {
            "attempt": 1,
            "restarts": 1,
            "uptime": 42_000,
            "downtime": 0,
            "waits-for": None,
            "failure-cause": None,
            "coordinator-losses": 0,
            "stale-ms": 0,
            "reason": None,
            "root": "s3://bucket/checkpoints",
            "detached": False,
            "standbys-ready": 1,
            **ours,
        },
    }


def rate(level: str = "ok", busy: float = 700.0, pressed: float = 100.0) -> Json:
    """What a vertex does in a second."""
    return {
        "numRecordsIn": 91_234,
        "numRecordsOut": 512,
        "numRecordsInPerSecond": 12_345.6,
        "numRecordsOutPerSecond": 3.0,
        "busyTimeMsPerSecond": busy,
        "idleTimeMsPerSecond": 1_000 - busy - pressed,
        "backPressuredTimeMsPerSecond": pressed,
        "backpressureLevel": level,
        "currentInputWatermark": NOW_MS - 4_000,
        "queuedBytes": 0,
        "stateBytes": None,
        "subtasks": [
            {
                "busy_ms_per_second": busy,
                "back_pressured_ms_per_second": pressed,
                "idle_ms_per_second": 1_000 - busy - pressed,
            }
        ],
    }


def rates() -> dict[str, Json]:
    """A source that waits for a busy vertex."""
    return {
        "orders": rate("high", 100.0, 800.0),
        "rates": rate("low", 200.0, 300.0),
        "keyed": rate("ok", 950.0, 0.0),
    }


UNMEASURED: Json = dict.fromkeys(rate())
"""A vertex that has not reported anything."""


def checkpoint(number: int, status: str = "COMPLETED", message: str = "", **changes: object) -> Json:
    """One checkpoint of the history."""
    triggered = NOW_MS - 60_000 + 1_000 * number
    found: Json = {
        "className": status.lower(),
        "id": number,
        "status": status,
        "is_savepoint": False,
        "savepointFormat": None,
        "trigger_timestamp": triggered,
        "latest_ack_timestamp": triggered + 84 if status == "COMPLETED" else -1,
        "checkpointed_size": 1_200_000,
        "state_size": 24_000_000,
        "end_to_end_duration": 84 + number,
        "alignment_buffered": 0,
        "processed_data": 0,
        "persisted_data": 0,
        "num_subtasks": 7,
        "num_acknowledged_subtasks": 7 if status == "COMPLETED" else 3,
        "checkpoint_type": "CHECKPOINT",
        "tasks": {},
    }
    if status == "COMPLETED":
        found |= {"external_path": f"s3://bucket/checkpoints/main-0/chk-{number}", "discarded": False}
    if status == "FAILED":
        found |= {"failure_timestamp": triggered + 10_000, "failure_message": message or "Checkpoint expired"}
    return found | changes


def savepoint(number: int) -> Json:
    """A savepoint of the history."""
    path = f"s3://bucket/savepoints/savepoint-main-0-{number}"
    return checkpoint(
        number, is_savepoint=True, savepointFormat="CANONICAL", checkpoint_type="SAVEPOINT", external_path=path
    )


QUANTILES = ("min", "max", "avg", "p50", "p90", "p95", "p99", "p999")
MEASURES = (
    "checkpointed_size",
    "state_size",
    "end_to_end_duration",
    "alignment_buffered",
    "processed_data",
    "persisted_data",
)


def checkpoints(*history: Json, restored: Json | None = None) -> Json:
    """The checkpoints of a job, newest first."""
    completed = [c for c in history if c["status"] == "COMPLETED"]
    failed = [c for c in history if c["status"] == "FAILED"]
    return {
        "counts": {
            "restored": int(restored is not None),
            "total": len(history),
            "in_progress": len(history) - len(completed) - len(failed),
            "completed": len(completed),
            "failed": len(failed),
        },
        "summary": {key: dict.fromkeys(QUANTILES, 84.0 if completed else "NaN") for key in MEASURES},
        "latest": {
            "completed": next((c for c in completed if not c["is_savepoint"]), None),
            "savepoint": next((c for c in completed if c["is_savepoint"]), None),
            "failed": failed[0] if failed else None,
            "restored": restored,
        },
        "history": list(history),
    }


def subtask(index: int, start_delay: int = 12, alignment: int = 5, sync: int = 3, writing: int = 41) -> Json:
    """One subtask of a checkpoint that has acknowledged."""
    return {
        "className": "completed",
        "index": index,
        "status": "completed",
        "ack_timestamp": NOW_MS,
        "end_to_end_duration": start_delay + alignment + sync + writing + 9,
        "checkpointed_size": 300_000,
        "state_size": 6_000_000,
        "checkpoint": {"sync": sync, "async": writing},
        "alignment": {"buffered": 0, "processed": 2_048, "persisted": 4_096, "duration": alignment},
        "start_delay": start_delay,
        "unaligned_checkpoint": False,
        "aborted": False,
    }


def pending(index: int) -> Json:
    """One that has not."""
    return {"className": "pending", "index": index, "status": "pending_or_failed"}


def with_tasks(given: Json, **subtasks: list[Json]) -> tuple[Json, dict[str, Json | None]]:
    """A checkpoint with its tasks, and its subtasks by vertex."""
    tasks = {
        name: {
            "id": given["id"],
            "status": given["status"],
            "latest_ack_timestamp": NOW_MS,
            "checkpointed_size": 1,
            "state_size": 24_000_000,
            "end_to_end_duration": 84,
            "alignment_buffered": 0,
            "processed_data": 0,
            "persisted_data": 0,
            "num_subtasks": len(parts),
            "num_acknowledged_subtasks": sum("checkpoint" in part for part in parts),
        }
        for name, parts in subtasks.items()
    }
    return given | {"tasks": tasks}, {name: tasks[name] | {"subtasks": parts} for name, parts in subtasks.items()}


def recovery(attempt: int = 1, cause: str = "ValueError: a row without a key", over: bool = True) -> Json:
    """One recovery."""
    return {
        "attempt": attempt,
        "started-at": NOW_MS - 50_000,
        "cause": cause,
        "task": "keyed (2/4)",
        "tasks-restarted": 4,
        "tasks": 7,
        "checkpoint": 17,
        "deployed-at": NOW_MS - 49_880,
        "running-at": NOW_MS - 49_240 if over else None,
        "total": 760 if over else None,
        "parts": {"wait": 120, "restore": 640 if over else None},
    }


def failure(name: str = "ValueError", trace: str = "Traceback ...\nValueError: a row without a key") -> Json:
    """One entry of the exceptions."""
    return {
        "exceptionName": name,
        "stacktrace": trace,
        "timestamp": NOW_MS - 50_000,
        "taskName": "sum by key (2/4)",
        "endpoint": "node-1",
        "taskManagerId": None,
        "location": None,
        "failureLabels": {},
        "concurrentExceptions": [],
    }


def exceptions(*entries: Json) -> Json:
    """The exceptions of a job."""
    return {
        "root-exception": None,
        "timestamp": None,
        "all-exceptions": [],
        "truncated": False,
        "exceptionHistory": {"entries": list(entries), "truncated": False},
    }


def sample(second: int, rows: float | None = 1_200.0, lag: int | None = 4_000, took: int | None = 84) -> Json:
    """Numbers of ten seconds, so many seconds after the job began."""
    return {"timestamp": NOW_MS - 3_600_000 + 1_000 * second, "rows-per-second": rows, "lag": lag,
            "checkpoint-duration": took}  # fmt: skip


def decision(text: str = "Attempt 1 is running", trouble: bool = False) -> Json:
    """One line of what was decided."""
    return {
        "timestamp": NOW_MS - 49_000,
        "text": text,
        "checkpoint": None,
        "attempt": 1,
        "trouble": trouble,
        "restart": True,
    }


def job(
    job_details: Json | None = None,
    of_checkpoints: Json | None = None,
    vertex_rates: dict[str, Json] | None = None,
    recoveries: list[Json] | None = None,
    failures: list[Json] | None = None,
    decisions: list[Json] | None = None,
    settings: list[Json] | None = None,
    last_hour: list[Json] | None = None,
    tasks: list[Json] | None = None,
) -> JobAnswers:
    """A job with all that has a default: it runs, and nothing has happened."""
    return JobAnswers(
        details=job_details or details(),
        rates=rates() if vertex_rates is None else vertex_rates,
        tasks=tasks or [],
        checkpoints=of_checkpoints or checkpoints(),
        recoveries={"recoveries": recoveries or []},
        exceptions=exceptions(*(failures or [])),
        timeline={"entries": decisions or [], "truncated": False},
        last_hour=last_hour or [],
        configuration=settings or [{"key": "execution.checkpointing.interval", "value": "1 s"}],
    )
