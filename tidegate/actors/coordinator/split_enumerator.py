"""Assigns the splits of bounded sources to subtasks, when they ask (Flink's `SplitEnumerator`, FLIP-27).

A fast subtask asks more often, and so reads more. Splits of other sources are dealt out in turn, once, where a task is
described (`tidegate/actors/drivers/job_context.py`). Rules:

- A split is in one place. What was given to a subtask is its own, until it is restored from a checkpoint that lacks it.
  Then the split goes back to the pool. The pool is what nobody has, so it is never stored apart from that.
- A checkpoint needs no order between its barriers and the answers. A split belongs to the snapshot of a subtask if it
  was taken in before the cut. Else it is in the checkpoint's pool: it was still on its way, or with nobody. A subtask
  takes in splits in the order in which they are given, so the number of splits in a snapshot says which ones they are.
- A subtask reads splits in the order of the source, also when some have come back to the pool. Rows that are ordered
  in time over all splits are then in order for each subtask, and none is late because another subtask has failed. A
  split that comes back is left to a subtask that has not read beyond it, as the one that has failed, as long as there
  is one that still asks.
- Who asks first gets several splits at a time, and one at a time in the end: the coordinator logs each answer, and many
  small files are not to wait for it one by one.
"""

from __future__ import annotations

from tidegate.actors.coordinator.job.job_spec import AssignedSource
from tidegate.actors.coordinator.messages.events import SplitsRequested, TaskReady
from tidegate.actors.coordinator.messages.splits import AssignSplits
from tidegate.actors.coordinator.split_invariants import (
    check_assigned,
    check_question,
    check_snapshot,
    check_told_end,
)
from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState, PendingCheckpoint
from tidegate.actors.coordinator.state.taken_splits import TakenSplits
from tidegate.actors.coordinator.state.untaken_splits import UntakenSplits
from tidegate.connectors.source import SOURCE_STATE
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import SplitPool, SubtaskState
from tidegate.storage.ids import OperatorUid, VertexId

ANSWERS_A_SUBTASK = 8
"""The pool is given away in about so many answers a subtask, before it is given away split by split."""
SPLITS_AN_ANSWER_MAX = 1_000

Pools = dict[VertexId, UntakenSplits]
"""What nobody has of each source."""


def took_up(state: CoordinatorState, event: TaskReady) -> None:
    """A subtask is ready, with the splits of its checkpoint. What it was given since goes back to the pool."""
    source = _source_of(state, event.task)
    if source is None:
        return
    if event.splits is None:
        state.splits[event.task] = TakenSplits(tuple(range(len(source.splits))), told_all=True)
        return
    if not event.splits:
        state.splits[event.task] = TakenSplits()
        return
    numbers = {split.split_id: number for number, split in enumerate(source.splits)}
    restored = tuple(numbers[split_id] for split_id in event.splits if split_id in numbers)
    state.splits[event.task] = TakenSplits(restored, len(event.splits))


def assign(state: CoordinatorState, event: SplitsRequested, pools: Pools) -> AssignSplits:
    """Answer a subtask. A question that was answered before gets the same answer.

    `pools` is kept between calls, and made anew where it does not follow from the state any more.
    """
    source = _source_of(state, event.task)
    assert source is not None, f"{event.task} asks for splits, and its source has dealt them out"
    taken = state.splits.setdefault(event.task, TakenSplits())
    check_question(event.first, len(taken.given))
    if event.first == len(taken.given) and not taken.told_all:
        _give(state, source, event.task, taken, pools)
    splits = tuple(source.splits[number] for number in taken.given[event.first :])
    return AssignSplits(event.attempt, event.task, event.first, splits)


def pools(state: CoordinatorState, pending: PendingCheckpoint) -> tuple[SplitPool, ...]:
    """What no subtask has in its part of a checkpoint, for each source whose splits are assigned."""
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
    """How many splits of each source were given to nobody yet, for people."""
    found = {}
    for source in () if state.spec is None else state.spec.assigned_sources:
        taken = {number for each in _subtasks(state, source).values() for number in each.all}
        found[source.vertex] = sum(number not in taken for number in source.unread)
    return found


def _taken_in(pending: PendingCheckpoint, task: TaskId, uid: OperatorUid, taken: TakenSplits) -> int:
    """How many of the splits that a subtask was given are in its part of a checkpoint: the first ones."""
    part = pending.acknowledged.get(task)
    if part is None:
        # It had finished before, so it had read all that it was given.
        return len(taken.given)
    in_snapshot = _splits_in(part, uid)
    check_snapshot(in_snapshot, taken.restored_count, len(taken.given))
    return in_snapshot - taken.restored_count


def _splits_in(part: SubtaskState, uid: OperatorUid) -> int:
    sections = (section for handle in part.state_handles for section in handle.sections)
    return sum(section.rows for section in sections if section.uid == uid and section.state == SOURCE_STATE)


def _give(state: CoordinatorState, source: AssignedSource, task: TaskId, taken: TakenSplits, pools: Pools) -> None:
    """Give a subtask what comes next in the pool, or tell it that there are no more for it."""
    subtasks = _subtasks(state, source)
    pool = _untaken(state, source, pools)
    still_ask = [pool.last(other) for other, each in subtasks.items() if other != task and not each.told_all]
    share = -(-len(pool.left) // (ANSWERS_A_SUBTASK * len(subtasks)))
    begin, end = _next_for(task, pool, still_ask)
    chunk = pool.left[begin : min(end, begin + share, begin + SPLITS_AN_ANSWER_MAX)]
    if chunk:
        check_assigned(chunk, pool.taken)
        pool.give(task, taken, begin, chunk)
    else:
        check_told_end(pool.left, bool(still_ask))
        taken.told_all = True


def _untaken(state: CoordinatorState, source: AssignedSource, pools: Pools) -> UntakenSplits:
    assert state.spec is not None
    sources = (task for task in state.spec.sources if task.vertex == source.vertex)
    have = {task: state.splits[task] for task in sources if task in state.splits}
    pool = pools.get(source.vertex)
    if pool is None or not pool.follows_from(source, have):
        pool = pools[source.vertex] = UntakenSplits(source, have)
    return pool


def _next_for(task: TaskId, pool: UntakenSplits, still_ask: list[int]) -> tuple[int, int]:
    """Which part of what is left a subtask may be given, where the others have read as far as `still_ask`."""
    begin = pool.after(pool.last(task))
    if begin < len(pool.left):
        return begin, len(pool.left)
    # It has read beyond all others. Those that another one has not read beyond are left to that.
    return 0, pool.after(min(still_ask)) if still_ask else len(pool.left)


def _subtasks(state: CoordinatorState, source: AssignedSource) -> dict[TaskId, TakenSplits]:
    """The subtasks of a source, and what each has taken."""
    assert state.spec is not None
    tasks = (task for task in state.spec.sources if task.vertex == source.vertex)
    return {task: state.splits.get(task, TakenSplits()) for task in tasks}


def _source_of(state: CoordinatorState, task: TaskId) -> AssignedSource | None:
    assert state.spec is not None
    return state.spec.assigned_source(task.vertex)
