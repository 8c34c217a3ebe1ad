"""The start of a source task: makes its cursor when the task machine hears what was restored, and tells its splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidegate.actors.task.messages import instructions as do
from tidegate.actors.task.messages.events import TaskRestored
from tidegate.actors.task.pipeline.operator_chain import OperatorChain
from tidegate.actors.task.pipeline.source_cursor import SourceCursor
from tidegate.actors.task.pipeline.split_alignment import SplitAlignment
from tidegate.actors.task.pipeline.split_positions import positions_from_tables
from tidegate.actors.task.pipeline.split_requests import SplitRequests
from tidegate.actors.task.pipeline.task_descriptor import TaskDescriptor
from tidegate.connectors.source import is_unbounded
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.snapshot import StateTable


def begin_source(
    d: TaskDescriptor, chain: OperatorChain, restored: Mapping[OperatorUid, Sequence[StateTable]], finished: bool
) -> SourceCursor | None:
    """The cursor of the task's source; None for a task without one.

    It begins where the checkpoint was, at the start if the checkpoint does not know the source, and at the end if the
    task had finished. It asks for more splits if the coordinator assigns them. The splits of an unbounded source are
    read in turn, and the chain hears which one rows are from. Splits wait for others in event time if the program says
    so.
    """
    if d.source is None:
        return None
    positions = () if finished else d.splits
    if d.source.uid in restored and not finished:
        positions = positions_from_tables(restored[d.source.uid])
    told = chain.splits if is_unbounded(d.source.source) else None
    requests = SplitRequests(d.attempt) if d.asks_for_splits and not finished else None
    found = None if finished else chain.aligned_generator
    alignment = None if found is None else SplitAlignment(d.attempt, *found, chain.splits)
    return SourceCursor(
        positions,
        d.source_rows_max,
        in_turn=told,
        idleness_ms=chain.idleness_ms,
        requests=requests,
        event_times=chain.splits,
        alignment=alignment,
        awaited=chain.awaited_generator(any(edge.event_time for edge in d.outputs)),
    )


def report_ready(d: TaskDescriptor, source: SourceCursor | None, event: TaskRestored) -> do.ReportReady:
    """What the task tells the coordinator when it is ready: also which splits it has, if it gets more from there."""
    splits: tuple[str, ...] | None = ()
    if source is not None and d.asks_for_splits:
        splits = None if event.finished else source.split_ids
    return do.ReportReady(d.attempt, event.origin, splits, 0 if source is None else source.rows_read)
