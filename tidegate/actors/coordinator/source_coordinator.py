"""The coordinator's work for sources: `assign` assigns splits to subtasks, `WatermarkAligner` aligns watermarks.

Splits of bounded sources are assigned to subtasks on request (Flink's `SplitEnumerator`, FLIP-27). A fast subtask
requests more often, and so reads more. Splits of other sources are distributed round robin, once, when tasks are
described (`tidegate/actors/drivers/job_context.py`). Rules:

- A split is in one place. An assigned split belongs to its subtask, until the subtask is restored from a checkpoint
  that lacks the split. Then the split returns to the pool. The pool consists of all splits without a subtask, so it is
  computed and never stored.
- A checkpoint needs no order between its barriers and the assignments. A split belongs to the snapshot of a subtask if
  the subtask had received it before the snapshot. Otherwise it is in the checkpoint's pool: it was still on its way, or
  unassigned. A subtask takes splits in the order of assignment, so the number of splits in a snapshot identifies them.
- A subtask reads splits in the order of the source, also after some have returned to the pool. If rows are ordered in
  time over all splits, they are then in order for each subtask, and the failure of another subtask makes none of them
  late. A returned split is left to a subtask that has not read beyond it, such as the failed one, as long as such a
  subtask still requests splits.
- The first requests get several splits at a time, the last ones get one. The coordinator logs each answer, and many
  small files should not wait for it one by one.
- A source may have two parts (`TwoPartSource`): first a bounded one, then one that is read in turn. A subtask requests
  more when it has processed all its splits. When the first part has no unassigned splits, the request is not answered
  while another subtask still reads the first part. The subtask repeats it, and the answer is the switch to the second
  part.
- The splits of the second part never end, so they are assigned in equal shares, each in one answer. After a restore
  from a checkpoint at the switch, the splits without a subtask are in the pool, and the switch happens again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tidegate.actors.coordinator.coordinator_state import CoordinatorState, PendingCheckpoint, TakenSplits
from tidegate.actors.coordinator.events import SplitsRequested, TaskReady, WatermarkReported
from tidegate.actors.coordinator.instructions import AnnounceWatermark, AssignSplits
from tidegate.actors.coordinator.invariants import (
    check_assigned,
    check_question,
    check_snapshot,
    check_told_end,
)
from tidegate.actors.coordinator.job_spec import AlignedSource, AssignedSource, JobSpec
from tidegate.connectors.source import SOURCE_STATE
from tidegate.protocol.identity import TaskId
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.checkpoints.metadata import SplitPool, SubtaskState
from tidegate.storage.ids import OperatorUid, VertexId

ANSWERS_A_SUBTASK = 8
"""The number of answers to a subtask that contain several splits. Later answers contain a single split."""
SPLITS_AN_ANSWER_MAX = 1_000


class UntakenSplits:
    """The unassigned splits of one source, indexed so that the time to assign splits does not depend on how many are
    unassigned.

    The content can be computed from the splits of the subtasks (`TakenSplits`), so it is not part of the coordinator's
    state. The caller checks with `follows_from` whether the object is up to date, and builds a new one if not, for
    example after a subtask was restored.

    `subtasks`: the subtasks that have splits, or were notified that there are no more.
    """

    def __init__(self, source: AssignedSource, subtasks: Mapping[TaskId, TakenSplits]) -> None:
        self._source = source
        self._seen = {task: (taken, len(taken.given)) for task, taken in subtasks.items()}
        self._last = {task: taken.last for task, taken in subtasks.items()}
        self.taken = {number for taken in subtasks.values() for number in taken.all}
        """Indices of the splits that belong to a subtask."""
        second = len(source.splits) if source.second is None else source.second
        untaken = [number for number in source.unread if number not in self.taken]
        self.left = [number for number in untaken if number < second]
        """Indices of the unassigned splits, ascending, without the splits of a second part."""
        self.later = [number for number in untaken if number >= second]
        """Indices of the unassigned splits of the second part, ascending."""

    def follows_from(self, source: AssignedSource, subtasks: Mapping[TaskId, TakenSplits]) -> bool:
        """Returns whether this object is still up to date: since it was created, all splits were assigned by its
        methods.
        """
        if source is not self._source or len(subtasks) != len(self._seen):
            return False
        seen = ((taken, self._seen.get(task, (None, 0))) for task, taken in subtasks.items())
        return all(taken is before and len(taken.given) == given for taken, (before, given) in seen)

    def last(self, task: TaskId) -> int:
        """Returns the highest index among the splits of a subtask, or -1 if it has none."""
        return self._last.get(task, -1)

    def after(self, number: int) -> int:
        """Returns the number of unassigned splits with an index up to and including `number`."""
        return bisect_right(self.left, number)

    def give(self, task: TaskId, taken: TakenSplits, begin: int, splits: Sequence[int]) -> None:
        """Assigns unassigned splits to a subtask. `begin` is the position of the first of them in `left`."""
        del self.left[begin : begin + len(splits)]
        self._give(task, taken, splits)

    def give_later(self, task: TaskId, taken: TakenSplits, splits: Sequence[int]) -> None:
        """Assigns unassigned splits of the second part of a two-part source to a subtask."""
        self.later = [number for number in self.later if number not in splits]
        self._give(task, taken, splits)

    def _give(self, task: TaskId, taken: TakenSplits, splits: Sequence[int]) -> None:
        self.taken.update(splits)
        taken.given += tuple(splits)
        self._seen[task] = taken, len(taken.given)
        self._last[task] = max(self._last[task], *splits)


Pools = dict[VertexId, UntakenSplits]
"""The unassigned splits (`UntakenSplits`) of each source, by its vertex."""


def took_up(state: CoordinatorState, event: TaskReady) -> None:
    """Records that a subtask is ready with the splits of its checkpoint. Splits assigned after that become
    unassigned again.
    """
    source = _source_of(state, event.task)
    if source is None:
        return
    for taken in _subtasks(state, source).values():
        taken.waits = False  # What returns to the pool may be for them. They request it again.
    if event.splits is None:
        state.splits[event.task] = TakenSplits(tuple(range(len(source.splits))), told_all=True)
        return
    if not event.splits:
        state.splits[event.task] = TakenSplits()
        return
    numbers = {split.split_id: number for number, split in enumerate(source.splits)}
    restored = tuple(numbers[split_id] for split_id in event.splits if split_id in numbers)
    state.splits[event.task] = TakenSplits(restored, len(event.splits))


def assign(state: CoordinatorState, event: SplitsRequested, pools: Pools) -> AssignSplits | None:
    """Returns the answer to a subtask that requests splits, or None if the subtask must wait and request again.

    The subtask waits while other subtasks still read the first part of a two-part source. A repeated request gets the
    same answer. `pools` is a cache that the caller passes to every call. Entries that are out of date are replaced.
    """
    source = _source_of(state, event.task)
    assert source is not None, f"{event.task} asks for splits, and its source has dealt them out"
    taken = state.splits.setdefault(event.task, TakenSplits())
    check_question(event.first, len(taken.given))
    unanswered = event.first == len(taken.given) and not taken.told_all
    if unanswered and not _give(state, source, event.task, taken, pools):
        return None
    splits = tuple(source.splits[number] for number in taken.given[event.first :])
    return AssignSplits(event.attempt, event.task, event.first, splits)


def pools(state: CoordinatorState, pending: PendingCheckpoint) -> tuple[SplitPool, ...]:
    """Returns, for each source with assigned splits, the splits that no subtask has in its snapshot of a checkpoint."""
    assert state.spec is not None
    found = []
    for source in state.spec.assigned_sources:
        held = set[int]()
        for task, taken in _subtasks(state, source).items():
            held.update(taken.restored, taken.given[: _taken_in(pending, task, source.uid, taken)])
        left = tuple(source.splits[number] for number in source.unread if number not in held)
        if left:
            found.append(SplitPool(source.uid, left))
    return tuple(found)


def splits_left(state: CoordinatorState) -> dict[VertexId, int]:
    """Returns the number of unassigned splits of each source, by its vertex."""
    found = {}
    for source in () if state.spec is None else state.spec.assigned_sources:
        taken = {number for each in _subtasks(state, source).values() for number in each.all}
        found[source.vertex] = sum(number not in taken for number in source.unread)
    return found


def _taken_in(pending: PendingCheckpoint, task: TaskId, uid: OperatorUid, taken: TakenSplits) -> int:
    """Returns how many of the splits that were assigned to a subtask are in its snapshot of a checkpoint.

    A subtask takes splits in the order of assignment, so the snapshot has the first ones.
    """
    part = pending.acknowledged.get(task)
    if part is None:
        # It had finished before, so it had read all that it was given.
        return len(taken.given)
    in_snapshot = _splits_in(part, uid)
    if taken.has_second:
        # Splits that were found come after all that it was given.
        in_snapshot = min(in_snapshot, taken.restored_count + len(taken.given))
    check_snapshot(in_snapshot, taken.restored_count, len(taken.given))
    return in_snapshot - taken.restored_count


def _splits_in(part: SubtaskState, uid: OperatorUid) -> int:
    sections = (section for handle in part.state_handles for section in handle.sections)
    return sum(section.rows for section in sections if section.uid == uid and section.state == SOURCE_STATE)


def still_waits(state: CoordinatorState, event: SplitsRequested) -> bool:
    """Returns whether a request for splits repeats an unanswered request, and must wait further.

    It must wait while other subtasks still read the first part of a two-part source (`TwoPartSource`).
    """
    source = _source_of(state, event.task)
    taken = state.splits.get(event.task)
    if source is None or taken is None or not taken.waits or event.first != len(taken.given):
        return False
    return not all(each.has_read_first for each in _subtasks(state, source).values())


def _give(state: CoordinatorState, source: AssignedSource, task: TaskId, taken: TakenSplits, pools: Pools) -> bool:
    """Assigns the next unassigned splits to a subtask, or marks that there are no more for it.

    Returns False if the subtask must wait for the second part of a two-part source (`TwoPartSource`).
    """
    subtasks = _subtasks(state, source)
    pool = _untaken(state, source, pools)
    still_ask = [pool.last(other) for other, each in subtasks.items() if other != task and not each.told_all]
    share = -(-len(pool.left) // (ANSWERS_A_SUBTASK * len(subtasks)))
    begin, end = _next_for(task, pool, still_ask)
    chunk = pool.left[begin : min(end, begin + share, begin + SPLITS_AN_ANSWER_MAX)]
    if chunk and not taken.has_second:
        check_assigned(chunk, pool.taken)
        pool.give(task, taken, begin, chunk)
        return True
    if source.second is not None and not taken.has_second:
        others = [each for other, each in subtasks.items() if other != task]
        taken.waits = bool(pool.left) or not all(each.has_read_first for each in others)
        if taken.waits:
            return False
        # The last subtask without a share gets all that is left.
        without = sum(not (each.has_second or each.told_all) for each in others)
        later = pool.later[:: without + 1]
        taken.has_second = True
        if later:
            check_assigned(later, pool.taken)
            pool.give_later(task, taken, later)
            return True
    check_told_end([*pool.left, *pool.later], bool(still_ask))
    taken.told_all = True
    return True


def _untaken(state: CoordinatorState, source: AssignedSource, pools: Pools) -> UntakenSplits:
    assert state.spec is not None
    sources = (task for task in state.spec.sources if task.vertex == source.vertex)
    have = {task: state.splits[task] for task in sources if task in state.splits}
    pool = pools.get(source.vertex)
    if pool is None or not pool.follows_from(source, have):
        pool = pools[source.vertex] = UntakenSplits(source, have)
    return pool


def _next_for(task: TaskId, pool: UntakenSplits, still_ask: list[int]) -> tuple[int, int]:
    """Returns the range of positions in `pool.left`, as start and exclusive end, of the splits that a subtask may get.

    `still_ask`: for each other subtask that still requests splits, the highest index among its splits.
    """
    begin = pool.after(pool.last(task))
    if begin < len(pool.left):
        return begin, len(pool.left)
    # It has read beyond all others. Splits that another subtask has not read beyond are left to that subtask.
    return 0, pool.after(min(still_ask)) if still_ask else len(pool.left)


def _subtasks(state: CoordinatorState, source: AssignedSource) -> dict[TaskId, TakenSplits]:
    """Returns the subtasks of a source, each with its splits."""
    assert state.spec is not None
    tasks = (task for task in state.spec.sources if task.vertex == source.vertex)
    return {task: state.splits.get(task, TakenSplits()) for task in tasks}


def _source_of(state: CoordinatorState, task: TaskId) -> AssignedSource | None:
    assert state.spec is not None
    return state.spec.assigned_source(task.vertex)


class WatermarkAligner:
    """Computes the answers to the watermark reports of source tasks: the lowest watermark of their alignment group.

    The coordinator's driver calls it, outside the machine: its state is never logged. Rules:

    - Every report of a task is answered. A waiting task is also notified as soon as the report of another task lets it
      continue: a group moves at the pace of its slowest member, and not of the report interval.
    - A task that is idle, or at the end of its data, does not hold other tasks back.
    - No report is answered while the watermark of any task is unknown: after the start of the job, after the restart of
      a task, after the loss of the coordinator. A waiting task keeps waiting. All tasks repeat their reports, so this
      passes.
    - Reports from another attempt than the task's present one do not count.

    With n tasks in a group an answer costs n steps.
    """

    def __init__(self) -> None:
        self._told: dict[TaskId, WatermarkReported] = {}
        """The last report of each task."""

    def reported(self, state: CoordinatorState, event: WatermarkReported) -> Iterator[AnnounceWatermark]:
        """Yields the answers to a watermark report: one to the task that reported, and others to waiting tasks that may
        now continue.
        """
        source = None if state.spec is None else state.spec.aligned_source(event.task)
        if state.spec is None or source is None or not state.is_current(event.task, event.attempt):
            return
        self._told[event.task] = event
        members = dict(_members(state.spec, source.group))
        lowest_ms = self.lowest_ms(state, members)
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

    def lowest_ms(self, state: CoordinatorState, members: dict[TaskId, AlignedSource]) -> int | None:
        """Returns the lowest watermark, in ms, of the group's tasks that have not ended. None if the watermark of a
        task is unknown.
        """
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
