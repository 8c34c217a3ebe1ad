"""`SeenJob` and `View`: what a web server knows of the jobs; immutable, and all clients are answered from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tidegate.actors.coordinator.chronicle import CHECKPOINTS_MAX, EndedCheckpoint, Past
from tidegate.actors.runtimes.job_snapshot import About, JobSnapshot, Known
from tidegate.storage.ids import JobId
from tidegate.web.samples import Sample, with_sample


@dataclass(frozen=True, slots=True)
class SeenJob:
    """One job: its newest snapshot, and what earlier ones have told. Times in ms since the epoch.

    `now_ms` is the time of the view that it belongs to. `reachable`: its coordinator answers, or the job is over.
    """

    snapshot: JobSnapshot
    about: About
    ended: tuple[EndedCheckpoint, ...]
    """Checkpoints that are over, oldest first."""
    past: Past
    now_ms: int
    reachable: bool = True
    samples: tuple[Sample, ...] = ()
    """Numbers of the last hour, oldest first."""

    @property
    def job_id(self) -> JobId:
        """Its id."""
        return self.snapshot.card.job_id

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.snapshot.status.terminal

    @property
    def stale_ms(self) -> int:
        """How old the snapshot is; 0 where nothing changes any more, and while the coordinator answers."""
        return 0 if self.reachable else max(0, self.now_ms - self.snapshot.at_ms)


def seen(before: SeenJob | None, snapshot: JobSnapshot) -> SeenJob | None:
    """A job after another snapshot; None if that leaves out what nobody has told yet."""
    about = snapshot.about if before is None or snapshot.about is not None else before.about
    past = snapshot.past if before is None or snapshot.past is not None else before.past
    if about is None or past is None:
        return None
    told = {ended.record.checkpoint_id: ended for ended in snapshot.ended}
    kept = () if before is None else (e for e in before.ended if e.record.checkpoint_id not in told)
    # A coordinator that has taken over tells again of some that its predecessor knew more of.
    again = {} if before is None else {e.record.checkpoint_id: e for e in before.ended if e.subtasks}
    news = (ended if ended.subtasks else again.get(number, ended) for number, ended in told.items())
    if before is not None:
        # One that has taken over, and the log of a job that is over, know nothing of how recoveries ended.
        ends = {**before.snapshot.recovery_ends, **snapshot.recovery_ends}
        attempts = {recovery.attempt for recovery in past.recoveries}
        snapshot = replace(snapshot, recovery_ends={a: each for a, each in ends.items() if a in attempts})
    samples = with_sample(() if before is None else before.samples, snapshot, about)
    return SeenJob(snapshot, about, (*kept, *news)[-CHECKPOINTS_MAX:], past, snapshot.at_ms, samples=samples)


def known_of(job: SeenJob | None) -> Known:
    """What need not be told again."""
    return Known() if job is None else job.snapshot.known


@dataclass(frozen=True, slots=True)
class View:
    """All jobs at one time, in ms since the epoch."""

    jobs: Mapping[JobId, SeenJob] = field(default_factory=dict)
    at_ms: int = 0

    def job(self, job_id: str) -> SeenJob | None:
        """The job of this id, None if there is none."""
        return self.jobs.get(JobId(job_id))

    def at(self, now_ms: int) -> View:
        """The same at another time."""
        return View({name: replace(job, now_ms=now_ms) for name, job in self.jobs.items()}, now_ms)
