"""Restores a task: reads the state, in-flight rows and prepared sink rows with which it starts from a checkpoint.

The driver of a task calls `restore_task` before the task is ready. Rules:

- A subtask gets the keyed state of its key groups. The layers of keyed state come oldest first.
- List state stays with its subtask at the same parallelism. At another parallelism its elements are distributed round
  robin. Every subtask gets all union state. Every subtask gets the broadcast state of one subtask that had not
  finished.
- A vertex is restored as finished, without state, only if all its subtasks had finished (FLIP-147). If only some had,
  their state is dropped.
- If some subtasks of a source had finished, each keeps its splits as read to the end. At another parallelism subtask 0
  gets the splits of all of them. Otherwise the coordinator would assign these splits again, and later checkpoints would
  lack them.
- Watermarks between the rows of waiting `map_async` calls are dropped unless event time continues
  (`event_time_goes_on`).
- States that the restore point drops are removed from the rows here, for every backend. Files of a backend that contain
  such a state are read as rows, and no later checkpoint is based on them.
- Prepared rows of a sink that commits in its tasks go to the subtask that now owns their bucket, also rows of subtasks
  that had finished (`prepared_rows`).
- `restore_in_flight` has the rules for in-flight rows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.actors.graph.job_graph import JobEdge, JobGraph, JobVertex
from tidegate.actors.task.channels import InFlightElement, has_rows
from tidegate.actors.task.split_positions import FrozenPositions
from tidegate.operators.functions.async_map import WATERMARKS
from tidegate.protocol.edges import PartitioningKind
from tidegate.protocol.identity import ChannelId, TaskId
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS, Watermark
from tidegate.protocol.task_reports import StateOrigin
from tidegate.state.factory import backend_folder
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.kernels.partition import gather
from tidegate.storage.checkpoints.layout import NATIVE_MARK
from tidegate.storage.checkpoints.metadata import (
    CheckpointMetadata,
    OperatorInfo,
    PreparedPart,
    PreparedRows,
    SectionRef,
    StateKind,
    SubtaskState,
    read_metadata,
)
from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.files.store import Store
from tidegate.storage.ids import CheckpointId, JobId, OperatorUid, SubtaskIndex, VertexId
from tidegate.storage.state.backend_files import fetch_native, tables_of_fetched
from tidegate.storage.state.handover import Handover, Spool, SpooledTables
from tidegate.storage.state.in_flight import ChannelEnd, InFlightRows, edges_in_flight, read_in_flight
from tidegate.storage.state.key_groups import key_group_range, key_groups_meet, key_groups_of
from tidegate.storage.state.local_copies import LocalFirstStore, NodeFolder
from tidegate.storage.state.snapshot import StateTable
from tidegate.storage.state.subtask_state import iter_subtask_state, read_subtask_state


@dataclass(frozen=True, slots=True)
class RestoredTask:
    """The data with which one task starts: state, in-flight rows, and prepared sink rows."""

    tables: tuple[tuple[OperatorUid, Sequence[StateTable]], ...]
    """The state tables of each operator. The operator takes its tables one by one, which frees them (`Handover`)."""
    finished: bool
    in_flight: RestoredChannels = ()
    part: SubtaskState | None = None
    """This subtask's part of the checkpoint, on which later snapshots may be based.

    None if it had finished, if the parallelism was another one, or if a state is dropped.
    """
    kept: frozenset[OperatorUid] = frozenset()
    """Operators with keyed state that is already in memory. Their tables have no rows."""
    origin: StateOrigin = StateOrigin.STORAGE
    prepared: tuple[PreparedRows, ...] = ()
    """Prepared rows of sinks that commit in their tasks, for the buckets of the subtask, oldest first."""


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
    """Reads the data with which one task starts. `store` is opened at the root of the restore point.

    - `readers`: up to this many threads read state at a time.
    - `spool_folder`: keyed state beyond a few MB is stored in this folder, instead of memory, until the backend loads
      it.
    - `local_copies`: folder of the node from which state is read if a valid copy is there.
    - `native_folder`: files of a backend are copied to this folder if the task still has the same key groups. The
      backend then opens them, and their tables have no rows.
    - `kept`: states of the checkpoint that a backend in this process still has. They are not read, and their tables
      have no rows.

    Raises StorageError (CorruptionError is one), and ConfigurationError for in-flight rows that were partitioned by
    other key columns.
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
                "; restore an older checkpoint, or a savepoint"
            )
        prepared = prepared_rows(metadata, vertex, task.subtask)
        return RestoredTask(tuple((uid, ()) for uid in uids), finished=True, prepared=prepared)
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
    prepared = prepared_rows(metadata, vertex, task.subtask)
    return RestoredTask(tuple(tables), False, in_flight, part, frozenset(kept), origin, prepared)


