"""The jobs of a web server: the interface to a runtime (`Jobs`), and the state of each job (`SeenJob`, `View`).

Rules:

- A server requests from a job only the data that it does not have yet (`Question`), and keeps the rest.
- `View` and `SeenJob` are immutable. Answers to all clients use the same view.
- A `Sample` covers ten seconds: rows per second, lag and checkpoint durations, for the charts. The samples of one hour
  are kept. The server looks at a job every second while a client watches and every 11 s otherwise, so an hour has up to
  360.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from tidegate.actors.coordinator.coordinator_state import JobStatus
from tidegate.actors.coordinator.job_history import CHECKPOINTS_MAX, EndedCheckpoint, Past
from tidegate.actors.runtimes.job_snapshot import About, JobSnapshot, Known
from tidegate.actors.runtimes.running_job import SnapshotRequest
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.errors import TidegateError
from tidegate.storage.ids import JobId

SAMPLE_MS = 10_000
SAMPLES_MAX = 360
HOUR_MS = 3_600_000


class NotReachedError(TidegateError):
    """Raised if a job does not answer now. It may answer a later request."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request to one job for the data that the server does not have yet, and for the answers to pending requests of
    users.
    """

    known: Known = Known()  # noqa: RUF009 (frozen)
    requests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Look:
    """The result of requesting the state of all jobs once. `nameless`: whether a job has not answered yet, so that its
    id is unknown.
    """

    snapshots: tuple[JobSnapshot, ...] = ()
    nameless: bool = False


class Jobs(Protocol):
    """The interface to the jobs of a runtime, for the web server.

    Calls block for a limited time and run in threads of the server. `look` runs in one thread only.
    """

    def look(self, questions: Mapping[JobId, Question]) -> Look:
        """Requests the state of every job, including new ones.

        The end of a job that has disappeared is included once.
        """
        ...

    def request(self, job_id: JobId, request: str, wanted: SnapshotRequest) -> None:
        """Requests a checkpoint or savepoint of a job. A later look has the answer under the name of the request.

        Raises NotReachedError, and ConfigurationError for an invalid target.
        """
        ...

    def cancel(self, job_id: JobId) -> None:
        """Requests the cancellation of a job. Raises NotReachedError."""
        ...

    def delete_savepoint(self, path: str) -> None:
        """Deletes a savepoint. Raises the errors of `recovery.delete`."""
        ...

    def close(self) -> None:
        """Ends all requests to jobs that are still pending."""
        ...


@dataclass(frozen=True, slots=True)
class SeenJob:
    """One job: its newest snapshot, and data from earlier snapshots. Times are in ms since the epoch.

    `now_ms` is the time of its view. `reachable`: its coordinator answers, or the job has ended.
    """

    snapshot: JobSnapshot
    about: About
    ended: tuple[EndedCheckpoint, ...]
    """The checkpoints that have ended, oldest first."""
    past: Past
    now_ms: int
    reachable: bool = True
    samples: tuple[Sample, ...] = ()
    """The samples of the last hour, oldest first."""

    @property
    def job_id(self) -> JobId:
        return self.snapshot.card.job_id

    @property
    def over(self) -> bool:
        return self.snapshot.status.terminal

    @property
    def stale_ms(self) -> int:
        """Returns the age of the snapshot in ms; 0 if the job has ended or its coordinator answers."""
        return 0 if self.reachable else max(0, self.now_ms - self.snapshot.at_ms)


@dataclass(frozen=True, slots=True)
class View:
    """The state of all jobs at one time, in ms since the epoch."""

    jobs: Mapping[JobId, SeenJob] = field(default_factory=dict)
    at_ms: int = 0

    def job(self, job_id: str) -> SeenJob | None:
        """Returns the job with this id, or None if there is none."""
        return self.jobs.get(JobId(job_id))

    def at(self, now_ms: int) -> View:
        """Returns the same jobs, seen at another time."""
        return View({name: replace(job, now_ms=now_ms) for name, job in self.jobs.items()}, now_ms)


def seen(before: SeenJob | None, snapshot: JobSnapshot) -> SeenJob | None:
    """Returns the state of a job after a new snapshot. `before` is its state so far.

    Returns None while the parts that a job sends only once are missing.
    """
    about = snapshot.about if before is None or snapshot.about is not None else before.about
    past = snapshot.past if before is None or snapshot.past is not None else before.past
    if about is None or past is None:
        return None
    ended_now = {ended.record.checkpoint_id: ended for ended in snapshot.ended}
    kept = () if before is None else (e for e in before.ended if e.record.checkpoint_id not in ended_now)
    # A coordinator after a takeover sends checkpoints again, without the subtasks that its predecessor knew.
    again = {} if before is None else {e.record.checkpoint_id: e for e in before.ended if e.subtasks}
    news = (ended if ended.subtasks else again.get(number, ended) for number, ended in ended_now.items())
    if before is not None:
        # After a takeover the coordinator has no ends of earlier recoveries, and neither has the log of a job that is
        # over.
        ends = {**before.snapshot.recovery_ends, **snapshot.recovery_ends}
        attempts = {recovery.attempt for recovery in past.recoveries}
        snapshot = replace(snapshot, recovery_ends={a: each for a, each in ends.items() if a in attempts})
    samples = with_sample(() if before is None else before.samples, snapshot, about)
    return SeenJob(snapshot, about, (*kept, *news)[-CHECKPOINTS_MAX:], past, snapshot.at_ms, samples=samples)


def known_of(job: SeenJob | None) -> Known:
    """Returns which data of a job the server already has, so that the job does not send it again."""
    return Known() if job is None else job.snapshot.known


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures about a job for the charts, from its snapshots in the `SAMPLE_MS` ms after `at_ms` (ms since the epoch).
    A figure is None if nothing was reported.

    - `rows_per_second`: rows that its sources read, the mean of `looks` snapshots.
    - `lag_ms`: how far the event time of its slowest vertex is behind the clock, the maximum.
    - `checkpoint_ms`: the duration of its slowest checkpoint.
    """

    at_ms: int
    looks: int
    rows_per_second: float | None
    lag_ms: int | None
    checkpoint_ms: int | None


