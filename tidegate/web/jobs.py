"""`Jobs`: the jobs as a web server reaches them. There is one such class a runtime.

Rules: calls block, for a bounded time, and are made on threads of the server; only one thread looks. What a server
asks for is what it does not know yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tidegate.actors.runtimes.job_snapshot import JobSnapshot, Known
from tidegate.actors.runtimes.running_job import SnapshotRequest
from tidegate.storage.errors import TidegateError
from tidegate.storage.ids import JobId


class NotReachedError(TidegateError):
    """The job does not answer now; whoever asks again later may have an answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of one job: news, and the answers to these requests."""

    known: Known = Known()  # noqa: RUF009 (frozen)
    requests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Look:
    """What one look has found. `nameless`: a job is there that has not answered yet, so nobody knows its id."""

    snapshots: tuple[JobSnapshot, ...] = ()
    nameless: bool = False


class Jobs(Protocol):
    """All jobs of a runtime."""

    def look(self, questions: Mapping[JobId, Question]) -> Look:
        """Ask every job, those that nobody knows yet included. A job that has gone is told of once more: its end."""
        ...

    def request(self, job_id: JobId, request: str, wanted: SnapshotRequest) -> None:
        """Ask a job for a checkpoint or savepoint; a later look has the answer, under the name of the request.

        Raises NotReachedError, and ConfigurationError for a target that cannot be.
        """
        ...

    def cancel(self, job_id: JobId) -> None:
        """Ask a job to be cancelled. Raises NotReachedError."""
        ...

    def delete_savepoint(self, path: str) -> None:
        """Delete a savepoint. Raises what `recovery.delete` raises."""
        ...

    def close(self) -> None:
        """Nothing is asked any more."""
        ...
