"""`diff`: returns what has changed between two checkpoints: operators, parallelism, contents, positions, and keys.

Rules:

- A state is *same* only if its stored bytes are the same: its chunks and files have equal checksums, in the same order.
  This needs the directories of state files, and no rows.
- If the bytes differ, the rows may still be the same: a backend has rewritten its files, or layers were merged. With
  `keys` the rows of keyed states are read and compared, a few key groups of both checkpoints at a time, so that memory
  is limited.
- Positions of sources are compared split by split.
- Rows are compared column by column, in the columns that both checkpoints have. Columns that one of them lacks, such as
  the column of a new aggregate, are listed for their state.
- A key has one row in each checkpoint. Null equals null, and NaN equals NaN. The order of a map's entries does not
  matter, because each backend has its own order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.recovery.inspection import CheckpointReport, StateInfo, inspect, native_states, read_splits
from tidegate.recovery.state_reader import StateSelection
from tidegate.storage.checkpoints.layout import parse_pointer
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import OperatorUid
from tidegate.storage.schemas.arrow_types import comparable
from tidegate.storage.state.state_file import read_directory

PART_BYTES = 64 * 1024 * 1024
"""Approximate size of the state of one checkpoint that is read at a time to compare keys, in bytes."""

Change: TypeAlias = Literal["added", "removed", "changed", "same"]

_POSITION_COLUMNS = ("split_id", "next_offset")
"""Columns of the state of a source with one row for each split: the id of the split, and the number of its next row."""


@dataclass(frozen=True, slots=True)
class StateDiff:
    """The difference of one state of one operator. Pairs are (older, newer), with None if a checkpoint lacks the state.

    `keys` is None if keys were not compared: that was not requested, the state is not keyed, or neither checkpoint
    records the key columns (older versions did not always).

    `added_columns` are only in the newer checkpoint, `removed_columns` only in the older one. They are listed with
    `keys`, and the keys are compared without them.
    """

    uid: OperatorUid
    state: str
    kind: StateKind
    change: Change
    size_bytes: tuple[int | None, int | None]
    keys: KeyChanges | None = None
    added_columns: tuple[str, ...] = ()
    removed_columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SplitDiff:
    """The difference of one split of a source: the number of its next row as (older, newer), None if the split is not
    listed.

    `read` is whether a finished subtask had read the split to its end, as (older, newer).
    """

    split_id: str
    next_offset: tuple[int | None, int | None]
    read: tuple[bool, bool] = (False, False)


@dataclass(frozen=True, slots=True)
class OperatorDiff:
    """The difference of one operator. Pairs are (older, newer), with None (0 for sizes) if a checkpoint lacks the
    operator.

    - `splits`: the splits of a source whose position has changed, by id.
    - `waiting_splits`: the number of splits that were not assigned to a subtask yet.
    - `read_splits`: the number of splits that finished subtasks had read to the end.
    """

    uid: OperatorUid
    change: Change
    parallelism: tuple[int | None, int | None]
    max_parallelism: tuple[int | None, int | None]
    size_bytes: tuple[int, int]
    states: tuple[StateDiff, ...]
    splits: tuple[SplitDiff, ...] = ()
    waiting_splits: tuple[int, int] = (0, 0)
    read_splits: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """The result of `diff`. Operators of the older checkpoint are listed first, followed by new operators."""

    old: str
    new: str
    size_bytes: tuple[int, int]
    operators: tuple[OperatorDiff, ...]

    @property
    def changed(self) -> tuple[OperatorDiff, ...]:
        """Returns the operators that differ between the two checkpoints."""
        return tuple(operator for operator in self.operators if operator.change != "same")


def diff(old: str, new: str, *, keys: bool = False, open_store: OpenStore = open_store) -> CheckpointDiff:
    """Returns what has changed from one checkpoint or savepoint to another. Paths are as for `inspect`.

    They may belong to different jobs. With `keys`, keyed states are read, and added, removed and changed keys are
    counted. Raises the errors of `inspect`, CorruptionError or NotFoundError if a state file is damaged or missing, and
    with `keys` the errors of `read_state`.
    """
    before, now = inspect(old, open_store=open_store), inspect(new, open_store=open_store)
    uids = list(dict.fromkeys([*(o.uid for o in before.operators), *(o.uid for o in now.operators)]))
    comparison = _Comparison(before, now, open_store, keys)
    operators = tuple(comparison.operator(uid) for uid in uids)
    return CheckpointDiff(before.path, now.path, (before.size_bytes, now.size_bytes), operators)


class _Comparison:
    """Compares the states and splits of two checkpoints, operator by operator."""

    def __init__(self, old: CheckpointReport, new: CheckpointReport, open_store: OpenStore, keys: bool) -> None:
        self._old = old
        self._new = new
        self._open_store = open_store
        self._with_keys = keys
        self._old_contents = _contents(old, open_store)
        self._new_contents = _contents(new, open_store)

    def operator(self, uid: OperatorUid) -> OperatorDiff:
        """Compares the operator with this uid, which at least one of the checkpoints has."""
        old, new = self._old.operator(uid), self._new.operator(uid)
        olds = {state.state: state for state in old.states} if old is not None else {}
        news = {state.state: state for state in new.states} if new is not None else {}
        names = dict.fromkeys([*olds, *news])
        states = tuple(self._state(olds.get(name), news.get(name)) for name in names)
        sizes = (old.size_bytes if old is not None else 0, new.size_bytes if new is not None else 0)
        parallelism = (None if old is None else old.parallelism, None if new is None else new.parallelism)
        highest = (None if old is None else old.max_parallelism, None if new is None else new.max_parallelism)
        waiting = (_waiting_splits(self._old, uid), _waiting_splits(self._new, uid))
        read = (_read_splits(self._old, uid), _read_splits(self._new, uid))
        if old is None or new is None:
            change: Change = "added" if old is None else "removed"
        else:
            finished = (old.finished_subtasks, new.finished_subtasks)
            pairs = (parallelism, highest, finished, waiting, read)
            is_same = all(first == second for first, second in pairs) and all(s.change == "same" for s in states)
            change = "same" if is_same else "changed"
        splits = tuple(self._moved(uid, states, read))
        counts = (len(read[0]), len(read[1]))
        return OperatorDiff(uid, change, parallelism, highest, sizes, states, splits, waiting, counts)

    def _state(self, old: StateInfo | None, new: StateInfo | None) -> StateDiff:
        either = new or old
        assert either is not None, "a state of neither"
        sizes = (None if old is None else old.size_bytes, None if new is None else new.size_bytes)
        at = either.uid, either.state
        if old is None or new is None:
            change: Change = "added" if old is None else "removed"
        else:
            change = "same" if self._old_contents[at] == self._new_contents[at] else "changed"
        found = None
        added: tuple[str, ...] = ()
        removed: tuple[str, ...] = ()
        if self._with_keys and either.kind is StateKind.KEYED and either.state:
            found = self._keys(either.uid, either.state, old, new)
            if found is not None and old is not None and new is not None:
                before = self._selection(self._old, *at).schema.names
                now = self._selection(self._new, *at).schema.names
                added = tuple(name for name in now if name not in before)
                removed = tuple(name for name in before if name not in now)
                change = "changed" if found.added or found.removed or found.changed or added or removed else "same"
        return StateDiff(either.uid, either.state, either.kind, change, sizes, found, added, removed)

    def _keys(self, uid: OperatorUid, state: str, old: StateInfo | None, new: StateInfo | None) -> KeyChanges | None:
        before = None if old is None else self._selection(self._old, uid, state)
        now = None if new is None else self._selection(self._new, uid, state)
        if before is None or now is None:
            only = before or now
            assert only is not None
            rows = sum(batch.num_rows for batch in only.batches())
            return KeyChanges(rows, 0, 0, 0) if before is None else KeyChanges(0, rows, 0, 0)
        what = f"state {state!r} of operator {uid!r}"
        keys = now.keys or before.keys
        if keys is None:
            return None
        found = NO_CHANGES
        for groups in _parts(before, now, max(self._old.size_bytes, self._new.size_bytes)):
            found += compare_rows(before.reader(groups).read_all(), now.reader(groups).read_all(), keys, what)
        return found

    def _moved(
        self, uid: OperatorUid, states: tuple[StateDiff, ...], read: tuple[frozenset[str], frozenset[str]]
    ) -> Iterator[SplitDiff]:
        listed = set()
        for state in states:
            if state.kind is StateKind.LIST and state.change != "same":
                old = {} if state.change == "added" else self._positions(self._old, uid, state.state)
                new = {} if state.change == "removed" else self._positions(self._new, uid, state.state)
                for split_id in sorted({*old, *new}):
                    offsets = (old.get(split_id), new.get(split_id))
                    if offsets[0] != offsets[1]:
                        listed.add(split_id)
                        yield SplitDiff(split_id, offsets, (split_id in read[0], split_id in read[1]))
        for split_id in sorted((read[0] ^ read[1]) - listed):
            yield SplitDiff(split_id, (None, None), (split_id in read[0], split_id in read[1]))

    def _positions(self, report: CheckpointReport, uid: OperatorUid, state: str) -> Mapping[str, int]:
        """Returns the number of the next row of each split, from a state.

        Empty if the state does not contain positions of a source.
        """
        selection = self._selection(report, uid, state)
        if not set(_POSITION_COLUMNS) <= set(selection.schema.names):
            return {}
        rows = selection.reader().read_all().select(_POSITION_COLUMNS).to_pylist()
        return {row["split_id"]: row["next_offset"] for row in rows}

    def _selection(self, report: CheckpointReport, uid: OperatorUid, state: str) -> StateSelection:
        store = self._open_store(parse_pointer(report.path).root)
        return StateSelection.find(store, report.metadata, uid, state)


def _waiting_splits(report: CheckpointReport, uid: OperatorUid) -> int:
    return sum(len(pool.splits) for pool in report.metadata.pools if pool.uid == uid)


def _read_splits(report: CheckpointReport, uid: OperatorUid) -> frozenset[str]:
    found = read_splits(report.metadata).get(uid, ())
    return frozenset(split.split_id for split in found)


def _contents(report: CheckpointReport, open_store: OpenStore) -> Mapping[tuple[OperatorUid, str], list[object]]:
    """Returns the stored content of each state, as checksums in the order of subtasks, layers and chunks."""
    found: dict[tuple[OperatorUid, str], list[object]] = defaultdict(list)
    store = open_store(parse_pointer(report.path).root)
    for subtask in sorted(report.metadata.subtasks, key=lambda subtask: (subtask.vertex, subtask.subtask)):
        for handle in subtask.state_handles:
            for stored in read_directory(store, handle):
                section = stored.section
                chunks = tuple((chunk.checksum, chunk.first_group, chunk.group_rows) for chunk in stored.chunks)
                found[section.uid, section.state].append((subtask.subtask, section.removed, chunks))
        for native in subtask.native:
            files = tuple(sorted(file.checksum for file in native.files))
            for name in native_states(native):
                found[native.uid, name].append((subtask.subtask, native.backend, files))
    return found


def _parts(old: StateSelection, new: StateSelection, size_bytes: int) -> Iterator[range | None]:
    """Yields ranges of key groups, which are compared one after the other.

    If a key may be in different key groups in the two checkpoints, yields only None, which means all key groups at
    once.
    """
    groups = old.operator.max_parallelism
    if groups != new.operator.max_parallelism:
        yield None
        return
    for info in (old.info, new.info):
        size_bytes = max(size_bytes if info.size_bytes is None else info.size_bytes, 1)
    parts = min(groups, 1 + size_bytes // PART_BYTES)
    for part in range(parts):
        yield range(part * groups // parts, (part + 1) * groups // parts)


Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class KeyChanges:
    """The numbers of added, removed, changed and unchanged keys of a state.

    `added` keys are only in the newer checkpoint, `removed` keys only in the older one. Keys in both have different
    values (`changed`) or the same value (`same`).
    """

    added: int
    removed: int
    changed: int
    same: int

    def __add__(self, other: KeyChanges) -> KeyChanges:
        return KeyChanges(
            self.added + other.added,
            self.removed + other.removed,
            self.changed + other.changed,
            self.same + other.same,
        )


NO_CHANGES = KeyChanges(0, 0, 0, 0)


def compare_rows(old: pa.Table, new: pa.Table, keys: Sequence[str], what: str) -> KeyChanges:
    """Compares the keys of two tables of one state, in the columns that both have. `what` names the state in error
    texts.

    Raises ConfigurationError if a table has other key columns, or types that cannot be converted to each other.
    """
    both_have = [name for name in new.schema.names if name in old.schema.names]
    if not set(keys) <= set(both_have):
        raise ConfigurationError(
            f"{what} has the columns {old.schema.names} in the older and {new.schema.names} in the newer checkpoint, "
            f"and not the key {list(keys)} in both; read both with read_state and compare them there"
        )
    old, new = old.select(both_have), new.select(both_have)
    try:
        old = old.cast(new.schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ConfigurationError(
            f"{what} has other types in one checkpoint than in the other: {error}"
            "; read both with read_state and compare them there"
        ) from error
    names = [str(number) for number in range(len(keys))]
    both = pa.concat_tables([old.select(list(keys)), new.select(list(keys))]).rename_columns(names)
    both = pa.table([comparable(column) for column in both.columns], names=names)
    numbered = both.append_column("row", pa.array(np.arange(both.num_rows, dtype=np.int64)))
    if both.num_rows == 0:
        return NO_CHANGES
    found = numbered.group_by(names).aggregate([("row", "min"), ("row", "max")])
    first, last = found.column("row_min").to_numpy(), found.column("row_max").to_numpy()
    in_both = (first < old.num_rows) & (last >= old.num_rows)
    added = int(np.count_nonzero(first >= old.num_rows))
    common = int(np.count_nonzero(in_both))
    values = [name for name in new.schema.names if name not in keys]
    same = np.ones(common, dtype=np.bool_)
    before, now = pa.array(first[in_both]), pa.array(last[in_both] - old.num_rows)
    for name in values:
        same &= _equal(_taken(old.column(name), before), _taken(new.column(name), now))
    kept = int(np.count_nonzero(same))
    return KeyChanges(added, len(first) - added - common, common - kept, kept)


def _taken(column: pa.ChunkedArray, rows: pa.Array) -> pa.Array:
    taken = column.combine_chunks().take(rows)
    return taken.combine_chunks() if isinstance(taken, pa.ChunkedArray) else taken


def _equal(one: pa.Array, other: pa.Array) -> Flags:
    """Returns for each row whether the values of two columns with the same type are equal."""
    valid, other_valid = _flags(one.is_valid()), _flags(other.is_valid())
    result: Flags = valid == other_valid
    both = np.flatnonzero(valid & other_valid)
    if len(both):
        rows = pa.array(both)
        result[both] = _equal_values(one.take(rows), other.take(rows))
    return result


def _equal_values(one: pa.Array, other: pa.Array) -> Flags:
    """Compares columns without nulls and without an offset, for `_equal`."""
    data_type = one.type
    types = pa.types
    if types.is_dictionary(data_type):
        return _equal_values(one.cast(data_type.value_type), other.cast(data_type.value_type))
    if types.is_fixed_size_list(data_type):
        as_list = pa.list_(data_type.value_field)
        return _equal_values(one.cast(as_list), other.cast(as_list))
    if types.is_map(data_type):
        return _equal_lists(*(_lengths_and_entries(column) for column in (one, other)))
    if types.is_list(data_type) or types.is_large_list(data_type):
        return _equal_lists(*((_lengths(column), column.flatten()) for column in (one, other)))
    if types.is_struct(data_type):
        fields = np.ones(len(one), dtype=np.bool_)
        for position in range(data_type.num_fields):
            fields &= _equal(pc.struct_field(one, [position]), pc.struct_field(other, [position]))
        return fields
    one, other = comparable(one), comparable(other)
    result: Flags = _flags(pc.equal(one, other))
    if types.is_floating(one.type):
        result |= _flags(pc.is_nan(one)) & _flags(pc.is_nan(other))
    return result


def _equal_lists(one: tuple[NDArray[np.int64], pa.Array], other: tuple[NDArray[np.int64], pa.Array]) -> Flags:
    """Returns for each row whether two lists are equal.

    The arguments are the lengths of the lists and all their values.
    """
    result: Flags = one[0] == other[0]
    parts = []
    for lengths, values in (one, other):
        selected = np.repeat(result, lengths)
        parts.append(values.take(pa.array(np.flatnonzero(selected))))
    lengths = one[0][result]
    rows = np.repeat(np.flatnonzero(result), lengths)
    result[rows[~_equal(*parts)]] = False
    return result


def _lengths(column: pa.Array) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = np.diff(column.offsets.to_numpy()).astype(np.int64)
    return lengths


def _lengths_and_entries(column: pa.Array) -> tuple[NDArray[np.int64], pa.Array]:
    """Returns the sizes of maps, and all their entries as structs. The entries of each map are sorted by key."""
    lengths = _lengths(column)
    rows = pa.array(np.repeat(np.arange(len(column)), lengths))
    first = int(column.offsets[0].as_py()) if len(column) else 0
    keys, items = (part.slice(first, len(rows)) for part in (column.keys, column.items))
    order = pc.sort_indices(
        pa.table([rows, keys], names=["row", "key"]), sort_keys=[("row", "ascending"), ("key", "ascending")]
    )
    return lengths, pa.StructArray.from_arrays([keys.take(order), items.take(order)], names=["key", "value"])


def _flags(column: pa.Array) -> Flags:
    result: Flags = np.array(column.to_numpy(zero_copy_only=False), dtype=np.bool_)
    return result
