"""Writes the subtasks of a savepoint for `SavepointWriter`.

A vertex in which nothing changes is copied byte for byte. In any other, the states that stay are read from the base,
and written anew together with those that were put.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa

from tidegate.recovery.contents.state_catalog import states_of
from tidegate.recovery.contents.state_reader import BATCH_ROWS_MAX, StateSelection
from tidegate.recovery.savepoints import copy_subtask
from tidegate.recovery.state_processor.state_rows import PutState
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.checkpoints.layout import CheckpointLayout, escape
from tidegate.storage.checkpoints.metadata import (
    CheckpointMetadata,
    OperatorInfo,
    SnapshotKind,
    StateKind,
    SubtaskState,
)
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.store import Store
from tidegate.storage.ids import OperatorUid, SubtaskIndex, VertexId
from tidegate.storage.schemas.common_schema import adapted
from tidegate.storage.state.key_groups import key_group_range, key_groups_of
from tidegate.storage.state.snapshot import FrozenState, StateChunk, sorted_by_group
from tidegate.storage.state.state_file import write_state
from tidegate.storage.state.timer_rows import TIMER_COLUMNS, TIMERS_STATE
from tidegate.storage.subtasks.state_stream import SubtaskStream


@dataclass(slots=True)
class Changes:
    """The changes to a base: states that are put, and operators and states that are dropped."""

    puts: dict[tuple[OperatorUid, str], PutState]
    dropped_operators: set[OperatorUid]
    dropped_states: set[tuple[OperatorUid, str]]
    new_operators: dict[OperatorUid, OperatorInfo] = field(default_factory=dict)

    def put(self, info: OperatorInfo, put: PutState, *, is_new: bool) -> None:
        """Put a state. ConfigurationError if it was put before."""
        if (info.uid, put.state) in self.puts:
            raise ConfigurationError(f"state {put.state!r} of operator {info.uid!r} is put twice")
        self.puts[info.uid, put.state] = put
        if is_new:
            self.new_operators[info.uid] = info if info.keys else replace(info, keys=put.keys)

    def refuse_put(self, uid: str, state: str | None = None) -> None:
        """Raise ConfigurationError if the state, or any of the operator, was put: then it cannot be dropped as well."""
        for put_uid, name in self.puts:
            if put_uid == uid and state in (None, name):
                raise ConfigurationError(f"state {name!r} of operator {uid!r} was put; do not drop it as well")

    def keys_of(self, uid: OperatorUid) -> pa.Schema | None:
        """The key columns of the states that were put for an operator; None if there are none."""
        for (put_uid, _), put in self.puts.items():
            if put_uid == uid and put.keys:
                return put.key_schema
        return None

    def stored_keys(self, store: Store, base: CheckpointMetadata, uid: OperatorUid) -> pa.Schema | None:
        """The key columns of an operator's states in the base; None if there are none, or nobody knows."""
        for info in states_of(base):
            if info.uid == uid and info.kind is StateKind.KEYED and (info.rows is None or info.rows):
                selection = StateSelection.find(store, base, uid, info.state)
                names = hashed_columns(selection)
                if names is not None:
                    return pa.schema([selection.stored.field(name).remove_metadata() for name in names])
        return None

    def touches(self, uid: OperatorUid) -> bool:
        """Whether anything changes in the state of an operator."""
        keyed = (*self.puts, *self.dropped_states)
        return uid in self.dropped_operators or any(changed == uid for changed, _ in keyed)

    def leaves(self, uid: OperatorUid, state: str) -> bool:
        """Whether a state of the base stays."""
        changed = (uid, state) in self.puts or (uid, state) in self.dropped_states
        return uid not in self.dropped_operators and not changed


def hashed_columns(selection: StateSelection) -> tuple[str, ...] | None:
    """The columns whose hash gives the key group of a stored row; None if nobody knows."""
    keys = selection.keys
    if selection.info.state == TIMERS_STATE and keys is not None:
        return keys[: -len(TIMER_COLUMNS)]
    return keys


