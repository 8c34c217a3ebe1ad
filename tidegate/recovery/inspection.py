"""`inspect`: returns the content of a checkpoint: its operators, the sizes of their states, and which have finished.

It reads metadata, and for a savepoint the names in a few folders. It is therefore fast for checkpoints of any size.

`find_state` finds one state by name. The error for a wrong name suggests the most similar one and lists all. A state
without rows stores nothing in a checkpoint, so it looks like a state that never existed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from tidegate.recovery.restore_chain import COLLECT, SOURCE, restore_chain
from tidegate.storage.checkpoints.layout import CheckpointLayout, CheckpointPointer, parse_pointer
from tidegate.storage.checkpoints.metadata import (
    CheckpointMetadata,
    NativeState,
    OperatorInfo,
    SectionRef,
    StateKind,
    StoredSplit,
    SubtaskState,
    read_pointed,
)
from tidegate.storage.errors import CodecError, ConfigurationError, StorageError
from tidegate.storage.files.file_system_store import join_url, open_store
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import OperatorUid, VertexId


@dataclass(frozen=True, slots=True)
class OperatorReport:
    """An operator in a checkpoint. `size_bytes` is the size of its state in all subtasks, with layers and shared files.

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
        """Returns whether all subtasks of the operator had finished."""
        return self.finished_subtasks == self.parallelism


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """The result of `inspect`. `metadata` is the complete metadata of the checkpoint."""

    path: str
    operators: tuple[OperatorReport, ...]
    metadata: CheckpointMetadata
    needs: tuple[str, ...] = ()
    """For a savepoint: URLs of the folders outside of it that a restore needs, and of the tables with files that it
    covers.
    """

    @property
    def size_bytes(self) -> int:
        """Returns the size in bytes of the state of all subtasks, including in-flight data."""
        return self.metadata.size_bytes

    @property
    def in_flight_bytes(self) -> int:
        """Returns the size in bytes of the in-flight data: rows that unaligned barriers have overtaken."""
        return sum(s.in_flight.size_bytes for s in self.metadata.subtasks if s.in_flight is not None)

    def operator(self, uid: str) -> OperatorReport | None:
        """Returns the operator with this uid, or None if there is none."""
        return next((operator for operator in self.operators if operator.uid == uid), None)


def inspect(path: str, *, open_store: OpenStore = open_store) -> CheckpointReport:
    """Returns the content of the checkpoint at `<root>/<job>/chk-N` or the savepoint at `<folder>/savepoint-<job>-N`.

    Raises ConfigurationError if the path has another form, NotFoundError if the checkpoint was never completed,
    CorruptionError or CodecError if its metadata cannot be read, StorageError.
    """
    at = parse_pointer(path)
    metadata = read_pointed(open_store(at.root), at)
    needs = needed_urls(at, metadata, open_store) if at.savepoint else ()
    return replace(report_of(str(at), metadata), needs=needs)


def report_of(path: str, metadata: CheckpointMetadata) -> CheckpointReport:
    """Returns the report for metadata that was already read, without `needs`."""
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
    """Returns the splits that finished subtasks have read to the end, by the uid of the source."""
    # A source is the first operator of its vertex.
    sources = {info.vertex: info.uid for info in reversed(metadata.operators)}
    found: dict[OperatorUid, list[StoredSplit]] = {}
    for subtask in metadata.subtasks:
        if subtask.finished and subtask.read_splits:
            found.setdefault(sources[subtask.vertex], []).extend(subtask.read_splits)
    return found


_LISTED_MAX = 50


@dataclass(frozen=True, slots=True)
class StateInfo:
    """One state of one operator, in all subtasks.

    `rows` is None if the state must be read to count them, because it is stored in layers or in files of a backend.
    `size_bytes` is None if it shares files with other states. `state` is empty if this version cannot read the files of
    the backend.
    """

    uid: OperatorUid
    state: str
    kind: StateKind
    rows: int | None
    size_bytes: int | None
    subtasks: int
    layers: int = 0
    """The largest number of layers (increments) of this state in any subtask. 0 if the state was written completely."""
    backend: str | None = None
    """The backend whose files contain the state, or None if it is stored in state files."""


def states_of(metadata: CheckpointMetadata) -> tuple[StateInfo, ...]:
    """Returns all states of a checkpoint, by uid, and for each uid in the order in which they were written."""
    found: dict[tuple[OperatorUid, str], StateInfo] = {}
    for subtask in metadata.subtasks:
        for info in _states_in(subtask):
            before = found.get((info.uid, info.state))
            found[info.uid, info.state] = info if before is None else _added(before, info)
    return tuple(sorted(found.values(), key=lambda info: info.uid))


