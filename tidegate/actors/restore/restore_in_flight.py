"""Distributes the in-flight data of a checkpoint over the input channels of the tasks that start from it.

All of it becomes input of the downstream task, even what a sender had not sent yet. Output queues start empty, as in
Flink with `execution.checkpointing.unaligned.recover-output-on-downstream`. Rules:
- The order of an old channel is kept: first the receiver's part, then what the sender had not sent.
- HASH: a row goes to the owner of its key group. A subtask reads only old channels that can have such rows.
- REBALANCE: each old channel goes to one subtask, whole. So it is on an edge that was rebalanced because its two ends
  had different parallelisms, and is forward now. Other forward edges, and broadcast edges, have no in-flight data.
- A task takes the data in on its channel from upstream subtask `old upstream % new parallelism`.
- If the parallelism of the sender and of all before it is unchanged, a channel has what one sender has sent, and that
  sender goes on behind it. So watermarks in flight keep their places: each row meets the one that it would have met.
  Where several old channels come to one, the one that is furthest behind in event time goes first (Flink has a virtual
  channel for each).
- If one has changed, or the edge is forward now, watermarks in flight are left out: rows of another old sender, or of
  another split, may follow on the channel, and some may be before such a watermark though they are in time. A row in
  flight that was late may count then. None becomes late that was in time.

If both parallelisms are unchanged, these rules map every old channel to itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from tidegate.actors.graph.job_graph import JobEdge, JobGraph
from tidegate.actors.restore.restored_event_time import event_time_goes_on, old_parallelism
from tidegate.actors.task.channels.in_flight_elements import InFlightElement, has_rows
from tidegate.protocol.identity import ChannelId, TaskId
from tidegate.protocol.partitioning import PartitioningKind
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS, Watermark
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.kernels.partition import gather
from tidegate.storage.checkpoints.metadata import CheckpointMetadata
from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.files.store import Store
from tidegate.storage.ids import SubtaskIndex
from tidegate.storage.state.key_groups import key_group_range, key_groups_meet, key_groups_of
from tidegate.storage.subtasks.in_flight import ChannelEnd, InFlightRows, edges_in_flight, read_in_flight

RestoredChannels = tuple[tuple[ChannelId, tuple[InFlightElement, ...]], ...]


def restore_in_flight(store: Store, metadata: CheckpointMetadata, graph: JobGraph, task: TaskId) -> RestoredChannels:
    """What the input channels of a task start with, oldest first. Channels without rows are left out.

    Raises StorageError (CorruptionError is one), and ConfigurationError for rows that were keyed by other columns.
    """
    restored: dict[ChannelId, dict[tuple[int, int], list[InFlightElement]]] = {}
    for edge in graph.edges:
        if edge.downstream != task.vertex:
            continue
        route = _Route(metadata, graph, edge, task.subtask)
        for held in _held(store, metadata, route):
            parts = restored.setdefault(route.channel(held.end), {})
            parts.setdefault((held.end.upstream, held.end.downstream), []).extend(route.elements(held))
    merged = ((channel, tuple(_merged([*parts.values()]))) for channel, parts in restored.items())
    return tuple((channel, elements) for channel, elements in merged if has_rows(elements))


def edges_with_in_flight(metadata: CheckpointMetadata) -> frozenset[str]:
    """Names of the edges that have in-flight data in a checkpoint."""
    return frozenset(
        name
        for subtask in metadata.subtasks
        if subtask.in_flight is not None
        for name in edges_in_flight(subtask.in_flight)
    )


def can_take_in_flight(metadata: CheckpointMetadata, graph: JobGraph, edge: JobEdge) -> bool:
    """Whether in-flight data of an edge can be routed over the edge as it is now."""
    match edge.partitioning.kind:
        case PartitioningKind.HASH | PartitioningKind.REBALANCE:
            return True
        case PartitioningKind.FORWARD:
            up, down = graph.emitter(edge), graph.vertex(edge.downstream).head
            return old_parallelism(metadata, up) != old_parallelism(metadata, down)
        case PartitioningKind.BROADCAST:
            return False


class _Route:
    """Which rows of which old channels belong to one downstream subtask, and on which channel they arrive."""

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
        """Whether this old channel may have rows for the subtask. CorruptionError if it cannot have any at all."""
        if not self._takes_any or end.downstream >= self._old_downstreams:
            raise CorruptionError(
                f"{self._where} has in-flight elements of channel {end.upstream}>{end.downstream} of the "
                f"{self.edge.partitioning.kind.value} edge {self.name!r}, which cannot have any"
            )
        if self.edge.partitioning.kind is PartitioningKind.HASH:
            return key_groups_meet(self._old_key_groups(end), self._own)
        return (end.upstream * self._old_downstreams + end.downstream) % self._downstreams == self._subtask

    def elements(self, held: InFlightRows) -> Iterator[InFlightElement]:
        """What of one end of an old channel, that `reads` accepts, the subtask takes in."""
        for element in held.elements() if self._keeps_watermarks else held.batches:
            if isinstance(element, int):
                yield Watermark(element)
            elif (mine := self.mine(held.end, element)) is not None:
                yield mine

    def mine(self, end: ChannelEnd, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """The subtask's rows of a batch, of an old channel that `reads` accepts. None if there are none."""
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
        """The input channel on which the rows of an old channel arrive."""
        if self.edge.partitioning.kind is PartitioningKind.FORWARD:
            return ChannelId(self.edge.index, self._subtask, self._subtask)
        return ChannelId(self.edge.index, SubtaskIndex(end.upstream % self._upstreams), self._subtask)

    def _old_key_groups(self, end: ChannelEnd) -> range:
        return key_group_range(end.downstream, self._max_parallelism, self._old_downstreams)


def _merged(parts: Sequence[Sequence[InFlightElement]]) -> Iterator[InFlightElement]:
    """What the old channels of one sender held, as one channel: each in its order, and no watermark before its time."""
    queues, reached_ms = [deque(part) for part in parts], [MIN_WATERMARK_MS for _ in parts]
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


def _held(store: Store, metadata: CheckpointMetadata, route: _Route) -> list[InFlightRows]:
    """What the old subtasks at both ends of an edge held, by channel, the receiver's part first."""
    found: list[InFlightRows] = []
    for subtask in metadata.subtasks:
        if subtask.in_flight is not None:
            found += read_in_flight(store, subtask.in_flight, route.name, route.reads)
    return sorted(found, key=lambda held: (held.end.upstream, held.end.downstream, held.end.direction == "output"))
