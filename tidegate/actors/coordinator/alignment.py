"""`Alignment`: knows how far the sources of each group are in event time, and tells them how far the slowest one is.

The coordinator's host asks it, beside the machine: what it knows is never logged. Rules:

- Every task is answered that tells how far it is. One that waits is also told, as soon as another one's report lets it
  go on: a group moves at the pace of its slowest member, and not of the interval.
- A task that is idle, or at the end of its data, holds nobody back.
- Nothing is told while it is not known of every other task how far it is: after the job has started, after a task has
  started anew, after the coordinator was lost. Who waits then waits on. All tasks tell it again, so this passes.
- What a task has told in another attempt than its present one does not count.

With n tasks in a group an answer costs n steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tidegate.actors.coordinator.job.job_spec import AlignedSource, JobSpec
from tidegate.actors.coordinator.messages.watermarks import AnnounceWatermark, WatermarkReported
from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState
from tidegate.protocol.identity import TaskId
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS


class Alignment:
    """Of one job, in one generation of its coordinator."""

    def __init__(self) -> None:
        self._told: dict[TaskId, WatermarkReported] = {}
        """What each task has told last."""

    def reported(self, state: CoordinatorState, event: WatermarkReported) -> Iterator[AnnounceWatermark]:
        """A task has told how far it is: what to tell it, and those that wait."""
        source = None if state.spec is None else state.spec.aligned_source(event.task)
        if state.spec is None or source is None or not state.is_current(event.task, event.attempt):
            return
        self._told[event.task] = event
        members = dict(_members(state.spec, source.group))
        lowest_ms = self._lowest_ms(state, members)
        if lowest_ms is None:
            return
        yield AnnounceWatermark(event.attempt, event.task, lowest_ms)
        for task, member in members.items():
            told = self._told.get(task)
            if told is None or not told.waits or not _may_go_on(told, lowest_ms, member):
                continue
            self._told[task] = replace(told, waits=False)
            if task != event.task:
                yield AnnounceWatermark(told.attempt, task, lowest_ms)

    def _lowest_ms(self, state: CoordinatorState, members: dict[TaskId, AlignedSource]) -> int | None:
        """The lowest watermark of those that count; None if it is not known."""
        lowest_ms = MAX_WATERMARK_MS
        for task in members:
            if task in state.ended:
                continue
            told = self._told.get(task)
            if told is None or not state.is_current(task, told.attempt):
                return None
            if told.watermark_ms is not None:
                lowest_ms = min(lowest_ms, told.watermark_ms)
        return lowest_ms


def _members(spec: JobSpec, group: str) -> Iterator[tuple[TaskId, AlignedSource]]:
    for task in spec.sources:
        source = spec.aligned_source(task)
        if source is not None and source.group == group:
            yield task, source


def _may_go_on(told: WatermarkReported, lowest_ms: int, source: AlignedSource) -> bool:
    return told.watermark_ms is None or told.watermark_ms <= lowest_ms + source.max_drift_ms
