"""What the REST API and the page show: pure functions from what is seen of the jobs to dicts with Flink's names."""

from __future__ import annotations

from tidegate.web.model.checkpoints import checkpoint_config, checkpoint_details, checkpoints, newest_checkpoint
from tidegate.web.model.history import exceptions, last_hour, timeline
from tidegate.web.model.jobs import (
    configuration,
    dashboard_config,
    job_accumulators,
    job_config,
    job_details,
    job_ids,
    job_status,
    jobs_overview,
    overview,
    plan,
)
from tidegate.web.model.metrics import job_metrics, vertex_metrics
from tidegate.web.model.processes import (
    subtask_times,
    task_manager,
    task_managers,
    task_processes,
    vertex_task_managers,
)
from tidegate.web.model.recoveries import recoveries
from tidegate.web.model.states import NotKnown, job_state
from tidegate.web.model.subtasks import checkpoint_subtasks
from tidegate.web.model.vertices import backpressure, vertex_accumulators, vertex_details, vertex_rates, watermarks

__all__ = [
    "NotKnown",
    "backpressure",
    "checkpoint_config",
    "checkpoint_details",
    "checkpoint_subtasks",
    "checkpoints",
    "configuration",
    "dashboard_config",
    "exceptions",
    "job_accumulators",
    "job_config",
    "job_details",
    "job_ids",
    "job_metrics",
    "job_state",
    "job_status",
    "jobs_overview",
    "last_hour",
    "newest_checkpoint",
    "overview",
    "plan",
    "recoveries",
    "subtask_times",
    "task_manager",
    "task_managers",
    "task_processes",
    "timeline",
    "vertex_accumulators",
    "vertex_details",
    "vertex_metrics",
    "vertex_rates",
    "vertex_task_managers",
    "watermarks",
]
