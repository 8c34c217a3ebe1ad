"""What the contract tests of state backends share: the backends, stored tables as dictionaries, and a plain model."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import pyarrow as pa
from rocksdb_backends import CACHE_BYTES, SMALL_CACHE_BYTES, LoggedBackend, rocks_backend

from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.state.columnar.key_space import KeySpace
from tidegate.state.common.backend import KeyedBackend, StateDescriptor, ValueSpec, VectorTable
from tidegate.state.kernels import accumulate
from tidegate.state.kernels.columns import NO_MASK
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.key_index.hash_table import Upserted
from tidegate.state.rocksdb.rocksdb_backend import RocksBackend
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, FrozenState, StateTable
from tidegate.storage.state.stored_rows import ROW_SEQUENCE, TIMERS_STATE, row_identity, timers_schema

MAX_PARALLELISM = 16
KEYS = pa.schema({"k": pa.int64(), "s": pa.string()})

MakeBackend = Callable[[bool], KeyedBackend]
"""Makes an empty backend for the keys of `KEYS`; the flag says whether it keeps what incremental snapshots need."""


def space_of(backend: Any) -> KeySpace:
    """Returns the slots of the keys of a columnar backend, with its undo log."""
    space: KeySpace = backend._space
    return space


def columnar_backend(incremental: bool) -> ColumnarBackend:
    """A backend in memory."""
    return ColumnarBackend(MAX_PARALLELISM, tuple(KEYS.names), incremental)


BACKENDS: dict[str, MakeBackend] = {
    "columnar": columnar_backend,
    "rocksdb": lambda _: rocks_backend(tuple(KEYS.names), MAX_PARALLELISM),
    "rocksdb with cache": lambda _: rocks_backend(tuple(KEYS.names), MAX_PARALLELISM, cache_bytes=CACHE_BYTES),
    "rocksdb with a small cache": lambda _: rocks_backend(
        tuple(KEYS.names), MAX_PARALLELISM, cache_bytes=SMALL_CACHE_BYTES
    ),
    "rocksdb with files": lambda _: rocks_backend(
        tuple(KEYS.names), MAX_PARALLELISM, cache_bytes=SMALL_CACHE_BYTES, files=True
    ),
    "rocksdb with changelog": lambda _: rocks_backend(tuple(KEYS.names), MAX_PARALLELISM, kind=LoggedBackend),
    "rocksdb with changelog and cache": lambda _: rocks_backend(
        tuple(KEYS.names), MAX_PARALLELISM, kind=LoggedBackend, cache_bytes=CACHE_BYTES
    ),
}
"""Every backend that has to pass the contract tests."""

EXAMPLES = {
    "columnar": 60,
    "rocksdb": 20,
    "rocksdb with cache": 20,
    "rocksdb with a small cache": 20,
    "rocksdb with files": 20,
    "rocksdb with changelog": 20,
    "rocksdb with changelog and cache": 20,
}
"""Random programs to try on each; opening a database takes time."""

WITH_INCREMENTS = ("columnar", "rocksdb with changelog", "rocksdb with changelog and cache")
"""Backends whose `freeze` takes a base; otherwise RocksDB has its files for that (`test_rocksdb_native.py`)."""

Key = tuple[Any, ...]
Rows = dict[str, dict[Key, Any]]
"""State name → key → what a checkpoint holds of it."""


def key_batch(keys: Sequence[int]) -> pa.RecordBatch:
    """The key columns of some keys: a number, and a string that goes with it (null for some)."""
    texts = [None if key % 7 == 3 else f"key-{key % 5}" for key in keys]
    return pa.record_batch([pa.array(keys, pa.int64()), pa.array(texts, pa.string())], schema=KEYS)


def key_of(key: int) -> Key:
    """The same key as stored tables have it."""
    return key, None if key % 7 == 3 else f"key-{key % 5}"


def tables(frozen: Iterable[FrozenState], layer: int = 0) -> list[StateTable]:
    """What storage would give back of frozen states; every chunk must keep the rules of chunks."""
    return [table for state in frozen for table in state_tables(state, layer)]


def state_tables(state: FrozenState, layer: int = 0) -> list[StateTable]:
    """The tables of one frozen state."""
    found = []
    for chunk in state.chunks():
        chunk.rows.validate(full=True)
        assert chunk.rows.num_rows > 0, "an empty chunk"
        assert state.kind is StateKind.KEYED
        groups = (hash_columns(chunk.rows, KEYS.names) % np.uint64(MAX_PARALLELISM)).astype(int)
        sizes = np.diff(chunk.group_rows)
        assert chunk.group_rows[0] == 0
        told = np.arange(chunk.first_group, chunk.first_group + len(sizes))
        assert np.repeat(told, sizes).tolist() == groups.tolist()
        if state.state == TIMERS_STATE:
            assert chunk.rows.schema.equals(timers_schema(KEYS))
        elif state.removed:
            assert chunk.rows.schema in (KEYS, row_identity(KEYS))
        found.append(StateTable(state.state, state.kind, chunk.rows, state.removed, layer))
    return found


def composed(stored: Sequence[StateTable]) -> Rows:
    """The rows that tables in layers stand for; no key twice in a layer of a state, neither put nor removed."""
    rows: Rows = {}
    told: dict[tuple[str, int], set[Key]] = {}
    for table in stored:
        kept = rows.setdefault(table.state, {})
        names = [name for name in table.rows.schema.names if name not in (*KEYS.names, ROW_SEQUENCE)]
        for row in table.rows.to_pylist():
            key = tuple(row.values()) if table.state == TIMERS_STATE else (row["k"], row["s"])
            if ROW_SEQUENCE in row:
                key = (*key, row[ROW_SEQUENCE])
            seen = told.setdefault((table.state, table.layer), set())
            assert key not in seen, f"{key} twice in layer {table.layer} of {table.state}"
            seen.add(key)
            if table.removed:
                kept.pop(key, None)
            else:
                kept[key] = {name: _in_order(row[name]) for name in names if table.state != TIMERS_STATE}
    return {state: _ranked(kept) for state, kept in rows.items() if kept}


def _ranked(kept: dict[Key, Any]) -> dict[Key, Any]:
    """Rows of a row table with their rank among those of their key, in place of their numbers; others as they are."""
    if any(len(key) != 3 or isinstance(key[2], str) for key in kept):
        return kept
    ranks: Counter[Key] = Counter()
    ranked = {}
    for key in sorted(kept, key=lambda key: key[2]):
        ranked[*key[:2], ranks[key[:2]]] = kept[key]
        ranks[key[:2]] += 1
    return ranked


def _in_order(value: Any) -> Any:
    """A stored value, the entries of a map in the order of their keys: which one a backend keeps is its own affair."""
    return sorted(value) if isinstance(value, list) and value and isinstance(value[0], tuple) else value


VALUE = StateDescriptor("v", pa.string())
LIST = StateDescriptor("l", pa.list_(pa.int64()))
MAP = StateDescriptor("m", pa.map_(pa.string(), pa.int64()))
COLUMNS = (ValueSpec("n", pa.int64(), 0), ValueSpec("most", pa.float64(), float("-inf")))


REMOVE = "remove"
"""Stands where a change of a table has a value: the key has no row after the batch."""
TableChange = float | str | None


class ObjectState:
    """A backend with a value, a list and a map for each key, beside what they should hold."""

    def __init__(
        self, make: MakeBackend, incremental: bool, stored: Sequence[StateTable] = (), files: Rows | None = None
    ) -> None:
        """`stored` is loaded; `files` is what the backend has in files that it is opened on."""
        self.backend = make(incremental)
        self.values, self.lists, self.maps = (
            self.backend.values(VALUE),
            self.backend.lists(LIST),
            self.backend.maps(MAP),
        )
        self.backend.fix_keys(KEYS)
        for table in stored:
            self.backend.load(table)
        self.backend.loaded()
        rows = composed(stored) if files is None else files
        self._model: dict[str, dict[Key, Any]] = {
            name: {key: row[name] for key, row in rows.get(name, {}).items()} for name in ("v", "l", "m")
        }
        self._model["m"] = {key: dict(entries) for key, entries in self._model["m"].items()}

    def batch(self, changes: Sequence[tuple[int, str, int]]) -> None:
        """Apply changes (key, what, with which number) in one batch; what is read before each must be the model's."""
        refs = self.backend.enter(key_batch([key for key, _, _ in changes]))
        for ref, (number, what, with_) in zip(refs, changes, strict=True):
            key = key_of(number)
            self._check(ref, key)
            values, lists, maps = (self._model[name] for name in ("v", "l", "m"))
            if what == "put":
                self.values.put(ref, f"value-{with_}")
                values[key] = f"value-{with_}"
            elif what == "remove":
                self.values.remove(ref)
                values.pop(key, None)
            elif what == "extend":
                self.lists.extend(ref, [with_, with_ + 1])
                lists[key] = [*lists.get(key, []), with_, with_ + 1]
            elif what == "replace":
                self.lists.put(ref, [with_][: with_ % 2])
                lists[key] = [with_][: with_ % 2]
            elif what == "clear":
                self.lists.remove(ref)
                lists.pop(key, None)
            elif what == "set":
                self.maps.put(ref, f"entry-{with_ % 3}", with_)
                maps.setdefault(key, {})[f"entry-{with_ % 3}"] = with_
            elif what == "discard":
                self.maps.discard(ref, f"entry-{with_ % 3}")
                maps.get(key, {}).pop(f"entry-{with_ % 3}", None)
            elif what == "empty":
                self.maps.remove(ref)
                maps.pop(key, None)
            self._check(ref, key)
        self.backend.leave()

    def expected(self) -> Rows:
        """What a checkpoint must hold now."""
        rows = {name: {key: copy.copy(held) for key, held in of.items() if held} for name, of in self._model.items()}
        rows["m"] = {key: sorted(held.items()) for key, held in rows["m"].items()}
        return {name: {key: {name: held} for key, held in of.items()} for name, of in rows.items() if of}

    def check(self) -> None:
        """Everything is as the model has it, read from the backend."""
        known = sorted({key[0] for of in self._model.values() for key in of})
        refs = self.backend.enter(key_batch(known))
        for ref, number in zip(refs, known, strict=True):
            self._check(ref, key_of(number))
        self.backend.leave()
        for name, of in self._model.items():
            found = [
                (row["k"], row["s"]) for keys in self.backend.keys(name, 3 + len(of) // 10) for row in keys.to_pylist()
            ]
            assert len(found) == len(set(found))
            assert set(found) == {key for key, held in of.items() if held}

    def _check(self, ref: Any, key: Key) -> None:
        assert self.values.get(ref) == self._model["v"].get(key)
        assert list(self.lists.get(ref)) == self._model["l"].get(key, [])
        entries = dict(self.maps.items(ref))
        assert entries == self._model["m"].get(key, {})
        assert all(self.maps.get(ref, name) == entries.get(name) for name in ("entry-0", "entry-1", "entry-2"))


class Table:
    """A backend with a vectorised table (rows counted, greatest value), beside what it should hold."""

    columns: Sequence[ValueSpec] = COLUMNS

    def __init__(
        self, make: MakeBackend, incremental: bool, stored: Sequence[StateTable] = (), files: Rows | None = None
    ) -> None:
        """Opens a backend like `ObjectState`. `stored` and `files`: the state that it starts from."""
        self.backend = make(incremental)
        self.table: VectorTable = self.backend.table("t", self.columns)
        self.backend.fix_keys(KEYS)
        for table in stored:
            self.backend.load(table)
        self.backend.loaded()
        rows = composed(stored) if files is None else copy.deepcopy(files)
        self._model: dict[Key, dict[str, Any]] = rows.get("t", {})

    def batch(self, changes: Sequence[tuple[int, TableChange]]) -> None:
        """Count the rows of keys and take the greatest of their values, null being none. Then remove keys."""
        gone = {number for number, value in changes if value == REMOVE}
        self._batch([(number, value if isinstance(value, float) else None) for number, value in changes], gone)

    def _batch(self, changes: Sequence[tuple[int, float | None]], gone: AbstractSet[int]) -> None:
        upserted = self.table.upsert(key_batch([key for key, _ in changes]))
        counts, most = self.table.column("n"), self.table.column("most")
        mask = np.array([value is not None for _, value in changes], dtype=np.uint8)
        values = np.array([-1e9 if value is None else value for _, value in changes])
        accumulate.count(counts.pages, upserted.slots, NO_MASK)
        valid = NO_MASK if mask.all() else mask
        if len(valid):
            accumulate.mark(most.track_nulls(), upserted.slots, valid)
        elif len(most.valid_pages):
            accumulate.mark(most.valid_pages, upserted.slots, valid)
        accumulate.maximum(most.pages, upserted.slots, values, valid)
        for number, value in changes:
            row = self._model.setdefault(key_of(number), {"n": 0, "most": None})
            row["n"] += 1
            row["most"] = value if row["most"] is None else row["most"] if value is None else max(value, row["most"])
        self._put_more(changes, upserted)
        taken = [self.table.column(spec.name).take(upserted.slots).to_pylist() for spec in self.columns]
        assert list(zip(*taken, strict=True)) == [tuple(self._model[key_of(n)].values()) for n, _ in changes]
        if gone:
            self.table.remove(upserted.slots[[number in gone for number, _ in changes]])
        self.table.done()
        for number in gone:
            del self._model[key_of(number)]

    def _put_more(self, changes: Sequence[tuple[int, float | None]], upserted: Upserted) -> None:
        """For more columns."""

    def expected(self) -> Rows:
        """What a checkpoint must hold now."""
        return {"t": {key: dict(row) for key, row in self._model.items()}} if self._model else {}

    def check(self) -> None:
        """Everything is as the model has it, read from the backend."""
        found: dict[Key, dict[str, Any]] = {}
        for keys, slots in self.table.scan(3 + len(self._model) // 10):
            names = [spec.name for spec in self.columns]
            columns = [self.table.column(name).take(slots).to_pylist() for name in names]
            for key, *values in zip(keys.to_pylist(), *columns, strict=True):
                assert (key["k"], key["s"]) not in found
                found[key["k"], key["s"]] = dict(zip(names, values, strict=True))
        assert found == self._model


Subject = ObjectState | Table


class Snapshots:
    """The checkpoints of one subject: frozen, written in pieces, completed or given up, and built on."""

    def __init__(self, subject: Subject, completed: tuple[CheckpointId, list[StateTable]] | None = None) -> None:
        self.subject = subject
        self.completed: tuple[CheckpointId, list[StateTable]] | None = completed
        """The newest complete checkpoint, with the tables of all its layers."""
        self._number = 0 if completed is None else completed[0]
        self._pending: list[_Pending] = []

    def freeze(self, incremental: bool) -> None:
        """Freeze, on top of the newest complete checkpoint if so wanted and there is one."""
        self._number += 1
        base = self.completed if incremental and type(self.subject.backend) is not RocksBackend else None
        cut = Cut(CheckpointId(self._number), None if base is None else base[0])
        frozen = self.subject.backend.freeze(cut)
        self._pending.append(_Pending(cut, frozen, [] if base is None else base[1], self.subject.expected()))

    def write(self, which: int) -> None:
        """Write one more piece of a pending one."""
        if self._pending:
            self._pending[which % len(self._pending)].step()

    def complete(self, which: int) -> None:
        """Write the rest of a pending one, check it, and build on it from now on, unless a newer one is complete."""
        if self._pending:
            pending = self._pending.pop(which % len(self._pending))
            stored = pending.finish()
            if self.completed is None or self.completed[0] < pending.cut.checkpoint_id:
                self.completed = pending.cut.checkpoint_id, stored
                self.subject.backend.completed(pending.cut.checkpoint_id)

    def abort(self, which: int) -> None:
        """Give a pending one up, written in part or not at all."""
        if self._pending:
            self._pending.pop(which % len(self._pending))

    def complete_all(self) -> None:
        """All that are pending."""
        while self._pending:
            self.complete(0)


class _Pending:
    def __init__(self, cut: Cut, frozen: Sequence[FrozenState], below: list[StateTable], expected: Rows) -> None:
        self.cut = cut
        self._below = below
        self._expected = expected
        self._layer = 0 if cut.base is None else below[-1].layer + 1 if below else 1
        self._written: list[StateTable] = []
        self._pieces = (table for state in frozen for table in _stepwise(state, self._layer))

    def step(self) -> None:
        self._written += [table for table in [next(self._pieces, None)] if table is not None]

    def finish(self) -> list[StateTable]:
        self._written += self._pieces
        stored = [*self._below, *self._written]
        assert composed(stored) == self._expected
        return stored


def _stepwise(state: FrozenState, layer: int) -> Iterable[StateTable]:
    for chunk in state.chunks():
        yield StateTable(state.state, state.kind, chunk.rows, state.removed, layer)
