"""Reads the state of a checkpoint or savepoint as Arrow rows, which are the same for every backend.

`read_state` and `diff` use it. Rules:

- A row of keyed state is one key with its newest value. A row of timers is one timer. A row of operator state is one
  element of a list or one entry of a map.
- Key columns are first, in their own types.
- In-flight data is not state, and is not read.
- Values are returned as they are stored. With a time to live that is `struct<value, updated_ms>`, even after the time
  has passed. Pickled values are returned as bytes, which are never unpickled here.
- A union list returns the elements that each subtask has added. A broadcast map is the same in all subtasks, and is
  read from one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.recovery.inspection import StateInfo, find_state, states_of
from tidegate.storage.checkpoints.layout import parse_pointer
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, OperatorInfo, StateKind, read_pointed
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import OperatorUid
from tidegate.storage.schemas.column_names import part_name
from tidegate.storage.schemas.evolution import adapted, common_schema
from tidegate.storage.state.stored_rows import TIMER_MOMENT, TIMERS_STATE
from tidegate.storage.state.subtask_state import StoredSchemas, SubtaskStream

BATCH_ROWS_MAX = 65_536
"""Limit of the rows of a state that readers and writers outside of a job have in memory at a time."""

AGGREGATE_STATE = "aggregate"
"""Name of the state of `aggregate(...)`. Its rows have the columns of all aggregates."""


def read_state_batches(
    path: str,
    *,
    uid: str,
    state: str | None = None,
    keys: Sequence[str] | None = None,
    key_groups: range | None = None,
    open_store: OpenStore = open_store,
) -> pa.RecordBatchReader:
    """Returns a reader of state that is larger than memory, in batches of up to 65,536 rows.

    Memory is limited: about 16 MB of a state file, and for layers a range of key groups with up to a million rows and
    128 MB. Files of RocksDB are downloaded into the folder for temporary files, one subtask at a time. Arguments and
    errors are as for `read_state`; the error for a damaged file is raised when it is read.
    """
    at = parse_pointer(path)
    store = open_store(at.root)
    metadata = read_pointed(store, at)
    return StateSelection.find(store, metadata, uid, state, keys).reader(key_groups)


@dataclass(frozen=True, slots=True)
class StateSelection:
    """One state of one operator in one checkpoint, and the columns that the reader returns.

    `stored` are all stored columns.
    """

    operator: OperatorInfo
    info: StateInfo
    streams: tuple[SubtaskStream, ...]
    stored: pa.Schema
    keys: tuple[str, ...] | None
    """The columns that identify a stored row. None for operator state, and if they are unknown."""
    column: str | None = None
    """For the state of `aggregate(...)`: the name of the aggregate to return, or None for all columns."""

    @staticmethod
    def find(
        store: Store, metadata: CheckpointMetadata, uid: str, state: str | None, keys: Sequence[str] | None = None
    ) -> StateSelection:
        """Finds a state. Arguments and errors are as for `read_state`."""
        if metadata.void:
            raise ConfigurationError(
                f"checkpoint {metadata.checkpoint_id} of job {metadata.job_id} was given up and never completed; "
                "`tidegate checkpoints list` shows the completed ones"
            )
        column = None
        try:
            operator, info = find_state(metadata, uid, state)
        except ConfigurationError:
            found = _aggregate_of(metadata, uid, state)
            if found is None:
                raise
            operator, info = found
            column = state
        streams = tuple(_streams(store, metadata, operator, info))
        schemas = [stream.schemas() for stream in streams]
        stored = common_schema([schema for each in schemas for schema in each.rows], info.state, info.uid)
        selection = StateSelection(operator, info, streams, stored, _row_keys(operator, info, stored, schemas, keys))
        if column is None:
            return selection
        of_mean = {part_name(column, ".sum"), part_name(column, ".count")} <= set(stored.names)
        if (column not in stored.names and not of_mean) or column in operator.keys:
            find_state(metadata, uid, state)  # raises the error that lists all states
        chosen = StateSelection(operator, info, streams, stored, selection.keys, column)
        if chosen.keys is None:
            raise ConfigurationError(
                f"operator {uid!r}: the checkpoint does not name its key columns among {stored.names}, because an "
                f"older version wrote it. Name them with keys=[...], or read all columns with state={info.state!r}"
            )
        return chosen

    @property
    def schema(self) -> pa.Schema:
        """Returns the schema of the returned rows."""
        if self.column is None:
            return self.stored
        shown = self._shown(pa.RecordBatch.from_arrays([pa.array([], f.type) for f in self.stored], schema=self.stored))
        schema: pa.Schema = shown.schema
        return schema

    @property
    def key_groups(self) -> range:
        """Returns the range of all key groups of the operator."""
        return range(self.operator.max_parallelism)

    def reader(self, key_groups: range | None = None) -> pa.RecordBatchReader:
        """Returns a reader of the rows of some key groups, or of all. Storage errors are raised during reading."""
        return pa.RecordBatchReader.from_batches(self.schema, self.batches(key_groups))

    def batches(self, key_groups: range | None = None) -> Iterator[pa.RecordBatch]:
        """Yields the rows of `reader` in batches of up to `BATCH_ROWS_MAX` rows."""
        adapt: Callable[[pa.RecordBatch], pa.RecordBatch] = partial(
            adapted, schema=self.stored, state=self.info.state, uid=self.info.uid
        )
        for stream in self.streams:
            for batch in stream.batches(self.stored, adapt, self.keys, key_groups):
                for start in range(0, batch.num_rows, BATCH_ROWS_MAX):
                    yield self._shown(batch.slice(start, BATCH_ROWS_MAX))

    def _shown(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if self.column is None:
            return rows
        assert self.keys is not None
        keys = [rows.column(name) for name in self.keys]
        fields = [self.stored.field(name) for name in self.keys]
        if self.column in self.stored.names:
            value, field = rows.column(self.column), self.stored.field(self.column)
            seen = part_name(self.column, ".seen")
            if seen in self.stored.names:  # the aggregate chooses a row, and there may be none yet
                value = pc.if_else(pc.equal(rows.column(seen), 1), value, pa.scalar(None, value.type))
        else:
            counts = rows.column(part_name(self.column, ".count"))
            sums = rows.column(part_name(self.column, ".sum")).cast(pa.float64())
            some = pc.if_else(pc.greater(counts, 0), counts, pa.scalar(None, counts.type))
            value = pc.divide(sums, some.cast(pa.float64()))
            field = pa.field(self.column, pa.float64())
        return pa.RecordBatch.from_arrays([*keys, value], schema=pa.schema([*fields, field]))


def _aggregate_of(metadata: CheckpointMetadata, uid: str, state: str | None) -> tuple[OperatorInfo, StateInfo] | None:
    """Returns the state of `aggregate(...)` of an operator, or None.

    It is used if `state` may be the name of an aggregate.
    """
    if state is None or not any(info.uid == uid and info.state == AGGREGATE_STATE for info in states_of(metadata)):
        return None
    return find_state(metadata, uid, AGGREGATE_STATE)


def _streams(
    store: Store, metadata: CheckpointMetadata, operator: OperatorInfo, info: StateInfo
) -> Iterator[SubtaskStream]:
    for subtask in sorted(metadata.subtasks, key=lambda subtask: subtask.subtask):
        if subtask.vertex != operator.vertex:
            continue
        stream = SubtaskStream(store, subtask, OperatorUid(info.uid), info.state)
        if stream.has_any:
            yield stream
            if info.kind is StateKind.BROADCAST:
                return


def _row_keys(
    operator: OperatorInfo,
    info: StateInfo,
    stored: pa.Schema,
    schemas: Sequence[StoredSchemas],
    given: Sequence[str] | None,
) -> tuple[str, ...] | None:
    """Returns the columns that identify rows of a keyed state, from the most reliable source, or None if they are
    unknown.
    """
    names: list[str] = stored.names
    if info.kind is not StateKind.KEYED:
        return None
    for each in schemas:
        if each.removed is not None:
            return tuple(each.removed.names)
    if info.state == TIMERS_STATE and TIMER_MOMENT in names:
        return tuple(names)
    if operator.keys and tuple(names[: len(operator.keys)]) == operator.keys:
        return operator.keys
    if given is not None:
        if names[: len(given)] != list(given):
            raise ConfigurationError(
                f"keys={list(given)} are not the first columns of state {info.state!r} of operator {info.uid!r}, "
                f"which has {names}"
                "; give them in this order"
            )
        return tuple(given)
    # A function's state has one value column: the last one, named as the state.
    return tuple(names[:-1]) if names[-1] == info.state else None
