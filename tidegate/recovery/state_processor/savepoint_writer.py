"""`SavepointWriter`: creates a savepoint from rows, or a changed copy of one, without running a job.

It is like Flink's State Processor API. Rules:

- The base is never changed, and an existing savepoint never overwritten.
- Vertices without changes are copied and verified, byte for byte. In other vertices the unchanged states are read from
  the base, and written again together with the added states, in the form that every backend reads.
- Files are written into a folder of this writer, and `_metadata` is created last. Until then the savepoint does not
  exist. A writer that fails deletes its files.
- Data that the base's job has staged and committed is not copied.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa

from tidegate.actors.graph.job_graph import MAX_PARALLELISM
from tidegate.api.submission.planner import make_job_id
from tidegate.api.submission.restoring import check_not_given_up
from tidegate.operators.state.keyed_state import KeyedState, ListState, MapState
from tidegate.recovery.inspection import find_state, states_of
from tidegate.recovery.savepoints import complete_savepoint, copy_subtask
from tidegate.recovery.state_processor.state_rows import PutState, keyed_rows, operator_rows, staged_rows
from tidegate.recovery.state_reader import BATCH_ROWS_MAX, StateSelection
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.checkpoints.layout import METADATA_NAME, CheckpointLayout, escape, parse_pointer, savepoint_name
from tidegate.storage.checkpoints.metadata import (
    METADATA_VERSION,
    CheckpointMetadata,
    OperatorInfo,
    SnapshotKind,
    StateKind,
    SubtaskState,
    read_metadata,
    read_pointed,
)
from tidegate.storage.errors import AlreadyExistsError, ConfigurationError, StorageError
from tidegate.storage.files.file_system_store import join_url, open_store
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import AttemptNumber, CheckpointId, OperatorUid, SubtaskIndex, VertexId
from tidegate.storage.schemas.evolution import adapted
from tidegate.storage.state.key_groups import MAX_PARALLELISM_LIMIT, key_group_range, key_groups_of
from tidegate.storage.state.snapshot import FrozenState, StateChunk, sorted_by_group
from tidegate.storage.state.state_file import write_state
from tidegate.storage.state.stored_rows import TIMER_COLUMNS, TIMERS_STATE
from tidegate.storage.state.subtask_state import SubtaskStream

log = logging.getLogger(__name__)


class SavepointWriter:
    """Collects the content of a savepoint, and writes it at the end of its `with` block. `path` is then its path.

    - `target`: the folder in which the savepoint gets its own folder.
    - `job`: the name of a job. The savepoint begins without state. Give either `job` or `base`.
    - `base`: the path of a savepoint or checkpoint, as for `recovery.inspect`. The savepoint begins with all content of
      the base. It also has the same name, so `target` must be another folder.
    - `parallelism`: the parallelism of new operators. A job may restore the savepoint with another one.

    An exception in the block writes nothing.

    Raises ConfigurationError for settings that contradict each other, for a base that cannot be changed, and later for
    rows that do not fit; AlreadyExistsError if the folder already has a savepoint with that name; StorageError.
    """

    def __init__(
        self,
        target: str,
        *,
        job: str | None = None,
        base: str | None = None,
        max_parallelism: int | None = None,
        parallelism: int = 1,
        open_store: OpenStore = open_store,
    ) -> None:
        if (job is None) == (base is None):
            raise ConfigurationError(
                "SavepointWriter: give either job=, to begin without state, or base=, a savepoint to change, and not "
                f"{'both' if job is not None else 'neither'}"
            )
        self._open_store = open_store
        self._base_store: Store | None = None
        if base is not None:
            self._base_store, self._metadata = _base(base, max_parallelism, open_store)
        else:
            assert job is not None
            self._metadata = _empty(job)
        known = {info.max_parallelism for info in self._metadata.operators}
        self._max_parallelism = max_parallelism or next(iter(known), MAX_PARALLELISM)
        if not 1 <= parallelism <= self._max_parallelism <= MAX_PARALLELISM_LIMIT:
            raise ConfigurationError(
                f"SavepointWriter: parallelism {parallelism} and max_parallelism {self._max_parallelism} must be "
                f"1 <= parallelism <= max_parallelism <= {MAX_PARALLELISM_LIMIT}"
            )
        self._parallelism = parallelism
        name = savepoint_name(self._metadata.job_id, self._metadata.checkpoint_id)
        self._store = open_store(join_url(open_store(target).url, name))
        self._changes = Changes({}, set(), set())
        self._path: str | None = None
        self._waiting = ExitStack()
        self._check_is_new()

    @property
    def path(self) -> str:
        """Returns the path of the savepoint, for `restore=`. Raises ConfigurationError before it is written."""
        if self._path is None:
            raise ConfigurationError(
                f"the savepoint at {self._store.url} is not written yet: read path after the end of the with block"
            )
        return self._path

    def keys_of(self, uid: str) -> tuple[str, ...]:
        """Returns the key columns of an operator, from the added states or the base. Empty if they are unknown."""
        known = (*self._changes.new_operators.values(), *self._metadata.operators)
        return next((info.keys for info in known if info.uid == uid), ())

    def with_keyed_state(self, *, uid: str, keys: Sequence[str], state: KeyedState | str, rows: Any) -> Self:
        """Adds a keyed state. It replaces a state with the same name.

        `rows` is an Arrow table, batch or reader, or a polars or Spark DataFrame. Its columns are `keys`, each key
        once, and one with the name of the state, which is converted to the declared type. Rows whose value is null, or
        an empty list or map, are dropped, because they are not state. `state` may also be a name: then rows have the
        form that `read_state` returns. The name is "aggregate" for running aggregates, and "_tidegate_timers" for
        timers.

        Rows of a reader or a Spark DataFrame are processed in the driver one batch at a time; if they exceed 64 MB,
        they are kept in temporary files. Executors first write the rows of a DataFrame to the target, so it must be
        storage that they can reach. Raises ConfigurationError for rows that do not fit, StorageError.
        """
        info = self._operator(uid, tuple(keys))
        known = self._stored_keys(info.uid)
        with ExitStack() as stack:
            if hasattr(rows, "sparkSession"):
                rows = stack.enter_context(staged_rows(rows, self._store))
            put = keyed_rows(info, tuple(keys), state, rows, known, self._max_parallelism, self._waiting_folder)
        self._put(info, put)
        return self

    def with_operator_state(
        self, *, uid: str, state: ListState, rows: Any, kind: Literal["list", "union"] = "list"
    ) -> Self:
        """Adds operator state that is a list. `rows` has one column, with the name of the state.

        A restored job distributes the elements of a "list" over its subtasks. With "union", each subtask gets all
        elements. Raises ConfigurationError for rows that do not fit.
        """
        self._put(self._operator(uid, ()), operator_rows(uid, state, StateKind(kind), rows))
        return self

    def with_broadcast_state(self, *, uid: str, state: MapState, rows: Any) -> Self:
        """Adds a broadcast map. `rows` has the columns `key` and `value`, each key once.

        Raises ConfigurationError for rows that do not fit.
        """
        self._put(self._operator(uid, ()), operator_rows(uid, state, StateKind.BROADCAST, rows))
        return self

    def without_operator(self, uid: str) -> Self:
        """Removes an operator of the base with all its state. A job that has the operator starts it without state.

        Raises ConfigurationError if the base has no operator with this uid.
        """
        self._changes.refuse_put(uid)
        if not any(info.uid == uid for info in self._metadata.operators):
            find_state(self._metadata, uid, None)  # raises the error that lists all operators
        self._changes.dropped_operators.add(OperatorUid(uid))
        return self

    def without_state(self, uid: str, state: str) -> Self:
        """Removes one state of an operator of the base. Raises ConfigurationError if the base has no such state."""
        self._changes.refuse_put(uid, state)
        find_state(self._metadata, uid, state)
        self._changes.dropped_states.add((OperatorUid(uid), state))
        return self

    def write(self) -> str:
        """Writes the savepoint and returns its path. The end of a `with` block calls it."""
        if self._path is not None:
            raise ConfigurationError(
                f"the savepoint is written already, at {self._path}; for another one make a new SavepointWriter"
            )
        self._check_is_new()
        folder = f"data-{secrets.token_hex(4)}"
        try:
            self._create(folder)
        except BaseException:
            self._leave_nothing(folder)
            raise
        finally:
            self._waiting.close()
        self._path = self._store.url
        return self._path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._path is None:
                self.write()
        finally:
            self._waiting.close()

    def _waiting_folder(self) -> str:
        """Returns a temporary folder for rows that are added but not written yet. The writer deletes the folder at its
        end.
        """
        return self._waiting.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-"))

    def _create(self, folder: str) -> None:
        vertices = ChangedVertices(
            self._base_store, self._store, folder, self._metadata, self._changes, self._max_parallelism
        )
        written = vertices.write()
        if not written.operators:
            raise ConfigurationError(
                f"the savepoint at {self._store.url} would have no operator: put a state, or keep an operator"
            )
        complete_savepoint(self._store, written)

    def _leave_nothing(self, folder: str) -> None:
        """Deletes the written files, unless the savepoint may exist.

        A create may have succeeded although it raised an error.
        """
        try:
            if METADATA_NAME not in self._store.list("") or not self._is_ours(folder):
                self._store.delete_tree(folder)
        except StorageError as error:
            log.warning(
                "%s may remain; while there is no %s next to it, no savepoint refers to it: %s",
                join_url(self._store.url, folder),
                METADATA_NAME,
                error,
            )

    def _is_ours(self, folder: str) -> bool:
        found = read_metadata(self._store, self._metadata.job_id, self._metadata.checkpoint_id, savepoint=True)
        return any(path.startswith(f"{folder}/") for subtask in found.subtasks for path in subtask.paths)

    def _check_is_new(self) -> None:
        if METADATA_NAME in self._store.list(""):
            raise AlreadyExistsError(
                f"{self._store.url} is a savepoint already, and none is overwritten: choose another folder for the new "
                "one, or delete it"
            )

    def _operator(self, uid: str, keys: tuple[str, ...]) -> OperatorInfo:
        """Returns the operator to which a state is added: an operator of the base, or a new one."""
        if not uid:
            raise ConfigurationError("an operator needs a uid: the job finds its state by the uid")
        if uid in self._changes.dropped_operators:
            raise ConfigurationError(f"operator {uid!r} is dropped already: put its states without dropping it")
        known = next((info for info in self._metadata.operators if info.uid == uid), None)
        known = self._changes.new_operators.get(OperatorUid(uid), known)
        if known is None:
            return OperatorInfo(OperatorUid(uid), uid, VertexId(uid), self._parallelism, self._max_parallelism, keys)
        if keys and known.keys and keys != known.keys:
            raise ConfigurationError(
                f"operator {uid!r} has the keys {list(known.keys)}, not {list(keys)}; give these keys"
            )
        finished = sum(s.finished for s in self._metadata.subtasks if s.vertex == known.vertex)
        if finished:
            raise ConfigurationError(
                f"{finished} subtasks of operator {uid!r} had finished, so they cannot have state. Begin with an "
                "earlier savepoint, or give the state to an operator with a new uid"
            )
        return known

    def _put(self, info: OperatorInfo, put: PutState) -> None:
        self._changes.put(info, put, is_new=all(known.uid != info.uid for known in self._metadata.operators))

    def _stored_keys(self, uid: OperatorUid) -> pa.Schema | None:
        """Returns the key columns of an operator's states, added or in the base, or None if there are none."""
        given = self._changes.keys_of(uid)
        if given is not None or self._base_store is None:
            return given
        return self._changes.stored_keys(self._base_store, self._metadata, uid)


