"""`begin_source`: the cursor with which the source of a task begins, or goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidegate.actors.sources.source import is_unbounded
from tidegate.actors.task.pipeline.operator_chain import OperatorChain
from tidegate.actors.task.pipeline.source_cursor import SourceCursor, positions_from_tables
from tidegate.actors.task.pipeline.task_descriptor import TaskDescriptor
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.snapshot import StateTable


def begin_source(
    d: TaskDescriptor, chain: OperatorChain, restored: Mapping[OperatorUid, Sequence[StateTable]], finished: bool
) -> SourceCursor | None:
    """Where the checkpoint was; at the beginning if it knows nothing of the source; at the end if it has finished.

    The chain hears of the splits of a source that is unbounded. None for a task without a source.
    """
    if d.source is None:
        return None
    positions = () if finished else d.splits
    if d.source.uid in restored and not finished:
        positions = positions_from_tables(restored[d.source.uid])
    told = chain.splits if is_unbounded(d.source.source) else None
    return SourceCursor(positions, d.source_rows_max, in_turn=told, idleness_ms=chain.idleness_ms)
