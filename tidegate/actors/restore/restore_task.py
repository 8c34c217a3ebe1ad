"""Restores a task: finds what it starts with in a checkpoint or savepoint.

The host of a task calls `restore_task` before the task is ready. Rules:
- Keyed state is cut to the key groups of the subtask. Its layers come oldest first.
- List state stays with its subtask at the same parallelism. At another one its elements are dealt out round robin.
  Union state goes whole to every subtask. Broadcast state goes to every subtask, from one that had not finished.
- A vertex is restored as finished, without state, only if all its subtasks had finished (FLIP-147). If only some had,
  their state is left out.
- If some subtasks of a source had finished, each takes over its own splits as read to the end. At another parallelism
  subtask 0 takes over the splits of all of them. Otherwise the coordinator would assign these splits again, and later
  checkpoints would not know them.
- Watermarks between the rows of calls that wait are left out unless event time goes on (`restored_event_time.py`).
- States that the restore point drops are left out of the rows here, for every backend, and nowhere else. Files of a
  backend that hold such a state are read as rows, and no later checkpoint builds on what they were read from.
- `restore_in_flight.py` has the rules for in-flight data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import pyarrow as pa

from tidegate.actors.coordinator.job.job_spec import RestorePoint
from tidegate.actors.graph.job_graph import JobGraph, JobVertex
from tidegate.actors.restore.restore_in_flight import RestoredChannels, restore_in_flight
from tidegate.actors.restore.restored_event_time import event_time_goes_on
from tidegate.actors.task.pipeline.split_positions import FrozenPositions
from tidegate.operators.functions.async_map import WATERMARKS
from tidegate.protocol.identity import TaskId
from tidegate.protocol.state_origin import StateOrigin
from tidegate.state.factory import backend_folder
from tidegate.storage.checkpoints.layout import NATIVE_MARK
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, OperatorInfo, SectionRef, StateKind, SubtaskState
from tidegate.storage.checkpoints.metadata_file import read_metadata
from tidegate.storage.copies.local_first import LocalFirstStore
from tidegate.storage.copies.node_folder import NodeFolder
from tidegate.storage.errors import CorruptionError
from tidegate.storage.files.store import Store
from tidegate.storage.ids import OperatorUid, SubtaskIndex
from tidegate.storage.state.handover import Handover
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import StateTable
from tidegate.storage.state.spool import Spool, SpooledTables
from tidegate.storage.subtasks.backend_files import fetch_native, tables_of_fetched
from tidegate.storage.subtasks.subtask_state import iter_subtask_state, read_subtask_state


@dataclass(frozen=True, slots=True)
class RestoredTask:
    """What one task starts with."""

    tables: tuple[tuple[OperatorUid, Sequence[StateTable]], ...]
    """The state of each operator. The operator consumes its tables, and so frees them (`Handover`)."""
    finished: bool
    in_flight: RestoredChannels = ()
    part: SubtaskState | None = None
    """The same subtask's part of the checkpoint. None if it had finished, the parallelism was another one, or a state
    is dropped."""
    kept: frozenset[OperatorUid] = frozenset()
    """Operators whose keyed state is in memory already. Tables without rows stand for it."""
    origin: StateOrigin = StateOrigin.STORAGE


def restore_task(
    store: Store,
    restore: RestorePoint,
    graph: JobGraph,
    task: TaskId,
    local_copies: NodeFolder | None = None,
    native_folder: str | None = None,
    readers: int = 1,
    kept: Mapping[OperatorUid, Sequence[StateTable]] = MappingProxyType({}),
    spool_folder: str | None = None,
) -> RestoredTask:
    """Read what one task starts with. `store` is opened at the root of the restore point.

    - `readers`: up to so many threads read state at a time.
    - `spool_folder`: keyed state beyond a few MB waits in this folder, not in memory, until the backend loads it.
    - `local_copies`: state is read from this folder of the node where a copy there verifies.
    - `native_folder`: files of a backend go there if their key groups are still those of the task. The backend then
      opens them, and tables without rows stand for them.
    - `kept`: states that a backend in this process still holds for the checkpoint. They are not read; tables without
      rows stand for them too.

    Raises StorageError (CorruptionError is one), and ConfigurationError for in-flight rows keyed by other columns.
    """
    metadata = read_metadata(store, restore.job_id, restore.checkpoint_id, savepoint=restore.savepoint)
    if local_copies is not None and not restore.savepoint:
        store = LocalFirstStore(store, local_copies, restore.job_id, metadata.subtasks)
    vertex = graph.vertex(task.vertex)
    uids = vertex.uids
    known = {info.uid: info for info in metadata.operators}
    in_flight = () if restore.ignore_in_flight else restore_in_flight(store, metadata, graph, task)
    if uids and all(uid in known and all(s.finished for s in subtasks_of(metadata, uid)) for uid in uids):
        if in_flight:
            raise CorruptionError(
                f"checkpoint {metadata.checkpoint_id} of {metadata.job_id} has in-flight elements for {task}, which "
                "had finished"
            )
        return RestoredTask(tuple((uid, ()) for uid in uids), finished=True)
    dropped: dict[OperatorUid, set[str]] = {}
    for uid, state in restore.dropped_states:
        dropped.setdefault(uid, set()).add(state)
    part = None if dropped.keys() & set(uids) else part_of(metadata, vertex, task)
    if part is None:
        kept = {}
    calling = {spec.uid for spec in vertex.operators if spec.calls is not None}
    stale = calling if calling and not event_time_goes_on(metadata, graph, task.vertex) else set()
    tables = [
        (
            uid,
            _tables_of(
                store,
                metadata,
                known[uid],
                task.subtask,
                vertex.parallelism,
                native_folder,
                readers,
                kept.get(uid, ()),
                None if spool_folder is None else Spool(f"{backend_folder(spool_folder, uid)}{NATIVE_MARK}restore"),
                frozenset({WATERMARKS} if uid in stale else ()),
                frozenset(dropped.get(uid, ())),
            ),
        )
        for uid in uids
        if uid in known
    ]
    if vertex.source is not None and vertex.source.uid in known:
        uid, found = tables[0]
        tables[0] = uid, Handover((*found, *_read_to_the_end(metadata, uid, task, vertex.parallelism)))
    copied = isinstance(store, LocalFirstStore) and store.sufficed
    origin = StateOrigin.MEMORY if kept else StateOrigin.LOCAL_COPY if copied else StateOrigin.STORAGE
    return RestoredTask(tuple(tables), False, in_flight, part, frozenset(kept), origin)


def part_of(metadata: CheckpointMetadata, vertex: JobVertex, task: TaskId) -> SubtaskState | None:
    """The same subtask's part of a checkpoint. None if it had finished, or the parallelism was another one."""
    parts = [subtask for subtask in metadata.subtasks if subtask.vertex == task.vertex]
    own = next((part for part in parts if part.subtask == task.subtask), None)
    return None if own is None or own.finished or len(parts) != vertex.parallelism else own


