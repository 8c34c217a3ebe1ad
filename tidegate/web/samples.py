"""`Sample`: rows a second, lag and checkpoint durations of a job over ten seconds; an hour of them is kept for charts.

The server looks at a job every 11 s while nobody watches, and every second while somebody does. So an hour has up to
360 samples, and each holds the mean or the maximum of the looks that it covers. Only the web server has them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.actors.coordinator.state.coordinator_state import JobStatus
from tidegate.actors.runtimes.job_snapshot import About, JobSnapshot
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS

SAMPLE_MS = 10_000
SAMPLES_MAX = 360
HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Sample:
    """Numbers of the looks at a job within `SAMPLE_MS` of `at_ms` (since the epoch). None where nothing was reported.

    `rows_per_second`: rows that its sources read, the mean of `looks` looks. `lag_ms`: how far the event time of its
    slowest vertex is behind the clock. `checkpoint_ms`: how long its slowest checkpoint took. Both are maxima.
    """

    at_ms: int
    looks: int
    rows_per_second: float | None
    lag_ms: int | None
    checkpoint_ms: int | None


def with_sample(samples: tuple[Sample, ...], snapshot: JobSnapshot, about: About) -> tuple[Sample, ...]:
    """Returns the samples after another snapshot. They stay as they are once the job is over."""
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
    # A watermark at the end of time comes with the end of the input. Nothing is behind then.
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
