"""Finds the event logs of jobs under a path."""

from __future__ import annotations

import tidegate.actors.coordinator.messages.instructions
import tidegate.actors.coordinator.state.coordinator_state  # noqa: F401 (imported for the classes that they register)
from tidegate.recovery.checkpoints import is_of_job
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import JobId


def logs_under(path: str, job: str | None, open_store: OpenStore = open_store) -> dict[JobId, EventLog]:
    """The logs of the jobs under a root, or of one job if `path` is its folder. Raises StorageError."""
    store, job = _root_of(path, job, open_store)
    logs = {JobId(name): EventLog(store, JobId(name)) for name in store.list("") if is_of_job(store, JobId(name), job)}
    return {job_id: log for job_id, log in logs.items() if log.indices()}


def _root_of(path: str, job: str | None, open_store: OpenStore) -> tuple[Store, str | None]:
    """The root and the job that are meant: `path` may be a root, or the folder of a job."""
    store = open_store(path)
    root, _, name = store.url.rpartition("/")
    if job is None and root and name and any(entry.isdigit() for entry in store.list("events")):
        return open_store(root), name
    return store, job


def only_one(logs: dict[JobId, EventLog], path: str, job: str | None) -> tuple[EventLog, JobId]:
    """The log of the one job that is meant. ConfigurationError if there is none, or more than one."""
    of_job = f" of job {job}" if job else ""
    if not logs:
        raise ConfigurationError(f"there is no event log under {path}{of_job}")
    if len(logs) > 1:
        names = ", ".join(sorted(logs))
        raise ConfigurationError(f"there are several event logs under {path}{of_job}: choose one by --job ({names})")
    return next((log, job_id) for job_id, log in logs.items())
