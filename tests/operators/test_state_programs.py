"""Random programs over keyed state give, on every backend, what plain dictionaries give: through snapshots that are
read later, whole and incremental ones, restores and other parallelisms."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pytest
from frozen_tables import tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from process_harness import Driven, Row

from tidegate.operators.functions.process_functions import ProcessContext, ProcessFunction
from tidegate.operators.state.keyed_state import ListState, MapState, ReducingState, ValueState
from tidegate.operators.state.ttl import StateTtl
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, FrozenState, StateTable

OPTIONS = {
    "columnar": StateBackendOptions(),
    "incremental": StateBackendOptions(incremental=True),
    "rocksdb": StateBackendOptions(kind="rocksdb", directory="?"),
}


@dataclass
class Point:
    """A value of a type of the program's own."""

    x: int
    tags: list[str] = field(default_factory=list)


class Program(ProcessFunction):
    """Does what its rows say to the state of their key, and tells all of it."""

    def open(self, context: ProcessContext) -> None:
        self.value = context.state(ValueState("value", Point))
        self.items = context.state(ListState("items", int))
        self.entries = context.state(MapState("entries", str, float))
        self.low = context.state(ReducingState("low", min, int))
        self.lasting = context.state(ListState("lasting", str, ttl=StateTtl("1d")))

    def process(self, row: Row, context: ProcessContext) -> Iterator[Row]:
        getattr(self, f"_{row['do']}")(row["x"])
        point = self.value.value()
        shown = (
            None if point is None else (point.x, point.tags),
            self.items.get(),
            sorted(self.entries.items()),
            self.low.get(),
            self.lasting.get(),
        )
        yield {"k": row["k"], "shown": repr(shown)}

    def _read(self, x: int) -> None:
        pass

    def _put(self, x: int) -> None:
        self.value.update(Point(x, [str(x)] * (x % 3)))

    def _clear(self, x: int) -> None:
        for state in (self.value, self.items, self.entries, self.low, self.lasting)[x % 5 :]:
            state.clear()

    def _append(self, x: int) -> None:
        self.items.add_all(range(x % 4))
        self.lasting.add(str(x))

    def _replace(self, x: int) -> None:
        self.items.update([*self.items.get()[x % 3 :], x])
        self.lasting.update([])

    def _set(self, x: int) -> None:
        self.entries.put_all({str(x % 3): float(x), "all": float(x)})

    def _discard(self, x: int) -> None:
        self.entries.remove(str(x % 3))
        self.entries.put("all", None)

    def _fold(self, x: int) -> None:
        self.low.add(x)


@dataclass
class Model:
    """What the program keeps for one key, in plain Python."""

    value: tuple[int, list[str]] | None = None
    items: list[int] = field(default_factory=list)
    entries: dict[str, float] = field(default_factory=dict)
    low: int | None = None
    lasting: list[str] = field(default_factory=list)

    def after(self, do: str, x: int) -> str:
        """Do what a row says, and tell all that is kept."""
        if do == "put":
            self.value = x, [str(x)] * (x % 3)
        elif do == "clear":
            fresh = Model()
            for name in ("value", "items", "entries", "low", "lasting")[x % 5 :]:
                setattr(self, name, getattr(fresh, name))
        elif do == "append":
            self.items += range(x % 4)
            self.lasting.append(str(x))
        elif do == "replace":
            self.items, self.lasting = [*self.items[x % 3 :], x], []
        elif do == "set":
            self.entries |= {str(x % 3): float(x), "all": float(x)}
        elif do == "discard":
            self.entries.pop(str(x % 3), None)
            self.entries.pop("all", None)
        elif do == "fold":
            self.low = x if self.low is None else min(self.low, x)
        return repr((self.value, self.items, sorted(self.entries.items()), self.low, self.lasting))