def find_state(metadata: CheckpointMetadata, uid: str, state: str | None) -> tuple[OperatorInfo, StateInfo]:
    """Returns the operator with a uid, and its state with this name. If `state` is None, the operator must have only
    one.

    Raises ConfigurationError, which lists the states of the checkpoint, if there is no such operator or state.
    """
    states = states_of(metadata)
    where = f"checkpoint {metadata.checkpoint_id} of job {metadata.job_id}"
    operator = next((info for info in metadata.operators if info.uid == uid), None)
    if operator is None:
        by_name = [info.uid for info in metadata.operators if info.name == uid]
        near = by_name or get_close_matches(uid, [info.uid for info in metadata.operators], 1, 0.5)
        raise ConfigurationError(
            f"{where} has no operator of uid {uid!r}{_meant(near)} {_holdings(metadata.operators, states)}"
        )
    own = [info for info in states if info.uid == uid]
    if state is None and len(own) == 1:
        return operator, own[0]
    if state is None and own:
        raise ConfigurationError(
            f"operator {uid!r} of {where} has several states: choose one with state=, from {_names(own)}"
        )
    chosen = next((info for info in own if info.state == state), None)
    if chosen is None:
        near = get_close_matches(state or "", [info.state for info in own], 1, 0.5)
        what = "no state" if state is None else f"no state {state!r}"
        subtasks = [subtask for subtask in metadata.subtasks if subtask.vertex == operator.vertex]
        finished = sum(subtask.finished for subtask in subtasks)
        over = (
            f" ({finished} of its {len(subtasks)} subtasks had finished, and finished subtasks keep no state: read an "
            "earlier checkpoint)"
            if finished
            else ""
        )
        raise ConfigurationError(
            f"operator {uid!r} has {what} with rows in {where}{over}{_meant(near)} "
            f"{_holdings(metadata.operators, states)}"
        )
    return operator, chosen


def _states_in(subtask: SubtaskState) -> Iterator[StateInfo]:
    layered: dict[tuple[OperatorUid, str], list[SectionRef]] = {}
    for handle in subtask.layers:
        for section in handle.sections:
            layered.setdefault((section.uid, section.state), []).append(section)
    for (uid, state), sections in layered.items():
        written_bytes = sum(section.length_bytes for section in sections)
        rows = sections[0].rows if len(sections) == 1 and not sections[0].removed else None
        yield StateInfo(uid, state, sections[0].kind, rows, written_bytes, 1, layers=len(sections))
    for section in () if subtask.handle is None else subtask.handle.sections:
        yield StateInfo(section.uid, section.state, section.kind, section.rows, section.length_bytes, 1)
    for native in subtask.native:
        names = native_states(native)
        for name in names:
            size_bytes = native.size_bytes if len(names) == 1 else None
            yield StateInfo(native.uid, name, StateKind.KEYED, None, size_bytes, 1, backend=native.backend)


def native_states(native: NativeState) -> tuple[str, ...]:
    """Returns the names of the states in the files of a backend, or one empty name if this version cannot read them."""
    # Imported late: only RocksDB has such files, and its library is large.
    from tidegate.storage.state.rocksdb.value_layout import describe

    try:
        return tuple(state.name for state in describe(native).states)
    except CodecError:
        return ("",)


def _added(one: StateInfo, other: StateInfo) -> StateInfo:
    def total(first: int | None, second: int | None) -> int | None:
        return None if first is None or second is None else first + second

    return StateInfo(
        one.uid,
        one.state,
        one.kind,
        total(one.rows, other.rows),
        total(one.size_bytes, other.size_bytes),
        one.subtasks + other.subtasks,
        max(one.layers, other.layers),
        one.backend or other.backend,
    )


def _meant(near: Iterable[str]) -> str:
    return "".join(f"; did you mean {name!r}?" for name in near) or "."


def _names(states: Iterable[StateInfo]) -> str:
    return ", ".join(f"{info.state!r} ({info.kind.value})" for info in states)


def _holdings(operators: Iterable[OperatorInfo], states: Iterable[StateInfo]) -> str:
    of: dict[str, list[StateInfo]] = {info.uid: [] for info in operators}
    for info in states:
        of.setdefault(info.uid, []).append(info)
    lines = [f"{uid!r} with {_names(own) if own else 'no state'}" for uid, own in sorted(of.items())]
    more = f"; and {len(lines) - _LISTED_MAX} more operators" if len(lines) > _LISTED_MAX else ""
    return "It holds: " + "; ".join(lines[:_LISTED_MAX]) + more


def needed_urls(at: CheckpointPointer, metadata: CheckpointMetadata, open_store: OpenStore) -> tuple[str, ...]:
    """Returns URLs of the folders that a restore of a savepoint needs, and of the tables with files that it covers.

    If a folder cannot be listed, its own URL is returned, because all of its content may be needed.
    """
    folders: dict[str, str] = {}
    if metadata.carried is None:
        for root, job_id in restore_chain(at, metadata, at.root, open_store):
            folder = join_url(root, CheckpointLayout(job_id).taskowned_dir())
            try:
                names = [name for name in open_store(folder).list("") if name.startswith((SOURCE, COLLECT))]
            except StorageError:
                folders.setdefault(folder, folder)
                continue
            for name in names:
                folders.setdefault(name, join_url(folder, name))
    return (*folders.values(), *(url for url in _tables_of(metadata) if url not in folders.values()))


def _tables_of(metadata: CheckpointMetadata) -> Iterator[str]:
    committables = (c for subtask in metadata.subtasks for c in subtask.committables)
    return iter(sorted({c.table for c in committables if "://" in c.table or c.table.startswith("/")}))