def prepared_rows(metadata: CheckpointMetadata, vertex: JobVertex, subtask: SubtaskIndex) -> tuple[PreparedRows, ...]:
    """Returns the prepared sink rows of a checkpoint that one subtask has to commit: the rows in its buckets, oldest
    checkpoint first.

    The parts of one checkpoint are grouped, even if several subtasks have prepared them.
    """
    found: list[PreparedRows] = []
    for spec in vertex.operators:
        if spec.committing is None:
            continue
        buckets = key_group_range(subtask, spec.committing.buckets, vertex.parallelism)
        parts: dict[tuple[CheckpointId, JobId], list[PreparedPart]] = {}
        for rows in (rows for old in metadata.subtasks for rows in old.prepared if rows.uid == spec.uid):
            mine = [part for part in rows.parts if part.bucket in buckets]
            if mine:
                parts.setdefault((rows.checkpoint_id, rows.job_id), []).extend(mine)
        for (checkpoint_id, job_id), mine in sorted(parts.items()):
            mine.sort(key=lambda part: part.bucket)
            found.append(PreparedRows(spec.uid, job_id, checkpoint_id, tuple(mine)))
    return tuple(found)


def part_of(metadata: CheckpointMetadata, vertex: JobVertex, task: TaskId) -> SubtaskState | None:
    """Returns the part of a checkpoint that the subtask with the same index wrote, or None.

    None if that subtask had finished, or if the parallelism was different.
    """
    parts = [subtask for subtask in metadata.subtasks if subtask.vertex == task.vertex]
    own = next((part for part in parts if part.subtask == task.subtask), None)
    return None if own is None or own.finished or len(parts) != vertex.parallelism else own


def _read_to_the_end(
    metadata: CheckpointMetadata, uid: OperatorUid, task: TaskId, parallelism: int
) -> list[StateTable]:
    """Returns a state table with the splits of finished source subtasks that this subtask has to keep as read to
    the end.
    """
    subtasks = subtasks_of(metadata, uid)
    if len(subtasks) == parallelism:
        subtasks = [subtask for subtask in subtasks if subtask.subtask == task.subtask]
    elif task.subtask != 0:
        return []
    splits = [split for subtask in subtasks if subtask.finished for split in subtask.read_splits]
    positions = FrozenPositions.read_to_the_end(splits)
    return [StateTable(positions.state, positions.kind, chunk.rows) for chunk in positions.chunks() if splits]