def _base(path: str, max_parallelism: int | None, open_store: OpenStore) -> tuple[Store, CheckpointMetadata]:
    at = parse_pointer(path)
    store = open_store(at.root)
    metadata = read_pointed(store, at)
    check_not_given_up(metadata, f"base={path!r}", open_store)
    if any(subtask.in_flight is not None for subtask in metadata.subtasks):
        raise ConfigurationError(
            f"base={path!r} has rows in flight, which belong to its states: take a savepoint, which has none"
        )
    for info in metadata.operators:
        if max_parallelism not in (None, info.max_parallelism):
            raise ConfigurationError(
                f"base={path!r} has max parallelism {info.max_parallelism}, which cannot change to {max_parallelism}"
                "; remove max_parallelism="
            )
    return store, metadata


def _empty(job: str) -> CheckpointMetadata:
    return CheckpointMetadata(
        version=METADATA_VERSION,
        job_id=make_job_id(job, secrets.token_hex(4)),
        job_name=job,
        checkpoint_id=CheckpointId(1),
        attempt=AttemptNumber(0),
        triggered_at_ms=0,
        operators=(),
        subtasks=(),
        kind=SnapshotKind.SAVEPOINT,
    )


@dataclass(slots=True)
class Changes:
    """The changes to a base: states that are added, and operators and states that are removed."""

    puts: dict[tuple[OperatorUid, str], PutState]
    dropped_operators: set[OperatorUid]
    dropped_states: set[tuple[OperatorUid, str]]
    new_operators: dict[OperatorUid, OperatorInfo] = field(default_factory=dict)

    def put(self, info: OperatorInfo, put: PutState, *, is_new: bool) -> None:
        """Adds a state. Raises ConfigurationError if it was added before."""
        if (info.uid, put.state) in self.puts:
            raise ConfigurationError(f"state {put.state!r} of operator {info.uid!r} is put twice; put it once")
        self.puts[info.uid, put.state] = put
        if is_new:
            self.new_operators[info.uid] = info if info.keys else replace(info, keys=put.keys)

    def refuse_put(self, uid: str, state: str | None = None) -> None:
        """Raises ConfigurationError if the state, or any state of the operator, was added before, because it cannot be
        removed then.
        """
        for put_uid, name in self.puts:
            if put_uid == uid and state in (None, name):
                raise ConfigurationError(f"state {name!r} of operator {uid!r} was put; do not drop it as well")

    def keys_of(self, uid: OperatorUid) -> pa.Schema | None:
        """Returns the key columns of the states that were added to an operator, or None if there are none."""
        for (put_uid, _), put in self.puts.items():
            if put_uid == uid and put.keys:
                return put.key_schema
        return None

    def stored_keys(self, store: Store, base: CheckpointMetadata, uid: OperatorUid) -> pa.Schema | None:
        """Returns the key columns of an operator's states in the base, or None if there are none or if they are
        unknown.
        """
        for info in states_of(base):
            if info.uid == uid and info.kind is StateKind.KEYED and (info.rows is None or info.rows):
                selection = StateSelection.find(store, base, uid, info.state)
                names = hashed_columns(selection)
                if names is not None:
                    return pa.schema([selection.stored.field(name).remove_metadata() for name in names])
        return None

    def touches(self, uid: OperatorUid) -> bool:
        """Returns whether anything in the state of an operator changes."""
        keyed = (*self.puts, *self.dropped_states)
        return uid in self.dropped_operators or any(changed == uid for changed, _ in keyed)

    def leaves(self, uid: OperatorUid, state: str) -> bool:
        """Returns whether these changes leave a state of the base checkpoint as it was."""
        changed = (uid, state) in self.puts or (uid, state) in self.dropped_states
        return uid not in self.dropped_operators and not changed


