"""From a checkpoint to what each task starts with.

Keyed state is cut to the key groups of the subtask. List state stays where it was when the parallelism did not change
and is dealt out row by row otherwise; union and broadcast state go to every subtask. A vertex is restored as finished
only if all its subtasks were; the state of the finished subtasks of another vertex is left out (FLIP-147).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from tidegate.actors.coordinator.spec import RestorePoint
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.identity import TaskId
from tidegate.actors.task.source import positions_from_tables
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import OperatorUid
from tidegate.storage.metadata import CheckpointMetadata, StateKind, SubtaskState
from tidegate.storage.metadata_file import read_metadata
from tidegate.storage.state import StateTable, key_group_range
from tidegate.storage.state_file import read_state
from tidegate.storage.store import Store


@dataclass(frozen=True, slots=True)
class RestoredTask:
    """What one task starts with."""

    tables: tuple[tuple[OperatorUid, tuple[StateTable, ...]], ...]
    finished: bool


def restore_task(store: Store, restore: RestorePoint, graph: JobGraph, task: TaskId) -> RestoredTask:
    """Read the state of one task. Raises StorageError (CorruptionError among them)."""
    metadata = read_metadata(store, restore.job_id, restore.checkpoint_id)
    vertex = graph.vertex(task.vertex)
    uids = [spec.uid for spec in vertex.operators]
    if vertex.source is not None:
        uids.insert(0, vertex.source.uid)
    known = {info.uid: info for info in metadata.operators}
    finished = bool(uids) and all(uid in known and all(s.finished for s in _subtasks(metadata, uid)) for uid in uids)
    groups = key_group_range(task.subtask, graph.max_parallelism, vertex.parallelism)
    tables = []
    for uid in uids:
        if uid not in known:
            continue
        unfinished = [s for s in _subtasks(metadata, uid) if finished or not s.finished]
        found: list[StateTable] = []
        for subtask in unfinished:
            if subtask.handle is None:
                continue
            for table in read_state(store, subtask.handle, uid, groups):
                same = known[uid].parallelism == vertex.parallelism
                if table.kind is StateKind.LIST and same and subtask.subtask != task.subtask:
                    continue
                found.append(table)
        if known[uid].parallelism != vertex.parallelism:
            found = _deal_out(found, task.subtask, vertex.parallelism)
        tables.append((uid, tuple(found)))
    return RestoredTask(tuple(tables), finished)


def check_restorable(metadata: CheckpointMetadata, graph: JobGraph) -> None:
    """Refuse, at submission, a checkpoint whose state this graph has no place for."""
    infos = {info.uid: info for info in graph.operator_infos()}
    stateful = {
        section.uid
        for subtask in metadata.subtasks
        if subtask.handle is not None
        for section in subtask.handle.sections
    }
    for uid in sorted(stateful - set(infos)):
        raise ConfigurationError(
            f"checkpoint {metadata.checkpoint_id} of {metadata.job_id} has state of operator {uid!r}, and the job has "
            f"no operator of that uid (it has {', '.join(sorted(infos))}); give the operator its old uid="
        )
    for old in metadata.operators:
        new = infos.get(old.uid)
        if new is not None and new.max_parallelism != old.max_parallelism:
            raise ConfigurationError(
                f"operator {old.uid!r} has max_parallelism {old.max_parallelism} in checkpoint "
                f"{metadata.checkpoint_id} and {new.max_parallelism} in the job; it cannot change"
            )


def check_restored_sources(store: Store, metadata: CheckpointMetadata, graph: JobGraph) -> None:
    """Refuse a source whose splits are not those that the checkpoint knows: it would skip rows, or read others.

    A source that is staged is read again from what was staged, so it is not compared.
    """
    known = {info.uid for info in metadata.operators}
    for vertex in graph.vertices:
        spec = vertex.source
        if spec is None or spec.uid not in known or hasattr(spec.source, "reopen"):
            continue
        tables = [
            table
            for subtask in _subtasks(metadata, spec.uid)
            if subtask.handle is not None
            for table in read_state(store, subtask.handle, spec.uid)
        ]
        before = {p.split.split_id: p.split for p in positions_from_tables(tables)}
        now = {split.split_id: split for split in spec.source.splits()}
        changed = sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
        if changed:
            raise ConfigurationError(
                f"source {spec.uid!r} is not what it was at checkpoint {metadata.checkpoint_id} of {metadata.job_id}: "
                f"split {changed[0]!r} and {len(changed) - 1} more were added, removed or changed; give it the same "
                "input and the same number of splits, or start without restore"
            )


def _subtasks(metadata: CheckpointMetadata, uid: OperatorUid) -> list[SubtaskState]:
    vertex = next(info.vertex for info in metadata.operators if info.uid == uid)
    return [subtask for subtask in metadata.subtasks if subtask.vertex == vertex]


def _deal_out(tables: Sequence[StateTable], subtask: int, parallelism: int) -> list[StateTable]:
    dealt = []
    start = 0
    for table in tables:
        if table.kind is not StateKind.LIST:
            dealt.append(table)
            continue
        mine = [i for i in range(table.rows.num_rows) if (start + i) % parallelism == subtask]
        start += table.rows.num_rows
        if mine:
            rows = table.rows.take(pa.array(mine, pa.int64()))
            dealt.append(StateTable(table.state, table.kind, rows))
    return dealt