def subtasks_of(metadata: CheckpointMetadata, uid: OperatorUid) -> list[SubtaskState]:
    """Returns the parts of a checkpoint that belong to the subtasks of an operator."""
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
    """Returns the state tables with which one subtask of an operator starts, in a vertex that had not finished.

    `left_out` are names of list states that are not read. `dropped` are names of states of any kind that are dropped.
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
    """Returns the rows of list state that one subtask gets: every `parallelism`-th row. Tables of other kinds are
    unchanged.
    """
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


RestoredChannels = tuple[tuple[ChannelId, tuple[InFlightElement, ...]], ...]


def restore_in_flight(store: Store, metadata: CheckpointMetadata, graph: JobGraph, task: TaskId) -> RestoredChannels:
    """Returns the in-flight rows of a checkpoint for the input channels of one task, by channel, oldest first.

    All in-flight rows become input of the downstream task, even rows that a sender had not sent yet. Output queues
    start empty, as in Flink with `execution.checkpointing.unaligned.recover-output-on-downstream`. If both parallelisms
    are unchanged, the rules map every old channel to itself. Rules:

    - The order of an old channel is kept: first the rows that the receiver had, then the rows that the sender had not
      sent.
    - HASH: a row goes to the owner of its key group. A subtask reads only old channels that can have such rows.
    - REBALANCE: all rows of an old channel go to one subtask. The same holds on an edge that was rebalanced because its
      two ends had different parallelisms, and is forward now. Other forward edges, and broadcast edges, have no
      in-flight rows.
    - A task gets the rows on its channel from upstream subtask `old upstream % new parallelism`.
    - If the parallelism of the sender and of all before it is unchanged, a channel has the rows of one sender, and that
      sender continues after them. So in-flight watermarks keep their places: each row meets the same watermark as it
      would have. If several old channels are merged into one, the channel that is furthest behind in event time goes
      first (Flink has a virtual channel for each).
    - If one parallelism has changed, or the edge is forward now, in-flight watermarks are dropped: rows of another old
      sender, or of another split, may follow on the channel, and a watermark would make some of them late. An in-flight
      row that was late may then count as in time. No row becomes late that was in time.

    Raises StorageError (CorruptionError is one), and ConfigurationError for rows that were partitioned by other key
    columns.
    """
    restored: dict[ChannelId, dict[tuple[int, int], list[InFlightElement]]] = {}
    for edge in graph.edges:
        if edge.downstream != task.vertex:
            continue
        route = Route(metadata, graph, edge, task.subtask)
        for held in in_flight_rows(store, metadata, route):
            parts = restored.setdefault(route.channel(held.end), {})
            parts.setdefault((held.end.upstream, held.end.downstream), []).extend(route.elements(held))
    merged = ((channel, tuple(_merged([*parts.values()]))) for channel, parts in restored.items())
    return tuple((channel, elements) for channel, elements in merged if has_rows(elements))


def edges_with_in_flight(metadata: CheckpointMetadata) -> frozenset[str]:
    """Returns the names of the edges with in-flight rows in a checkpoint."""
    return frozenset(
        name
        for subtask in metadata.subtasks
        if subtask.in_flight is not None
        for name in edges_in_flight(subtask.in_flight)
    )


def can_take_in_flight(metadata: CheckpointMetadata, graph: JobGraph, edge: JobEdge) -> bool:
    """Returns whether the in-flight rows of an edge can be routed over the edge of the restored program."""
    match edge.partitioning.kind:
        case PartitioningKind.HASH | PartitioningKind.REBALANCE:
            return True
        case PartitioningKind.FORWARD:
            up = graph.emitter(edge)
            down = graph.vertex(edge.downstream).head
            return old_parallelism(metadata, up) != old_parallelism(metadata, down)
        case PartitioningKind.BROADCAST:
            return False


class Route:
    """Selects, for one edge, the in-flight rows for one downstream subtask, and the input channels on which they
    arrive.
    """

    def __init__(self, metadata: CheckpointMetadata, graph: JobGraph, edge: JobEdge, subtask: SubtaskIndex) -> None:
        self.edge = edge
        self.name = graph.edge_name(edge)
        self._takes_any = can_take_in_flight(metadata, graph, edge)
        self._subtask = subtask
        self._where = f"checkpoint {metadata.checkpoint_id} of {metadata.job_id}"
        self._upstreams = graph.vertex(edge.upstream).parallelism
        self._downstreams = graph.vertex(edge.downstream).parallelism
        goes_on = event_time_goes_on(metadata, graph, edge.upstream)
        self._keeps_watermarks = goes_on and edge.partitioning.kind is not PartitioningKind.FORWARD
        self._old_downstreams = old_parallelism(metadata, graph.vertex(edge.downstream).head)
        self._max_parallelism = graph.max_parallelism
        self._own = key_group_range(subtask, graph.max_parallelism, self._downstreams)

    def reads(self, end: ChannelEnd) -> bool:
        """Returns whether an input or output of an old task (`end`) may have rows for the subtask.

        Raises CorruptionError if the edge cannot have such a channel.
        """
        if not self._takes_any or end.downstream >= self._old_downstreams:
            raise CorruptionError(
                f"{self._where} has in-flight elements of channel {end.upstream}>{end.downstream} of the "
                f"{self.edge.partitioning.kind.value} edge {self.name!r}, which cannot have any"
                "; restore an older checkpoint, or a savepoint"
            )
        if self.edge.partitioning.kind is PartitioningKind.HASH:
            return key_groups_meet(self._old_key_groups(end), self._own)
        return (end.upstream * self._old_downstreams + end.downstream) % self._downstreams == self._subtask

    def elements(self, held: InFlightRows) -> Iterator[InFlightElement]:
        """Yields the subtask's elements of one end of an old channel. `reads` must have returned True."""
        for element in held.elements() if self._keeps_watermarks else held.batches:
            if isinstance(element, int):
                yield Watermark(element)
            elif (mine := self.mine(held.end, element)) is not None:
                yield mine

    def mine(self, end: ChannelEnd, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Returns the subtask's rows in a batch of an old channel, or None if there are none. `reads` must have
        returned True.
        """
        if self.edge.partitioning.kind is not PartitioningKind.HASH:
            return batch
        groups = key_groups_of(hash_columns(batch, self.edge.partitioning.keys), self._max_parallelism)
        old = self._old_key_groups(end)
        if len(groups) and not (old.start <= groups.min() and groups.max() < old.stop):
            raise ConfigurationError(
                f"{self._where} has in-flight rows on {self.name!r} that were not partitioned by "
                f"{list(self.edge.partitioning.keys)}; keep the keys of that edge, or restore from a savepoint, "
                "which has no in-flight rows"
            )
        rows = np.flatnonzero((groups >= self._own.start) & (groups < self._own.stop)).astype(np.int32)
        if len(rows) == batch.num_rows:
            return batch
        return gather(batch, rows) if len(rows) else None

    def channel(self, end: ChannelEnd) -> ChannelId:
        """Returns the input channel on which the rows of an old channel arrive."""
        if self.edge.partitioning.kind is PartitioningKind.FORWARD:
            return ChannelId(self.edge.index, self._subtask, self._subtask)
        return ChannelId(self.edge.index, SubtaskIndex(end.upstream % self._upstreams), self._subtask)

    def _old_key_groups(self, end: ChannelEnd) -> range:
        return key_group_range(end.downstream, self._max_parallelism, self._old_downstreams)


def _merged(parts: Sequence[Sequence[InFlightElement]]) -> Iterator[InFlightElement]:
    """Merges the elements of several old channels of one sender. Each channel keeps its order, and no watermark
    comes too early.
    """
    queues = [deque(part) for part in parts]
    reached_ms = [MIN_WATERMARK_MS for _ in parts]
    told_ms = MIN_WATERMARK_MS
    while waiting := [number for number, queue in enumerate(queues) if queue]:
        first = min(waiting, key=reached_ms.__getitem__)
        element = queues[first].popleft()
        if isinstance(element, Watermark):
            reached_ms[first] = max(reached_ms[first], element.timestamp_ms)
            continue
        if reached_ms[first] > told_ms:
            told_ms = reached_ms[first]
            yield Watermark(told_ms)
        yield element
    if (last_ms := max(reached_ms)) > told_ms:
        yield Watermark(last_ms)


def in_flight_rows(store: Store, metadata: CheckpointMetadata, route: Route) -> list[InFlightRows]:
    """Returns the in-flight elements of an edge, sorted by channel. The receiver's elements come before the
    sender's.
    """
    found: list[InFlightRows] = []
    for subtask in metadata.subtasks:
        if subtask.in_flight is not None:
            found += read_in_flight(store, subtask.in_flight, route.name, route.reads)
    return sorted(found, key=lambda held: (held.end.upstream, held.end.downstream, held.end.direction == "output"))


def event_time_goes_on(metadata: CheckpointMetadata, graph: JobGraph, vertex: VertexId) -> bool:
    """Returns whether event time may continue at the watermarks of the checkpoint.

    True if all operators of a vertex, and of the vertices before it, have the same parallelism as in the checkpoint.
    """
    before = [vertex]
    found = set[VertexId]()
    while before:
        found.add(reached := before.pop())
        before += [edge.upstream for edge in graph.edges if edge.downstream == reached and edge.upstream not in found]
    return all(
        old_parallelism(metadata, uid) == graph.vertex(each).parallelism
        for each in found
        for uid in graph.vertex(each).uids
    )


def old_parallelism(metadata: CheckpointMetadata, uid: OperatorUid) -> int:
    """Returns the parallelism of an operator in the checkpoint. 0 if the operator is new."""
    return next((info.parallelism for info in metadata.operators if info.uid == uid), 0)
