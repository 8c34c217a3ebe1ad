"""A watch that knows certain jobs, and an application before it."""

from __future__ import annotations

from typing import Any

from asgi_client import Client
from fixture_jobs import failed_job, running_job, view_of

from tidegate.actors.runtimes.running_job import SnapshotRequest
from tidegate.storage.ids import JobId
from tidegate.web.jobs import SeenJob, View
from tidegate.web.options import digest_of
from tidegate.web.security import Access, Limits
from tidegate.web.server import make_app
from tidegate.web.watch import Triggers

TOKEN = "a-token-of-the-tests"
WITH_TOKEN = {"authorization": f"Bearer {TOKEN}"}
MANY = Limits(a_second=1e9, burst=1_000_000)
"""No client is ever too quick."""


class FixedWatch:
    """What a `JobWatch` is to routes. `asked`: what reached a job; `error`: what is raised instead."""

    refresh_s = 1.0

    def __init__(self, *jobs: SeenJob) -> None:
        self.known = view_of(*(jobs or (running_job(), failed_job())))
        self.triggers = Triggers()
        self.asked: list[tuple[JobId, object]] = []
        self.error: Exception | None = None

    async def view(self) -> View:
        return self.known

    async def job(self, job_id: str) -> SeenJob | None:
        return self.known.job(job_id)

    async def request(self, job_id: JobId, trigger_id: str, wanted: SnapshotRequest) -> None:
        if self.error is not None:
            raise self.error
        self.triggers.add(trigger_id, job_id, wanted.kind)
        self.asked.append((job_id, wanted))

    async def cancel(self, job_id: JobId) -> None:
        self.asked.append((job_id, "cancel"))


def app_of(watch: FixedWatch, limits: Limits = MANY, *, open_to_others: bool = False, **gate: Any) -> Any:
    """The application; `gate` goes to its gate."""
    app: Any = make_app(watch, Access(digest_of(TOKEN), open_to_others), limits=limits)  # type: ignore[arg-type]
    for name, value in gate.items():
        setattr(app, f"_{name}", value)
    return app


def client_of(watch: FixedWatch | None = None, **options: Any) -> Client:
    """A client on loopback."""
    return Client(app_of(FixedWatch() if watch is None else watch, **options))