def hashed_columns(selection: StateSelection) -> tuple[str, ...] | None:
    """Returns the columns whose hash determines the key group of a stored row, or None if they are unknown."""
    keys = selection.keys
    if selection.info.state == TIMERS_STATE and keys is not None:
        return keys[: -len(TIMER_COLUMNS)]
    return keys


@dataclass(frozen=True, slots=True)
class ChangedVertices:
    """Writes the files of the new savepoint into `folder`."""

    base_store: Store | None
    store: Store
    folder: str
    base: CheckpointMetadata
    changes: Changes
    max_parallelism: int

    def write(self) -> CheckpointMetadata:
        """Writes all files of the savepoint and returns its metadata."""
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
            # Staged data is stored with the base: under a checkpoint's root, or in a relocated savepoint's folder.
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
        rest = replace(subtask, handle=None, in_flight=None, layers=(), native=())
        return replace(self._copied(rest) if rest.sink_paths else rest, handle=handle)

    def _staying(self, subtask: SubtaskState) -> Iterator[tuple[OperatorUid, FrozenState]]:
        """Yields the states of a subtask of the base that are not changed, as rows."""
        own = replace(self.base, subtasks=(subtask,))
        for info in states_of(own):
            if not self.changes.leaves(info.uid, info.state):
                continue
            if self.base_store is None:
                raise AssertionError(
                    f"state {info.state!r} of operator {info.uid!r} belongs to no base savepoint; this is a bug in "
                    "tidegate, please report it"
                )
            if info.kind is not StateKind.KEYED and not info.rows:
                yield info.uid, _Stored(info.state, info.kind, None, None, 0)
                continue
            # Selected from the whole base, so that it has the columns of all subtasks.
            selection = StateSelection.find(self.base_store, self.base, info.uid, info.state)
            keys = hashed_columns(selection)
            if info.kind is StateKind.KEYED and keys is None:
                raise ConfigurationError(
                    f"state {info.state!r} of operator {info.uid!r} has to be written again, but the base does not "
                    "name its key columns, because an older version wrote it. Restore it once and take a savepoint"
                )
            stream = SubtaskStream(self.base_store, subtask, info.uid, info.state)
            yield info.uid, _Stored(info.state, info.kind, (selection, stream), keys, self.max_parallelism)

    def _put(self, vertex: VertexId, subtask: SubtaskIndex) -> Iterator[tuple[OperatorUid, FrozenState]]:
        """Yields, for each added state, the part that belongs to this subtask."""
        operators = {info.uid: info for info in (*self.base.operators, *self.changes.new_operators.values())}
        for (uid, _), put in self.changes.puts.items():
            info = operators[uid]
            if info.vertex == vertex:
                yield uid, _Given(put, subtask, info.parallelism, self.max_parallelism)


@dataclass(frozen=True, slots=True)
class _Stored:
    """The part of a state of the base that one subtask has, as a snapshot (`FrozenState`)."""

    state: str
    kind: StateKind
    source: tuple[StateSelection, SubtaskStream] | None
    keys: tuple[str, ...] | None
    max_parallelism: int
    removed: bool = False

    def chunks(self) -> Iterator[StateChunk]:
        """Yields the rows. Rows of a keyed state are sorted by key group."""
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
    """The part of an added state that one subtask gets, as a snapshot (`FrozenState`)."""

    put: PutState
    subtask: SubtaskIndex
    parallelism: int
    max_parallelism: int
    removed: bool = False

    @property
    def state(self) -> str:
        """Returns the name of the state."""
        return self.put.state

    @property
    def kind(self) -> StateKind:
        """Returns how the state is divided when the parallelism changes."""
        return self.put.kind

    def chunks(self) -> Iterator[StateChunk]:
        """Yields the rows, a limited number at a time. Rows of keyed state are sorted by key group.

        Raises ConfigurationError for a key that occurs twice.
        """
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