def _read_to_the_end(
    metadata: CheckpointMetadata, uid: OperatorUid, task: TaskId, parallelism: int
) -> list[StateTable]:
    """The splits of finished subtasks of a source that a subtask takes over."""
    subtasks = subtasks_of(metadata, uid)
    if len(subtasks) == parallelism:
        subtasks = [subtask for subtask in subtasks if subtask.subtask == task.subtask]
    elif task.subtask != 0:
        return []
    splits = [split for subtask in subtasks if subtask.finished for split in subtask.read_splits]
    positions = FrozenPositions.read_to_the_end(splits)
    return [StateTable(positions.state, positions.kind, chunk.rows) for chunk in positions.chunks() if splits]


def subtasks_of(metadata: CheckpointMetadata, uid: OperatorUid) -> list[SubtaskState]:
    """The parts of a checkpoint of the subtasks that ran an operator."""
    vertex = next(info.vertex for info in metadata.operators if info.uid == uid)
    return [subtask for subtask in metadata.subtasks if subtask.vertex == vertex]


def _tables_of(
    store: Store,
    metadata: CheckpointMetadata,
    info: OperatorInfo,
    subtask: SubtaskIndex,
    parallelism: int,
    native_folder: str | None,
    readers: int,
    kept: Sequence[StateTable],
    spool: Spool | None,
    left_out: frozenset[str],
    dropped: frozenset[str],
) -> Handover:
    """The state with which one subtask of an operator starts, in a vertex that has not finished.

    `left_out`: names of list states that are not read. `dropped`: names of states of any kind.
    """
    groups = key_group_range(subtask, info.max_parallelism, parallelism)
    rescaled = info.parallelism != parallelism
    broadcast_from: dict[str, SubtaskIndex] = {}
    found: list[StateTable | SpooledTables] = [*kept]
    in_memory = {table.state for table in kept}
    for old in subtasks_of(metadata, info.uid):
        if old.finished:
            continue
        had = key_group_range(old.subtask, info.max_parallelism, info.parallelism)
        has_groups = had.start < groups.stop and groups.start < had.stop

        def wanted(section: SectionRef, old: SubtaskState = old, has_groups: bool = has_groups) -> bool:
            if section.state in dropped:
                return False
            match section.kind:
                case StateKind.KEYED:
                    return has_groups and section.state not in in_memory
                case StateKind.LIST:
                    return section.state not in left_out and (rescaled or old.subtask == subtask)
                case StateKind.BROADCAST:
                    return broadcast_from.setdefault(section.state, old.subtask) == old.subtask
                case StateKind.UNION:
                    return True

        if native_folder is not None and old.subtask == subtask:
            alike = [n for n in old.native if n.uid == info.uid and n.key_groups == (groups.start, groups.stop)]
            tables_of = [(native, tables_of_fetched(native)) for native in alike]
            whole = [(native, held) for native, held in tables_of if dropped.isdisjoint(each.state for each in held)]
            for native, held in whole:
                fetch_native(store, native, backend_folder(native_folder, info.uid))
                found += held
            fetched = [native for native, _ in whole]
            old = replace(old, native=tuple(native for native in old.native if native not in fetched))
        if spool is None:
            tables: Iterable[StateTable] = read_subtask_state(
                store, old, info.uid, groups, wanted=wanted, readers=readers
            )
        else:
            tables = iter_subtask_state(
                store, old, info.uid, groups, wanted=wanted, scratch_dir=spool.folder, readers=readers
            )
        # `wanted` does not choose among the states in a backend's files.
        left = (table for table in tables if table.state not in dropped)
        found += left if spool is None else spool.keep(left)
    found.sort(key=lambda table: table.layer)
    return Handover(_deal_out(found, subtask, parallelism) if rescaled else found)


def _deal_out(
    tables: Sequence[StateTable | SpooledTables], subtask: int, parallelism: int
) -> list[StateTable | SpooledTables]:
    """One subtask's share of list state: every `parallelism`-th row. Shares differ by at most one row."""
    dealt: list[StateTable | SpooledTables] = []
    rows_before: Counter[str] = Counter()
    for table in tables:
        if isinstance(table, SpooledTables) or table.kind is not StateKind.LIST:
            dealt.append(table)
            continue
        first = (subtask - rows_before[table.state]) % parallelism
        rows_before[table.state] += table.rows.num_rows
        mine = range(first, table.rows.num_rows, parallelism)
        if mine:
            dealt.append(replace(table, rows=table.rows.take(pa.array(mine, pa.int64()))))
    return dealt