@dataclass(frozen=True, slots=True)
class ChangedVertices:
    """Writes the files below `folder` of the new savepoint."""

    base_store: Store | None
    store: Store
    folder: str
    base: CheckpointMetadata
    changes: Changes
    max_parallelism: int

    def write(self) -> CheckpointMetadata:
        """Write all files of the savepoint; returns its metadata."""
        kept = tuple(info for info in self.base.operators if info.uid not in self.changes.dropped_operators)
        operators = (*kept, *self.changes.new_operators.values())
        vertices = {info.vertex for info in kept}
        changed = {info.vertex for info in self.base.operators if self.changes.touches(info.uid)}
        subtasks = [
            self._rewritten(subtask) if subtask.vertex in changed else self._copied(subtask)
            for subtask in self.base.subtasks
            if subtask.vertex in vertices
        ]
        for info in self.changes.new_operators.values():
            subtasks += [
                self._rewritten(SubtaskState(info.vertex, SubtaskIndex(index), None))
                for index in range(info.parallelism)
            ]
        origin = self.base.origin_root
        if self.base_store is not None and (origin is None or not self.base.kind.is_savepoint):
            # What was staged is with the base: under a checkpoint's root, or in the folder of a relocated savepoint.
            origin = self.base_store.url
        return replace(
            self.base,
            operators=operators,
            subtasks=tuple(subtasks),
            kind=self.base.kind if self.base.kind.is_savepoint else SnapshotKind.SAVEPOINT,
            origin_root=origin,
            carried=None,
            savepoint_format=None,
        )

    def _copied(self, subtask: SubtaskState) -> SubtaskState:
        assert self.base_store is not None, "a subtask of nothing"
        layout = CheckpointLayout(self.base.job_id)

        def moved(path: str) -> str:
            return f"{self.folder}/{layout.path_in_savepoint(self.base.checkpoint_id, path)}"

        return copy_subtask(self.base_store, self.store, subtask, moved)

    def _rewritten(self, subtask: SubtaskState) -> SubtaskState:
        states = [*self._staying(subtask), *self._put(subtask.vertex, subtask.subtask)]
        path = f"{self.folder}/{escape(subtask.vertex)}-{subtask.subtask}"
        handle = write_state(self.store, path, states)
        return replace(subtask, handle=handle, in_flight=None, layers=(), native=())

    def _staying(self, subtask: SubtaskState) -> Iterator[tuple[OperatorUid, FrozenState]]:
        """The states of a subtask of the base that stay, as rows."""
        own = replace(self.base, subtasks=(subtask,))
        for info in states_of(own):
            if not self.changes.leaves(info.uid, info.state):
                continue
            if self.base_store is None:
                raise AssertionError("a state of nothing")
            if info.kind is not StateKind.KEYED and not info.rows:
                yield info.uid, _Stored(info.state, info.kind, None, None, 0)
                continue
            # Selected from the whole base: its columns are those of all subtasks together.
            selection = StateSelection.find(self.base_store, self.base, info.uid, info.state)
            keys = hashed_columns(selection)
            if info.kind is StateKind.KEYED and keys is None:
                raise ConfigurationError(
                    f"state {info.state!r} of operator {info.uid!r} has to be written anew, and the base does not say "
                    "which of its columns are the key: an older version wrote it. Restore it once and take a savepoint"
                )
            stream = SubtaskStream(self.base_store, subtask, info.uid, info.state)
            yield info.uid, _Stored(info.state, info.kind, (selection, stream), keys, self.max_parallelism)

    def _put(self, vertex: VertexId, subtask: SubtaskIndex) -> Iterator[tuple[OperatorUid, FrozenState]]:
        """The part of each put state that this subtask has."""
        operators = {info.uid: info for info in (*self.base.operators, *self.changes.new_operators.values())}
        for (uid, _), put in self.changes.puts.items():
            info = operators[uid]
            if info.vertex == vertex:
                yield uid, _Given(put, subtask, info.parallelism, self.max_parallelism)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A `FrozenState`: one subtask's part of a state in the base."""

    state: str
    kind: StateKind
    source: tuple[StateSelection, SubtaskStream] | None
    keys: tuple[str, ...] | None
    max_parallelism: int
    removed: bool = False

    def chunks(self) -> Iterator[StateChunk]:
        """The rows; of a keyed state sorted by key group."""
        if self.source is None:
            return
        selection, stream = self.source
        adapt = partial(adapted, schema=selection.stored, state=self.state, uid=stream.uid)
        for batch in stream.batches(selection.stored, adapt, selection.keys, None):
            if self.kind is not StateKind.KEYED:
                yield StateChunk(batch)
                continue
            assert self.keys is not None
            yield sorted_by_group(batch, key_groups_of(hash_columns(batch, self.keys), self.max_parallelism))


@dataclass(frozen=True, slots=True)
class _Given:
    """A `FrozenState`: one subtask's part of a state that was put."""

    put: PutState
    subtask: SubtaskIndex
    parallelism: int
    max_parallelism: int
    removed: bool = False

    @property
    def state(self) -> str:
        """Name of the state."""
        return self.put.state

    @property
    def kind(self) -> StateKind:
        """How it is split when the parallelism changes."""
        return self.put.kind

    def chunks(self) -> Iterator[StateChunk]:
        """The rows, a bounded number at a time; of keyed state sorted by key group.

        ConfigurationError for a key that comes twice."""
        owned = key_group_range(self.subtask, self.max_parallelism, self.parallelism)
        for rows in self.put.tables(owned):
            yield from self._of_table(rows, owned)

    def _of_table(self, rows: pa.Table, owned: range) -> Iterator[StateChunk]:
        groups = np.zeros(0, dtype=np.uint16)
        if self.kind is StateKind.KEYED:
            hashes = (hash_columns(batch, self.put.keys) for batch in rows.to_batches())
            of_batches = [key_groups_of(of_batch, self.max_parallelism) for of_batch in hashes]
            groups = np.concatenate([groups, *of_batches])
            mine = np.flatnonzero((groups >= owned.start) & (groups < owned.stop))
            mine = mine[np.argsort(groups[mine], kind="stable")]
        elif self.kind is StateKind.LIST:
            mine = np.arange(self.subtask, rows.num_rows, self.parallelism)
        else:
            mine = np.arange(rows.num_rows if self.subtask == 0 else 0)
        for start in range(0, len(mine), BATCH_ROWS_MAX):
            places = mine[start : start + BATCH_ROWS_MAX]
            (batch,) = rows.take(pa.array(places)).combine_chunks().to_batches()
            if self.kind is StateKind.KEYED:
                yield sorted_by_group(batch, groups[places])
            else:
                yield StateChunk(batch)
