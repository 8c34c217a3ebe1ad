"""The local runtime: whole jobs in one process, on the real clock, without Ray and without a JVM."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.local.local_job import LocalJob, jobs_here
from tidegate.actors.runtimes.running_job import JobCard, JobOverview, RunningJob, SilentJob, Submission, not_there
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import OpenStore

log = logging.getLogger(__name__)

STOP_WAIT_S = 30
ENDED_MAX = 20
"""Jobs that are over and stay known, so that their pages do: the newest of them."""


class LocalRuntime:
    """Runs jobs in this process."""

    memory_url = "memory://tidegate-checkpoints"
    sends_functions = False

    def __init__(self, open_store: OpenStore = open_store) -> None:
        self.open_store = open_store
        self._jobs: list[LocalJob] = []

    def check(self, graph: JobGraph, urls: Sequence[str]) -> None:
        """Everything runs here."""

    def check_detached(self, name: str, urls: Sequence[str]) -> None:
        """No job outlives the process that it runs in."""
        raise ConfigurationError(
            f"execute({name!r}, detached=True): a local job runs in the process of its script and ends with it. Leave "
            "detached out, or run it on a Ray cluster that was started by itself "
            '(StreamEnvironment.raydp(ray_address="host:port"))'
        )

    def submit(self, submission: Submission) -> RunningJob:
        """Start a job on a thread of its own."""
        job = LocalJob(submission, self.open_store)
        job.start()
        self._jobs.append(job)
        ended = self.ended()
        dropped = {id(each) for each in ended[: max(0, len(ended) - ENDED_MAX)]}
        self._jobs = [each for each in self._jobs if id(each) not in dropped]
        return job

    def ended(self) -> list[LocalJob]:
        """Returns the newest jobs of this runtime that are over, oldest first; about `ENDED_MAX` of them are kept."""
        return [job for job in list(self._jobs) if job.over]

    def overviews(self) -> list[tuple[str, JobOverview | SilentJob]]:
        """The jobs of this process, of all its environments."""
        return [(job.name, job.overview()) for job in jobs_here()]

    def attach(self, name: str) -> tuple[JobCard, RunningJob]:
        """A job of this process, of whichever environment."""
        jobs = jobs_here()
        found = [job for job in jobs if name in (job.card.name, job.card.job_id)]
        if len(found) != 1:
            raise not_there(name, "in this process", [job.card for job in jobs])
        return found[0].card, found[0]

    def stop(self) -> None:
        """Cancel what runs, and wait for it."""
        jobs = list(self._jobs)
        self._jobs.clear()
        deadline_s = time.monotonic() + STOP_WAIT_S
        for job in jobs:
            if not job.over:
                job.cancel()
        for job in jobs:
            if not job.join(deadline_s):
                log.warning("job %r has not ended within %d s: it is left behind", job.name, STOP_WAIT_S)