_DO = st.sampled_from(["read", "put", "clear", "append", "replace", "set", "discard", "fold"])
_ROWS = st.lists(
    st.fixed_dictionaries({"k": st.sampled_from([None, *"abcdefgh"]), "do": _DO, "x": st.integers(0, 9)}),
    min_size=1,
    max_size=8,
)
_STEPS = st.lists(
    st.tuples(st.just("batch"), _ROWS)
    | st.tuples(st.just("snapshot"), st.booleans())
    | st.tuples(st.just("restore"), st.integers(1, 4)),
    max_size=16,
)

_SCHEMA = pa.schema({"k": pa.string(), "do": pa.string(), "x": pa.int64()})


class Run:
    """The program on one backend, and its newest snapshot."""

    def __init__(self, options: StateBackendOptions, folder: str) -> None:
        self._options = options
        self._folder = folder
        self._attempts = itertools.count()
        self._ids = itertools.count(1)
        self.model: dict[str | None, Model] = {}
        self.driven = self._started(1, ())
        self._frozen: list[FrozenState] = []
        self._layers: list[list[StateTable]] = []
        self._base: CheckpointId | None = None
        self._snapshot_model: dict[str | None, Model] = {}

    def batch(self, rows: list[Row]) -> None:
        """Process rows, and look whether the program has told what the model has."""
        expected: dict[str | None, list[str]] = {}
        told: dict[str | None, list[str]] = {}
        for row in rows:
            shown = self.model.setdefault(row["k"], Model()).after(row["do"], row["x"])
            expected.setdefault(row["k"], []).append(shown)
        for row in self.driven.rows(*rows, schema=_SCHEMA):
            told.setdefault(row["k"], []).append(row["shown"])
        assert expected == told

    def snapshot(self, incremental: bool) -> None:
        """Freeze everything, on the last snapshot where that can be; it is read at the next restore or snapshot."""
        self._read()
        checkpoint = CheckpointId(next(self._ids))
        base = self._base if incremental and self._options.incremental else None
        if base is None:
            self._layers = []
        for operator in self.driven.operators:
            snapshot = operator.snapshot(Cut(checkpoint, base, canonical=self._options.kind == "rocksdb"))
            assert snapshot is not None
            assert snapshot.states == () or not self._options.incremental
            self._frozen += [*snapshot.states, *snapshot.layer]
        self._base = checkpoint
        self._snapshot_model = deepcopy(self.model)

    def restore(self, parallelism: int) -> None:
        """Begin again from the last snapshot."""
        self._read()
        self.close()
        tables, self.model = list(itertools.chain(*self._layers)), deepcopy(self._snapshot_model)
        if parallelism != len(self.driven.operators):
            self._base = None  # layers are of one subtask's
        self.driven = self._started(parallelism, tables)

    def close(self) -> None:
        """End the attempt."""
        for operator in self.driven.operators:
            operator.close()

    def _read(self) -> None:
        """Read what was frozen, after whatever has happened since."""
        if self._frozen:
            layer = len(self._layers)
            self._layers.append([table for state in self._frozen for table in tables_of(state, layer)])
            self._frozen = []

    def _started(self, parallelism: int, tables: list[StateTable] | tuple[()]) -> Driven:
        options = self._options
        if options.directory is not None:
            options = replace(options, directory=f"{self._folder}/{next(self._attempts)}")
        return Driven(Program(), parallelism=parallelism, restored=tables, backend=options)


@pytest.mark.parametrize("backend", sorted(OPTIONS))
@settings(max_examples=25, deadline=None)
@given(steps=_STEPS)
def test_a_program_is_the_same_on_every_backend(backend: str, steps: list[tuple[str, Any]]) -> None:
    """What it tells after each row, whenever snapshots are taken and wherever it is restored."""
    folder = tempfile.mkdtemp()
    run = Run(OPTIONS[backend], folder)
    try:
        for step, argument in steps:
            getattr(run, step)(argument)
        run.batch([{"k": key, "do": "read", "x": 0} for key in [None, *"abcdefgh"]])
    finally:
        run.close()
        shutil.rmtree(folder)