def with_sample(samples: tuple[Sample, ...], snapshot: JobSnapshot, about: About) -> tuple[Sample, ...]:
    """Adds the figures of a new snapshot to the samples of a job, and returns them.

    The samples of a job that has ended do not change.
    """
    if snapshot.status.terminal:
        return samples
    now = _sample(snapshot, about)
    if samples and now.at_ms < samples[-1].at_ms + SAMPLE_MS:
        samples = (*samples[:-1], _merged(samples[-1], now))
    else:
        samples = (*samples, now)
    return tuple(sample for sample in samples[-SAMPLES_MAX:] if sample.at_ms > now.at_ms - HOUR_MS)


def _sample(snapshot: JobSnapshot, about: About) -> Sample:
    durations = [ended.record.duration_ms for ended in snapshot.ended if ended.record.reason is None]
    checkpoint_ms = max(durations, default=None)
    if snapshot.status is not JobStatus.RUNNING:
        return Sample(snapshot.at_ms, 0, None, None, checkpoint_ms)
    fed = {edge.downstream for edge in about.edges}
    rates = [v.records_in_per_second for v in snapshot.vertices if v.vertex not in fed and v.subtasks]
    watermarks = [w for v in snapshot.vertices for w in (v.input_watermark_ms, v.output_watermark_ms) if w is not None]
    # The watermark at the end of time comes with the end of the input: then the lag is 0.
    lags = [0 if w >= MAX_WATERMARK_MS else max(0, snapshot.at_ms - w) for w in watermarks]
    rows = sum(rates) if rates else None
    return Sample(snapshot.at_ms, 0 if rows is None else 1, rows, max(lags, default=None), checkpoint_ms)


def _merged(before: Sample, now: Sample) -> Sample:
    looks = before.looks + now.looks
    total = (before.rows_per_second or 0.0) * before.looks + (now.rows_per_second or 0.0) * now.looks
    return Sample(
        before.at_ms,
        looks,
        total / looks if looks else None,
        _most(before.lag_ms, now.lag_ms),
        _most(before.checkpoint_ms, now.checkpoint_ms),
    )


def _most(one: int | None, other: int | None) -> int | None:
    return max((each for each in (one, other) if each is not None), default=None)
