"""`inspect`: what a checkpoint holds: its operators, their sizes, which of them have finished, and their states.

It reads metadata, and for a savepoint the names of a few folders. So it is quick however large the checkpoint is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tidegate.recovery.contents.savepoint_needs import needed_urls
from tidegate.recovery.contents.state_catalog import StateInfo, states_of
from tidegate.storage.checkpoints.layout import parse_pointer
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, OperatorInfo, StoredSplit
from tidegate.storage.checkpoints.metadata_file import read_pointed
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import OperatorUid, VertexId


@dataclass(frozen=True, slots=True)
class OperatorReport:
    """An operator in a checkpoint. `size_bytes` is its state in all subtasks, layers and shared files included.

    `finished_subtasks` is how many of its subtasks had finished; they do not run again after a restore.
    """

    uid: OperatorUid
    name: str
    vertex: VertexId
    parallelism: int
    max_parallelism: int
    keys: tuple[str, ...]
    size_bytes: int
    finished_subtasks: int
    states: tuple[StateInfo, ...]

    @property
    def finished(self) -> bool:
        """Whether all of its subtasks had finished."""
        return self.finished_subtasks == self.parallelism


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """What `inspect` found. `metadata` is all that the checkpoint says of itself."""

    path: str
    operators: tuple[OperatorReport, ...]
    metadata: CheckpointMetadata
    needs: tuple[str, ...] = ()
    """Of a savepoint: URLs of folders outside of it that must stay, and of tables with files that it covers."""

    @property
    def size_bytes(self) -> int:
        """State of all subtasks, in-flight data included."""
        return self.metadata.size_bytes

    @property
    def in_flight_bytes(self) -> int:
        """In-flight data, which unaligned barriers have overtaken."""
        return sum(s.in_flight.size_bytes for s in self.metadata.subtasks if s.in_flight is not None)

    def operator(self, uid: str) -> OperatorReport | None:
        """The operator of this uid; None if there is none."""
        return next((operator for operator in self.operators if operator.uid == uid), None)


def inspect(path: str, *, open_store: OpenStore = open_store) -> CheckpointReport:
    """What the checkpoint at `<root>/<job>/chk-N` or the savepoint at `<folder>/savepoint-<job>-N` holds.

    Raises ConfigurationError for a path that names no checkpoint, NotFoundError if it was never completed,
    CorruptionError or CodecError if its metadata cannot be read, StorageError.
    """
    at = parse_pointer(path)
    metadata = read_pointed(open_store(at.root), at)
    needs = needed_urls(at, metadata, open_store) if at.savepoint else ()
    return replace(report_of(str(at), metadata), needs=needs)


def report_of(path: str, metadata: CheckpointMetadata) -> CheckpointReport:
    """As `inspect`, of metadata that was read already; without `needs`."""
    states = states_of(metadata)
    sizes: Counter[OperatorUid] = Counter()
    for subtask in metadata.subtasks:
        for handle in subtask.state_handles:
            for section in handle.sections:
                sizes[section.uid] += section.length_bytes
        for native in subtask.native:
            sizes[native.uid] += native.size_bytes

    def of_operator(info: OperatorInfo) -> OperatorReport:
        return OperatorReport(
            info.uid,
            info.name,
            info.vertex,
            info.parallelism,
            info.max_parallelism,
            info.keys,
            sizes[info.uid],
            sum(subtask.finished for subtask in metadata.subtasks if subtask.vertex == info.vertex),
            tuple(state for state in states if state.uid == info.uid),
        )

    return CheckpointReport(path, tuple(map(of_operator, metadata.operators)), metadata)


def read_splits(metadata: CheckpointMetadata) -> Mapping[OperatorUid, Sequence[StoredSplit]]:
    """The splits that finished subtasks have read to the end, by the uid of the source."""
    # A source is the first operator of its vertex.
    sources = {info.vertex: info.uid for info in reversed(metadata.operators)}
    found: dict[OperatorUid, list[StoredSplit]] = {}
    for subtask in metadata.subtasks:
        if subtask.finished and subtask.read_splits:
            found.setdefault(sources[subtask.vertex], []).extend(subtask.read_splits)
    return found
